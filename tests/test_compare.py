"""`resformer compare`: pairs are pairs, a stopped study goes on, the numbers are what anybody computes."""

import json
import math
import os
import re
import shlex
import signal
from collections.abc import Callable
from functools import partial
from importlib import metadata
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoints import byte_tokenizer, save_checkpoint, save_notes
from command_server import Run
from conftest import Stop, tiny_config, tiny_model
from filelock import FileLock
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, TrainerCallback, get_scheduler

from resformer import METHODS, ResFormerForCausalLM
from resformer.configuration import mixing_layers
from resformer.errors import CheckpointError
from resformer.training.data import is_held_out
from resformer.training.flops import forward_flops, training_flops
from resformer.training.optimizer import ConnectionTrainer, is_connection
from resformer.training.options import RunSettings, StudyOptions, names
from resformer.training.packing import Blocks, PackedBlocks
from resformer.training.sizes import scratch_config
from resformer.training.study import comparison
from resformer.training.study import paired_run as paired_run_module
from resformer.training.study.data import study_data
from resformer.training.study.paired_run import losses_by_document, paired_model, paired_run, run_arguments
from resformer.training.study.record import add_line, read_record
from resformer.training.study.table import detectable, paired_difference, rows_of

SHAPE = "tiny:hidden_size=32:intermediate_size=48:num_hidden_layers=6:num_attention_heads=4"
TEXT = ["--data", "notes.txt", "--sample-by", "paragraph", "--tokenizer", "bytes"]
OPTIONS = ["--block", "32", "--batch", "4", "--held-out", "0.1", "--held-out-blocks", "6", "--no-bf16"]
SMALL = ["--sizes", SHAPE, *TEXT, *OPTIONS]
CONTINUED = ["--from", "checkpoint", *TEXT[:4], *OPTIONS]
GQA = "transformer:num_key_value_heads=2"
STUDIES = Path(__file__).parents[1] / "benchmarks" / "results" / "study"


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with some text."""
    folder = tmp_path_factory.mktemp("compare")
    save_notes(folder)
    save_checkpoint(folder / "checkpoint")
    return folder


@pytest.fixture
def compare(work: Path, invoke: Callable[..., Any]) -> Callable[..., Any]:
    """`compare("out", "--steps", 4)` in this process, in the folder `work`."""
    return partial(invoke, work, "compare")


class Recorded(PackedBlocks):
    """Blocks that remember in which order they were read."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return super().__getitem__(index)


def random_blocks(most: int | None = None, separate: bool = False) -> Blocks:
    """10 blocks of 8 tokens, and 3 that are held out."""
    ids = torch.randint(97, (104,), generator=torch.Generator().manual_seed(0)).numpy()
    train, held_out = (pa.chunked_array([part]) for part in (ids[:80], ids[80:]))
    starts = np.array([0, 5, 16])
    side = PackedBlocks(held_out, starts, 8, most=most, separate=separate)
    return Blocks(Recorded(train, starts, 8), side, {"random": 3})


# Pairs.


def test_models_of_a_seed_start_from_one_backbone_and_their_own_connections(method: str) -> None:
    backbone = tiny_config()
    llama = paired_model(backbone, backbone, 3).state_dict()
    model = paired_model(tiny_config(method), backbone, 3)
    for name, parameter in model.named_parameters():
        if is_connection(name):
            assert name not in llama
        else:
            assert torch.equal(parameter, llama[name]), name
    starts = [each.model.value_mixing_matrix() for each in (model, ResFormerForCausalLM(tiny_config(method)))]
    assert torch.equal(*(matrix.nan_to_num(7) for matrix in starts))
    other = paired_model(tiny_config(method), backbone, 4)
    assert not torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)


