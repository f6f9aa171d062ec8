"""`resformer compare`: pairs are pairs, a stopped study goes on, the numbers are what anybody computes."""

import json
import math
import os
from collections.abc import Callable
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from checkpoints import byte_tokenizer, save_checkpoint, save_notes
from conftest import Stop, tiny_config, tiny_model, windowed_model
from safetensors.torch import load_file
from scipy import stats
from small_decoders import small_decoder
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, default_data_collator, get_scheduler

from resformer import METHODS, value_mixing_matrix
from resformer.configuration import mixing_layers
from resformer.convert import connections
from resformer.errors import CheckpointError
from resformer.files import locked
from resformer.training.data import is_held_out, load_documents
from resformer.training.flops import forward_flops, training_flops
from resformer.training.optimizer import is_connection
from resformer.training.options import ScheduleOptions, StudyOptions, names
from resformer.training.packing import pack_documents
from resformer.training.pretraining import pretrain
from resformer.training.study import comparison
from resformer.training.study.report import add_line, detectable, joined, paired_difference, read_record, rows_of
from resformer.training.untrained import schedule_arguments, scratch_config, untrained_model

SHAPE = "tiny:hidden_size=32:intermediate_size=48:num_hidden_layers=6:num_attention_heads=4"
TEXT = ["--data", "notes.txt", "--sample-by", "paragraph", "--tokenizer", "bytes"]
OPTIONS = ["--block", "32", "--batch", "4", "--held-out", "0.1", "--held-out-blocks", "6", "--no-bf16"]
SMALL = ["--sizes", SHAPE, *TEXT, *OPTIONS]
CONTINUED = ["--from", "checkpoint", *TEXT[:4], *OPTIONS]
GQA = "transformer:num_key_value_heads=2"


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


# Pairs.


def test_models_of_a_seed_start_from_one_backbone_and_their_own_connections(method: str) -> None:
    llama = untrained_model(tiny_config(), 3).state_dict()
    model = untrained_model(tiny_config(method), 3)
    for name, parameter in model.named_parameters():
        if is_connection(name):
            assert name not in llama
        else:
            assert torch.equal(parameter, llama[name]), name
    starts = [value_mixing_matrix(each) for each in (model, AutoModelForCausalLM.from_config(tiny_config(method)))]
    assert torch.equal(*(matrix.nan_to_num(7) for matrix in starts))
    other = untrained_model(tiny_config(method), 4)
    assert not torch.equal(other.model.embed_tokens.weight, model.model.embed_tokens.weight)


@pytest.mark.parametrize("method", ["transformer", "svformer"])
@pytest.mark.parametrize("family", [None, "qwen3"])
def test_fewer_key_value_heads_are_the_first_ones_and_all_else_starts_equal(family: str | None, method: str) -> None:
    shape = "tiny:hidden_size=32:intermediate_size=48:num_hidden_layers=3:num_attention_heads=4:head_dim=8"
    plain = scratch_config("transformer", f"{shape}:num_key_value_heads=4", byte_tokenizer(), 16, family)
    torch.manual_seed(3)
    full = AutoModelForCausalLM.from_config(plain).state_dict()
    narrow = scratch_config(method, f"{shape}:num_key_value_heads=2", byte_tokenizer(), 16, family)
    for name, parameter in untrained_model(narrow, 3).named_parameters():
        if not is_connection(name):
            assert torch.equal(parameter, full[name][: len(parameter)]), name
            assert (parameter.shape == full[name].shape) == (name.split(".")[-2] not in ("k_proj", "v_proj")), name


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [0, 1, 2, 2, 2, 2, 2, 2, 2, 2, 2]), ("wsd", [0, 1, 2, 2, 2, 2, 2, 1.5, 1, 0.5, 0])],
)
def test_the_rate_is_constant_or_falls_at_the_end(schedule: str, rates: list[float]) -> None:
    arguments = schedule_arguments(ScheduleOptions(schedule=schedule, warmup=0.2, decay=0.4), 10)
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=2.0)
    scheduler = get_scheduler(
        arguments["lr_scheduler_type"], optimizer, arguments["warmup_steps"], 10, arguments["lr_scheduler_kwargs"]
    )
    found = []
    for _ in range(11):
        found += scheduler.get_last_lr()
        optimizer.step()
        scheduler.step()
    assert found == pytest.approx(rates)


# Costs.


