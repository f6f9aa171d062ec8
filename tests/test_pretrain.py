"""`resformer pretrain`: a size is a plan, a plan a run of `finetune`, and a stopped run ends with the same weights."""

import json
import math
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from checkpoints import save_notes
from conftest import Stop
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, TrainerControl

from resformer import ResFormerConfig
from resformer.errors import CheckpointError
from resformer.model_cards import model_card
from resformer.training import pretraining, recipe
from resformer.training.options import FinetuneOptions, PretrainOptions, TokenizeOptions
from resformer.training.report import FinetuneReport, record_origin
from resformer.training.tokenizing import tokenize
from resformer.training.trainer import LossGuard

NARROW = {"hidden_size": 32, "num_hidden_layers": 2, "intermediate_size": 48, "num_attention_heads": 4}
SMALL: dict[str, Any] = {
    "tokenizer": "bytes", "fields": NARROW, "block": 32, "batch_tokens": 128, "tokens": 128 * 8, "evaluations": 4,
    "held_out": 0.1, "held_out_blocks": 4, "sample_by": "line", "bf16": False,
}  # fmt: skip


@pytest.fixture
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with text, which is the working one."""
    monkeypatch.chdir(tmp_path)
    save_notes(tmp_path, "text.txt", "\n")
    return tmp_path


def test_the_result_is_a_checkpoint_from_scratch(work: Path, invoke: Callable[..., Any]) -> None:
    Path("options.yaml").write_text(
        f"output: out\ndata: text.txt\nsample_by: line\ntokenizer: bytes\nset: {json.dumps(NARROW)}\nblock: 32\n"
        "batch-tokens: 256\nheld-out: 0.1\nheld-out-blocks: 4\nevaluations: 2\nbf16: false\nmethod: svformer\n"
        "adam_epsilon: 1.0e-7\n"
    )
    done = invoke(
        work, "pretrain", "--config", "options.yaml", "--batch-tokens", "128", "--tokens", "1k",
        "--trainer", "dataloader_num_workers=0", "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.output
    report = json.loads(done.stdout)
    assert (report["plan"]["steps"], report["tokens"], report["method"]) == (8, 1024, "svformer")
    assert report["arguments"]["trainer"].items() >= {"adam_epsilon": 1e-7, "dataloader_num_workers": 0}.items()
    assert report["loss_after"] < report["loss_before"]
    assert report["source"] is None
    model = AutoModelForCausalLM.from_pretrained("out")
    assert (model.config.hidden_size, model.num_parameters()) == (32, report["plan"]["parameters"])
    assert "trained from scratch on text.txt" in Path("out/README.md").read_text()
    log = json.loads(Path("out/log.json").read_text())
    losses = [entry for entry in log if "loss" in entry]
    assert {"grad_norm", "learning_rate", "tokens", "tokens_per_second"} <= losses[-1].keys()
    assert [entry["step"] for entry in log if "eval_loss" in entry] == [0, 4, 8]
    assert max(entry["learning_rate"] for entry in losses) == report["plan"]["learning_rate"]


@pytest.mark.slow
def test_a_stopped_run_ends_with_the_same_weights(work: Path) -> None:
    tokenize(TokenizeOptions(data=["text.txt"], output="tokens", tokenizer="bytes", held_out=0.1, sample_by="line"))
    options = {"data": ["tokens"], "optim": "muon", **SMALL}
    pretraining.pretrain(PretrainOptions(output="whole", **options))
    Path("stopped.training/.start.resformer-partial").mkdir(parents=True)  # of a run that was killed as it began
    for step in (1, 5):  # before the first checkpoint, and between two
        stop = Stop(lambda state, step=step: state.global_step == step)
        with pytest.raises(KeyboardInterrupt):
            pretraining.pretrain(PretrainOptions(output="stopped", resume=True, **options), callbacks=[stop])
    with pytest.raises(CheckpointError, match="method was 'resformer', is 'svformer'"):
        pretraining.pretrain(PretrainOptions(output="stopped", resume=True, method="svformer", **options))
    _, report = pretraining.pretrain(PretrainOptions(output="stopped", resume=True, **options))
    assert report.resumed_from == 4
    whole, resumed = (load_file(Path(name, "model.safetensors")) for name in ("whole", "stopped"))
    assert all(torch.equal(tensor, resumed[name]) for name, tensor in whole.items())
    logs = [json.loads(Path(name, "log.json").read_text()) for name in ("whole", "stopped")]
    assert [entry.get("loss") for entry in logs[0]] == [entry.get("loss") for entry in logs[1]]


@pytest.mark.slow
def test_a_finished_run_goes_on_and_branches_as_a_longer_one(work: Path) -> None:
    options = {"data": ["text.txt"], **SMALL, "fields": {**NARROW, "attention_dropout": 0.1}}

    def trained(output: str, steps: int | None, **more: Any) -> FinetuneReport:
        tokens = None if steps is None else 128 * steps
        return pretraining.pretrain(PretrainOptions(output=output, **{**options, "tokens": tokens, **more}))[1]

    def same(one: str, other: str) -> bool:
        return Path(one, "model.safetensors").read_bytes() == Path(other, "model.safetensors").read_bytes()

    first = trained("run", 20, schedule="constant", warmup=0.1)
    assert [path.name for path in Path("run.training").glob("checkpoint-*")] == ["checkpoint-20"]
    # What changes no step may be another; the rate, which followed from the tokens, is that of the beginning.
    free = {"report_to": ["tensorboard"], "trainer": {"save_total_limit": 1}, "evaluations": 2}
    longer = trained("run", 32, schedule="constant", warmup=0.1, resume=True, gradient_checkpointing=True, **free)
    assert (longer.resumed_from, longer.steps) == (20, 32)
    last = [entry for entry in json.loads(Path("run/log.json").read_text()) if "eval_loss" in entry][-1]
    assert last["coefficients"]
    assert not any("/" in name for name in last)  # each number by itself is TensorBoard's
    rate = {"learning_rate": first.arguments["learning_rate"], "warmup": 2}
    trained("whole", 32, schedule="constant", **rate)
    assert same("run", "whole")
    branch = trained("branch", None, start="run", schedule="wsd", decay=0.2, warmup=0.1)
    assert (branch.resumed_from, branch.steps) == (32, 40)
    trained("wsd", 40, schedule="wsd", decay=0.2, **rate)
    assert same("branch", "wsd")
    rates = [entry["learning_rate"] for entry in json.loads(Path("branch/log.json").read_text()) if "loss" in entry]
    assert max(rates) > rates[-2] > rates[-1]
    again = trained("branch", None, start="run", schedule="wsd", decay=0.2, warmup=0.1, resume=True)
    assert (again.resumed_from, again.steps) == (40, 40)
    with pytest.raises(CheckpointError, match=r"seed was 0, is 1, .* A branch differs in --tokens"):
        trained("other", None, start="run", schedule="wsd", seed=1, warmup=0.1)
    with pytest.raises(CheckpointError, match=r"run.training: is at step 32 .* here it falls at 28"):
        trained("other", 35, start="run", schedule="wsd", warmup=0.1)
    with pytest.raises(CheckpointError, match=r"run.training: is at step 32 .* here it falls at 0"):
        trained("other", 40, start="run", schedule="cosine", warmup=0.1)
    with pytest.raises(CheckpointError, match=r"nothing: no run is kept to go on from: expected its folder .*training"):
        trained("other", 40, start="nothing", schedule="wsd", warmup=0.1)
    with pytest.raises(CheckpointError, match="steps was 40, is 50"):
        trained("branch", 50, start="run", schedule="wsd", resume=True, warmup=0.1)


def history(losses: list[float], **last: float) -> list[dict[str, float]]:
    """Of logs at every second step, and one in between."""
    entries = [{"loss": loss, "grad_norm": 1.0, "step": 2 * number} for number, loss in enumerate(losses, start=1)]
    return [{**entries[0], "step": 1}, *entries[:-1], {**entries[-1], **last}]


@pytest.mark.parametrize(
    ("losses", "last", "said"),
    [
        ([3.0, 5.1, 5.1, 5.1], {}, "the last losses are 5.1000, 5.1000 and 5.1000, the lowest was 3.0000"),
        ([3.0, 2.9, 5.1, 5.1, 4.8], {}, ""),
        ([3.0, 9.0, 9.0], {}, ""),
        ([3.0, 9.0, 3.0, 9.0, 9.0], {}, ""),
        ([3.0, math.nan], {}, "the loss is nan, the norm of the gradient 1.0000"),
        ([3.0, 2.9], {"grad_norm": math.inf}, "the norm of the gradient inf"),
    ],
)
def test_a_lost_loss_stops_the_training(losses: list[float], last: Any, said: str, tmp_path: Path) -> None:
    state = SimpleNamespace(log_history=history(losses, **last), global_step=9, logging_steps=2)
    arguments, control = SimpleNamespace(output_dir=tmp_path, fp16=False), TrainerControl(should_save=True)
    LossGuard(2.0).on_step_end(arguments, state, control, model=torch.nn.Linear(1, 1))
    assert control.should_log  # before the checkpoint
    if not said:
        LossGuard(2.0).on_log(arguments, state, control)
        return
    with pytest.raises(CheckpointError, match=f"{said}. There is no checkpoint yet"):
        LossGuard(2.0).on_log(arguments, state, control)
    (tmp_path / "checkpoint-8").mkdir()
    (tmp_path / "checkpoint-8" / "trainer_state.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"The last checkpoint is .*/checkpoint-8"):
        LossGuard(2.0).on_log(arguments, state, control)
    if math.isfinite(losses[-1]) and not last:
        LossGuard(0.0).on_log(arguments, state, control)  # the way out


def plan_of(devices: int = 1, **more: Any) -> pretraining.PretrainPlan:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pretraining, "_devices", lambda: devices)
        return pretraining.plan_pretraining(PretrainOptions(output="a", data=["text.txt"], tokenizer="bytes", **more))


def test_a_step_is_as_large_on_any_number_of_devices(work: Path) -> None:
    plans = [plan_of(devices, size="82m") for devices in (1, 2, 8)]
    assert len({(plan.steps, plan.tokens, plan.sequences) for plan in plans}) == 1
    assert [plan.sequences // (plan.micro_batch * plan.accumulate) for plan in plans] == [1, 2, 8]
    assert plans[0].rates["coefficients"] == 50 * plans[0].learning_rate
    assert plans[0].tokens == pytest.approx(20 * plans[0].plain_parameters, rel=0.01)
    step = plans[0].sequences
    words = rf"A step has {step} sequences of 2,048 tokens, which 3 devices do not divide; use --batch-tokens (\d+) or"
    words += r" (\d+)"
    with pytest.raises(ValueError, match=words) as error:
        plan_of(3, size="82m")
    for tokens in re.search(words, str(error.value)).groups():
        assert abs(int(tokens) / 2048 - step) < 3
        assert plan_of(3, size="82m", batch_tokens=int(tokens)).sequences == int(tokens) // 2048


def test_the_size_decides_the_budget_whatever_the_method_and_the_idle_experts(work: Path) -> None:
    methods = ("transformer", "resformer", "svformer", "value-embeddings", "nanochat", "delta-attention-residuals")
    plans = [plan_of(size="tiny", method=method) for method in methods]
    assert len({plan.parameters for plan in plans}) > 4
    assert len({(plan.tokens, plan.sequences, plan.learning_rate, plan.plain_parameters) for plan in plans}) == 1
    dense, sparse = (plan_of(size="tiny", method="transformer", backbone=name) for name in ("qwen3", "qwen3_moe"))
    assert sparse.parameters > 1.8 * dense.parameters
    assert sparse.tokens == pytest.approx(dense.tokens, rel=0.02)
    tied = plan_of(size="tiny", method="transformer", backbone="qwen3", fields={"tie_word_embeddings": True})
    assert dense.parameters - tied.parameters == dense.plain_parameters - tied.plain_parameters == 257 * 128


def test_a_dry_run_writes_nothing(work: Path, invoke: Callable[..., Any]) -> None:
    narrow = [word for name, value in NARROW.items() for word in ("--set", f"{name}={value}")]
    arguments = ["--data", "text.txt", "--tokenizer", "bytes", "--block", 32, "--batch-tokens", 64, *narrow]
    done = invoke(work, "pretrain", "out", *arguments, "--dry-run", "--json")
    assert done.exit_code == 0, done.output
    plan = json.loads(done.stdout)["plan"]
    assert plan["sequences"] == 2
    shown = invoke(work, "pretrain", "out", *arguments, "--dry-run")
    assert f"coefficients {plan['rates']['coefficients']:.2g}, gates" in shown.stdout
    assert not list(work.glob("out*"))


def test_a_run_goes_on_with_another_number_of_processes_and_the_same_batches(work: Path) -> None:
    reading = PretrainOptions(output="a", data=["d"]).reading
    begun = {**reading, "trainer": {}, "batch": 4, "accumulate": 2, "processes": 1}
    decides = recipe._deciding
    assert decides(begun) == decides({**begun, "batch": 2, "processes": 4, "accumulate": 1})
    assert decides(begun) != decides({**begun, "processes": 2})


def test_a_card_names_the_licences_and_the_tokens_of_the_data(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, licence in {"one": "odc-by", "many": "[mit, apache-2.0]", "none": "null"}.items():
        Path(name).mkdir()
        Path(name, "README.md").write_text(f"---\nlicense: {licence}\n---\n")

    def cached_file(repository: str, name: str, repo_type: str | None = None, **more: Any) -> str | None:
        return str(Path(repository.partition("/")[2], name)) if repo_type == "dataset" else None

    monkeypatch.setattr("resformer.training.report.cached_file", cached_file)
    options = FinetuneOptions(model="m", output="out", data=["text.txt"])
    report = FinetuneReport({}, "svformer", 1, 1, 32, 1, 0, 0, 0, {}, tokens=10, steps=1)
    tokens = {"text.txt": (1, 1.0), "you/one": (2, 1.0), "you/many:subset": (3, 1.0), "you/none": (4000, 1.0)}
    record_origin(options, ResFormerConfig(), report, tokens)
    assert report.datasets == ["you/one", "you/many", "you/none"]
    card = str(model_card(asdict(report), "you/new", config=ResFormerConfig.for_method("svformer")))
    for row in ("text.txt | unknown | 1", "you/one | odc-by | 2", "you/many:subset | mit, apache-2.0 | 3"):
        assert f"| {row} |" in card
    assert "| you/none | unknown | 4,000 |" in card


def test_compile_compiles_each_layer_by_itself(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[str] = []
    monkeypatch.setattr(torch, "compile", lambda module, **given: compiled.append(type(module).__name__) or module)
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "")  # which the run sets
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    pretraining.pretrain(PretrainOptions(output="out", data=["text.txt"], compile=True, **{**SMALL, "tokens": 256}))
    assert compiled.count("LlamaDecoderLayer") == 2
    assert "ResFormerForCausalLM" not in compiled
