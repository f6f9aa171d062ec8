"""nanochat's runs, of every era, against a twin of nanochat."""

import json
import pickle
import zipfile
from pathlib import Path
from typing import Any

import nanochat_twin as twin
import pytest
import torch
from conftest import cli
from hub_server import Commands
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from resformer.convert.nanochat import convert_nanochat, is_run
from resformer.convert.tiktoken_pickle import read_encoding
from resformer.errors import CheckpointError

IDS = torch.randint(0, twin.SIZES["vocab_size"], (1, 290), generator=torch.Generator().manual_seed(0))
TEXT = "The thing, 12345 in the aaaaaaa \n\n x they'll über 日本 123 an ing 'LL\r\n end  "
ERAS = range(5)


class Run:
    """A run of an era, converted."""

    def __init__(self, era: int, folder: Path):
        self.era, self.source, self.output = era, folder / "run", folder / "out"
        self.weights = twin.save_run(self.source, era)
        self.sizes = twin.SIZES | ({"window_pattern": "L"} if era == 0 else {})
        self.report = convert_nanochat(self.source, self.output)

    def twin(self, ids: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return twin.logits(self.era, self.weights, ids, self.sizes, dtype)

    def model(self, dtype: torch.dtype = torch.float32) -> Any:
        return AutoModelForCausalLM.from_pretrained(self.output, dtype=dtype).eval()


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    return [Run(era, tmp_path_factory.mktemp("nanochat")) for era in ERAS]


@pytest.fixture(params=ERAS)
def run(request: pytest.FixtureRequest, runs: list[Run]) -> Run:
    return runs[request.param]


@pytest.fixture
def newest(runs: list[Run]) -> Run:
    return runs[-1]


@torch.no_grad()
def test_logits_are_nanochats(run: Run) -> None:
    expected, logits = run.twin(IDS), run.model()(IDS).logits
    torch.testing.assert_close(logits, expected, rtol=0, atol=1e-4)
    assert run.report.era == run.era


@torch.no_grad()
def test_bfloat16_is_as_near_to_float32_as_nanochats(run: Run) -> None:
    exact = run.twin(IDS)
    theirs, ours = (
        (each - exact).abs().mean() for each in (run.twin(IDS, torch.bfloat16), run.model(torch.bfloat16)(IDS).logits)
    )
    assert ours <= 1.05 * theirs


@pytest.mark.parametrize("cache", [None, "static", "dynamic"])
def test_greedy_tokens_are_nanochats_through_each_cache(run: Run, cache: str | None) -> None:
    expected = IDS[:, :140]  # longer than the newest era's window
    for _ in range(4):
        expected = torch.cat([expected, run.twin(expected)[:, -1:].argmax(-1)], dim=1)
    options = {} if cache is None else {"cache_implementation": cache}
    tokens = run.model().generate(IDS[:, :140], max_new_tokens=4, do_sample=False, eos_token_id=None, **options)
    assert tokens.tolist() == expected.tolist()


def test_tokens_are_tiktokens(newest: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(newest.output)
    assert tokenizer(TEXT, add_special_tokens=False)["input_ids"] == twin.encoded(TEXT)
    bos = len(twin.RANKS)
    assert tokenizer(TEXT)["input_ids"] == [bos, *twin.encoded(TEXT)]
    assert tokenizer.decode(twin.encoded(TEXT)) == TEXT
    assert [tokenizer.convert_tokens_to_ids(f"<|{name}|>") for name in twin.SPECIAL] == [*range(bos, bos + 9)]


def test_conversations_are_rendered_as_nanochat_does(newest: Run) -> None:
    tokenizer = AutoTokenizer.from_pretrained(newest.output)
    parts = [
        {"type": "text", "text": "It is "},
        {"type": "python", "text": "2+2"},
        {"type": "python_output", "text": "4"},
        {"type": "text", "text": "4."},
    ]
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 2 + 2?"},
        {"role": "assistant", "content": parts},
        {"role": "user", "content": [{"type": "text", "text": "Thanks"}]},
    ]
    assert tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True) == (
        "<|bos|><|user_start|>Be brief.\n\nWhat is 2 + 2?<|user_end|><|assistant_start|>It is <|python_start|>2+2"
        "<|python_end|><|output_start|>4<|output_end|>4.<|assistant_end|><|user_start|>Thanks<|user_end|>"
        "<|assistant_start|>"
    )
    rendered = tokenizer.apply_chat_template(messages[1:3], return_dict=True, return_assistant_tokens_mask=True)
    learned = [token for token, one in zip(rendered["input_ids"], rendered["assistant_masks"], strict=True) if one]
    assert tokenizer.decode(learned) == "It is <|python_start|>2+2<|python_end|>4.<|assistant_end|>"
    generation = GenerationConfig.from_pretrained(newest.output)
    ends = tokenizer.convert_tokens_to_ids(["<|assistant_end|>", "<|bos|>"])
    assert (generation.eos_token_id, generation.bos_token_id) == (ends, ends[1])