@pytest.mark.parametrize(
    ("family", "fields"), [("gpt2", {}), ("opt", {}), ("deepseek_v3", {"first_k_dense_replace": 4})]
)
def test_operations_of_other_families_are_those_that_torch_counts(family: str, fields: dict[str, Any]) -> None:
    """Tables of positions are no products; keys may be wider than values."""
    model, tokens = small_decoder(family, **fields), 16
    model.set_attn_implementation("eager")
    with FlopCounterMode(display=False) as counter:
        model(input_ids=torch.arange(tokens)[None], use_cache=False)
    parts = forward_flops(model.config, tokens)
    parts["attention"] *= 2 * tokens / (tokens + 1)  # eager attention computes the masked half too
    assert sum(parts.values()) * tokens == counter.get_total_flops()


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
    gates = parts["connections"] if config.delta_attention_residuals or config.mudd else 0
    if config.value_residual == "gated":
        gates = 2 * config.hidden_size * config.num_key_value_heads * len(mixing_layers(config))
    gates += 2 * 12 * config.num_key_value_heads * len(config.value_embeddings or ())
    counted = parts["projections"] + parts["head"] + attention + gates
    summed = config.dwa or config.attnres or config.hyper_connections != "none"
    averages = parts["connections"] if summed else 0
    assert counted * tokens <= counter.get_total_flops() <= (counted + 3 * averages) * tokens
    assert training_flops(config, tokens) == 3 * sum(parts.values())
    # Queries of 32 numbers in 6 layers; a token sees up to 4 keys.
    assert (
        forward_flops(windowed_model(variant, 4).config, tokens)["attention"] == 4 * 32 * 6 * (1 + 2 + 3 + 13 * 4) / 16
    )


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
    given = StudyOptions(output="", data=[str(tmp_path / "notes.txt")], **options)
    tokenizer, facts, size_of_token = comparison._data(given, "bpe:300")
    assert facts["name"] == "notes.txt"
    assert len(tokenizer("abcdefgh")["input_ids"]) == 1
    assert len(tokenizer("zyxwvuts")["input_ids"]) == 8
    # Bytes of whole documents, of which first tokens are not predicted.
    labels = sum(len(tokenizer(text)["input_ids"]) for text in unseen)
    assert size_of_token == pytest.approx(sum(len(text) - 1 for text in unseen) / labels, rel=0.02)


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
    assert "\n2/2 transformer:num_key_value_heads=2 seed 0: held-out" in first.stderr, "one size is not said"
    record = work / "study" / "runs.jsonl"
    begun = record.read_text()
    assert len(begun.splitlines()) == 3
    assert (work / "study" / "study.png").read_bytes().startswith(b"\x89PNG")
    assert not (work / "study" / "unfinished").exists()

    faster, same = "transformer:learning_rate=1e-2:embedding_learning_rate=2e-2:steps=6", "transformer:steps=4"
    grown = ["study", "--methods", f"transformer,{GQA},{faster},{same}", "--seeds", 2, *common, "--json"]
    with locked(work / ".study.resformer-lock"):
        refused = compare(*grown)
    assert (refused.exit_code, "another process is at work on this study" in refused.stderr) == (1, True)
    again = compare(*grown)
    assert again.exit_code == 0, again.output
    assert again.stderr.count("seed 0: held-out loss") + again.stderr.count("seed 1: held-out loss") == 6
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
    assert 20 <= report["data"]["held_out_documents"] <= 40
    assert report["data"]["held_out_tokens"] > 30 * 32
    own = {(*run["rates"].values(), run["curve"][-1]["step"]) for run in trained if run["method"] == faster}
    assert own == {(0.2, 1e-2, 1e-2, 2e-2, 6)}
    plain = next(run for run in trained if run["method"] == "transformer")
    assert plain["learning_rate"] == pytest.approx(0.3118 * plain["training_flops"] ** -0.125)
    assert plain["rates"]["coefficients"] == plain["connection_learning_rate"] == 0.2
    assert "embeddings" not in plain["rates"]

    turned = compare(*grown, "--baseline", faster, "--save-models")  # which is no part of the study
    assert "seed 0: held-out loss" not in turned.stderr
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


