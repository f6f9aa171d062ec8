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
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoints import save_checkpoint, save_notes
from command_server import Run, resformer
from conftest import Stop, tiny_config, tiny_model
from filelock import FileLock
from matplotlib.figure import Figure
from scipy import stats
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, TrainerCallback, get_scheduler

from resformer import METHODS, ResFormerForCausalLM
from resformer.configuration import mixing_layers
from resformer.model_cards.metrics import metrics_of
from resformer.training.data import is_held_out
from resformer.training.flops import forward_flops, training_flops
from resformer.training.optimizer import ConnectionTrainer, is_connection
from resformer.training.options import RunSettings, StudyOptions, names
from resformer.training.packing import Blocks, PackedBlocks
from resformer.training.study import comparison
from resformer.training.study import paired_run as paired_run_module
from resformer.training.study.data import study_data
from resformer.training.study.paired_run import paired_model, paired_run, run_arguments
from resformer.training.study.plot import plot
from resformer.training.study.table import dunnett_critical_value, losses_of, pooled_error, rows_of

SHAPE = "tiny:hidden_size=32:intermediate_size=48:num_hidden_layers=6:num_attention_heads=4"
TEXT = ["--data", "notes.txt", "--sample-by", "paragraph", "--tokenizer", "bytes"]
OPTIONS = ["--block", "32", "--batch", "4", "--held-out", "0.1", "--held-out-blocks", "6", "--no-bf16"]
SMALL = ["--sizes", SHAPE, *TEXT, *OPTIONS]
CONTINUED = ["--from", "checkpoint", *TEXT[:4], *OPTIONS]
GQA = "transformer:num_key_value_heads=2"
STUDIES = (Path(__file__).parents[1] / "benchmarks" / "results" / "study").glob("*.json")
#: Those whose text and checkpoint are in the repository, without those that take minutes.
REPEATED = [
    path
    for path in STUDIES
    if path.stem not in ("trend", "five-rates", "five") and not re.search(" --(data|from) ", path.read_text())
]


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


#: Runs a study in a process that sends itself a signal after a number of training steps.
STOPPED = """
import os, sys
from resformer.cli import main
from resformer.training.study import paired_run

number, last, *sys.argv[1:] = sys.argv[1:]
steps = iter(range(1, int(last) + 1))

class Stopping(paired_run._Recorder):
    def on_step_end(self, args, state, control, **kwargs):
        super().on_step_end(args, state, control, **kwargs)
        if next(steps) == int(last):
            os.kill(os.getpid(), int(number))

paired_run._Recorder = Stopping
main()
"""


class Recorded(PackedBlocks):
    """Blocks that remember in which order they were read."""

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self.read: list[int] = []

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        self.read.append(index)
        return super().__getitem__(index)


def random_blocks(count: int = 10, block: int = 8, vocabulary: int = 97, most: int | None = None) -> Blocks:
    ids = torch.randint(vocabulary, ((count + 3) * block,), generator=torch.Generator().manual_seed(0)).numpy()
    train, held_out = (pa.chunked_array([part]) for part in (ids[: count * block], ids[count * block :]))
    starts = np.array([0, 5, 16])
    return Blocks(Recorded(train, starts, block), PackedBlocks(held_out, starts, block, most=most), {"random": 3})


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
        paired_run(model, blocks, RunSettings(steps=6, batch=4), seed, folder=tmp_path / "unfinished")
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
    [("constant", [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2]), ("wsd", [0.2, 1.1, 2, 2, 2, 2, 2, 1.55, 1.1, 0.65, 0.2])],
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
    assert not (tmp_path / "unfinished").exists()


def test_a_stopped_run_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    def run(*callbacks: TrainerCallback) -> dict[str, Any]:
        recipe = RunSettings(steps=12, batch=4, evaluations=4, learning_rate=1e-2)
        model = paired_model(tiny_config("resformer-denseformer"), tiny_config(), 0)
        return paired_run(model, random_blocks(), recipe, 0, folder=tmp_path / "unfinished", callbacks=callbacks)

    whole = run()
    with pytest.raises(KeyboardInterrupt):
        run(Stop(lambda state: state.global_step == 8))
    resumed = run()
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
    # Eager attention computes the masked half too; torch counts matrix products and not the sums of the connections.
    attention = parts["attention"] * 2 * tokens / (tokens + 1)
    gates = parts["connections"] / 2 if config.attention_residuals else 0  # scores
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


