"""Checkpoints that were made to do harm: each is refused, with a name and a reason, and nothing is left.

A case damages a copy of a good checkpoint. `refused` checks what every refusal promises.
"""

import json
import os
import re
import shutil
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from checkpoints import change_json, save_checkpoint
from conftest import SNAPSHOTS, assert_one_said, cli
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from test_planted_folders import places
from transformers.utils import logging

from resformer import retrofit
from resformer.convert import CheckpointError, inspect, revert, verify
from resformer.names import INDEX
from resformer.names import SINGLE as WEIGHTS
from resformer.safetensors_format import read_shard
from resformer.untrusted import parse_json

#: A refusal takes under a second; what blocks or works for long is ended by this limit.
pytestmark = pytest.mark.timeout(120)
if sys.platform == "win32":
    pytest.skip("needs links, FIFOs and sockets in the file system", allow_module_level=True)

CONFIG = "config.json"
HEAD, NORM = "lm_head.weight", "model.norm.weight"
Q, V = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"
VALUES = "model.layers.1.value_residual.weight"
#: Clears the screen, renames the window, rings, turns the text around; and a character that UTF-8 does not have.
ESCAPES, SURROGATE = "\x1b[2J\x1b]0;owned\x07\u202e", "\ud800"
LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 16060522240\n"

Json = dict[str, Any]
Tensors = dict[str, torch.Tensor]
Damage = Callable[[Path], object]
Copy = Callable[..., Path]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that convert: `llama`, `sharded`, and a `retrofit` in one file."""
    folder = tmp_path_factory.mktemp("good")
    save_checkpoint(folder / "llama", num_hidden_layers=2)
    save_checkpoint(folder / "sharded", num_hidden_layers=2, shards=True)
    retrofit(folder / "llama", folder / "retrofit", "resformer-denseformer")
    tensors = {}
    for path in (folder / "retrofit").glob("*.safetensors"):
        tensors |= load_file(path)
        path.unlink()
    save_file(tensors, folder / "retrofit" / WEIGHTS)
    (folder / "retrofit" / INDEX).unlink()
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def copy(good: dict[str, Path], tmp_path: Path) -> Copy:
    """`copy("sharded")`: a copy to damage, the only thing in its folder."""
    return lambda name="llama": Path(shutil.copytree(good[name], tmp_path / "source", symlinks=True))


def command(*arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `resformer ...`, in this process; what it says is plain text."""
    done = cli(*arguments)
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    assert_plain(done.stdout + done.stderr)
    return done.exit_code, done.stdout, done.stderr


def assert_plain(text: str) -> None:
    """Nothing in it moves a cursor, or cannot be encoded."""
    assert not [character for character in text if not character.isprintable() and character != "\n"]


def refused(root: Path, *arguments: object) -> str:
    """The one plain line that a command says of what it refuses, without `root`; nothing is left in there."""

    def listing() -> dict[str, tuple[int, int]]:
        return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_size) for path in root.rglob("*")}

    before = listing()
    code, stdout, stderr = command(*arguments)
    assert (code, stdout) == (3, ""), stdout
    assert listing() == before, "something was left"
    error, *hint = stderr.splitlines()
    assert error.startswith("Error: ")
    assert all(line.startswith("Try: resformer ") for line in hint)
    assert len(error) < 3000
    return error.replace(str(root), "<root>").replace(" while calling a Python object", "")  # of Python 3.11 alone


def convert_refused(source: Path, *options: str) -> str:
    """What `revert` says of a retrofit, or `convert` of others."""
    command = "revert" if (source / "resformer_conversion.json").exists() else "convert"
    return refused(source.parent, command, source, source.parent / "out", *options)


# Damages.


def written(name: str, content: bytes) -> Damage:
    """Puts `content` in the place of a file."""
    return lambda folder: (folder / name).write_bytes(content)


def json_file(name: str, change: Callable[[Json], object]) -> Damage:
    def damage(folder: Path) -> None:
        content = json.loads((folder / name).read_text())
        change(content)
        (folder / name).write_text(json.dumps(content))

    return damage


def config(**values: Any) -> Damage:
    return lambda folder: change_json(folder / CONFIG, **values)