def test_fewer_key_value_heads_are_the_first_ones() -> None:
    backbone = tiny_config(num_key_value_heads=4)
    full, half = (paired_model(tiny_config(num_key_value_heads=heads), backbone, 0) for heads in (4, 2))
    for name, parameter in half.named_parameters():
        whole = full.get_parameter(name)
        assert torch.equal(parameter, whole[: len(parameter)]), name
        assert (len(parameter) < len(whole)) == (".k_proj" in name or ".v_proj" in name)


def test_methods_of_a_seed_see_the_same_batches(tmp_path: Path) -> None:
    def order(method: str, seed: int) -> list[int]:
        blocks = random_blocks()
        assert isinstance(blocks.train, Recorded)
        model = paired_model(tiny_config(method), tiny_config(), seed)
        paired_run(model, blocks, RunSettings(steps=6, batch=4), seed, folder=tmp_path / f"{method}-{seed}")
        return blocks.train.read

    expected = order("transformer", 0)
    assert len(expected) == 24
    epochs = [expected[start : start + 8] for start in (0, 8, 16)]  # of 10 blocks, those that fill batches
    assert [sorted(epoch) for epoch in epochs] == [list(range(8))] * 3
    assert epochs[0] != epochs[1]
    assert order("resformer-gated", 0) == expected
    assert order("transformer", 1) != expected


# The recipe.


def test_the_recipe_is_the_papers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[ConnectionTrainer] = []
    monkeypatch.setattr(
        paired_run_module, "ConnectionTrainer", lambda **given: made.append(ConnectionTrainer(**given)) or made[-1]
    )
    recipe = RunSettings(steps=20, batch=2, warmup=0.1, evaluations=20, connection_learning_rate=6e-3)
    model = paired_model(tiny_config("resformer-denseformer"), tiny_config(), 0)
    paired_run(model, random_blocks(), recipe, 0, folder=tmp_path / "u")
    (trainer,) = made
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, torch.optim.AdamW)
    assert trainer.args.max_grad_norm == 1.0
    groups = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    for name, parameter in trainer.model.named_parameters():
        group = groups[id(parameter)]
        assert group["weight_decay"] == (0.1 if parameter.dim() == 2 and not is_connection(name) else 0.0), name
        assert group["lr"] == pytest.approx(6e-4 if is_connection(name) else 6e-5), name
    assert {group["betas"] for group in optimizer.param_groups} == {(0.9, 0.95)}
    rates = [entry["learning_rate"] for entry in trainer.state.log_history if "learning_rate" in entry]
    assert max(rates) == pytest.approx(6e-4)
    assert rates.index(max(rates)) == 2
    assert all(left > right for left, right in pairwise(rates[2:]))


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2]), ("wsd", [0, 1, 2, 2, 2, 2, 2, 1.5, 1, 0.5, 0])],
)
def test_the_rate_is_constant_or_falls_at_the_end(tmp_path: Path, schedule: str, rates: list[float]) -> None:
    settings = RunSettings(steps=10, warmup=0.2, schedule=schedule, decay=0.4, learning_rate=2.0)
    arguments = run_arguments(settings, tmp_path, 0)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    options = arguments.lr_scheduler_kwargs
    scheduler = get_scheduler(arguments.lr_scheduler_type, optimizer, 2, 10, options)
    found = []
    for _ in range(11):
        found += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert (arguments.warmup_steps, found) == (2, pytest.approx(rates))