def test_the_critical_value_is_dunnetts() -> None:
    found = [dunnett_critical_value(comparisons, 20) for comparisons in (2, 3, 9)]
    assert found == pytest.approx([2.38, 2.54, 2.95], abs=0.005)  # Dunnett's table for two-sided intervals of 95 %
    assert dunnett_critical_value(1, 2) == pytest.approx(4.30265, rel=1e-5)


def a_run(method: str, seed: int, loss: float | None, documents: list[list[float]] | None = None) -> dict[str, Any]:
    costs = {"architecture": method, "cache_bytes_per_token": 64, "parameters": 9, "training_flops": 2.0 + len(method)}
    held_out = {"documents": None if loss is None else documents or [[10, 10 * loss]]}
    return {"size": "small", "method": method, "seed": seed, "loss": loss, "held_out": held_out, **costs}


def test_differences_have_the_error_of_all_methods_and_seeds() -> None:
    losses: dict[str, list[float | None]] = {"a": [4.0, 5.0, 4.4], "bb": [4.1, 5.12, 4.46], "c": [1.0, None, 1.0]}
    runs = [a_run(method, seed, values[seed]) for seed in range(3) for method, values in losses.items()]
    base, row, diverged = rows_of(runs, "a")["small"]
    assert (base["difference"], base["over_documents"]) == (None, None)
    assert (row["loss"], row["relative_flops"]) == pytest.approx((4.56, 4 / 3))
    assert row["difference"]["values"] == pytest.approx([0.1, 0.12, 0.06])
    student = stats.ttest_rel(losses["bb"], losses["a"]).confidence_interval()  # of two methods it is the paired t
    assert (row["difference"]["low"], row["difference"]["high"]) == pytest.approx(tuple(student))
    assert diverged["loss"] is diverged["difference"] is diverged["over_documents"] is None
    assert rows_of(runs, "bb")["small"][0]["difference"]["mean"] == pytest.approx(-row["difference"]["mean"])
    one_seed = rows_of(runs[:2], "a")["small"][1]["difference"]
    assert one_seed["low"] is one_seed["own"] is None

    error = pooled_error({"a": [0.0, 0.0], "b": [1.0, 3.0], "c": [2.0, 1.0]})  # residuals of 1/6, 5/6 and 4/6, twice
    assert (error.comparisons, error.degrees_of_freedom) == (2, 2)
    assert error.standard_error == pytest.approx(math.sqrt(2 / 2 * 2 * (1 + 25 + 16) / 36 / 2))


def test_each_method_has_its_own_paired_test_with_holms_correction() -> None:
    losses = {
        "a": [4.0, 5.0, 4.4, 4.1],
        "b": [4.1, 5.12, 4.46, 4.2],
        "c": [4.12, 5.14, 4.46, 4.2],
        "d": [3.0, 4.1, 3.3, 3.2],
    }
    runs = [a_run(method, seed, values[seed]) for seed in range(4) for method, values in losses.items()]
    own = {row["method"]: row["difference"]["own"] for row in rows_of(runs, "a")["small"][1:]}
    tests = {method: stats.ttest_rel(values, losses["a"]) for method, values in losses.items() if method != "a"}
    for method, test in tests.items():
        assert own[method]["p"] == pytest.approx(test.pvalue)
        assert (own[method]["low"], own[method]["high"]) == pytest.approx(tuple(test.confidence_interval()))
    p = {method: test.pvalue for method, test in tests.items()}
    assert p["d"] < p["b"] < p["c"] < 2 * p["b"]
    corrected = (3 * p["d"], 2 * p["b"], 2 * p["b"])  # no p-value is corrected to less than a smaller one
    assert tuple(own[method]["holm"] for method in "dbc") == pytest.approx(corrected)