def test_constants_are_told_and_can_be_given(newest: Run, tmp_path: Path) -> None:
    expected = {"rope_theta": 1e5, "gate_limit": 3.0, "qk_scale": 1.2, "softcap": 15.0, "short_window": 128}
    assert newest.report.constants == expected
    given = convert_nanochat(newest.source, tmp_path / "out", softcap=20)
    assert given.constants == {**expected, "softcap": 20}
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.no_grad():
        logits = model(IDS[:, :20]).logits
    torch.testing.assert_close(logits, twin.logits(4, newest.weights, IDS[:, :20], softcap=20.0), rtol=0, atol=2e-4)
    with pytest.raises(ValueError, match=r"`softcp` is no constant .* Did you mean 'softcap'"):
        convert_nanochat(newest.source, tmp_path / "other", softcp=20)
    with pytest.raises(ValueError, match=r"`short_window` is 1\.5: expected a whole number"):
        convert_nanochat(newest.source, tmp_path / "other", short_window=1.5)


def test_the_last_step_is_taken_and_weights_of_a_compiled_model(tmp_path: Path) -> None:
    twin.save_run(tmp_path / "run", 2, step=50)
    weights = torch.load(tmp_path / "run/model_000050.pt")
    torch.save({f"_orig_mod.{name}": tensor for name, tensor in weights.items()}, tmp_path / "run/model_000100.pt")
    (tmp_path / "run/meta_000100.json").write_text((tmp_path / "run/meta_000050.json").read_text())
    report = convert_nanochat(tmp_path / "run", tmp_path / "out", dry_run=True)
    assert report.weights == "model_000100.pt"
    assert any("the last was taken, model_000100.pt" in each for each in report.warnings)
    report = convert_nanochat(tmp_path / "run", tmp_path / "out", dry_run=True, step=50)
    assert report.weights == "model_000050.pt"
    with pytest.raises(CheckpointError, match="has steps 50, 100, and no step 7"):
        convert_nanochat(tmp_path / "run", tmp_path / "out", dry_run=True, step=7)
    assert is_run(tmp_path / "run")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda w: w.update(extra=torch.ones(1)), "holds 'extra', which is in none of the five eras"),
        (lambda w: w.pop("smear_lambda"), "era 4 of nanochat, but lacks 'smear_lambda'"),
        (lambda w: w.update({"x0_lambdas": torch.ones(7)}), r"x0_lambdas is torch.float32 \[7\]; expected \[6\]"),
        (lambda w: w.update({"lm_head.weight": torch.ones(320, 64, dtype=torch.int8)}), "lm_head.weight is torch.int8"),
        (lambda w: w["lm_head.weight"].fill_(torch.nan), "'lm_head.weight' would not be finite"),
        (
            lambda w: w.update({f"transformer.h.{n}.attn.ve_gate.weight": torch.ones(2, 9) for n in (1, 3, 5)}),
            r"gates of value embeddings read \[9\] channels",
        ),
        ({"n_layer": 10**9}, "lacks '1000000000 layers'"),
        ({"n_embd": -1}, "n_embd -1; expected a size"),
        ({"window_pattern": "SXL"}, "window_pattern is 'SXL'"),
        ({"moe": 8}, "`model_config` has 'moe'"),
        ({"vocab_size": 300}, "has 282 tokens, meta_000100.json says 300"),
    ],
)
def test_unknown_tensors_and_sizes_are_refused_by_name(change: Any, message: str, tmp_path: Path) -> None:
    weights = twin.save_run(tmp_path / "run", 4)
    if isinstance(change, dict):
        meta = {"model_config": {**twin.SIZES, **change}}
        (tmp_path / "run/meta_000100.json").write_text(json.dumps(meta))
    else:
        change(weights)
        torch.save(weights, tmp_path / "run/model_000100.pt")
    with pytest.raises(CheckpointError, match=message):
        convert_nanochat(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()


class Planted:
    """Unpickling it writes a file."""

    def __init__(self, path: Path):
        self.path = path

    def __reduce__(self) -> Any:
        return Path.touch, (self.path,)


def test_nothing_is_unpickled(tmp_path: Path) -> None:
    twin.save_run(tmp_path / "run", 4)
    for name in ("tokenizer.pkl", "model_000100.pt"):
        content = (tmp_path / "run" / name).read_bytes()
        (tmp_path / "run" / name).write_bytes(pickle.dumps(Planted(tmp_path / "planted")))
        with pytest.raises(CheckpointError, match=name):
            convert_nanochat(tmp_path / "run", tmp_path / "out")
        (tmp_path / "run" / name).write_bytes(content)
    assert not (tmp_path / "planted").exists()


@pytest.mark.parametrize("protocol", [4, 5])
def test_pickles_of_other_protocols_are_read(protocol: int, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.pkl").write_bytes(twin.pickled(protocol=protocol))
    assert read_encoding(tmp_path / "tokenizer.pkl").ranks == twin.RANKS


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (twin.pickled(dict.fromkeys(twin.RANKS, 5)), "not numbered from 0 on"),
        (twin.pickled({b"a": 0}), "no token for the byte 0"),
        (twin.pickled()[:-40], "is no pickle|has no|known"),
        (pickle.dumps({}), "has STOP"),
        (b"\x80\x04]\x94.", "has EMPTY_LIST"),
        (b"", "is no pickle"),
    ],
)
def test_other_pickles_are_refused_by_name(content: bytes, message: str, tmp_path: Path) -> None:
    (tmp_path / "tokenizer.pkl").write_bytes(content)
    with pytest.raises(CheckpointError, match=message):
        read_encoding(tmp_path / "tokenizer.pkl")