def test_the_last_loss_is_that_of_all_held_out_documents_and_the_curve_has_the_intervals(tmp_path: Path) -> None:
    blocks = random_blocks(most=2)
    result = paired_run(
        paired_model(tiny_config("resformer"), tiny_config(), 0), blocks,
        RunSettings(steps=7, batch=2, evaluations=3, bf16=False), 0,
        folder=tmp_path / "unfinished", save_to=tmp_path / "model",
    )  # fmt: skip
    assert [point["step"] for point in result["curve"]] == [0, 3, 6, 7]
    assert [point["tokens"] for point in result["curve"]] == [0, 48, 96, 112]
    assert all(math.isfinite(point["training_loss"]) for point in result["curve"][1:])
    model = ResFormerForCausalLM.from_pretrained(tmp_path / "model").eval()
    whole, curve = (torch.stack([b["input_ids"] for b in part]) for part in (blocks.held_out.whole, blocks.held_out))
    with torch.no_grad():
        assert result["loss"] == pytest.approx(model(input_ids=whole, labels=whole).loss.item(), rel=1e-5)
        last = model(input_ids=curve, labels=curve).loss.item()
        logits = model(input_ids=whole).logits[:, :-1]
    assert result["curve"][-1]["validation_loss"] == pytest.approx(last, rel=1e-5)
    # Tokens 0, 8 and 16 begin a block, and are not predicted; the documents begin at 0, 5 and 16.
    losses = torch.nn.functional.cross_entropy(logits.flatten(0, 1), whole[:, 1:].flatten(), reduction="none")
    nats = [part.sum().item() for part in losses.split([4, 10, 7])]
    tokens, measured = zip(*result["held_out"]["documents"], strict=True)
    assert (tokens, result["held_out"]["tokens"]) == ((4, 10, 7), 21)
    assert measured == pytest.approx(nats, rel=1e-5)
    assert result["parameters"] == sum(parameter.numel() for parameter in model.parameters())


def test_separate_documents_have_the_losses_of_each_alone() -> None:
    model, blocks = tiny_model("resformer-denseformer").eval(), random_blocks(separate=True).held_out
    ids, nats = torch.cat([block["input_ids"] for block in map(blocks.__getitem__, range(3))]), [0.0] * 3
    for document, begin, end in ((0, 0, 5), (1, 5, 8), (1, 8, 16), (2, 16, 24)):  # a block's end cuts the second
        alone = ids[None, begin:end]
        with torch.no_grad():
            nats[document] += model(input_ids=alone, labels=alone).loss.item() * (end - begin - 1)
    tokens, measured = zip(*losses_by_document(model, blocks, 2)["documents"], strict=True)
    assert tokens == (4, 9, 7)
    assert measured == pytest.approx(nats, rel=1e-5)


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def run(folder: str, *callbacks: TrainerCallback) -> dict[str, Any]:
        recipe = RunSettings(steps=12, batch=4, evaluations=4, learning_rate=1e-2)
        model = paired_model(tiny_config("resformer-denseformer"), tiny_config(), 0)
        return paired_run(model, random_blocks(), recipe, 0, folder=tmp_path / folder, callbacks=callbacks)

    whole = run("whole")
    with pytest.raises(KeyboardInterrupt):
        run("stopped", Stop(lambda state: state.global_step == 8))
    resumed = run("stopped")
    assert (whole["resumed_from"], resumed["resumed_from"]) == (0, 6)
    assert (resumed["curve"], resumed["held_out"]) == (whole["curve"], whole["held_out"])
    # In bfloat16 where the processor has it, as the curve is.
    assert whole["loss"] == pytest.approx(whole["curve"][-1]["validation_loss"], rel=1e-6)


# Costs.


@pytest.mark.parametrize("variant", [*METHODS, "crossed-sharing"])
def test_operations_are_those_that_torch_counts(variant: str) -> None:
    tokens = 16
    model = tiny_model(variant, attention="eager")
    config = model.config
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None], use_cache=False)
    parts = forward_flops(config, tokens)
    # Eager attention computes the masked half too; torch counts matrix products and not other sums of the connections.
    attention = parts["attention"] * 2 * tokens / (tokens + 1)
    gates = parts["connections"] if config.attention_residuals else 0
    if config.value_residual == "gated":
        gates = 2 * config.hidden_size * config.num_key_value_heads * len(mixing_layers(config))
    gates += 2 * 12 * config.num_key_value_heads * len(config.value_embeddings or ())
    counted = parts["projections"] + parts["head"] + attention + gates
    averages = 0 if not config.dwa else parts["connections"]
    assert counted * tokens <= counter.get_total_flops() <= (counted + 3 * averages) * tokens
    assert training_flops(config, tokens) == 3 * sum(parts.values())
    # Queries of 32 numbers in 6 layers; a token sees up to 4 keys.
    config.sliding_window, config.layer_types = 4, ["sliding_attention"] * 6
    assert forward_flops(config, tokens)["attention"] == 4 * 32 * 6 * (1 + 2 + 3 + 13 * 4) / 16