def content_of(path: Path) -> tuple[Json, bytes]:
    """A safetensors file is 8 bytes of header length, the header, and the data: (header, data)."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def safetensors_file(header: bytes, data: bytes = b"") -> bytes:
    return len(header).to_bytes(8, "little") + header + data


def header_bytes(change: Callable[[bytes], bytes]) -> Damage:
    """Changes the text of the header; the data stay."""

    def damage(folder: Path) -> None:
        entries, data = content_of(folder / WEIGHTS)
        (folder / WEIGHTS).write_bytes(safetensors_file(change(json.dumps(entries).encode()), data))

    return damage


def header(change: Callable[[Json], object]) -> Damage:
    """Changes the entries of the header, in place."""

    def changed(text: bytes) -> bytes:
        entries = json.loads(text)
        change(entries)
        return json.dumps(entries).encode()

    return header_bytes(changed)


def norm(**values: Any) -> Damage:
    """Changes the entry of the last norm, 32 numbers."""
    return header(lambda entries: entries[NORM].update(values))


EMPTY = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}


def added(name: str) -> Damage:
    return header(lambda entries: entries.update({name: EMPTY}))


def many_tensors(count: int) -> Damage:
    """Tensors without an element each."""

    def damage(folder: Path) -> None:
        header = json.dumps(dict.fromkeys(map(str, range(count)), EMPTY), separators=(",", ":")).encode()
        (folder / WEIGHTS).write_bytes(safetensors_file(header))

    return damage


def with_sparse_tensor(folder: Path) -> None:
    """Adds a tensor of 4 TB, all of it there, and none of it stored."""
    entries, data = content_of(folder / WEIGHTS)
    offsets = [len(data), len(data) + 2**42]
    entries["model.huge.weight"] = {"dtype": "F32", "shape": [2**40], "data_offsets": offsets}
    content = safetensors_file(json.dumps(entries).encode(), data)
    (folder / WEIGHTS).write_bytes(content)
    os.truncate(folder / WEIGHTS, len(content) + 2**42)


def tensors(change: Callable[[Tensors], object]) -> Damage:
    """Changes the tensors, in place: the file is a good one."""

    def damage(folder: Path) -> None:
        stored = load_file(folder / WEIGHTS)
        change(stored)
        save_file({name: tensor.contiguous() for name, tensor in stored.items()}, folder / WEIGHTS)

    return damage


def tensor(name: str, change: Callable[[torch.Tensor], torch.Tensor]) -> Damage:
    return tensors(lambda stored: stored.update({name: change(stored[name])}))


def of_shape(name: str, *shape: int) -> Damage:
    return tensors(lambda stored: stored.update({name: torch.zeros(shape)}))


def file_of_norm(file: object) -> Damage:
    """Of the last norm in the index."""
    return json_file(INDEX, lambda content: content["weight_map"].update({NORM: file}))


def in_two_files(folder: Path) -> None:
    first, *_, last = sorted(folder.glob("model-*.safetensors"))
    save_file({**load_file(first), **load_file(last)}, first)


def without(*names: str) -> Damage:
    return lambda folder: [(folder / name).unlink() for name in names]


def both(*damages: Damage) -> Damage:
    return lambda folder: [damage(folder) for damage in damages]


# Cases: a table for each file, of its damages.

Table = dict[str, Damage]

#: What is no JSON object.
NO_JSON: dict[str, bytes] = {
    "empty": b"",
    "not-json": b"{'a': 1}",
    "not-utf-8": b'{"\xff": 1}',
    "a-list": b"[]",
    "deep-objects": b'{"a":' * 10**5,
    "a-key-twice": b'{"a": "x", "a": "y"}',
}

#: Files that do not follow the format of safetensors: the fuzzer below knows more.
FORMAT: Table = {
    "a-git-lfs-pointer": written(WEIGHTS, LFS),
}
#: Well stored, and not the tensors that config.json asks for.
TENSORS: Table = {
    "of-eight-bits": tensor(V, lambda old: old.to(torch.float8_e4m3fn)),
    "missing": tensors(lambda stored: stored.pop(Q)),
    "a-layer-with-a-leading-zero": tensors(lambda stored: stored.update({Q.replace(".1.", ".01."): stored.pop(Q)})),
    "beside-a-distributed-checkpoint": written("shard-00000-model-00001-of-00001.safetensors", b""),
    "beside-an-adapter": written("adapter_config.json", b"{}"),
    "a-tied-head-of-(0, 32)": both(config(tie_word_embeddings=True), of_shape(HEAD, 0, 32)),
}
SECOND = "model-00002-of-00006.safetensors"
INDICES: Table = {
    "not-json": written(INDEX, NO_JSON["not-json"]),
    "no-metadata": json_file(INDEX, lambda content: content.pop("metadata")),
    "file-of-500-bytes-in-250-characters": file_of_norm("é" * 238 + ".safetensors"),
    "in-two-files": in_two_files,
    "no-index-and-a-shard-missing": without(SECOND, INDEX),
}
CONFIGS: Table = {
    **{name: written(CONFIG, content) for name, content in NO_JSON.items()},
    "missing": without(CONFIG),
    "huge": written(CONFIG, b" " * (50 * 2**20) + b"{}"),
    "layer-types-a-bomb": config(model_type="qwen2", layer_types=["full_attention"] * 5000),
}
#: Damages to what a retrofit adds.
CONNECTIONS: Table = {
    "layers-a-bomb": config(value_residual_layers=[1] * 10_000),
    "missing": tensors(lambda stored: stored.pop(VALUES)),
}
#: Title -> the checkpoint, its damages, and what takes the fields of a case like `config {hidden_size: -1}`, which is
#: in the snapshot alone.
TITLES: dict[str, tuple[str, Table, Callable[..., Damage]]] = {
    "format": ("llama", FORMAT, norm),
    "tensors": ("llama", TENSORS, norm),
    "index": ("sharded", INDICES, file_of_norm),
    "config": ("llama", CONFIGS, config),
    "connections": ("retrofit", CONNECTIONS, config),
}
CASES = [f"{title}-{name}" for title, (_, table, _) in TITLES.items() for name in table]
CASES += [case for case in json.loads((SNAPSHOTS / "hostile.json").read_text(encoding="utf-8")) if " {" in case]


@pytest.mark.parametrize("case", CASES)
def test_damaged_checkpoints_are_refused(case: str, copy: Copy, good: dict[str, Path]) -> None:
    """By every command that reads them; the whole messages are in `snapshots/hostile.json`."""
    title, name, fields = re.fullmatch(r"([a-z]+)[- ](?:(\{.*)|(.*))", case).group(1, 3, 2)
    checkpoint, table, change = TITLES[title]
    source = copy(checkpoint)
    (change(**yaml.safe_load(fields)) if fields else table[name])(source)
    assert_one_said("hostile", case, convert_refused(source))
    convert_refused(source, "--dry-run")
    refused(source.parent, "inspect", source)
    level = "logits" if checkpoint == "retrofit" else "hashes"
    for one, other in ((good[checkpoint], source), (source, good[checkpoint])):
        code, _, stderr = command("verify", one, other, "--verify", level)
        assert code in (3, 4), stderr


#: What would take gigabytes if it were read without a limit.
BOMBS = {
    "tensors-beyond-the-header": many_tensors(700_000),
    "tensors-beyond-the-number": many_tensors(200_001),
    "spaces": header_bytes(lambda text: text + b" " * 10**8),
    "a-tensor-of-4-TB": with_sparse_tensor,
}


@pytest.mark.parametrize("damage", BOMBS.values(), ids=BOMBS)
def test_damaged_weights_take_no_memory(damage: Damage, copy: Copy) -> None:
    source = copy()
    damage(source)
    tracemalloc.start()
    try:
        assert WEIGHTS in convert_refused(source)
        assert WEIGHTS in refused(source.parent, "inspect", source)
        assert tracemalloc.get_traced_memory()[1] < 200 * 10**6
    finally:
        tracemalloc.stop()


def test_numbers_that_are_not_finite_go_along_to_the_bit_or_are_named(copy: Copy) -> None:
    source = copy()
    out, back = source.parent / "out", source.parent / "back"
    payloads = torch.arange(0x7F800001, 0x7F800001 + 32, dtype=torch.int32)  # signalling: arithmetic would quiet them
    payloads[:2] = torch.tensor([0x7F800000, -0x00800000])  # both infinities
    tensor(NORM, lambda old: payloads.view(torch.float32))(source)
    assert "not finite" in convert_refused(source, "--verify", "logits")
    retrofit(source, out, verify="hashes")
    assert verify(source, out, verify="hashes").same
    revert(out, back, verify="hashes")
    for folder in (out, back):
        (path,) = (path for path in folder.glob("*.safetensors") if NORM in load_file(path))
        assert torch.equal(load_file(path)[NORM].view(torch.int32), payloads)


# What a retrofit adds.


@pytest.mark.parametrize("content", [b"{", b'{"family": {}}', b'{"family": "gpt2"}', b"{}"])
def test_revert_survives_any_record(content: bytes, copy: Copy) -> None:
    source = copy("retrofit")
    (source / "resformer_conversion.json").write_bytes(content)
    try:
        assert revert(source, source.parent / "out").family == "llama"
    except CheckpointError as error:
        assert "resformer_conversion.json" in str(error)  # noqa: PT017


# Keys that would run code.


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["llama", "retrofit"])
def test_no_code_of_the_source_runs(name: str, copy: Copy, monkeypatch: pytest.MonkeyPatch) -> None:
    source = copy(name)
    out, marker = source.parent / "out", source.parent / "it-ran"
    evil = f"import pathlib\npathlib.Path({str(marker)!r}).touch()\nclass A: ...\n"
    (source / "custom_generate").mkdir()
    for module in "modeling_evil configuration_evil sitecustomize torch __init__ custom_generate/generate".split():
        (source / f"{module}.py").write_text(evil)
    code = {"AutoConfig": "configuration_evil.A", "AutoModelForCausalLM": "modeling_evil.A"}
    config(
        auto_map=code,
        trust_remote_code=True,
        architectures=["EvilForCausalLM"],
        _attn_implementation="evil/kernels:run",
        _attn_implementation_internal="evil/kernels",
        _experts_implementation="evil/kernels",
        attn_implementation="evil/kernels",
    )(source)
    json_file("tokenizer_config.json", lambda content: content.update(auto_map=code))(source)
    json_file("generation_config.json", lambda content: content.update(custom_generate=code, auto_map=code))(source)
    monkeypatch.chdir(source)
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("a question was asked"))
    report: Any = (retrofit if name == "llama" else revert)(source, out)
    inspect(source)
    verify(source, out)
    assert report.logits.identical
    assert {"config.json: auto_map", "config.json: _attn_implementation"} <= set(report.left_behind)
    assert sum("names code" in warning for warning in report.warnings) == 3
    assert not marker.exists()
    assert not list(out.rglob("*.py"))
    for path in out.glob("*.json"):
        for word in ("auto_map", "evil", "trust_remote_code", "custom_generate"):
            assert word not in path.read_text(), path.name


# What reaches the terminal.


@pytest.mark.parametrize("hostile", [ESCAPES, SURROGATE], ids=["escapes", "surrogate"])
def test_hostile_names_in_reports_are_plain(hostile: str, copy: Copy, good: dict[str, Path]) -> None:
    """Of files that stay behind, keys of config.json, values in generation_config.json, and tensors."""
    source = copy()
    os.close(os.open(os.fsencode(source) + b"/x" + (b"\xff" if hostile == SURROGATE else hostile.encode()), os.O_CREAT))
    config(**{f"x{hostile}": 1})(source)
    for options in ((), ("--json",)):
        code, _, stderr = command("convert", source, source.parent / "out", "--verify", "hashes", "--force", *options)
        assert code == 0, stderr
    settings = (source / "generation_config.json").read_bytes()
    json_file("generation_config.json", lambda content: content.update(cache_implementation=hostile))(source)
    assert "cache_implementation" in convert_refused(source, "--force")
    (source / "generation_config.json").write_bytes(settings)
    added(f"x{hostile}")(source)
    for one in (good["llama"], source):
        code, _, stderr = command("verify", one, source, "--verify", "hashes")
        # safetensors has no such name; a key that only one config.json has is a difference.
        assert code == (3 if hostile == SURROGATE else 4 if one != source else 0), stderr
    _, _, stderr = command("convert", source, source.parent / "new", "--verify", "hashes")
    assert hostile == SURROGATE or "Transformers ignores 'x\\x1b[2J" in stderr


def test_what_libraries_say_of_a_checkpoint_is_plain(copy: Copy, caplog: pytest.LogCaptureFixture) -> None:
    """Transformers reports unexpected tensors."""
    source = copy("retrofit")
    added(f"model.{ESCAPES}")(source)
    (source.parent / "t.txt").write_text("some text " * 20)
    logging.add_handler(caplog.handler)
    done = cli("analyze", source, "--text", source.parent / "t.txt")
    logging.remove_handler(caplog.handler)
    assert done.exit_code == 0, done.stderr
    assert_plain(done.stdout + "".join(caplog.messages))
    assert r"model.\x1b[2J" in "".join(caplog.messages)


@pytest.mark.timeout(20)
def test_a_few_hundred_bytes_of_yaml_do_not_stop_a_command(copy: Copy) -> None:
    source, levels = copy("retrofit"), range(1, 9)
    bomb = "".join(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 9)}]}}\n" for n in levels)
    (source / "README.md").write_text(f"---\nlicense: mit\na0: &a0 {{b: 1}}\n{bomb}---\n{{{{ x }}}}")
    for words in (
        ["convert", "--method", "neutreno", "--lossy", "--dry-run"],
        ["card", "--dry-run"],
        ["push", "you/x"],
    ):
        name, *options = words
        output = [source.parent / "out"] if name == "convert" else []
        code, _, stderr = command(name, source, *output, *options, *(["--dry-run"] if name == "push" else []))
        assert code == (3 if name == "push" else 0), stderr
    assert "aliases (*name) are not read" in stderr


# Whatever comes: the right result or `CheckpointError`, and no other exception.


SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
NUMBERS = st.sampled_from([0, 1, -1, 127, 128, 2**31, 2**63 - 1, 2**63, 2**64, 10**299, True, False]) | st.integers()
VALUES_OF_JSON = st.recursive(
    st.none() | NUMBERS | st.floats() | st.text(max_size=8) | st.sampled_from(["F32", "F4", ESCAPES]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=8,
)


@st.composite
def mutated(draw: Any, value: dict[str, Any]) -> dict[str, Any]:
    """A JSON object with values replaced, nudged or removed in up to three places."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, 3))):
        every = list(places(value))
        if not every:
            break
        holder, key = every[draw(st.integers(0, len(every) - 1))]
        what = draw(st.sampled_from(["replace", "nudge", "remove"]))
        if what == "replace":
            holder[key] = draw(VALUES_OF_JSON)
        elif what == "nudge" and type(holder[key]) is int:
            holder[key] += draw(st.sampled_from([-128, -4, -1, 1, 4, 128]))
        elif what == "remove":
            del holder[key]
    return value