def test_choices_and_reports_are_of_different_documents() -> None:
    documents = [[10, 10.0], [30, 60.0], [20, 60.0], [5, 20.0]]
    assert losses_of(a_run("a", 0, 1.0, documents), None) == (70 / 40, 80 / 25)  # the longest and the third longest
    # Groups: z has 35 tokens, x 20, y 10.
    assert losses_of(a_run("a", 0, 1.0, documents), ["y", "z", "x", "z"]) == (90 / 45, 60 / 20)
    assert losses_of(a_run("a", 0, 1.0, documents), ["x"] * 4) == (None, 150 / 65)
    assert losses_of(a_run("a", 0, None), None) == (None, None)


def test_the_evaluations_error_is_that_of_the_reported_documents() -> None:
    ours, theirs = [[90, 1.0], [80, 0.0], [80, 0.0], [10, 10.0]], [[90, 2.0], [80, 40.0], [80, 40.0], [10, 11.0]]
    runs = [a_run("a", 0, 1.0, ours), a_run("b", 0, 1.25, theirs)]  # the second and the fourth are reported
    interval = rows_of(runs, "a")["small"][1]["over_documents"]
    assert (interval["low"], interval["high"]) == pytest.approx((0.1, 0.5))  # one of the two documents, twice
    assert rows_of([a_run("a", 0, 1.0), a_run("b", 0, 1.25)], "a")["small"][1]["over_documents"] is None
    assert rows_of(runs, "a", ["x", "y", "y", "y"])["small"][1]["over_documents"] is None
    ours = [[90, 1.0], [60, 0.0], [50, 0.0], [20, 0.0], [10, 0.0]]
    theirs = [[90, 2.0], [60, 30.0], [50, 40.0], [20, 0.0], [10, 3.0]]
    runs = [a_run("a", 0, 1.0, ours), a_run("b", 0, 1.25, theirs)]
    interval = rows_of(runs, "a", ["x", "y", "z", "w", "w"])["small"][1]["over_documents"]
    assert (interval["low"], interval["high"]) == pytest.approx((0.1, 0.5))  # y twice, w twice


def test_a_sweep_has_a_line_for_every_other_setting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = []
    for steps, rate in product((2, 4), (1e-3, 2e-3)):
        settings = {"learning_rate": rate, "connection_learning_rate": None, "architecture": "transformer", "curve": []}
        runs.append(a_run(f"transformer:learning_rate={rate}:steps={steps}", 0, 1.0 + steps) | settings)
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    study = {"sizes": rows_of(runs, runs[0]["method"]), "baseline": runs[0]["method"], "held_out_groups": None}
    plot(study, runs, tmp_path / "study.png")
    lines = {line.get_label(): list(line.get_ydata()) for line in drawn[0].axes[2].lines}
    assert lines == {"transformer:steps=2": [3.0, 3.0], "transformer:steps=4": [5.0, 5.0]}


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


# The command.