# Statistics.


def a_run(method: str, seed: int, loss: float | None) -> dict[str, Any]:
    costs = {"architecture": method, "cache_bytes_per_token": 64, "parameters": 9, "training_flops": 2.0 + len(method)}
    return {"size": "small", "method": method, "seed": seed, "loss": loss, **costs}


LOSSES: dict[str, list[float | None]] = {
    "a": [4.0, 5.0, 4.4, 4.1],
    "bb": [4.1, 5.12, 4.46, 4.2],
    "c": [4.12, 5.14, 4.46, 4.2],
    "d": [3.0, 4.1, 3.3, 3.2],
    "diverged": [1.0, None, 1.0, 1.0],
}


def rows(seeds: int = 4, baseline: str = "a") -> dict[str, dict[str, Any]]:
    """Of `LOSSES`; the order in which runs ended says nothing."""
    runs = [a_run(method, seed, losses[seed]) for method, losses in LOSSES.items() for seed in reversed(range(seeds))]
    return {row["method"]: row for row in rows_of(runs, baseline)["small"]}


def test_differences_are_paired_by_seed() -> None:
    found = rows()
    assert found["a"]["difference"] is None
    assert found["bb"]["difference"]["values"] == pytest.approx([0.1, 0.12, 0.06, 0.1])
    assert (found["bb"]["loss"], found["bb"]["relative_flops"]) == pytest.approx((4.47, 4 / 3))
    assert found["diverged"]["loss"] is found["diverged"]["difference"] is None
    assert rows(baseline="bb")["a"]["difference"]["mean"] == pytest.approx(-found["bb"]["difference"]["mean"])
    one = rows(seeds=1)["bb"]["difference"]
    assert (one["mean"], one["low"], one["p"], one["detectable"], one["holm"]) == (pytest.approx(0.1), *[None] * 4)
    same = paired_difference([1.0, 2.0], [1.0, 2.0])  # no variance, no test
    assert same is not None
    assert (same["mean"], same["p"]) == (0.0, None)


def test_each_method_has_its_own_paired_t_test_with_holms_correction() -> None:
    found = {method: row["difference"] for method, row in rows().items() if row["difference"]}
    tests = {method: stats.ttest_rel(LOSSES[method], LOSSES["a"]) for method in ("bb", "c", "d")}
    for method, test in tests.items():
        assert found[method]["p"] == pytest.approx(test.pvalue)
        assert (found[method]["low"], found[method]["high"]) == pytest.approx(tuple(test.confidence_interval()))
    p = {method: test.pvalue for method, test in tests.items()}
    assert p["d"] < p["bb"] < p["c"] < 2 * p["bb"]
    corrected = (3 * p["d"], 2 * p["bb"], 2 * p["bb"])  # no p-value is corrected to less than a smaller one
    assert tuple(found[method]["holm"] for method in ("d", "bb", "c")) == pytest.approx(corrected)


def test_what_could_have_been_seen_is_what_tables_of_power_say() -> None:
    # Pairs that a t-test of 5 % needs for 80 % power, by the effect in standard deviations (Cohen's tables; G*Power).
    for effect, pairs in {0.2: 199, 0.5: 34, 0.8: 15}.items():
        assert detectable(1.0, pairs) <= effect < detectable(1.0, pairs - 1)
    assert detectable(3.0, 34) == pytest.approx(3 * detectable(1.0, 34))
    # Many pairs: the normal distribution's.
    assert detectable(1.0, 10**6) * 1e3 == pytest.approx(stats.norm.ppf(0.975) + stats.norm.ppf(0.8), rel=1e-4)
    draws = np.random.default_rng(0).normal(detectable(1.0, 5), 1.0, (20_000, 5))
    assert (stats.ttest_1samp(draws, 0.0, axis=1).pvalue < 0.05).mean() == pytest.approx(0.8, abs=0.01)