#: The header and the data of four tensors, one of them empty.
SMALL_HEADER: Json = {
    "__metadata__": {"format": "pt"},
    "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
    "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
    "c": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
    "d": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
}
SMALL_DATA = bytes(range(33))


def outcome_of(act: Callable[[], Any]) -> tuple[Any, str]:
    """(what it returns, ""), or (None, the message of its CheckpointError, which is fit to print)."""
    try:
        return act(), ""
    except CheckpointError as error:
        message = str(error)
    assert_plain(message)
    return None, message


@st.composite
def flipped(draw: Any) -> bytes:
    """The small file with some of its bytes overwritten, and perhaps cut."""
    content = bytearray(safetensors_file(json.dumps(SMALL_HEADER).encode(), SMALL_DATA))
    for position, value in draw(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6)):
        content[position % len(content)] = value
    return bytes(content[: draw(st.one_of(st.none(), st.integers(0, 400)))])


def with_data(header: Json, trailing: int) -> bytes:
    data = SMALL_DATA[: len(SMALL_DATA) + min(trailing, 0)] + bytes(max(trailing, 0))
    return safetensors_file(json.dumps(header).encode(), data)


@settings(suppress_health_check=SLOW_TO_DRAW)
@given(content=st.one_of(st.builds(with_data, mutated(SMALL_HEADER), st.sampled_from([0, 0, -1, 1, 3])), flipped()))
def test_every_byte_of_a_file_is_accounted_for_once_or_it_is_refused(content: bytes, tmp_path: Path) -> None:
    any_file = tmp_path / "any.safetensors"
    any_file.write_bytes(content)
    shard, message = outcome_of(lambda: read_shard(any_file))
    if shard is None:
        assert str(any_file) in message
        assert len(message) < 3000
        return
    position = 8 + int.from_bytes(content[:8], "little")
    for tensor in shard.tensors:
        assert tensor.start == position
        position += tensor.nbytes
    assert position == shard.size == len(content)
    assert len({tensor.name for tensor in shard.tensors}) == len(shard.tensors)


@given(content=st.binary(max_size=200))
def test_no_json_raises_anything_else(content: bytes) -> None:
    value, message = outcome_of(lambda: parse_json(content, "here"))
    assert isinstance(value, dict) or message.startswith("here: ")