def test_a_study_is_made_once_and_grows(work: Path, compare: Callable[..., Any]) -> None:
    common = [*SMALL, "--steps", 4, "--evaluations", 2]
    (work / "study").mkdir()
    (work / "study" / ".plan.json.0123.partial").touch()  # of a process that was killed
    first = compare("study", "--methods", GQA, "--seeds", 1, *common)
    assert first.exit_code == 0, first.output
    assert "one seed, no interval" in first.stdout
    runs = {path: path.read_bytes() for path in (work / "study" / "runs").rglob("*.json")}
    assert len(runs) == 2
    assert (work / "study" / "study.png").read_bytes().startswith(b"\x89PNG")
    assert not (work / "study" / "unfinished").exists()

    faster, same = "transformer:learning_rate=1e-2:steps=6", "transformer:steps=4"
    grown = ["study", "--methods", f"transformer,{GQA},{faster},{same}", "--seeds", 2, *common, "--json"]
    folder = work / "study" / "unfinished" / min(runs).parent.relative_to(work / "study" / "runs")
    folder.mkdir(parents=True)
    with FileLock(folder / "1.lock"):  # in another process
        rest = compare(*grown)
    assert (rest.exit_code, rest.stdout) == (0, "")
    assert rest.stderr.count("held-out loss") == 5
    assert "In work in other processes: 1 runs." in rest.stderr
    again = compare(*grown)
    assert again.exit_code == 0, again.output
    assert again.stderr.count("held-out loss") == 1
    assert {path: path.read_bytes() for path in runs} == runs
    report = json.loads(again.stdout)
    assert report == json.loads((work / "study" / "study.json").read_text())
    (rows,) = report["sizes"].values()
    assert [row["method"] for row in rows] == ["transformer", GQA, faster, same]
    assert (rows[3]["losses"], rows[3]["difference"]["own"]) == (rows[0]["losses"], None)  # no variance, no test
    assert rows[0]["parameters"] - rows[1]["parameters"] == 6 * 2 * 32 * 16
    assert rows[1]["cache_bytes_per_token"] * 2 == rows[0]["cache_bytes_per_token"] == 6 * 2 * 32 * 2
    trained = [json.loads(path.read_text()) for path in sorted((work / "study" / "runs").rglob("*.json"))]
    for row in rows:
        own = [run for run in trained if run["method"] == row["method"]]
        assert row["losses"] == [losses_of(run, None)[1] for run in own]
        assert row["choice_loss"] == pytest.approx(np.mean([losses_of(run, None)[0] for run in own]))
        assert row["bits_per_byte"] == pytest.approx(row["loss"] / math.log(2) / report["bytes_per_token"])
    of_faster = [metric for metric in metrics_of(report) if faster in metric.name]
    assert [metric.value for metric in of_faster] == [rows[2]["loss"], rows[2]["difference"]["mean"]]
    assert {metric.method for metric in of_faster} == {"transformer"}
    assert [metric.type for metric in of_faster] == ["loss", None]
    assert all("768 tokens, mean of 2 seeds" in metric.note for metric in of_faster)
    assert f"p {rows[2]['difference']['own']['holm']:.3f} by its own t-test" in of_faster[1].note
    assert any("methods have different learning rates" in note for note in report["notes"])
    assert report["environments"][0]["packages"]["torch"] == metadata.version("torch")
    assert report["data"]["curve_tokens"] == 6 * 32
    assert 6 <= report["data"]["curve_documents"] <= 12
    assert 20 <= report["data"]["held_out_documents"] <= 40
    assert report["data"]["held_out_tokens"] > 30 * 32
    own = {(run["learning_rate"], run["curve"][-1]["step"]) for run in trained if run["method"] == faster}
    assert own == {(1e-2, 6)}

    turned = compare(*grown, "--baseline", faster)
    assert "held-out loss" not in turned.stderr
    (others,) = json.loads(turned.stdout)["sizes"].values()
    assert others[0]["difference"]["mean"] == pytest.approx(-rows[2]["difference"]["mean"])
    assert others[2]["difference"] is None

    other = compare("study", "--methods", GQA, "--seeds", 1, *common, "--learning-rate", "1e-3")
    assert other.exit_code == 3
    assert "study: holds another study: learning_rate was 0.0006, is 0.001." in other.stderr


def test_a_checkpoint_is_continued_as_every_method(work: Path, compare: Callable[..., Any]) -> None:
    before = {path: path.read_bytes() for path in (work / "checkpoint").iterdir()}
    common = [*CONTINUED, "--seeds", 2, "--first-seed", 1, "--steps", 4, "--evaluations", 2]
    methods = ["resformer:connection_learning_rate=1e-2", "svformer"]
    planned = compare("continued", "--methods", ",".join(methods), *common, "--dry-run", "--json")
    assert [run["method"] for run in json.loads(planned.stdout)["runs"]] == ["transformer", *methods]
    assert not (work / "continued").exists()
    done = compare("continued", "--methods", ",".join(methods), *common, "--save-models", "--json")
    assert done.exit_code == 0, done.output
    assert {path: path.read_bytes() for path in (work / "checkpoint").iterdir()} == before
    assert sorted(path.name for path in (work / "continued").iterdir()) == [
        "models", "plan.json", "runs", "study.json", "study.png", "tokenizer",
    ]  # fmt: skip

    report = json.loads(done.stdout)
    assert list(report["sizes"]) == ["checkpoint"]
    assert all("2 seeds, continued from the checkpoint" in metric["note"] for metric in report["metrics"])
    assert any("methods have different learning rates" in note for note in report["notes"])
    (note,) = (m["note"] for m in report["metrics"] if m["method"] == "svformer" and "minus" in m["name"])
    assert re.search(r"; simultaneous 95 % interval [+-]\d\.\d{4} to [+-]\d\.\d{4}, p [01]\.\d{3} by", note)
    runs = [json.loads(path.read_text()) for path in (work / "continued" / "runs").rglob("*.json")]
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
    model.config.use_cache = False
    assert model.config.value_residual == "learnable"
    of_it = {metric.method for metric in metrics_of(report) if metric.is_of(model.config)}
    assert of_it == {"resformer"}

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
    assert (plan["steps"], plan["tokens"], plan["seconds"] > 0) == (6, 768, True)
    assert [(run["method"], run["to_do"]) for run in plan["runs"]] == [("transformer", 3), ("resformer", 3)]
    assert "min at the speed of" in compare("planned", "--tokens", 700, *SMALL, "--seeds", 1, "--dry-run").stdout
    assert set(work.iterdir()) == before