# Data.


def test_a_tokenizer_is_trained_on_the_training_part_alone(tmp_path: Path) -> None:
    seen = [text for i in range(400) if not is_held_out(text := f"abcdefgh number {i}", 0.3)]
    unseen = [text for i in range(400) if is_held_out(text := f"zyxwvuts number {i}", 0.3)]
    (tmp_path / "notes.txt").write_text("\n\n".join([*seen, *unseen]))
    options = {"sample_by": "paragraph", "block": 16, "held_out": 0.3, "held_out_blocks": 1000, "steps": 1}
    data = study_data(StudyOptions(output="", data=[str(tmp_path / "notes.txt")], **options), "bpe:300")
    assert data.name == "notes.txt"
    assert len(data.tokenizer("abcdefgh")["input_ids"]) == 1
    assert len(data.tokenizer("zyxwvuts")["input_ids"]) == 8
    text = data.tokenizer.decode(data.blocks.held_out[0]["input_ids"])
    assert "zyxwvuts" in text
    assert "abcdefgh" not in text
    # Bytes of whole documents; the tail that fills no block is missing.
    tokens = sum(len(data.tokenizer(text)["input_ids"]) + 1 for text in unseen)
    assert data.bytes_per_token == pytest.approx(sum(map(len, unseen)) / tokens, rel=0.02)


def test_bytes_are_tokens(work: Path) -> None:
    options = {"sample_by": "paragraph", "block": 32, "held_out": 0.1, "held_out_blocks": 6, "steps": 1}
    data = study_data(StudyOptions(output="", data=[str(work / "notes.txt")], **options), "bytes")
    assert len(data.tokenizer) == 257
    ids = torch.cat([block["input_ids"] for block in data.blocks.held_out.whole])
    assert data.bytes_per_token == (ids != data.tokenizer.eos_token_id).sum().item() / len(ids)
    assert data.tokenizer.decode(data.tokenizer("naïve 値")["input_ids"]) == "naïve 値"
    assert len(data.tokenizer("naïve 値")["input_ids"]) == len("naïve 値".encode())


def test_lists_of_names_keep_the_commas_of_values() -> None:
    assert names(f"svformer, {GQA},resformer:value_residual_init=[0.5,1e-3]") == [
        "svformer", GQA, "resformer:value_residual_init=[0.5,1e-3]",
    ]  # fmt: skip
    assert names("tiny,10m") == ["tiny", "10m"]
    sizes = names("resformer:value_residual_init=2,1:value_residual_layers=6,7,10m:num_hidden_layers=2")
    assert sizes == ["resformer:value_residual_init=2,1:value_residual_layers=6,7", "10m:num_hidden_layers=2"]
    config = scratch_config("resformer", "tiny:hidden_size=64:value_residual_layers=6,7", byte_tokenizer())
    assert (config.hidden_size, config.value_residual_layers, config.num_hidden_layers) == (64, [6, 7], 8)


# The command.