def test_records_that_are_joined_have_one_run_for_each_size_method_and_seed(tmp_path: Path) -> None:
    path, plan = tmp_path / "joined.jsonl", {"steps": 4, "command": "one"}
    runs = [a_run(method, seed, losses[seed]) for method, losses in LOSSES.items() for seed in range(2)]

    def write(*studies: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        lines = [line for study, of_study in studies for line in ({"study": study}, *of_study)]
        path.write_text("".join(json.dumps(line) + "\n" for line in lines))

    write((plan, runs[:5]), ({**plan, "command": "two"}, runs[3:]))
    study, found = joined(path)
    assert study == plan
    assert [*found.values()] == runs
    write((plan, runs), (plan, [{**runs[0], "loss": 9.0}]))
    with pytest.raises(CheckpointError, match="has two results of small a 0; remove the line of one"):
        joined(path)
    write((plan, runs), ({**plan, "steps": 5}, []))
    with pytest.raises(CheckpointError, match="joins studies that differ in 'steps'"):
        joined(path)
    with pytest.raises(CheckpointError, match=r"small: bb has the seeds \[1\], a \[0, 1\]"):
        rows_of(runs[:2] + runs[3:], "a")
    with pytest.raises(CheckpointError, match=r"a has the seeds \[0, 0, 1\]"):
        rows_of([*runs, runs[0]], "a")


def test_pretrain_trains_what_compare_does(work: Path, compare: Callable[..., Any], invoke: Callable[..., Any]) -> None:
    """The same run by the other command, to the bit; a study that was stopped goes on to it."""
    given = ["--steps", 4, "--evaluations", 2, "--seeds", 1, "--first-seed", 3, "--save-models"]

    def stopped(run: Any, options: Any) -> Any:
        if run.key[1] == "transformer":
            return trained(run, options)
        return pretrain(run.options, callbacks=[Stop(lambda state: state.global_step == 3)])

    trained = comparison._trained
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(comparison, "_trained", stopped)
        assert compare("same", "--methods", "resformer", *SMALL, *given).exit_code == 130
    done = compare("same", "--methods", "resformer", *SMALL, *given)
    assert done.exit_code == 0, done.output
    ((_, runs),) = read_record(work / "same" / "runs.jsonl")
    assert [run["resumed_from"] for run in runs] == [0, 2]
    size = ["--size", SHAPE, *TEXT, "--block", 32, "--held-out", "0.1", "--held-out-blocks", 6, "--no-bf16"]
    budget = ["--batch-tokens", 128, "--tokens", 512, "--evaluations", 2, "--seed", 3]
    alone = invoke(work, "pretrain", "alone", "--method", "resformer", *size, *budget)
    assert alone.exit_code == 0, alone.output
    (folder,) = (work / "same" / "models").glob("*/resformer/3")
    weights = [load_file(each / "model.safetensors") for each in (folder, work / "alone")]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    log = json.loads((work / "alone" / "log.json").read_text())
    losses = [entry["eval_loss"] for entry in log if "eval_loss" in entry]
    assert [point["validation_loss"] for point in runs[1]["curve"]] == losses


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
    assert run["curve"][-1]["step"] == 4
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
    documents = load_documents(["notes.txt"], sample_by="paragraph")
    options = {"block": 32, "held_out": 0.1, "held_out_blocks": 6, "separate": True}
    held_out = pack_documents(documents, AutoTokenizer.from_pretrained("checkpoint"), **options).held_out
    model = AutoModelForCausalLM.from_pretrained("checkpoint")
    with torch.no_grad():
        loss = model(**default_data_collator([held_out[n] for n in range(6)]), use_cache=False).loss.item()
    assert starts["transformer", 1] == starts["transformer", 2] == pytest.approx(loss, rel=1e-5)
    assert starts[methods[0], 1] == starts[methods[0], 2] == starts["transformer", 1]  # exact
    assert starts["svformer", 1] != starts["transformer", 1]
    assert len({run["loss"] for run in runs}) == 6  # the order of the batches is the seed's, the rest the method's
    (folder,) = (work / "continued" / "models" / "checkpoint").glob("resformer*/1")
    assert AutoModelForCausalLM.from_pretrained(folder).config.value_residual == "learnable"

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
    runs = [(run["method"], run["steps"], run["tokens"], run["to_do"]) for run in plan["runs"]]
    assert runs == [("transformer", 6, 768, 3), ("resformer", 6, 768, 3)]
    sizes = ["--methods", f"resformer,{GQA},transformer:intermediate_size=512", "--sizes", SHAPE, *TEXT]
    by_size = json.loads(compare("planned", *sizes, "--dry-run", "--json").stdout)["runs"]
    assert len({(run["steps"], run["batch"], run["learning_rate"]) for run in by_size}) == 1
    assert by_size[0]["tokens"] == pytest.approx(20 * by_size[0]["parameters"], rel=0.05)
    of_steps = json.loads(compare("planned", *sizes, "--steps", 3, "--dry-run", "--json").stdout)["runs"]
    assert {(run["steps"], run["batch"], run["learning_rate"]) for run in of_steps} == {
        (3, of_steps[0]["batch"], of_steps[0]["learning_rate"])
    }
    assert of_steps[0]["batch"] < by_size[0]["batch"]  # as the tokens of three steps ask for
    assert "runs to do: 1, of " in compare("planned", "--tokens", 700, *SMALL, "--seeds", 1, "--dry-run").stdout
    assert set(work.iterdir()) == before


def test_a_plan_builds_a_model_for_each_size_and_method_whatever_the_seeds(
    compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    built: list[str] = []
    init = PreTrainedModel.__init__

    def counted(self: Any, *given: Any, **more: Any) -> None:
        built.append(type(self).__name__)
        init(self, *given, **more)

    monkeypatch.setattr(PreTrainedModel, "__init__", counted)
    sizes = ["--methods", "resformer,svformer,denseformer,cla2", "--sizes", f"{SHAPE},{SHAPE}:head_dim=16", *TEXT]
    for seeds in (1, 3):
        connections._meta_model.cache_clear()
        built.clear()
        done = compare("planned", *sizes, "--steps", 3, "--seeds", seeds, "--dry-run")
        assert done.exit_code == 0, done.output
        assert built.count("ResFormerForCausalLM") == 2 * 5  # the plain decoder of a size is one of its methods


def test_a_launcher_is_refused(work: Path, compare: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    done = compare("launched", "--methods", "resformer", *SMALL, "--steps", 6)
    assert (done.exit_code, "one run after another" in done.stderr) == (2, True)
    assert not (work / "launched").exists()
