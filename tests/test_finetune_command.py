"""`resformer finetune`: a whole checkpoint or nothing, resumed to the bit, on one process or two."""

import errno
import hashlib
import json
import math
import os
import re
import shutil
import signal
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import byte_tokenizer, save_checkpoint, save_notes
from command_server import resformer
from conftest import Stop
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, TrainerCallback, default_data_collator

from resformer import ResFormerForCausalLM, connect, retrofit
from resformer.checkpoint_cards import checkpoint_card
from resformer.errors import CheckpointError, OutputError
from resformer.files import check_target, locked
from resformer.names import DESCRIPTIONS, LISTING
from resformer.training import recipe
from resformer.training.data import load_documents
from resformer.training.optimizer import is_connection
from resformer.training.options import FinetuneOptions
from resformer.training.packing import pack_documents
from resformer.training.recipe import finetune_checkpoint
from resformer.training.report import FinetuneReport

SMALL = ["--sample-by", "paragraph", "--block", "32", "--batch", "4", "--held-out", "0.1", "--no-bf16"]


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, its retrofit and some text."""
    folder = tmp_path_factory.mktemp("finetune")
    save_checkpoint(folder / "source")
    (folder / "source" / "LICENSE.txt").write_text("for all")
    retrofit(folder / "source", folder / "retrofit", "resformer-denseformer")
    retrofit(folder / "source", folder / "shared", "svformer", lossy=True)
    save_notes(folder)
    return folder


def finetune(work: Path, *arguments: object, launcher: tuple[str, ...] = ()) -> subprocess.CompletedProcess[str]:
    environment = {"HF_HOME": str(work / "home"), "TRANSFORMERS_VERBOSITY": "error"}
    return resformer("finetune", *arguments, cwd=work, launcher=launcher, **environment)


def loss_of(folder: Path, work: Path, blocks: int) -> float:
    """The mean over the held-out blocks' labels, computed without the Trainer."""
    documents = load_documents([str(work / "notes.txt")], sample_by="paragraph")
    options = {"block": 32, "held_out": 0.1, "held_out_blocks": blocks, "separate": True}
    held_out = pack_documents(documents, byte_tokenizer(), **options).held_out
    model = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        rows = default_data_collator([held_out[index] for index in range(blocks)])
        return model(**rows, use_cache=False).loss.item()