def test_a_study_is_made_once_and_grows(work: Path, compare: Callable[..., Any]) -> None:
    common = [*SMALL, "--steps", 4, "--evaluations", 2]
    (work / "study").mkdir()
    (work / "study" / ".runs.jsonl.0123.partial").touch()  # of a process that was killed
    first = compare("study", "--methods", GQA, "--seeds", 1, *common)
    assert first.exit_code == 0, first.output
    assert "One seed: no interval." in first.stdout
    record = work / "study" / "runs.jsonl"
    begun = record.read_text()
    assert len(begun.splitlines()) == 3
    assert (work / "study" / "study.png").read_bytes().startswith(b"\x89PNG")
    assert not (work / "study" / "unfinished").exists()

    faster, same = "transformer:learning_rate=1e-2:steps=6", "transformer:steps=4"
    grown = ["study", "--methods", f"transformer,{GQA},{faster},{same}", "--seeds", 2, *common, "--json"]
    folder = work / "study" / "unfinished" / re.sub(r"[^\w.-]+", "-", SHAPE) / "transformer"
    folder.mkdir(parents=True)
    with FileLock(folder / "1.lock"):  # in another process
        rest = compare(*grown)
    assert (rest.exit_code, rest.stdout) == (0, "")
    assert rest.stderr.count("held-out loss") == 5
    assert "In work in other processes: 1 runs." in rest.stderr
    again = compare(*grown)
    assert again.exit_code == 0, again.output
    assert again.stderr.count("held-out loss") == 1
    assert record.read_text().startswith(begun)
    report = json.loads(again.stdout)
    assert report == json.loads((work / "study" / "study.json").read_text())
    (rows,) = report["sizes"].values()
    assert [row["method"] for row in rows] == ["transformer", GQA, faster, same]
    assert (rows[3]["losses"], rows[3]["difference"]["p"]) == (rows[0]["losses"], None)  # no variance, no test
    assert rows[0]["parameters"] - rows[1]["parameters"] == 6 * 2 * 32 * 16
    assert rows[1]["cache_bytes_per_token"] * 2 == rows[0]["cache_bytes_per_token"] == 6 * 2 * 32 * 2
    ((study, trained),) = read_record(record)
    assert study.items() <= {**report, "command": study["command"]}.items()
    for row in rows:
        own = [run for run in trained if run["method"] == row["method"]]
        assert row["losses"] == [run["loss"] for run in sorted(own, key=lambda run: run["seed"])]
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) / report["bytes_per_token"])
    assert any("methods have different learning rates" in note for note in report["notes"])
    assert report["environments"][0]["packages"]["torch"] == metadata.version("torch")
    assert report["data"]["curve_tokens"] == 6 * 32
    assert 6 <= report["data"]["curve_documents"] <= 12
    assert 20 <= report["data"]["held_out_documents"] <= 40
    assert report["data"]["held_out_tokens"] > 30 * 32
    own = {(run["learning_rate"], run["curve"][-1]["step"]) for run in trained if run["method"] == faster}
    assert own == {(1e-2, 6)}
    assert {run["connection_learning_rate"] for run in trained} == {None}  # none of these methods learns any
    plain = next(run for run in trained if run["method"] == "transformer")
    operations = plain["training_flops"] / plain["curve"][-1]["tokens"] * 20 * plain["parameters"]
    assert plain["learning_rate"] == pytest.approx(0.3118 * operations**-0.125)  # the size's, however short the run

    turned = compare(*grown, "--baseline", faster, "--save-models")  # which is no part of the study
    assert "held-out loss" not in turned.stderr
    (others,) = json.loads(turned.stdout)["sizes"].values()
    assert others[0]["difference"]["mean"] == pytest.approx(-rows[2]["difference"]["mean"])
    assert others[2]["difference"] is None

    other = compare("study", "--methods", GQA, "--seeds", 1, *common, "--learning-rate", "1e-3")
    assert other.exit_code == 3
    assert "study: holds another study: learning_rate was None, is 0.001." in other.stderr


def test_a_diverged_run_is_recorded_and_left_out(work: Path, compare: Callable[..., Any]) -> None:
    given = ["--methods", "resformer:learning_rate=1e30", "--seeds", 1, *SMALL, "--steps", 4, "--json"]
    done = compare("lost", *given)
    assert done.exit_code == 0, done.output
    ((_, runs),) = read_record(work / "lost" / "runs.jsonl")
    assert [run["loss"] is None for run in runs] == [False, True]


