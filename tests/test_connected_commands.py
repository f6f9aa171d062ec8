"""Every command on checkpoints of families that only Transformers' own decoders express."""

import json
import re
from pathlib import Path
from typing import Any

import any_decoder
import pytest
import torch
from checkpoints import byte_tokenizer, save_checkpoint, save_notes, stored
from conftest import cli, others_slow
from hub_server import Commands
from safetensors.torch import load_file
from small_decoders import small_config
from transformers import AutoModelForCausalLM

import resformer
from resformer import inspect, retrofit, verify
from resformer.checkpoint_cards import checkpoint_card
from resformer.training.optimizer import is_connection

#: The first sees images, too, and has other names of tensors on the disk than in the model.
FAMILIES = others_slow(["gemma3", "qwen3_moe"], ["gemma3"])
IDS = torch.arange(1, 41).view(2, 20)


def save_family(folder: Path, family: str, **options: Any) -> None:
    save_checkpoint(folder, family, vocab_size=300, max_position_embeddings=256, **options)


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Has a checkpoint, `source`, of two shards; its retrofit, `out`; one whose coefficients have moved, `moved`."""
    folder = tmp_path_factory.mktemp(request.param)
    save_family(folder / "source", request.param, shards=True)
    retrofit(folder / "source", folder / "out", "resformer-denseformer", link=True, progress=False)
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    any_decoder.move(model)
    model.save_pretrained(folder / "moved")
    byte_tokenizer().save_pretrained(folder / "moved")
    save_notes(folder)
    return folder


@torch.no_grad()
def logits_of(folder: Path) -> torch.Tensor:
    return AutoModelForCausalLM.from_pretrained(folder).eval()(input_ids=IDS).logits


def test_reports_say_what_transformers_computes(folder: Path) -> None:
    record = json.loads((folder / "out" / "resformer_conversion.json").read_text())
    model = AutoModelForCausalLM.from_pretrained(folder / "out")
    assert record["parameters"] == model.num_parameters()
    report = verify(folder / "source", folder / "out")
    assert (report.same, report.logits.identical, report.tokens.identical) == (True, True, True)
    moved = verify(folder / "out", folder / "moved")
    assert (moved.same, moved.logits.identical) == (False, False)
    assert set(moved.different) == set(filter(is_connection, stored(folder / "moved")))
    inspected = inspect(folder / "moved")
    loaded = AutoModelForCausalLM.from_pretrained(folder / "moved")
    assert torch.equal(torch.tensor(inspected.value_mixing_matrix), resformer.value_mixing_matrix(loaded))
    assert torch.equal(torch.tensor(inspected.depth_mixing_matrix), resformer.depth_mixing_matrix(loaded))
    decoder = loaded.config.get_text_config()
    assert (inspected.parameters, inspected.layers) == (loaded.num_parameters(), decoder.num_hidden_layers)
    assert inspected.method == "resformer-denseformer"
    assert cli("inspect", folder / "source").exit_code == 0


def test_what_a_family_cannot_have_is_refused_with_the_reason(tmp_path: Path) -> None:
    save_family(tmp_path / "mamba", "mamba")
    done = cli("convert", tmp_path / "mamba", tmp_path / "out")
    assert done.exit_code == 3
    assert "mamba cannot have `value_residual`: no projection of values is known" in done.stderr


def test_connections_alone_are_pushed_and_added_from_the_hub(folder: Path, commands: Commands, tmp_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder / "moved")
    resformer.save_connections(model, tmp_path / "connections")
    done = commands("push", tmp_path / "connections", "you/connections", "--json")
    assert set(json.loads(done.stdout)["files"]) == {"README.md", "config.json", "connections.safetensors"}
    assert f"resformer card {tmp_path / 'connections'} --repository you/connections" in done.stderr
    inspected = [
        json.loads(commands("inspect", name, "--json").stdout) for name in ("you/connections", folder / "moved")
    ]
    maps = [
        {name: each[name] for name in ("value_mixing_matrix", "depth_mixing_matrix", "method")} for each in inspected
    ]
    assert maps[0] == maps[1]
    assert inspected[0]["needs"] == {"base": "source", "revision": None, "changed": None}
    save_notes(tmp_path)
    alone = tmp_path / "connections"
    for words in (
        ("verify", folder / "source", "you/connections"),
        ("finetune", alone, "tuned", "--data", tmp_path / "notes.txt"),
        ("analyze", alone),
    ):
        refused = commands(*words)
        assert refused.exit_code == 3
        assert "holds connections alone, without the weights of source. Make a checkpoint of both" in refused.stderr
    plain = AutoModelForCausalLM.from_pretrained(folder / "source").eval()
    with torch.no_grad():
        connected = resformer.connect(plain, "you/connections")(input_ids=IDS).logits
    assert torch.equal(connected, logits_of(folder / "moved"))


@pytest.mark.parametrize("method", ["resformer", "value-embeddings", "nanochat"])
def test_connections_alone_are_counted_with_their_tables(method: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "base")
    model = resformer.connect(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), method)
    resformer.save_connections(model, tmp_path / "alone")
    inspected = resformer.inspect(tmp_path / "alone")
    stored = load_file(tmp_path / "alone" / "connections.safetensors")
    assert inspected.parameters == sum(tensor.numel() for tensor in stored.values())
    cache = f"| key/value cache a token, in float32 | {inspected.cache_bytes_per_token:,} bytes, 100.0 %"
    assert cache in (tmp_path / "alone" / "README.md").read_text()
    assert cache in str(checkpoint_card(tmp_path / "alone").card)


def test_training_measuring_and_comparing(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    data = ("--data", folder / "notes.txt", "--sample-by", "paragraph")
    retrofit(folder / "source", "copied", "resformer-denseformer", verify="hashes", progress=False)
    done = cli("finetune", "copied", "tuned", *data, "--steps", 2, "--block", 32, "--train", "connections", "--no-bf16")
    assert done.exit_code == 0, done.stderr
    before, after = stored(folder / "out"), stored(tmp_path / "tuned")
    assert {name for name in after if after[name] != before[name]} == set(filter(is_connection, after))
    assert "fine-tuned" in (tmp_path / "tuned" / "README.md").read_text()
    trained, alone = AutoModelForCausalLM.from_pretrained("tuned").eval(), Path("tuned/connections")
    source = resformer.connect(AutoModelForCausalLM.from_pretrained(folder / "source").eval(), str(alone))
    with torch.no_grad():
        assert torch.equal(source(IDS).logits, trained(IDS).logits)
    assert sum(file.stat().st_size for file in alone.iterdir()) < 20_000
    card = (alone / "README.md").read_text()
    assert "and **no other weights**. They were trained with the `resformer` package on notes.txt" in card
    assert cli("card", alone, "--dry-run").stdout.strip() == card.strip()
    for model in (folder / "moved", "tuned"):  # whose weights the former has is not known
        again = ("--steps", 1, "--block", 32, "--train", "connections", "--no-bf16", "--held-out", 0, "--force")
        assert cli("finetune", model, "again", *data, *again).exit_code == 0
        needs = inspect("again/connections").needs
        assert (needs.base, needs.changed) == ("source" if model == "tuned" else "moved", False)
    done = cli("analyze", folder / "moved", "--text", folder / "notes.txt", "--texts", 1, "--max-tokens", 16, "--json")
    [analysis] = json.loads(done.stdout)["checkpoints"]
    model = AutoModelForCausalLM.from_pretrained(folder / "moved")
    assert torch.equal(torch.tensor(analysis["value_mixing_matrix"]), resformer.value_mixing_matrix(model))
    study = ("--steps", 1, "--block", 32, "--batch", 2, "--seeds", 1, "--held-out", 0.1, "--no-bf16", "--json")
    done = cli("compare", "study", "--from", folder / "source", "--methods", "denseformer", *data, *study)
    assert done.exit_code == 0, done.stderr
    [rows] = json.loads(done.stdout)["sizes"].values()
    plain, denseformer = (AutoModelForCausalLM.from_pretrained(folder / name) for name in ("source", "out"))
    assert [row["parameters"] for row in rows] == [
        plain.num_parameters(),
        denseformer.num_parameters() - sum(p.numel() for n, p in denseformer.named_parameters() if "value_res" in n),
    ]


@pytest.mark.parametrize("family", others_slow(["gemma3_text", "qwen3_moe"], ["gemma3_text"]))
def test_from_scratch_with_the_decoder_of_a_family(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_notes(tmp_path)
    shape = ("--backbone", family, "--tokenizer", "bytes", "--set", "num_hidden_layers=3", "--set", "hidden_size=64")
    done = cli("new", "new", *shape, "--method", "resformer", "--json")
    assert done.exit_code == 0, done.stderr
    model = AutoModelForCausalLM.from_pretrained("new")
    assert json.loads(done.stdout)["parameters"] == model.num_parameters()
    assert (model.config.model_type, model.config.num_hidden_layers) == (f"resformer_{family}", 3)
    assert resformer.value_mixing_matrix(model)[1, :2].tolist() == [0.5, 0.5], "the paper's start"
    data = ("--data", "notes.txt", "--sample-by", "paragraph", "--held-out", 0.1, "--no-bf16")
    done = cli(
        "pretrain", "trained", *shape, "--method", "denseformer", *data, "--block", 32, "--tokens", 256,
        "--batch-tokens", 128, "--json",
    )  # fmt: skip
    assert done.exit_code == 0, done.stderr
    plan = json.loads(done.stdout)["plan"]
    trained = AutoModelForCausalLM.from_pretrained("trained")
    assert plan["parameters"] == trained.num_parameters()
    assert plan["flops"] > 6 * 256 * sum(p.numel() for n, p in trained.named_parameters() if "self_attn" in n)
    study = ("--backbone", family, "--sizes", "tiny:num_hidden_layers=3", "--tokenizer", "bytes")
    steps = ("--steps", 1, "--batch", 2, "--block", 32, "--seeds", 1)
    done = cli("compare", "study", *study, "--methods", "resformer", *data, *steps)
    assert done.exit_code == 0, done.stderr
    assert "| resformer |" in done.stdout
    shared = cli("new", "shared", *shape, "--method", "svformer", "--json")
    assert shared.exit_code == 0, shared.stderr
    assert json.loads(shared.stdout)["parameters"] < model.num_parameters()
    assert cli("new", "baseline", *shape, "--method", "transformer", "--no-weights").exit_code == 0
    baseline = json.loads(Path("baseline/config.json").read_text())
    assert (baseline["model_type"], baseline["architectures"][0][:9] == "ResFormer") == (family, False)
    plain = type(small_config(family))(num_hidden_layers=3, hidden_size=32, intermediate_size=16)
    plain.save_pretrained("plain")
    of_file = cli("new", "again", "--backbone", "plain/config.json", "--tokenizer", "bytes", "--no-weights", "--json")
    assert of_file.exit_code == 0, of_file.stderr
    made = json.loads(of_file.stdout)
    assert (made["hidden_size"], made["vocab_size"], made["value_residual"]) == (32, 257, "learnable")


@pytest.mark.slow
def test_the_page_of_other_decoders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[1] / "docs" / "any-decoder.md").read_text(encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    save_notes(tmp_path)
    save_family(tmp_path / "gemma", "gemma3_text")
    page = page.replace("google/gemma-3-1b-it", "gemma")
    for line in re.findall(r"^resformer .*$", page, re.MULTILINE):
        done = cli(*line.split()[1:], *(("--no-bf16",) if "--data" in line else ()))
        assert done.exit_code == 0, done.stderr
    names: dict[str, Any] = {}
    for code in re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL):
        exec(code, names)
    assert torch.equal(logits_of(tmp_path / "connected"), logits_of(tmp_path / "gemma"))
    assert names["untrained"].config.dwa