@pytest.mark.slow
def test_processes_share_the_runs_of_a_study_and_those_of_a_killed_one(work: Path) -> None:
    arguments = ["compare", "shared", "--methods", "resformer", "--seeds", 3, *SMALL, "--steps", 30]
    env = {**os.environ, "HF_HOME": str(work / "home")}
    files = [(work / f"shared{number}.out", work / f"shared{number}.err") for number in range(3)]
    one, two, killed = (
        Run(*words, *arguments, log=log, errors=errors, cwd=work, env=env)
        for words, (log, errors) in zip([["-m", "resformer"]] * 2 + [["-c", STOPPED, 9, 20]], files, strict=True)
    )
    assert (one.wait(), two.wait(), killed.wait()) == (0, 0, -signal.SIGKILL)
    trained = [(number, run) for number, (_, errors) in enumerate(files)
               for run in re.findall(r"/6 (.*): held-out", errors.read_text())]  # fmt: skip
    assert {number for number, _ in trained} >= {0, 1}
    assert len({run for _, run in trained}) == len(trained) == 6
    assert any("| transformer |" in log.read_text() for log, _ in files)
    assert not (work / "shared" / "unfinished").exists()


@pytest.mark.slow
@pytest.mark.parametrize("path", REPEATED, ids=lambda path: path.stem)
def test_a_committed_run_begins_as_its_command_says(
    path: Path, tmp_path: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first run, until its first evaluation."""
    study = json.loads(path.read_text())
    plan, unfinished = tmp_path / "again" / "plan.json", tmp_path / "again" / "unfinished"

    def begin(*args: Any, **options: Any) -> dict[str, Any]:
        if json.loads(plan.read_text())["data"] != study["data"]:
            pytest.skip(f"{study['data']['name']}: other files than here")
        return paired_run(*args, **options, callbacks=[Stop(lambda _: any(unfinished.rglob("trainer_state.json")))])

    monkeypatch.setattr(comparison, "paired_run", begin)
    invoke(tmp_path, "compare", "again", *shlex.split(study["command"])[3:])
    (state,) = unfinished.rglob("trainer_state.json")
    place = state.parents[1].relative_to(unfinished)
    curve = json.loads((path.with_suffix("") / "runs" / f"{place}.json").read_text())["curve"]
    losses = [entry["eval_loss"] for entry in json.loads(state.read_text())["log_history"] if "eval_loss" in entry]
    tolerance = 2e-2 if study["bf16"] else 1e-3  # processors round products in bfloat16 differently
    assert losses == pytest.approx([point["validation_loss"] for point in curve[:2]], abs=tolerance)


@pytest.mark.slow
def test_two_processes_train_what_one_does(work: Path) -> None:
    arguments = ["--methods", "resformer", "--seeds", 1, *SMALL, "--steps", 6, "--json"]
    launcher = ("torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    reports = []
    for options in ({}, {"launcher": launcher}):
        output = "two" if options else "one"
        done = resformer("compare", output, *arguments, cwd=work, HF_HOME=str(work / "home"), **options)
        assert done.returncode == 0, done.stderr
        reports.append(json.loads(done.stdout))
    one, two = (next(iter(report["sizes"].values())) for report in reports)
    for alone, both in zip(one, two, strict=True):
        assert both["loss"] == pytest.approx(alone["loss"], rel=1e-4)
    runs = [json.loads(path.read_text()) for path in (work / "two" / "runs").rglob("*.json")]
    assert [run["processes"] for run in runs] == [2, 2]