def test_a_record_survives_the_death_of_its_writer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = tmp_path / "runs.jsonl"
    add_line(record, {"study": {"steps": 4}})
    add_line(record, {"seed": 0})
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            add_line(record, {"seed": 1})
    assert read_record(record) == [({"steps": 4}, [{"seed": 0}])]
    add_line(record, {"seed": 1})
    assert [path.name for path in tmp_path.iterdir()] == ["runs.jsonl"]
    joined = tmp_path / "joined.jsonl"
    joined.write_text(2 * record.read_text())
    assert read_record(joined) == 2 * [({"steps": 4}, [{"seed": 0}, {"seed": 1}])]
    record.write_text(record.read_text() + '{"seed": ')
    with pytest.raises(CheckpointError, match=r"runs\.jsonl: line 4 is no run of a study .*; remove it"):
        read_record(record)


def test_a_run_that_ended_is_not_lost_before_it_is_recorded(
    work: Path, compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ["late", "--methods", "transformer", "--seeds", 1, *SMALL, "--steps", 4, "--evaluations", 2]

    def killed(path: Path, line: dict[str, Any]) -> None:
        if "study" not in line:
            raise KeyboardInterrupt
        add_line(path, line)

    with monkeypatch.context() as patch:
        patch.setattr(comparison, "add_line", killed)
        assert compare(*command).exit_code == 130
    done = compare(*command)
    assert done.exit_code == 0, done.output
    ((_, (run,)),) = read_record(work / "late" / "runs.jsonl")
    assert run["resumed_from"] == 2
    assert not (work / "late" / "unfinished").exists()


def test_a_checkpoint_is_continued_as_every_method(work: Path, compare: Callable[..., Any]) -> None:
    before = {path: path.read_bytes() for path in (work / "checkpoint").iterdir()}
    common = [*CONTINUED, "--seeds", 2, "--first-seed", 1, "--steps", 4, "--evaluations", 2]  # with models and without
    methods = ["resformer:connection_learning_rate=1e-2", "svformer"]
    planned = compare("continued", "--methods", ",".join(methods), *common, "--dry-run", "--json")
    assert [run["method"] for run in json.loads(planned.stdout)["runs"]] == ["transformer", *methods]
    assert not (work / "continued").exists()
    done = compare("continued", "--methods", ",".join(methods), *common, "--save-models", "--json")
    assert done.exit_code == 0, done.output
    assert {path: path.read_bytes() for path in (work / "checkpoint").iterdir()} == before
    assert sorted(path.name for path in (work / "continued").iterdir()) == [
        "models", "runs.jsonl", "study.json", "study.png", "tokenizer",
    ]  # fmt: skip

    report = json.loads(done.stdout)
    assert list(report["sizes"]) == ["checkpoint"]
    assert any("methods have different learning rates" in note for note in report["notes"])
    ((_, runs),) = read_record(work / "continued" / "runs.jsonl")
    starts = {(run["method"], run["seed"]): run["curve"][0]["validation_loss"] for run in runs}
    options = {"sample_by": "paragraph", "block": 32, "held_out": 0.1, "held_out_blocks": 6, "steps": 1}
    data = study_data(StudyOptions(output="", data=["notes.txt"], **options), "checkpoint")
    ids = torch.stack([block["input_ids"] for block in data.blocks.held_out])
    model = AutoModelForCausalLM.from_pretrained("checkpoint")
    with torch.no_grad():
        loss = model(input_ids=ids, labels=ids).loss.item()
    assert starts["transformer", 1] == starts["transformer", 2] == pytest.approx(loss, rel=1e-5)
    assert starts[methods[0], 1] == starts[methods[0], 2] == starts["transformer", 1]  # exact
    assert starts["svformer", 1] != starts["transformer", 1]
    assert len({run["loss"] for run in runs}) == 6  # the order of the batches is the seed's, the rest the method's
    (folder,) = (work / "continued" / "models" / "checkpoint").glob("resformer*/1")
    model = ResFormerForCausalLM.from_pretrained(folder)
    assert model.config.value_residual == "learnable"

    weights = (work / "checkpoint" / "model.safetensors").read_bytes()
    try:
        (work / "checkpoint" / "model.safetensors").write_bytes(weights[:-4] + b"1234")
        other = compare("continued", "--methods", ",".join(methods), *common, "--save-models")
    finally:
        (work / "checkpoint" / "model.safetensors").write_bytes(weights)
    assert (other.exit_code, "holds another study: start_weights was" in other.stderr) == (3, True)


def test_a_dry_run_prints_the_plan_and_writes_nothing(work: Path, compare: Callable[..., Any]) -> None:
    before = set(work.iterdir())
    done = compare("planned", "--methods", "resformer", "--tokens", 700, *SMALL, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)
    assert (plan["steps"], plan["tokens"]) == (6, 768)
    assert [(run["method"], run["to_do"]) for run in plan["runs"]] == [("transformer", 3), ("resformer", 3)]
    assert "runs to do: 1, of " in compare("planned", "--tokens", 700, *SMALL, "--seeds", 1, "--dry-run").stdout
    assert set(work.iterdir()) == before


@pytest.mark.slow
def test_processes_share_the_runs_of_a_study_and_those_of_a_killed_one(work: Path) -> None:
    arguments = ["compare", "shared", "--methods", "resformer", "--seeds", 3, *SMALL, "--steps", 30]
    env = {**os.environ, "HF_HOME": str(work / "home"), "KILLED_AT": "20"}
    worker = Path(__file__).with_name("killed_worker.py").read_text()
    files = [(work / f"shared{number}.out", work / f"shared{number}.err") for number in range(3)]
    one, two, killed = (
        Run(*words, *arguments, log=log, errors=errors, cwd=work, env=env)
        for words, (log, errors) in zip([["-m", "resformer"]] * 2 + [["-c", worker]], files, strict=True)
    )
    assert (one.wait(), two.wait(), killed.wait()) == (0, 0, -signal.SIGKILL)
    trained = [(number, run) for number, (_, errors) in enumerate(files)
               for run in re.findall(r"/6 (.*): held-out", errors.read_text())]  # fmt: skip
    assert {number for number, _ in trained} >= {0, 1}
    assert len({run for _, run in trained}) == len(trained) == 6
    assert any("| transformer |" in log.read_text() for log, _ in files)
    assert not (work / "shared" / "unfinished").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["main", "budget20-rates", "budget20"])