def test_the_output_is_a_whole_checkpoint_with_true_metrics(work: Path) -> None:
    done = finetune(
        work, "retrofit", "out", "--data", "notes.txt", *SMALL, "--steps", "10", "--accumulate", "2", "--json",
        "--learning-rate", "1e-2", "--connection-learning-rate", "2e-2", "--held-out-blocks", "5",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    metrics = json.loads(done.stdout)
    written = json.loads((work / "out" / "metrics.json").read_text())
    assert written.pop("config_sha256")
    weights = (work / "out" / "model.safetensors").read_bytes()
    assert written.pop("files") == {"model.safetensors": {"sha256": hashlib.sha256(weights).hexdigest()}}
    assert metrics == written
    assert {path.name for path in (work / "out").iterdir()} == {
        "README.md", "config.json", "generation_config.json", "metrics.json", "model.safetensors", "tokenizer.json",
        "tokenizer_config.json", "chat_template.jinja", "LICENSE.txt", LISTING,
    }  # fmt: skip
    assert not (work / "out.training").exists()
    # What the metrics say is what anybody computes from the folders.
    assert (metrics["held_out_blocks"], metrics["held_out_tokens"]) == (5, 160)
    assert metrics["held_out_documents"] == metrics["held_out_by_source"]["notes.txt"] > 5
    assert metrics["loss_before"] == pytest.approx(loss_of(work / "retrofit", work, 5), rel=1e-5)
    assert metrics["loss_after"] == pytest.approx(loss_of(work / "out", work, 5), rel=1e-5)
    assert metrics["loss_after"] < metrics["loss_before"] - 1
    assert metrics["perplexity_after"] == pytest.approx(math.exp(metrics["loss_after"]))
    assert (metrics["steps"], metrics["tokens"]) == (10, 10 * 2 * 4 * 32)
    assert metrics["tokens_per_second"] == pytest.approx(metrics["tokens"] / metrics["seconds"])
    assert [entry["step"] for entry in metrics["evaluations"]] == list(range(11))
    # The plan, one line an evaluation, and nothing else, off a terminal; bitsandbytes says what it lacks when it is
    # imported, and Transformers that two checkpoints were saved at the same time.
    plan, *lines = [line for line in done.stderr.splitlines() if not re.search("kernels-community|mtime may not", line)]
    assert [bool(re.match(r"step \d+/10: held-out loss", line)) for line in lines] == [True] * 11, done.stderr
    (passes,) = metrics["passes"].values()
    assert passes == pytest.approx(10 * 2 * 4 / metrics["training_blocks"], abs=1e-3)
    assert plan == f"data: {passes:.3g} passes over notes.txt"
    assert metrics["data"] == [{"source": "notes.txt", "license": None, "tokens": metrics["tokens"], "passes": passes}]
    model = AutoModelForCausalLM.from_pretrained(work / "out")
    assert isinstance(model, ResFormerForCausalLM)
    assert model.config.use_cache
    assert (model.model.value_mixing_matrix()[1:, 0] != 0).all()
    assert model.generation_config.temperature == 0.7
    assert len(AutoTokenizer.from_pretrained(work / "out")) == 257
    assert metrics["tokenizer"]["identical"]
    card = (work / "out" / "README.md").read_text()
    assert f"{metrics['perplexity_after']:.3f}" in card
    assert str(checkpoint_card(work / "out").card) == card


def test_a_plan_names_the_held_out_documents_of_each_source_and_writes_nothing(work: Path) -> None:
    (work / "other.txt").write_text("\n\n".join(f"Layer {index} reads another text." for index in range(200)))
    before = sorted(work.iterdir())
    done = finetune(
        work, "source", "planned", "--data", "notes.txt:1", "--data", "other.txt:3", *SMALL, "--held-out-blocks", 12,
        "--dry-run", "--connection-learning-rate", "0.1",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "the model has no connections that learn: their learning rate is not used" in done.stdout
    counts = re.findall(r"held out      (\d+) documents of (\w+).txt", done.stdout)
    assert [name for _, name in counts] == ["notes", "other"]
    assert all(int(count) > 4 for count, _ in counts)
    (blocks,) = re.findall(r"data +(\d+) blocks", done.stdout)
    characters = [(work / name).stat().st_size for name in ("notes.txt", "other.txt")]
    assert int(blocks) * 32 == pytest.approx(0.9 * sum(characters), rel=0.1)
    passes = {name: number for number, name in re.findall(r"passes +(\S+) over (\w+).txt", done.stdout)}
    assert float(passes["notes"]) == pytest.approx(1, abs=0.1)  # the larger one, for a quarter of the tokens
    assert float(passes["other"]) == pytest.approx(3 * characters[0] / characters[1], rel=0.1)
    assert re.search(r"other.txt: is read \S+ times. Beyond 4 passes, text teaches less", done.stderr)
    assert re.search(r"memory +\S+ \wB, the most in one step", done.stdout)
    assert "would write   planned" in done.stdout
    assert {path for path in work.iterdir() if path not in before} <= {work / "home"}


def test_settings_that_cannot_be_saved_are_refused_before_the_first_step(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`eos_token_id` is not the tokenizer's, which the Trainer sets."""
    shutil.copytree(work / "retrofit", work / "settings")
    (work / "settings" / "generation_config.json").write_text('{"temperature": 0.6, "eos_token_id": 2}')
    said = r"settings: generation_config.json could not be saved again \(.*temperature"
    with pytest.raises(CheckpointError, match=said):
        tuned(work, "from-settings", monkeypatch, model="settings")
    assert not (work / "from-settings").exists()


def test_one_process_at_a_time_trains_an_output(work: Path) -> None:
    options = FinetuneOptions(model=str(work / "source"), output=str(work / "busy"), data=[str(work / "notes.txt")])
    with (
        locked(work / ".busy.training.resformer-lock"),
        pytest.raises(OutputError, match="another process is training"),
    ):
        finetune_checkpoint(options)


def tuned(
    work: Path, output: str, monkeypatch: pytest.MonkeyPatch, callbacks: Sequence[TrainerCallback] = (), **values: Any
) -> FinetuneReport:
    """`finetune_checkpoint` in this process, for two steps; `work` as the current folder."""
    monkeypatch.chdir(work)
    options = {"model": "retrofit", "output": output, "data": ["notes.txt"], "sample_by": "paragraph", "block": 32,
               "held_out": 0.1, "held_out_blocks": 4, "steps": 2, "bf16": False, **values}  # fmt: skip
    known = {name: options.pop(name) for name in FinetuneOptions.__dataclass_fields__ if name in options}
    return finetune_checkpoint(FinetuneOptions(**known, trainer={"disable_tqdm": True, **options}), callbacks=callbacks)


@pytest.mark.parametrize("bf16", [False, True])
def test_dtypes_and_attention_are_those_that_were_asked_for(
    work: Path, monkeypatch: pytest.MonkeyPatch, bf16: bool
) -> None:
    loaded: list[tuple[Any, ...]] = []
    load = recipe._model

    def spy(name: str, dtype: torch.dtype, **options: Any) -> Any:
        loaded.append((Path(name).name, dtype, *options.values()))
        return load(name, dtype, **options)

    monkeypatch.setattr(recipe, "_model", spy)
    name = f"saved-{bf16}"
    tuned(work, name, monkeypatch, save_dtype="float16", bf16=bf16, attn_implementation="eager")
    assert loaded == [("retrofit", torch.float32, "eager"), ("trained", torch.float16)]
    weights = load_file(work / name / "model.safetensors")
    for key, tensor in weights.items():
        assert tensor.dtype == (torch.float32 if is_connection(key) else torch.float16), key
    assert json.loads((work / name / "config.json").read_text())["dtype"] == "float16"
    assert "cache a token, in float16" in (work / name / "README.md").read_text()
    assert len(AutoTokenizer.from_pretrained(work / name)) == 257


@pytest.mark.parametrize(("train", "gradient_checkpointing"), [("all", False), ("connections", True)])
def test_only_what_is_named_is_trained(
    work: Path, monkeypatch: pytest.MonkeyPatch, train: str, gradient_checkpointing: bool
) -> None:
    trainers: list[Any] = []
    run_trainer = recipe._train
    monkeypatch.setattr(recipe, "_train", lambda *given: (trainers.append(given[0]), run_trainer(*given))[1])
    options = {"train": train, "force": True, "gradient_checkpointing": gradient_checkpointing}
    report = tuned(work, "taught", monkeypatch, learning_rate=1e-2, **options)
    before, after = (
        dict(AutoModelForCausalLM.from_pretrained(work / name, dtype="float32").named_parameters())
        for name in ("retrofit", "taught")
    )
    named = {name for name in before if train == "all" or is_connection(name)}
    assert {name for name in before if not torch.equal(before[name], after[name])} == named
    (trainer,) = trainers
    assert sum(len(moments) > 0 for moments in trainer.optimizer.optimizer.state.values()) == len(named)
    assert report.trained_parameters == sum(before[name].numel() for name in named)
    card = (work / "taught" / "README.md").read_text()
    rest = ": the connections" if train == "connections" else ""
    assert f"{report.trained_parameters:,} of {report.parameters:,} parameters were trained{rest}." in card
    assert str(checkpoint_card(work / "taught").card) == card


def test_connections_of_a_model_without_a_name_are_for_the_checkpoint(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = AutoConfig.from_pretrained(work / "source")
    config.name_or_path = ""
    connect(AutoModelForCausalLM.from_config(config), "mudd").save_pretrained(work / "nameless")
    AutoTokenizer.from_pretrained(work / "source").save_pretrained(work / "nameless")
    tuned(work, "of-nameless", monkeypatch, model="nameless", train="connections")
    written = json.loads((work / "of-nameless/connections/config.json").read_text())
    assert written["base_model"]["name"] == "nameless"


def test_a_run_that_died_after_its_last_step_trains_no_more(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"lr_scheduler_type": "constant", "learning_rate": 1e-2}
    options |= {"load_best_model_at_end": True, "metric_for_best_model": "loss", "greater_is_better": True}
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "_write", Mock(side_effect=RuntimeError("unexpected pos 64 vs 0")))  # torch's full disk
        with pytest.raises(OutputError, match=r"died: .* bytes are free .*--resume"):
            tuned(work, "died", patch, **options)
        patch.setattr("os.replace", Mock(side_effect=OSError(errno.ENOSPC, "the disk is full")))
        with pytest.raises(OutputError, match=r"arguments.json: cannot be written: the disk is full"):
            tuned(work, "died", patch, **options, resume=True)
    report = tuned(work, "died", monkeypatch, **options, resume=True)
    assert (report.steps, report.resumed_from) == (2, 2)
    _, first, second = (entry.loss for entry in report.evaluations)
    assert report.loss_after == pytest.approx(first, rel=1e-5)  # the "best" is what is written, not the last
    assert loss_of(work / "died", work, 4) == pytest.approx(first, rel=1e-5)
    assert second < first
    assert 3 * 32 < report.evaluation_tokens < 4 * 32  # that are predicted
    lower = FinetuneOptions(model="m", output="o", data=["d"], trainer={"metric_for_best_model": "bits_per_byte"})
    assert recipe._training_arguments(lower).greater_is_better is False


class Ends(TrainerCallback):
    """Ends a training early, as a time limit does."""

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        control.should_training_stop = control.should_training_stop or state.global_step == 5


def test_a_run_that_anything_has_stopped_is_not_written(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"steps": 8, "save_steps": 4}
    tuned(work, "whole", monkeypatch, **options)
    with pytest.raises(
        CheckpointError, match=r"stopped at step 5 of 8, and nothing .*ended.training/checkpoint-4"
    ) as e:
        tuned(work, "ended", monkeypatch, callbacks=[Ends()], **options)
    assert e.value.option == "--resume"
    assert not (work / "ended").exists()
    step = recipe.RecipeTrainer.training_step

    def signalled(self: Any, *given: Any) -> Any:
        if self.state.global_step == 2:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.2)  # a timer's thread takes the signal up
        return step(self, *given)

    monkeypatch.setattr(recipe.RecipeTrainer, "training_step", signalled)
    monkeypatch.setattr("transformers.trainer_jit_checkpoint.CheckpointManager.__init__.__defaults__", (0,))
    with pytest.raises(
        CheckpointError, match=r"stopped at step \d of 8, and nothing was written. .*/checkpoint-[23]\."
    ):
        tuned(work, "signalled", monkeypatch, enable_jit_checkpoint=True, **options)
    monkeypatch.setattr(recipe.RecipeTrainer, "training_step", step)
    whole = load_file(work / "whole" / "model.safetensors")
    for name in ("ended", "signalled"):
        tuned(work, name, monkeypatch, **options, resume=True)
        again = load_file(work / name / "model.safetensors")
        assert all(torch.equal(tensor, again[key]) for key, tensor in whole.items()), name


def test_one_lost_gradient_ends_the_run_with_its_last_checkpoint(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    step = recipe.RecipeTrainer.training_step

    def lost(self: Any, model: Any, *given: Any) -> Any:
        loss = step(self, model, *given)
        if self.state.global_step == 3:
            next(model.parameters()).grad[0, 0] = math.nan
        return loss

    monkeypatch.setattr(recipe.RecipeTrainer, "training_step", lost)
    with pytest.raises(
        CheckpointError, match=r"Step 4: .* The last checkpoint is .*/checkpoint-3; --resume would come"
    ):
        tuned(work, "nan", monkeypatch, steps=8, save_steps=1, save_total_limit=1)
    model = AutoModelForCausalLM.from_pretrained(work / "nan.training" / "checkpoint-3")
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not (work / "nan").exists()


def test_what_comes_after_each_epoch_comes_after_each(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    each = {"eval_strategy": "epoch", "save_strategy": "epoch", "load_best_model_at_end": True}
    report = tuned(work, "each", monkeypatch, steps=None, epochs=3, batch=64, held_out_blocks=1, **each)
    pass_ = math.ceil(report.steps / 3)
    assert [entry.step for entry in report.evaluations] == [0, pass_, 2 * pass_, report.steps]


def test_a_finetuning_with_a_constant_rate_goes_on(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    constant = {"lr_scheduler_type": "constant", "keep_optimizer": True}
    tuned(work, "short", monkeypatch, steps=3, **constant, eval_steps=3)
    report = tuned(work, "short", monkeypatch, steps=6, **constant, resume=True, eval_steps=2)
    assert [entry.step for entry in report.evaluations] == [0, 3, 4, 6]
    tuned(work, "long", monkeypatch, steps=6, lr_scheduler_type="constant")
    short, long = (load_file(work / name / "model.safetensors") for name in ("short", "long"))
    assert all(torch.equal(tensor, short[key]) for key, tensor in long.items())
    assert not (work / "long.training").exists()


@pytest.mark.parametrize("weights", [False, True])
def test_every_step_has_its_batch(work: Path, monkeypatch: pytest.MonkeyPatch, weights: bool) -> None:
    """Three passes of blocks that no number of steps divides."""
    data = ["notes.txt:2", "few.txt:1"] if weights else ["notes.txt"]
    (work / "few.txt").write_text("\n\n".join(f"Layer {index} reads few words." for index in range(40)))
    sizes: list[int] = []
    step = recipe.RecipeTrainer.training_step

    def counted(self: Any, model: Any, inputs: Any, *more: Any) -> Any:
        sizes.append(len(inputs["input_ids"]))
        return step(self, model, inputs, *more)

    monkeypatch.setattr(recipe.RecipeTrainer, "training_step", counted)
    options: dict[str, Any] = {"data": data, "steps": None, "epochs": 1.5, "batch": 16, "accumulate": 3}
    report = tuned(work, f"full-{weights}", monkeypatch, **options, eval_steps=0.5, save_steps=0.5)
    assert {*sizes} == {16}
    assert len(sizes) == 3 * (report.steps or 0)
    assert report.tokens == (report.steps or 0) * 3 * 16 * 32
    assert report.passes["notes.txt"] == pytest.approx(1.5, abs=48 / (report.training_blocks or 0))
    if weights:
        assert [part.tokens for part in report.data] == pytest.approx(
            [report.tokens * 2 / 3, report.tokens / 3], abs=64
        )
    assert sum(part.tokens for part in report.data) == report.tokens
    card = (work / f"full-{weights}" / "README.md").read_text()
    assert f"| notes.txt | unknown | {report.data[0].tokens:,} | {report.passes['notes.txt']:.3g} |" in card


@pytest.mark.slow
def test_a_batch_that_was_found_automatically_is_resumed_with_its_data(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    step, seen = recipe.RecipeTrainer.training_step, dict[int, torch.Tensor]()

    def small(self: Any, model: Any, inputs: Any, *more: Any) -> Any:
        if len(inputs["input_ids"]) > 2:
            raise RuntimeError("CUDA out of memory.")  # which Accelerate looks for
        seen[self.state.global_step] = inputs["input_ids"].clone()
        return step(self, model, inputs, *more)

    monkeypatch.setattr(recipe.RecipeTrainer, "training_step", small)
    options: dict[str, Any] = {"steps": 9, "batch": 8, "auto_find_batch_size": True, "save_steps": 1}
    tuned(work, "auto", monkeypatch, **options)
    whole = {**seen}
    assert len(whole) == 9
    stop = Stop(lambda state: state.global_step == 5)
    with pytest.raises(KeyboardInterrupt):
        tuned(work, "auto-cut", monkeypatch, callbacks=[stop], **options)
    seen.clear()
    report = tuned(work, "auto-cut", monkeypatch, **options, resume=True)
    assert report.resumed_from == 4
    assert [*seen] == [*range(4, 9)]
    assert all(torch.equal(whole[number], ids) for number, ids in seen.items())


def test_a_run_that_cannot_be_gone_on_with_is_refused(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copytree(work / "retrofit", work / "changing")
    (work / "text.txt").write_text((work / "notes.txt").read_text())
    options = {"model": "changing", "data": ["text.txt"], "save_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        tuned(work, "begun", monkeypatch, callbacks=[Stop(lambda state: state.global_step == 2)], **options)
    files = {path.name for path in (work / "begun.training" / "checkpoint-1").iterdir()}
    assert {"trainer_state.json", "tokenizer.json", "tokenizer_config.json"} <= files

    def refused(words: str, **more: Any) -> None:
        with pytest.raises(CheckpointError, match=words):
            tuned(work, "begun", monkeypatch, **{**options, "resume": True, **more})

    refused("holds an unfinished run; go on with --resume, or begin again with --force", resume=False)
    refused("seed was 0, is 1", seed=1)
    with monkeypatch.context() as patch:
        patch.setattr("transformers.TrainingArguments.world_size", 2)
        refused("sequences a step was 8, is 16. --batch, --accumulate and the number of processes must be 8")
    with monkeypatch.context() as patch:
        patch.setattr(recipe, "gather_object", lambda found: [*found, False])  # another node's
        refused("checkpoint-1: is on the first process's disk and not on those of all")
    (work / "text.txt").write_text((work / "notes.txt").read_text().replace("first layer", "third layer", 1))
    refused("data_sha256 was '.*', is '")
    (work / "text.txt").write_text((work / "notes.txt").read_text())
    (work / "begun.training" / "checkpoint-1" / "scheduler.pt").unlink()
    refused(r"checkpoint-1: has no state of the optimizer \(save_only_model\)")
    shard = work / "changing" / "model-00001-of-00002.safetensors"
    tensors = load_file(shard)
    save_file({**tensors, "model.norm.weight": tensors["model.norm.weight"] + 1}, shard)
    refused(r"weights was \['.*'\], is \['")


def test_the_weights_that_a_schedule_free_optimizer_averages_are_saved(
    work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Averaging(torch.optim.SGD):
        """Adds one to each weight in its evaluation mode."""

        training = True

        def eval(self) -> None:
            self._to(False, 1.0)

        def train(self) -> None:
            self._to(True, -1.0)

        def _to(self, training: bool, more: float) -> None:
            for parameter in self.param_groups[0]["params"] if training != self.training else ():
                parameter.data += more
            self.training = training

    make = recipe.build_trainer

    def averaging(*given: Any, **more: Any) -> Any:
        trainer, config = make(*given, **more)
        trainer.optimizer_cls_and_kwargs = Averaging, {"lr": 0.0}
        return trainer, config

    monkeypatch.setattr(recipe, "build_trainer", averaging)
    before = load_file(work / "source" / "model.safetensors")
    for share in (0.0, 0.1):
        tuned(work, f"averaged-{share}", monkeypatch, model="source", held_out=share)
        after = load_file(work / f"averaged-{share}" / "model.safetensors")
        name = "model.layers.0.mlp.up_proj.weight"
        torch.testing.assert_close(after[name], before[name] + 1)


def test_without_held_out_text_nothing_is_evaluated(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = tuned(work, "unseen", monkeypatch, held_out=0.0, steps=1)
    assert (report.held_out_blocks, report.evaluations, report.loss_after) == (0, [], None)
    assert report.steps == 1
    card = (work / "unseen" / "README.md").read_text()
    assert "No text was held out." in card
    assert "perplexity" not in card
    assert str(checkpoint_card(work / "unseen").card) == card
    with pytest.raises(CheckpointError, match=r"Step 1: .* weights are not finite. There is no checkpoint yet"):
        tuned(work, "lost", monkeypatch, held_out=0.0, learning_rate=math.inf)


def test_a_dry_run_takes_one_step_and_says_what_it_took(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    steps: list[Any] = []
    train = recipe.RecipeTrainer.training_step
    monkeypatch.setattr(
        recipe.RecipeTrainer, "training_step", lambda *given: (steps.append(given[0]), train(*given))[1]
    )
    options = {"batch": 3, "accumulate": 2, "save_steps": 1}
    report = tuned(work, "planned", monkeypatch, model="shared", **options, dry_run=True)
    assert len(steps) == 2
    assert sum(len(moments) > 0 for moments in steps[0].optimizer.optimizer.state.values()) > 0
    assert report.peak_memory == pytest.approx(recipe.peak_memory(), rel=0.01)
    assert not list(work.glob("planned*"))


def test_no_path_of_this_machine_is_in_the_output(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports and curves are pushed. Sources of the same name stay two."""
    (work / "other").mkdir()
    save_notes(work / "other")
    chats = [{"prompt": f"Value {n}? ", "completion": f"{n} " * n} for n in range(60)]
    (work / "chats.jsonl").write_text("\n".join(map(json.dumps, chats)))
    data = [
        f"{work / name}:{weight}" for name, weight in (("notes.txt", 1), ("other/notes.txt", 2), ("chats.jsonl", 1))
    ]
    places = {"model": str(work / "retrofit"), "tokenizer": str(work / "retrofit"), "data": data}
    report = tuned(
        work, str(work / "public"), monkeypatch, **places, truncate=True, train="connections", report_to=["tensorboard"]
    )
    names = [f"{work.name}/notes.txt", "other/notes.txt", "chats.jsonl"]
    assert [*report.held_out_by_source] == [*report.passes] == [part.source for part in report.data] == names
    assert report.arguments["data"] == [f"{names[0]}:1", f"{names[1]}:2", f"{names[2]}:1"]
    assert any(note.startswith("chats.jsonl: ") for note in report.notes)
    written = {path: path.read_bytes() for path in (work / "public").rglob("*") if path.is_file()}
    assert [path for path, content in written.items() if str(work).encode() in content] == []


def test_tensorboard_files_are_in_the_output(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    tuned(work, "logged", monkeypatch, report_to=["tensorboard"], optim="adafactor")
    (file,) = (work / "logged" / "runs").iterdir()
    assert re.fullmatch(r"events\.out\.tfevents\.\d+\.0", file.name)  # no name of a host
    assert DESCRIPTIONS.fullmatch(f"runs/{file.name}")
    events = reader.EventAccumulator(str(file.parent)).Reload()
    assert [event.step for event in events.Scalars("eval/loss")] == [0, 1, 2]
    drawn = {tag: events.Scalars(tag)[-1].value for tag in events.Tags()["scalars"] if "/coefficients/" in tag}
    trained = load_file(file.parent.parent / "model.safetensors")
    for tag, value in drawn.items():
        name, _, n = tag.removeprefix("eval/coefficients/").rpartition("/")
        assert value == pytest.approx(trained[name].flatten()[int(n)].item(), abs=1e-5), tag
    assert len(drawn) == sum(each.numel() for name, each in trained.items() if is_connection(name)) > 0
    check_target(work / "logged", made_by="finetune", force=True)