def test_what_a_run_has_no_use_for_is_refused(newest: Run, tmp_path: Path) -> None:
    done = cli("convert", newest.source, tmp_path / "out", "--lossy", "--method", "cla2")
    assert done.exit_code != 0
    assert "--lossy, --method: a nanochat run is converted as it is" in done.stderr
    done = cli("convert", newest.source, tmp_path / "out", "--json", "--set", "softcap=20")
    assert json.loads(done.stdout)["constants"]["softcap"] == 20


def test_runs_as_they_are_published(commands: Commands, tmp_path: Path) -> None:
    """With the tokenizer in its folder, a config.json for other code beside, and on the Hub."""
    run = tmp_path / "run"
    twin.save_run(run, 2, step=50)
    (run / "tokenizer").mkdir()
    (run / "tokenizer.pkl").rename(run / "tokenizer" / "tokenizer.pkl")
    (run / "config.json").write_text('{"model_type": "nanochat"}')
    report = convert_nanochat(run, tmp_path / "local")
    assert ["softcap=20" in each for each in report.warnings] == [True]
    assert convert_nanochat(run, tmp_path / "x", dry_run=True, softcap=20).warnings == []
    commands.hub.add("you/d12", run)["model_000007.pt"] = b"an earlier step, which is not fetched"
    done = commands("convert", "you/d12", "hub", "--json")
    assert done.exit_code == 0, done.stderr
    assert (Path("hub") / "model.safetensors").read_bytes() == (tmp_path / "local/model.safetensors").read_bytes()
    base = json.loads((Path("hub") / "config.json").read_text())["base_model"]
    assert base == {"name": "you/d12", "revision": commands.hub.commit_id("you/d12")}
    assert not [path for path in commands.home.rglob("model_000007.pt") if "d12" in str(path)]


def test_tensors_that_claim_more_than_the_file_has_are_refused(tmp_path: Path) -> None:
    weights = twin.save_run(tmp_path / "run", 4)
    weights["lm_head.weight"] = torch.ones(1).expand(2**40, 64)
    torch.save(weights, tmp_path / "run/model_000100.pt")
    with pytest.raises(CheckpointError, match=r"its tensors claim 281,\d+,\d+,\d+,\d+ bytes, the file has"):
        convert_nanochat(tmp_path / "run", tmp_path / "out", dry_run=True)


def test_weights_that_would_be_unpacked_to_more_than_the_file_are_refused(tmp_path: Path) -> None:
    twin.save_run(tmp_path / "run", 4)
    path = tmp_path / "run/model_000100.pt"
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}

    def refusal(method: int, before_stop: bytes) -> str:
        with zipfile.ZipFile(path, "w", method) as archive:
            for name, content in contents.items():
                content = content[:-1] + before_stop + b"." if name.endswith("data.pkl") else content
                archive.writestr(name, content)
        with pytest.raises(CheckpointError) as refused:
            convert_nanochat(tmp_path / "run", tmp_path / "out", dry_run=True)
        return str(refused.value)

    assert "is compressed" in refusal(zipfile.ZIP_DEFLATED, b"")
    assert "holds 'builtins bytearray'" in refusal(
        zipfile.ZIP_STORED, b"cbuiltins\nbytearray\n\x8a\x04\0\0\0\x40\x85R0"
    )
    assert "names and shapes take" in refusal(zipfile.ZIP_STORED, b"X\0\0\x10\0" + bytes(2**20) + b"0")