def test_a_committed_run_begins_as_its_command_says(
    name: str, tmp_path: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run, until its first evaluation."""
    ((study, runs),) = read_record(STUDIES / f"{name}.jsonl")
    record, unfinished = tmp_path / "again" / "runs.jsonl", tmp_path / "again" / "unfinished"

    def begin(*args: Any, **options: Any) -> dict[str, Any]:
        if read_record(record)[0][0]["data"] != study["data"]:
            pytest.skip(f"{study['data']['name']}: other files than here")
        return paired_run(*args, **options, callbacks=[Stop(lambda _: any(unfinished.rglob("trainer_state.json")))])

    monkeypatch.setattr(comparison, "paired_run", begin)
    invoke(tmp_path, "compare", "again", *shlex.split(study["command"])[3:])
    (state,) = unfinished.rglob("trainer_state.json")
    losses = [entry["eval_loss"] for entry in json.loads(state.read_text())["log_history"] if "eval_loss" in entry]
    tolerance = 2e-2 if study["bf16"] else 1e-3  # processors round products in bfloat16 differently
    assert losses == pytest.approx([point["validation_loss"] for point in runs[0]["curve"][:2]], abs=tolerance)


def test_a_launcher_is_refused(work: Path, compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = compare("launched", "--methods", "resformer", *SMALL, "--steps", 6)
    assert (done.exit_code, "start the command several times" in done.stderr) == (2, True)
    assert not (work / "launched").exists()
