"""Checkpoints that were made to do harm: each is refused, with a name and a reason, and nothing is left.

A case damages a copy of a good checkpoint. What is asked of every refusal is in `refused`.
"""

import json
import os
import shutil
import socket
import struct
import sys
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import family_model, save_checkpoint
from command_server import run
from conftest import others_slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import resformer.cli
from resformer import retrofit
from resformer.convert import CheckpointError, inspect, revert, verify
from resformer.convert.reading import read_checkpoint
from resformer.convert.safetensors_format import read_shard
from resformer.untrusted import parse_json

#: A refusal takes under a second; what blocks or works for long is ended by this limit.
pytestmark = pytest.mark.timeout(120)

INDEX = "model.safetensors.index.json"
WEIGHTS = "model.safetensors"
EMBEDDING, HEAD, NORM = "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"
#: Clears the screen, renames the window, rings, turns the text around; and a character that UTF-8 does not have.
ESCAPES, SURROGATE = "\x1b[2J\x1b]0;owned\x07\u202e", "\ud800"

Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints that convert: `llama`, `sharded`, `tied`, and `ours`, a retrofit. The first conversion imports."""
    folder = tmp_path_factory.mktemp("good")
    save_checkpoint(folder / "llama", num_hidden_layers=2)
    save_checkpoint(folder / "sharded", num_hidden_layers=2, shards=True)
    save_checkpoint(folder / "tied", num_hidden_layers=2, tie_word_embeddings=True)
    for name in ("llama", "sharded", "tied"):
        retrofit(folder / name, folder / f"retrofit-{name}", "resformer-denseformer")
    (folder / "retrofit-llama").rename(folder / "ours")
    revert(folder / "ours", folder / "reverted")
    inspect(folder / "ours")
    return {path.name: path for path in folder.iterdir()}


@pytest.fixture
def copy(good: dict[str, Path], tmp_path: Path) -> Callable[..., Path]:
    """`copy("sharded")`: a copy to damage, the only thing in a folder of its own."""

    def make(name: str = "llama") -> Path:
        return Path(shutil.copytree(good[name], tmp_path / "source", symlinks=True))

    return make


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


def listing(folder: Path) -> dict[str, tuple[int, int]]:
    """What lies in a folder, and what of it has changed."""
    found = {}
    for path in folder.rglob("*"):
        status = path.lstat()
        found[os.fsdecode(os.fsencode(path))] = (status.st_mtime_ns, status.st_size)
    return found


def assert_plain(text: str) -> None:
    """Nothing in it moves a cursor, or cannot be encoded."""
    assert not [character for character in text if not character.isprintable() and character != "\n"]


def refused(
    act: Callable[[], object],
    root: Path,
    *needles: str,
    error: type[Exception] = CheckpointError,
) -> str:
    """Expects `act` to be refused: by a message for a person that says where, and with nothing left."""
    before = listing(root)
    with pytest.raises(error) as caught:
        act()
    message = str(caught.value)
    assert listing(root) == before, "something was left"
    for needle in needles:
        assert needle in message
    assert len(message) < 3000
    assert_plain(message)
    return message


def refused_conversion(source: Path, *needles: str, **options: Any) -> str:
    return refused(lambda: retrofit(source, source.parent / "out", **options), source.parent, *needles)


def edit_json(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


# Weights: a file is 8 bytes of header length, the header, and the data.


def taken_apart(path: Path) -> tuple[dict[str, Any], bytes]:
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    return json.loads(content[8 : 8 + length]), content[8 + length :]


def put_together(path: Path, header: bytes, data: bytes) -> None:
    path.write_bytes(len(header).to_bytes(8, "little") + header + data)


def cut(where: Callable[[int, int], int]) -> Damage:
    """Truncates the weights to `where(length of the header, size of the file)` bytes."""

    def damage(folder: Path) -> None:
        path = folder / WEIGHTS
        content = path.read_bytes()
        path.write_bytes(content[: where(int.from_bytes(content[:8], "little"), len(content))])

    return damage


def length(value: int) -> Damage:
    """Overwrites the length of the header."""

    def damage(folder: Path) -> None:
        with (folder / WEIGHTS).open("r+b") as file:
            file.write(struct.pack("<Q", value))

    return damage


def raw_header(header: bytes, *, keep_data: bool = True) -> Damage:
    """Puts `header` in the place of the header."""

    def damage(folder: Path) -> None:
        _, data = taken_apart(folder / WEIGHTS)
        put_together(folder / WEIGHTS, header, data if keep_data else b"")

    return damage


def header(change: Callable[[dict[str, Any]], object]) -> Damage:
    """Changes the entries of the header, in place."""

    def damage(folder: Path) -> None:
        entries, data = taken_apart(folder / WEIGHTS)
        change(entries)
        put_together(folder / WEIGHTS, json.dumps(entries).encode(), data)

    return damage


def header_text(old: str, new: str) -> Damage:
    """Replaces a piece of the header's text, once."""

    def damage(folder: Path) -> None:
        entries, data = taken_apart(folder / WEIGHTS)
        text = json.dumps(entries)
        assert old in text
        put_together(folder / WEIGHTS, text.replace(old, new, 1).encode(), data)

    return damage


def norm(**values: Any) -> Damage:
    """Changes the entry of the last norm, 32 numbers."""
    return header(lambda entries: entries[NORM].update(values))


def shifted(start: int, stop: int) -> Damage:
    """Moves the range of the last norm."""

    def change(entries: dict[str, Any]) -> None:
        begin, end = entries[NORM]["data_offsets"]
        entries[NORM]["data_offsets"] = [begin + start, end + stop]

    return header(change)


def renamed(new: str) -> Damage:
    """Gives the last norm another name."""
    return header(lambda entries: entries.update({new: entries.pop(NORM)}))


def added(name: str, entry: object) -> Damage:
    return header(lambda entries: entries.update({name: entry}))


def overlapping(entries: dict[str, Any]) -> None:
    entries["model.layers.0.input_layernorm.weight"] = entries["model.layers.1.input_layernorm.weight"]


def appended(content: bytes) -> Damage:
    def damage(folder: Path) -> None:
        with (folder / WEIGHTS).open("ab") as file:
            file.write(content)

    return damage


def written(name: str, content: bytes) -> Damage:
    """Puts `content` in the place of a file."""
    return lambda folder: void((folder / name).write_bytes(content))


def void(_: object) -> None:
    return None


def many_tensors(folder: Path) -> None:
    entries = ",".join(f'"{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(1_000_000))
    put_together(folder / WEIGHTS, b"{" + entries.encode() + b"}", b"")


def many_small_tensors(folder: Path) -> None:
    """As many as fit into a header of 4 MiB."""
    entries = ",".join(f'"{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(70_000))
    put_together(folder / WEIGHTS, b"{" + entries.encode() + b"}", b"")


def padded_with_spaces(folder: Path) -> None:
    entries, data = taken_apart(folder / WEIGHTS)
    put_together(folder / WEIGHTS, json.dumps(entries).encode() + b" " * 100_000_000, data)


def all_of_one_length(folder: Path) -> None:
    """A length field that is the whole file's: the header would be the data too."""
    length((folder / WEIGHTS).stat().st_size - 8)(folder)


def sparse(size: int) -> Damage:
    """A hole of `size` bytes at the end of the weights, which no tensor speaks of."""
    return lambda folder: os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + size)


def sparse_tensor(folder: Path) -> None:
    """An embedding of 4 TB, all of it there, and none of it stored."""
    entries, data = taken_apart(folder / WEIGHTS)
    name = EMBEDDING
    begin, end = max(entry["data_offsets"] for key, entry in entries.items() if key != "__metadata__")
    rows = 2**35
    entries["model.huge.weight"] = {"dtype": "F32", "shape": [rows, 32], "data_offsets": [end, end + rows * 128]}
    del name, begin
    put_together(folder / WEIGHTS, json.dumps(entries).encode(), data)
    os.truncate(folder / WEIGHTS, (folder / WEIGHTS).stat().st_size + rows * 128)


LFS = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 16060522240\n"
WITH_NORM = (WEIGHTS, NORM)

#: Name -> (damage, what the message has to say).
WEIGHT_CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "empty": (cut(lambda header, size: 0), (WEIGHTS, "truncated")),
    "cut-in-length": (cut(lambda header, size: 5), (WEIGHTS, "truncated")),
    "cut-after-length": (cut(lambda header, size: 8), (WEIGHTS, "truncated")),
    "cut-in-header": (cut(lambda header, size: 8 + header // 2), (WEIGHTS, "truncated")),
    "cut-before-the-headers-end": (cut(lambda header, size: 7 + header), (WEIGHTS, "truncated")),
    "cut-after-header": (cut(lambda header, size: 8 + header), (WEIGHTS, "truncated")),
    "cut-in-data": (cut(lambda header, size: (8 + header + size) // 2), (WEIGHTS, "truncated")),
    "cut-by-one-byte": (cut(lambda header, size: size - 1), WITH_NORM),
    "length-zero": (length(0), (WEIGHTS,)),
    "length-one": (length(1), (WEIGHTS,)),
    "length-too-short-by-one": (lambda f: length(int.from_bytes((f / WEIGHTS).read_bytes()[:8], "little") - 1)(f), ()),
    "length-minus-one": (length(2**64 - 1), (WEIGHTS, "truncated")),
    "length-minus-2^63": (length(2**63), (WEIGHTS, "truncated")),
    "length-100-MB-beyond-the-end": (length(10**8), (WEIGHTS, "truncated")),
    "length-of-the-whole-file": (all_of_one_length, (WEIGHTS,)),
    "header-of-zero-bytes": (raw_header(b"", keep_data=False), (WEIGHTS,)),
    "header-not-utf-8": (raw_header(b'{"\xff\xfe": 1}'), (WEIGHTS, "UTF-8")),
    "header-in-utf-16": (raw_header('{"a": 1}'.encode("utf-16-le")), (WEIGHTS,)),
    "header-with-a-byte-order-mark": (raw_header(b"\xef\xbb\xbf{}"), (WEIGHTS,)),
    "header-not-json": (raw_header(b"{not json}"), (WEIGHTS, "JSON")),
    "header-a-list": (raw_header(b"[]"), (WEIGHTS,)),
    "header-a-string": (raw_header(b'"{}"'), (WEIGHTS,)),
    "header-null": (raw_header(b"null"), (WEIGHTS,)),
    "header-nul-bytes": (raw_header(bytes(64)), (WEIGHTS,)),
    "header-then-more": (raw_header(b"{} {}"), (WEIGHTS, "JSON")),
    "header-without-tensors": (raw_header(b"{}"), (WEIGHTS,)),
    "nothing-but-an-empty-header": (raw_header(b"{}", keep_data=False), ()),
    "lists-nested-deeply": (raw_header(b'{"a":' + b"[" * 500_000 + b"]" * 500_000 + b"}"), (WEIGHTS, "nested")),
    "objects-nested-deeply": (raw_header(b'{"a":' * 500_000 + b"1" + b"}" * 500_000), (WEIGHTS, "nested")),
    "lists-nested-as-deep-as-json-goes": (raw_header(b'{"a":' + b"[" * 900 + b"]" * 900 + b"}"), (WEIGHTS,)),
    "a-tensor-twice": (header_text(f'"{NORM}":', f'"{NORM}": {{}}, "{NORM}":'), (WEIGHTS, NORM, "twice")),
    "a-key-twice": (header_text('"dtype":', '"dtype": "I8", "dtype":'), (WEIGHTS, "dtype", "twice")),
    "metadata-twice": (header_text('"__metadata__":', '"__metadata__": {}, "__metadata__":'), (WEIGHTS, "twice")),
    "metadata-null": (header(lambda e: e.update(__metadata__=None)), (WEIGHTS, "__metadata__")),
    "metadata-a-list": (header(lambda e: e.update(__metadata__=[["format", "pt"]])), (WEIGHTS, "__metadata__")),
    "metadata-of-numbers": (header(lambda e: e.update(__metadata__={"format": 1})), (WEIGHTS, "__metadata__")),
    "metadata-nested": (header(lambda e: e.update(__metadata__={"format": {"a": "b"}})), (WEIGHTS, "__metadata__")),
    "entry-null": (added("x", None), (WEIGHTS, "'x'")),
    "entry-a-list": (added("x", ["F32", [0], [0, 0]]), (WEIGHTS, "'x'")),
    "entry-empty": (added("x", {}), (WEIGHTS, "'x'")),
    "entry-with-more": (norm(more=1), WITH_NORM),
    "entry-with-less": (header(lambda e: e[NORM].pop("shape")), WITH_NORM),
    "dtype-unknown": (norm(dtype="F33"), (*WITH_NORM, "F33")),
    "dtype-a-number": (norm(dtype=32), WITH_NORM),
    "dtype-a-list": (norm(dtype=["F32"]), WITH_NORM),
    "dtype-null": (norm(dtype=None), WITH_NORM),
    "dtype-in-lower-case": (norm(dtype="f32"), WITH_NORM),
    "dtype-with-escapes": (norm(dtype=ESCAPES), WITH_NORM),
    "dtype-of-a-megabyte": (norm(dtype="F" * 10**6), WITH_NORM),
    "dtype-of-another-width": (norm(dtype="F16"), WITH_NORM),
    "dtype-of-integers": (norm(dtype="I32"), WITH_NORM),
    "dtype-of-quantised-weights": (norm(dtype="F8_E4M3", shape=[128]), WITH_NORM),
    "dtype-of-half-a-byte": (norm(dtype="F4", shape=[256]), WITH_NORM),
    "dtype-of-half-a-byte-of-an-odd-number": (norm(dtype="F4", shape=[255]), WITH_NORM),
    "dtype-of-six-bits": (norm(dtype="F6_E2M3", shape=[170]), WITH_NORM),
    "dtype-complex": (norm(dtype="C64", shape=[16]), WITH_NORM),
    "shape-null": (norm(shape=None), WITH_NORM),
    "shape-a-number": (norm(shape=32), WITH_NORM),
    "shape-an-object": (norm(shape={"0": 32}), WITH_NORM),
    "shape-of-a-bool": (norm(shape=[32, True]), WITH_NORM),
    "shape-of-a-float": (norm(shape=[32.0]), WITH_NORM),
    "shape-of-a-string": (norm(shape=["32"]), WITH_NORM),
    "shape-of-nan": (norm(shape=[float("nan")]), WITH_NORM),
    "shape-negative": (norm(shape=[-32]), WITH_NORM),
    "shape-twice-negative": (norm(shape=[-4, -8]), WITH_NORM),
    "shape-of-2^63": (norm(shape=[2**63]), WITH_NORM),
    "shape-of-2^64+32": (norm(shape=[2**64 + 32]), WITH_NORM),
    "shape-whose-product-wraps-to-32": (norm(shape=[2**32 + 1, 2**32, 32]), WITH_NORM),
    "shape-of-300-digits": (norm(shape=[10**299]), WITH_NORM),
    "shape-of-5000-digits": (header_text("[32]", f"[{'1' * 5000}]"), (WEIGHTS,)),
    "shape-of-9-dimensions": (norm(shape=[32, *[1] * 8]), WITH_NORM),
    "shape-of-a-million-dimensions": (norm(shape=[32, *[1] * 10**6]), WITH_NORM),
    "shape-another": (norm(shape=[31]), WITH_NORM),
    "shape-empty": (norm(shape=[]), WITH_NORM),
    "shape-of-zero": (norm(shape=[0]), WITH_NORM),
    "offsets-null": (norm(data_offsets=None), WITH_NORM),
    "offsets-an-object": (norm(data_offsets={"0": 0, "1": 128}), WITH_NORM),
    "offsets-one": (norm(data_offsets=[0]), WITH_NORM),
    "offsets-three": (norm(data_offsets=[0, 128, 128]), WITH_NORM),
    "offsets-bool": (norm(data_offsets=[False, 128]), WITH_NORM),
    "offsets-float": (norm(data_offsets=[0.0, 128.0]), WITH_NORM),
    "offsets-strings": (norm(data_offsets=["0", "128"]), WITH_NORM),
    "offsets-negative": (norm(data_offsets=[-128, 0]), WITH_NORM),
    "offsets-backwards": (norm(data_offsets=[128, 0]), WITH_NORM),
    "offsets-of-2^64": (norm(data_offsets=[2**64, 2**64 + 128]), WITH_NORM),
    "offsets-of-300-digits": (norm(data_offsets=[10**299, 10**299 + 128]), WITH_NORM),
    "offsets-beyond-the-end": (norm(data_offsets=[10**15, 10**15 + 128]), WITH_NORM),
    "overlap-of-a-byte": (shifted(-1, -1), WITH_NORM),
    "overlap-of-all": (header(overlapping), (WEIGHTS,)),
    "hole-of-a-byte": (shifted(1, 1), WITH_NORM),
    "hole-at-the-beginning": (header(lambda e: e.pop(HEAD)), (WEIGHTS,)),
    "hole-of-a-tensor": (header(lambda e: e.pop("model.layers.0.mlp.up_proj.weight")), (WEIGHTS,)),
    "last-tensor-gone-but-its-bytes": (header(lambda e: e.pop(NORM)), (WEIGHTS, "no tensor")),
    "a-byte-more": (appended(b"\0"), WITH_NORM),
    "a-megabyte-more": (appended(bytes(10**6)), WITH_NORM),
    "another-file-at-the-end": (lambda f: appended((f / WEIGHTS).read_bytes())(f), WITH_NORM),
    "a-million-tensors": (many_tensors, (WEIGHTS,)),
    "70000-tensors": (many_small_tensors, (WEIGHTS,)),
    "100-MB-of-spaces": (padded_with_spaces, (WEIGHTS, "header")),
    "a-sparse-terabyte": (sparse(10**12), (WEIGHTS,)),
    "a-sparse-tensor-of-4-TB": (sparse_tensor, (WEIGHTS, "model.huge.weight")),
    "a-name-that-is-empty": (renamed(""), ("missing",)),
    "a-name-with-escapes": (renamed(ESCAPES), ("missing",)),
    "one-more-name-with-escapes": (added(ESCAPES, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}), (WEIGHTS,)),
    "one-more-name-with-a-lone-surrogate": (
        added(SURROGATE, {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        (WEIGHTS, "ud800"),
    ),
    "a-rotary-name-with-a-lone-surrogate": (
        added(SURROGATE + ".rotary_emb.inv_freq", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        (WEIGHTS, "ud800"),
    ),
    "a-rotary-name-with-escapes": (
        added(ESCAPES + ".rotary_emb.inv_freq", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}),
        (WEIGHTS, "rotary"),
    ),
    "a-rotary-name-of-nothing": (
        added("lora.rotary_emb.inv_freq", {"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}),
        (WEIGHTS, "lora"),
    ),
    "a-name-of-a-megabyte": (renamed("x" * 10**6), ("missing",)),
    "a-layer-of-another-number": (
        header(lambda e: e.update({"model.layers.7.input_layernorm.weight": e.pop(NORM)})),
        ("num_hidden_layers",),
    ),
    "a-layer-with-a-leading-zero": (
        header(lambda e: e.update({"model.layers.01.mlp.up_proj.weight": e.pop("model.layers.1.mlp.up_proj.weight")})),
        (),
    ),
    "a-git-lfs-pointer": (written(WEIGHTS, LFS), (WEIGHTS, "git lfs pull")),
    "a-short-git-lfs-pointer": (written(WEIGHTS, LFS[:48]), (WEIGHTS,)),
    "a-web-page": (written(WEIGHTS, b"<!DOCTYPE html><html><body>401 Unauthorized</body></html>"), (WEIGHTS,)),
    "a-zip": (written(WEIGHTS, b"PK\x03\x04" + bytes(100)), (WEIGHTS,)),
    "a-pickle": (written(WEIGHTS, b"\x80\x02cposix\nsystem\nX\x04\0\0\0exit\x85R."), (WEIGHTS,)),
}


@pytest.mark.parametrize("case", WEIGHT_CASES)
def test_damaged_weights_are_refused(case: str, copy: Callable[..., Path]) -> None:
    damage, needles = WEIGHT_CASES[case]
    source = copy()
    damage(source)
    refused_conversion(source, *needles)


def differs_or_refused(one: Path, other: Path, level: Any = "hashes") -> None:
    """`verify` says that two checkpoints are not the same, or why it cannot: never anything else."""
    with suppress(CheckpointError):
        assert not verify(one, other, verify=level).same


@pytest.mark.parametrize("case", [case for number, case in enumerate(WEIGHT_CASES) if number % 4 == 0])
def test_damaged_weights_are_refused_by_inspect_and_verify(
    case: str, copy: Callable[..., Path], good: dict[str, Path]
) -> None:
    damage, needles = WEIGHT_CASES[case]
    source = copy()
    damage(source)
    refused(lambda: inspect(source), source.parent, *needles)
    differs_or_refused(good["llama"], source)
    differs_or_refused(source, good["llama"])


@pytest.mark.parametrize("case", [case for number, case in enumerate(WEIGHT_CASES) if number % 4 == 1])
def test_damaged_weights_are_refused_by_revert(case: str, copy: Callable[..., Path]) -> None:
    damage, _ = WEIGHT_CASES[case]
    source = copy("ours")
    (source / "model-00001-of-00002.safetensors").rename(source / WEIGHTS)
    damage(source)
    (source / WEIGHTS).rename(source / "model-00001-of-00002.safetensors")
    refused(lambda: revert(source, source.parent / "out"), source.parent)


@pytest.mark.parametrize("case", ["a-million-tensors", "100-MB-of-spaces", "a-sparse-tensor-of-4-TB", "70000-tensors"])
def test_damaged_weights_take_no_memory(case: str, copy: Callable[..., Path]) -> None:
    source = copy()
    WEIGHT_CASES[case][0](source)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError):
            inspect(source)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 200 * 10**6


def test_nothing_is_left_where_there_was_no_folder_to_write_into(copy: Callable[..., Path]) -> None:
    source = copy()
    appended(b"\0")(source)
    refused(lambda: retrofit(source, source.parent / "not" / "yet" / "there"), source.parent, WEIGHTS)


# Tensors that are well stored, and not those that config.json asks for.


def tensors(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        found = load_file(folder / WEIGHTS)
        change(found)
        save_file({name: tensor.contiguous() for name, tensor in found.items()}, folder / WEIGHTS)

    return damage


Q, V = "model.layers.1.self_attn.q_proj.weight", "model.layers.1.self_attn.v_proj.weight"
TENSOR_CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "transposed": (tensors(lambda t: t.update({V: t[V].T})), (WEIGHTS, V, "[32, 16]", "[16, 32]")),
    "flat": (tensors(lambda t: t.update({V: t[V].view(-1)})), (WEIGHTS, V)),
    "too-wide": (tensors(lambda t: t.update({V: torch.zeros(32, 32)})), (WEIGHTS, V)),
    "of-no-elements": (tensors(lambda t: t.update({V: torch.zeros(0, 32)})), (WEIGHTS, V)),
    "scalar": (tensors(lambda t: t.update({NORM: torch.tensor(1.0)})), (WEIGHTS, NORM)),
    "missing": (tensors(lambda t: t.pop(Q)), ("missing", Q)),
    "missing-norm": (tensors(lambda t: t.pop(NORM)), ("missing", NORM)),
    "missing-embedding": (tensors(lambda t: t.pop(EMBEDDING)), ("missing", EMBEDDING)),
    "missing-layer": (
        tensors(lambda t: [t.pop(name) for name in list(t) if name.startswith("model.layers.1.")]),
        ("num_hidden_layers",),
    ),
    "unexpected-bias": (tensors(lambda t: t.update({Q.replace("weight", "bias"): torch.zeros(32)})), (WEIGHTS, "bias")),
    "unexpected-expert": (
        tensors(lambda t: t.update({"model.layers.0.mlp.experts.0.w1.weight": torch.zeros(2, 2)})),
        (WEIGHTS, "experts"),
    ),
    "unexpected-connection": (
        tensors(lambda t: t.update({"model.value_residual.bias": torch.zeros(2)})),
        (WEIGHTS, "value_residual"),
    ),
    "integers": (tensors(lambda t: t.update({V: t[V].to(torch.int32)})), (WEIGHTS, V, "quantised")),
    "eight-bits": (tensors(lambda t: t.update({V: t[V].to(torch.float8_e4m3fn)})), (WEIGHTS, V, "quantised")),
    "all-integers": (tensors(lambda t: t.update({n: x.to(torch.int8) for n, x in t.items()})), ()),
    "no-prefix": (
        lambda f: save_file({n.removeprefix("model."): t for n, t in load_file(f / WEIGHTS).items()}, f / WEIGHTS),
        ("model.layers",),
    ),
}


@pytest.mark.parametrize("case", TENSOR_CASES)
def test_tensors_that_do_not_fit_the_configuration_are_refused(case: str, copy: Callable[..., Path]) -> None:
    damage, needles = TENSOR_CASES[case]
    source = copy()
    damage(source)
    refused_conversion(source, *needles)
    refused(lambda: inspect(source), source.parent, *needles)


def tie(folder: Path, tied: bool) -> None:
    edit_json(folder / "config.json", lambda config: config.update(tie_word_embeddings=tied))


def test_the_four_states_of_a_tied_head(copy: Callable[..., Path]) -> None:
    source, out = copy(), iter("abcd")

    def convert() -> dict[str, Any]:
        folder = source.parent / next(out)
        retrofit(source, folder)
        return json.loads((folder / "config.json").read_text())

    assert convert()["tie_word_embeddings"] is False  # says untied, has a head
    tie(source, True)  # says tied, has another head: what Transformers loads is the head of the file
    assert convert()["tie_word_embeddings"] is False
    tensors(lambda t: t.update({HEAD: t[EMBEDDING].clone()}))(source)  # says tied, has the same head
    assert convert()["tie_word_embeddings"] is True
    tensors(lambda t: t.pop(HEAD))(source)  # says tied, has none
    assert convert()["tie_word_embeddings"] is True
    tie(source, False)  # says untied, has none
    refused_conversion(source, HEAD, "tie_word_embeddings")
    tensors(lambda t: t.pop(EMBEDDING))(source)
    tie(source, True)  # says tied, has neither
    refused_conversion(source, "missing")


@pytest.mark.parametrize("shape", [(300, 16), (300, 32, 1), (299, 32), (0, 32)])
def test_a_tied_head_of_the_wrong_shape_is_refused(shape: tuple[int, ...], copy: Callable[..., Path]) -> None:
    source = copy()
    tie(source, True)
    tensors(lambda t: t.update({HEAD: torch.zeros(shape)}))(source)
    refused_conversion(source, WEIGHTS, HEAD)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dtype", others_slow(["float32", "bfloat16", "float16"], ["bfloat16"]))
def test_numbers_that_are_not_finite_go_along_or_are_named(value: float, dtype: str, copy: Callable[..., Path]) -> None:
    source = copy()

    def poison(found: dict[str, torch.Tensor]) -> None:
        for name in found:
            found[name] = found[name].to(getattr(torch, dtype))
        found[V][3, 5] = value

    tensors(poison)(source)
    refused_conversion(source, V, "not finite", verify="logits")
    retrofit(source, source.parent / "out", verify="hashes")
    converted = load_file(source.parent / "out" / "model-00001-of-00002.safetensors")
    for name, tensor in load_file(source / WEIGHTS).items():
        assert torch.equal(tensor.view(torch.uint8), converted[name].view(torch.uint8)), name
    comparison = verify(source, source.parent / "out", verify="hashes")
    assert comparison.same
    revert(source.parent / "out", source.parent / "back", verify="hashes")
    assert (source.parent / "back" / WEIGHTS).read_bytes()[-1000:] == (source / WEIGHTS).read_bytes()[-1000:]


def test_nan_payloads_keep_every_bit(copy: Callable[..., Path]) -> None:
    source = copy()
    payloads = torch.arange(0x7F800001, 0x7F800001 + 32, dtype=torch.int32)  # signalling: arithmetic would quiet them
    tensors(lambda t: t.update({NORM: payloads.view(torch.float32)}))(source)
    refused_conversion(source, NORM, "not finite", verify="logits")
    retrofit(source, source.parent / "out", max_shard_size=10_000, verify="hashes")
    stored = {}
    for path in (source.parent / "out").glob("*.safetensors"):
        stored |= load_file(path)
    assert torch.equal(stored[NORM].view(torch.int32), payloads)


# The index.


def index(change: Callable[[dict[str, Any]], object]) -> Damage:
    return lambda folder: edit_json(folder / INDEX, change)


def every_file(name: object) -> Damage:
    """Says that all tensors are in the file `name`."""
    return index(lambda found: found.update(weight_map=dict.fromkeys(found["weight_map"], name)))


def one_file(name: object) -> Damage:
    return index(lambda found: found["weight_map"].update({NORM: name}))


def shards_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("model-*.safetensors"))


def in_the_wrong_file(folder: Path) -> None:
    first = shards_of(folder)[0].name
    index(lambda found: found["weight_map"].update({NORM: first}))(folder)


def in_two_files(folder: Path) -> None:
    first, *_, last = shards_of(folder)
    save_file({**load_file(first), **load_file(last)}, first)


def case_collision(folder: Path) -> None:
    first = shards_of(folder)[0]
    shutil.copy(first, folder / first.name.replace("model", "Model"))
    index(lambda found: found["weight_map"].update({NORM: first.name.replace("model", "Model")}))(folder)


def same_file_twice(link: Callable[[Path, Path], object]) -> Damage:
    """One shard under two names, with the tensors divided between them."""

    def damage(folder: Path) -> None:
        first = max(shards_of(folder), key=lambda path: len(load_file(path)))
        link(first, folder / "twin.safetensors")
        names = list(load_file(first))
        index(lambda found: found["weight_map"].update(dict.fromkeys(names[:1], "twin.safetensors")))(folder)

    return damage


def self_referring(folder: Path) -> None:
    path = shards_of(folder)[0]
    path.unlink()
    path.symlink_to(path.name)


INDEX_CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "empty": (written(INDEX, b""), (INDEX, "JSON")),
    "not-json": (written(INDEX, b"{"), (INDEX, "JSON")),
    "not-utf-8": (written(INDEX, b'{"\xff": 1}'), (INDEX, "UTF-8")),
    "a-list": (written(INDEX, b"[]"), (INDEX,)),
    "null": (written(INDEX, b"null"), (INDEX,)),
    "deep": (written(INDEX, b'{"weight_map":' * 10**5), (INDEX, "nested")),
    "huge": (written(INDEX, b" " * (64 * 2**20)), (INDEX, "larger")),
    "a-git-lfs-pointer": (written(INDEX, LFS), (INDEX,)),
    "keys-twice": (written(INDEX, b'{"weight_map": {}, "weight_map": {}}'), (INDEX, "twice")),
    "tensor-twice": (written(INDEX, b'{"weight_map": {"a": "a.safetensors", "a": "b.safetensors"}}'), (INDEX, "twice")),
    "no-weight-map": (index(lambda found: found.pop("weight_map")), (INDEX, "weight_map")),
    "empty-weight-map": (index(lambda found: found.update(weight_map={})), (INDEX, "weight_map")),
    "weight-map-a-list": (index(lambda found: found.update(weight_map=[])), (INDEX, "weight_map")),
    "weight-map-a-string": (index(lambda found: found.update(weight_map="x.safetensors")), (INDEX, "weight_map")),
    "a-million-tensors": (
        written(INDEX, json.dumps({"weight_map": {str(n): "a.safetensors" for n in range(10**6)}}).encode()),
        (INDEX,),
    ),
    "100000-tensors": (
        written(INDEX, json.dumps({"weight_map": {str(n): "a.safetensors" for n in range(10**5)}}).encode()),
        (INDEX,),
    ),
    **{
        f"file-{name}": (one_file(value), (INDEX,))
        for name, value in {
            "null": None,
            "number": 1,
            "list": ["model.safetensors"],
            "object": {"file": "model.safetensors"},
            "nested": json.loads("[" * 900 + "]" * 900),
            "empty": "",
            "dot": ".",
            "hidden": ".safetensors",
            "parent": "../source/model-00001-of-00013.safetensors",
            "parent-of-sub": "sub/../../x.safetensors",
            "sub": "sub/x.safetensors",
            "absolute": "/etc/x.safetensors",
            "drive": "C:x.safetensors",
            "drive-path": "C:\\x.safetensors",
            "backslash": "..\\x.safetensors",
            "share": "\\\\host\\share\\x.safetensors",
            "nul": "x\0.safetensors",
            "nul-after": "x.safetensors\0.txt",
            "newline": "x\n.safetensors",
            "escapes": ESCAPES + ".safetensors",
            "surrogate": SURROGATE + ".safetensors",
            "wildcard": "*.safetensors",
            "another-suffix": "model.bin",
            "upper-case-suffix": "model.SAFETENSORS",
            "home": "~/x.safetensors/",
            "url": "https://example.org/x.safetensors",
            "of-a-megabyte": "x" * 10**6 + ".safetensors",
            "of-300-bytes": "x" * 289 + ".safetensors",
        }.items()
    },
    "file-of-500-bytes-in-250-characters": (one_file("é" * 238 + ".safetensors"), ()),
    "file-missing": (one_file("absent.safetensors"), ("absent.safetensors", "missing")),
    "every-file-missing": (every_file("absent.safetensors"), ("absent.safetensors",)),
    "all-in-one-file": (every_file("model-00001-of-00013.safetensors"), ()),
    "in-the-wrong-file": (in_the_wrong_file, (NORM,)),
    "in-two-files": (in_two_files, (" is in ",)),
    "more-than-there-is": (
        index(lambda found: found["weight_map"].update({"x": found["weight_map"][NORM]})),
        ("'x'", ".safetensors"),
    ),
    "less-than-there-is": (index(lambda found: found["weight_map"].pop(NORM)), ()),
    "case-collision": (case_collision, ("case",)),
    "one-shard-under-two-names": (same_file_twice(os.link), ("twin",)),
    "one-shard-behind-a-link": (same_file_twice(lambda a, b: b.symlink_to(a.name)), ("twin",)),
    "a-link-to-itself": (self_referring, ("model-00001-of",)),
    "a-shard-is-missing": (lambda f: shards_of(f)[1].unlink(), ("model-00002-of", "missing")),
    "a-shard-is-empty": (lambda f: void(shards_of(f)[1].write_bytes(b"")), ("model-00002-of",)),
    "a-shard-is-a-folder": (lambda f: void((shards_of(f)[1].unlink(), shards_of(f)[0].with_name("d").mkdir())), ()),
    "no-index-and-a-shard-missing": (lambda f: void(((f / INDEX).unlink(), shards_of(f)[1].unlink())), ("00002",)),
    "no-index-and-two-series": (
        lambda f: void(((f / INDEX).unlink(), shutil.copy(shards_of(f)[0], f / "other-00001-of-00001.safetensors"))),
        ("series",),
    ),
    "no-index-and-no-shards": (
        lambda f: void(((f / INDEX).unlink(), [path.unlink() for path in shards_of(f)])),
        ("safetensors",),
    ),
}


@pytest.mark.parametrize("case", INDEX_CASES)
def test_damaged_indices_are_refused(case: str, copy: Callable[..., Path]) -> None:
    damage, needles = INDEX_CASES[case]
    source = copy("sharded")
    damage(source)
    refused_conversion(source, *needles)


@pytest.mark.parametrize("case", [case for number, case in enumerate(INDEX_CASES) if number % 5 == 0])
def test_damaged_indices_are_refused_by_inspect_and_verify(
    case: str, copy: Callable[..., Path], good: dict[str, Path]
) -> None:
    damage, needles = INDEX_CASES[case]
    source = copy("sharded")
    damage(source)
    refused(lambda: inspect(source), source.parent, *needles)
    refused(lambda: verify(good["llama"], source), source.parent, *needles)


@pytest.mark.parametrize("case", ["not-json", "no-weight-map", "file-parent", "file-nul", "file-missing", "deep"])
def test_damaged_indices_are_refused_by_revert(case: str, copy: Callable[..., Path]) -> None:
    damage, needles = INDEX_CASES[case]
    source = copy("ours")
    damage(source)
    refused(lambda: revert(source, source.parent / "out"), source.parent, *needles)


# Files that are none: each in the place of each file that is read.


def outside(folder: Path, name: str) -> None:
    """A link out of the folder, to the very file."""
    (folder / name).rename(folder.parent / "elsewhere")
    (folder / name).symlink_to("../elsewhere")


def bind_socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # a socket's path has 108 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def replaced(make: Callable[[Path], object]) -> Callable[[Path, str], None]:
    def damage(folder: Path, name: str) -> None:
        (folder / name).unlink()
        make(folder / name)

    return damage


NO_FILES: dict[str, Callable[[Path, str], None]] = {
    "link-to-a-password-file": replaced(lambda path: path.symlink_to("/etc/passwd")),
    "link-to-nothing": replaced(lambda path: path.symlink_to("nothing")),
    "link-to-itself": replaced(lambda path: path.symlink_to(path.name)),
    "link-to-zero": replaced(lambda path: path.symlink_to("/dev/zero")),
    "link-to-random": replaced(lambda path: path.symlink_to("/dev/urandom")),
    "link-to-null": replaced(lambda path: path.symlink_to("/dev/null")),
    "link-to-its-folder": replaced(lambda path: path.symlink_to(".")),
    "fifo": replaced(os.mkfifo),
    "folder": replaced(lambda path: path.mkdir()),
    "socket": replaced(bind_socket),
}
if sys.platform == "win32":
    pytest.skip("needs links, FIFOs and sockets in the file system", allow_module_level=True)


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", ["config.json", WEIGHTS])
def test_what_is_no_file_is_refused_at_once(kind: str, name: str, copy: Callable[..., Path]) -> None:
    source = copy()
    NO_FILES[kind](source, name)
    refused_conversion(source, name)
    refused(lambda: inspect(source), source.parent, name)


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("name", [INDEX, "model-00002-of-"])
def test_what_is_no_file_is_refused_at_once_among_shards(kind: str, name: str, copy: Callable[..., Path]) -> None:
    source = copy("sharded")
    name = next(path.name for path in source.iterdir() if path.name.startswith(name))
    NO_FILES[kind](source, name)
    refused_conversion(source, name)
    refused(lambda: verify(source, source), source.parent, name)


@pytest.mark.parametrize("kind", others_slow(["link-out", *NO_FILES], ["link-out", "link-to-zero", "fifo", "folder"]))
@pytest.mark.parametrize(
    "name", ["tokenizer.json", "tokenizer_config.json", "generation_config.json", "chat_template.jinja"]
)
def test_a_side_file_that_is_none_is_left_behind_and_named(kind: str, name: str, copy: Callable[..., Path]) -> None:
    source = copy()
    assert (source / name).exists()
    {"link-out": outside, **NO_FILES}[kind](source, name)
    # Transformers looks at generation_config.json itself when it loads the source.
    level: Any = "logits" if name == "generation_config.json" else "headers"
    report = retrofit(source, source.parent / "out", verify=level)
    assert not (source.parent / "out" / name).exists()
    assert any(name in warning for warning in report.warnings)


def test_an_adapter_beside_a_source_is_not_applied(copy: Callable[..., Path]) -> None:
    source, ids = copy(), torch.arange(1, 17).view(1, 16)
    model = AutoModelForCausalLM.from_pretrained(source)
    expected = model(ids).logits
    adapted = get_peft_model(model, LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    adapted.save_pretrained(source)
    assert not torch.equal(AutoModelForCausalLM.from_pretrained(source)(ids).logits, expected)
    report = retrofit(source, source.parent / "out")
    assert "adapter_config.json" in report.left_behind
    assert torch.equal(AutoModelForCausalLM.from_pretrained(source.parent / "out")(ids).logits, expected)


@pytest.mark.parametrize("kind", others_slow(NO_FILES, ["link-out", "link-to-zero", "fifo", "folder"]))
def test_more_files_that_are_none_do_no_harm(kind: str, copy: Callable[..., Path]) -> None:
    """What is not read of the source is not opened either."""
    source = copy()
    for name in ("stray.safetensors", "adapter_config.json", "pytorch_model.bin", "weights.gguf", "LICENSE"):
        (source / name).write_bytes(b"{}")
        NO_FILES[kind](source, name)
    retrofit(source, source.parent / "out")
    written = {path.name for path in (source.parent / "out").iterdir()}
    assert written.isdisjoint({"stray.safetensors", "adapter_config.json", "pytorch_model.bin", "LICENSE"})


@pytest.mark.parametrize("folder", ["chat_templates", "additional_chat_templates"])
def test_a_linked_folder_of_templates_is_not_followed_out(folder: str, copy: Callable[..., Path]) -> None:
    source = copy()
    (source.parent / "private").mkdir()
    (source.parent / "private" / "secret.jinja").write_text("secret")
    (source / folder).symlink_to("../private")
    retrofit(source, source.parent / "out", verify="headers")
    assert not list((source.parent / "out").rglob("*.jinja*/secret.jinja"))
    assert not (source.parent / "out" / folder / "secret.jinja").exists()


def test_links_of_a_hub_snapshot_are_followed(good: dict[str, Path], tmp_path: Path) -> None:
    snapshot, blobs = tmp_path / "models--a--b" / "snapshots" / ("0" * 40), tmp_path / "models--a--b" / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, path in enumerate(sorted(good["sharded"].iterdir())):
        shutil.copy(path, blobs / f"{number:064x}")
        (snapshot / path.name).symlink_to(f"../../blobs/{number:064x}")
    (snapshot / "additional_chat_templates").mkdir()
    (blobs / "tools").write_text("{{ tools }}")
    (snapshot / "additional_chat_templates" / "tools.jinja").symlink_to("../../../blobs/tools")
    assert retrofit(snapshot, tmp_path / "out").warnings == []
    assert (tmp_path / "out" / "additional_chat_templates" / "tools.jinja").read_text() == "{{ tools }}"
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())
    assert verify(good["sharded"], tmp_path / "out").same


def test_no_code_and_no_pickle_goes_along_whatever_its_name(copy: Callable[..., Path]) -> None:
    source = copy()
    names = "LICENSE.py NOTICE_of_it.py COPYING.bin USE_POLICY.exe notice.so tokenizer.py README.md chat_template.py"
    for name in names.split():
        (source / name).write_text("raise SystemExit")
    (source / "LICENSE").write_text("free")
    (source / "LICENSE").chmod(0o755)
    retrofit(source, source.parent / "out", verify="headers")
    out = source.parent / "out"
    assert not {path.name for path in out.iterdir()} & (set(names.split()) - {"README.md"})
    assert "SystemExit" not in (out / "README.md").read_text()
    assert not any(path.stat().st_mode & 0o111 for path in out.iterdir() if path.is_file())


# config.json.


def config(**values: Any) -> Damage:
    return lambda folder: edit_json(folder / "config.json", lambda found: found.update(values))


SIZES = (
    "vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads num_key_value_heads head_dim "
    "max_position_embeddings"
).split()
WRONG_SIZES: dict[str, Any] = {
    "a-string": "32",
    "true": True,
    "false": False,
    "negative": -1,
    "a-billion": 10**9,
    "2^40": 2**40,
    "2^31": 2**31,
    "2^64": 2**64,
    "of-300-digits": 10**299,
    "a-float": 32.0,
    "infinity": float("inf"),
    "nan": float("nan"),
    "a-list": [32],
    "an-object": {"x": 32},
    "zero": 0,
}
#: What still is a model: nothing is allocated by it, and a head of no size of its own is a default.
HARMLESS = {("max_position_embeddings", "a-billion")}
CONFIG_CASES: dict[str, tuple[Damage, tuple[str, ...]]] = {
    "missing": (lambda f: (f / "config.json").unlink(), ("config.json",)),
    "empty": (written("config.json", b""), ("config.json", "JSON")),
    "not-json": (written("config.json", b"{'a': 1}"), ("config.json", "JSON")),
    "not-utf-8": (written("config.json", b'{"model_type": "ll\xffma"}'), ("config.json", "UTF-8")),
    "a-list": (written("config.json", b"[]"), ("config.json",)),
    "a-string": (written("config.json", b'"llama"'), ("config.json",)),
    "an-empty-object": (written("config.json", b"{}"), ("config.json", "model_type")),
    "deep": (written("config.json", b'{"a":' * 10**5), ("config.json", "nested")),
    "deep-list": (written("config.json", b'{"a":' + b"[" * 10**5), ("config.json", "nested")),
    "huge": (written("config.json", b" " * (50 * 2**20) + b"{}"), ("config.json", "larger")),
    "keys-twice": (written("config.json", b'{"model_type": "llama", "model_type": "qwen2"}'), ("config.json", "twice")),
    "a-git-lfs-pointer": (written("config.json", LFS), ("config.json",)),
    "model-type-missing": (lambda f: edit_json(f / "config.json", lambda c: c.pop("model_type")), ("model_type",)),
    "model-type-null": (config(model_type=None), ("config.json", "model_type")),
    "model-type-a-list": (config(model_type=["llama"]), ("config.json", "model_type")),
    "model-type-unknown": (config(model_type="mixtral"), ("config.json", "experts")),
    "model-type-of-a-path": (config(model_type="../../llama"), ("config.json", "model_type")),
    "model-type-with-escapes": (config(model_type=ESCAPES), ("config.json", "model_type")),
    "model-type-with-a-surrogate": (config(model_type=SURROGATE), ("config.json", "model_type")),
    "model-type-of-a-megabyte": (config(model_type="x" * 10**6), ("config.json", "model_type")),
    "model-type-another": (config(model_type="qwen3"), ()),
    "quantised": (config(quantization_config={"quant_method": "gptq", "bits": 4}), ("config.json", "quantised")),
    "quantised-of-nonsense": (config(quantization_config=[ESCAPES] * 10**4), ("config.json", "quantised")),
    "heads-that-do-not-divide": (config(num_key_value_heads=3), ()),
    "more-key-heads-than-heads": (config(num_key_value_heads=8), ()),
    "head-dim-odd": (config(head_dim=7), ()),
    "layer-types-a-bomb": (config(model_type="qwen2", layer_types=["full_attention"] * 50_000), ()),
    "layer-types-unknown": (config(model_type="qwen2", layer_types=["x", "y"]), ()),
    "layer-types-a-string": (config(model_type="qwen2", layer_types="full_attention"), ()),
    "layer-types-of-objects": (config(model_type="qwen2", layer_types=[{}, {}]), ()),
    "no-rope-layers-of-strings": (config(model_type="smollm3", no_rope_layers=["x", "y"]), ()),
    "no-rope-interval-zero": (config(model_type="smollm3", no_rope_layer_interval=0, no_rope_layers=None), ()),
    "rope-a-string": (config(rope_parameters="default"), ("config.json",)),
    "rope-a-list": (config(rope_parameters=[1]), ("config.json",)),
    "rope-a-number": (config(rope_parameters=1), ("config.json",)),
    "rope-of-an-unknown-type": (config(rope_parameters={"rope_type": "x", "rope_theta": 1e4}), ()),
    "rope-of-a-type-that-is-a-list": (config(rope_parameters={"rope_type": ["x"], "rope_theta": 1e4}), ()),
    "rope-of-a-type-with-escapes": (config(rope_parameters={"rope_type": ESCAPES, "rope_theta": 1e4}), ()),
    "rope-theta-a-string": (config(rope_parameters={"rope_type": "default", "rope_theta": "x"}), ()),
    "rope-theta-a-list": (config(rope_parameters={"rope_type": "default", "rope_theta": [1]}), ()),
    "rope-linear-without-factor": (config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4}), ()),
    "rope-linear-factor-a-string": (
        config(rope_parameters={"rope_type": "linear", "rope_theta": 1e4, "factor": "2"}),
        (),
    ),
    "rope-llama3-without-all": (config(rope_parameters={"rope_type": "llama3", "rope_theta": 1e4}), ()),
    "rope-longrope-without-all": (config(rope_parameters={"rope_type": "longrope", "rope_theta": 1e4}), ()),
    "rope-longrope-of-a-wrong-length": (
        config(
            rope_parameters={
                "rope_type": "longrope",
                "rope_theta": 1e4,
                "factor": 2.0,
                "short_factor": [1.0] * 9,
                "long_factor": [1.0] * 9,
                "original_max_position_embeddings": 64,
            }
        ),
        (),
    ),
    "rope-deep": (config(rope_parameters=json.loads('{"a":' * 900 + "1" + "}" * 900)), ()),
    "rope-scaling-of-nonsense": (
        lambda f: edit_json(
            f / "config.json", lambda c: (c.pop("rope_parameters", None), c.update(rope_scaling={"type": {}}))
        ),
        (),
    ),
    "activation-unknown": (config(hidden_act="x"), ()),
    "activation-with-escapes": (config(hidden_act=ESCAPES), ()),
    "activation-null": (config(hidden_act=None), ()),
    "activation-a-list": (config(hidden_act=["silu"]), ()),
    "activation-with-parameters": (config(hidden_act="xielu"), ()),
    "padding-beyond-the-vocabulary": (config(pad_token_id=10**9), ()),
    "padding-negative": (config(pad_token_id=-(10**9)), ()),
    "padding-a-string": (config(pad_token_id="x"), ()),
    "epsilon-a-string": (config(rms_norm_eps="1e-6"), ()),
    "epsilon-a-list": (config(rms_norm_eps=[1e-6]), ()),
    "bias-a-string": (config(attention_bias="yes"), ()),
    "bias-that-is-not-there": (config(attention_bias=True), ("missing", "bias")),
    "tie-a-string": (config(tie_word_embeddings="false"), ()),
    "tie-a-number": (config(tie_word_embeddings=2), ()),
    "tie-a-list": (config(tie_word_embeddings=[]), ()),
    "dropout-a-string": (config(attention_dropout="x"), ()),
    **{
        f"{field}-{name}": (config(**{field: value}), ())
        for field in SIZES
        for name, value in WRONG_SIZES.items()
        if (field, name) not in HARMLESS
    },
}


@pytest.mark.parametrize("case", CONFIG_CASES)
def test_damaged_configurations_are_refused(case: str, copy: Callable[..., Path]) -> None:
    damage, needles = CONFIG_CASES[case]
    source = copy()
    damage(source)
    refused_conversion(source, *needles)


@pytest.mark.parametrize("case", [case for number, case in enumerate(CONFIG_CASES) if number % 5 == 0])
def test_damaged_configurations_are_refused_by_inspect_and_verify(
    case: str, copy: Callable[..., Path], good: dict[str, Path]
) -> None:
    damage, needles = CONFIG_CASES[case]
    source = copy()
    damage(source)
    refused(lambda: inspect(source), source.parent, *needles)
    refused(lambda: verify(good["llama"], source), source.parent, *needles)


OUR_CONFIGS: dict[str, dict[str, Any]] = {
    "layers": {"num_hidden_layers": 10**9},
    "value-residual-unknown": {"value_residual": "x"},
    "value-residual-a-list": {"value_residual": []},
    "initial-values-a-string": {"value_residual_init": "x"},
    "initial-values-nan": {"value_residual_init": [float("nan")] * 2},
    "layers-of-nothing": {"value_residual_layers": [99]},
    "layers-negative": {"value_residual_layers": [-1]},
    "layers-a-bomb": {"value_residual_layers": [1] * 100_000},
    "lambda-a-string": {"neutreno_lambda": "x"},
    "lambda-nan": {"neutreno_lambda": float("nan")},
    "sources-too-few": {"value_sources": [0]},
    "sources-later": {"value_sources": [1, 1]},
    "sources-negative": {"value_sources": [0, -1]},
    "sources-strings": {"value_sources": ["0", "1"]},
    "sources-a-chain": {"key_sources": [0, 0]},
    "dilation-zero": {"dwa_dilation": 0},
    "period-zero": {"dwa_period": 0},
    "period-a-string": {"dwa_period": "x"},
    "dwa-a-string": {"dwa": "x"},
    "connections-that-are-not-there": {"value_residual": "gated"},
    "no-connections": {"value_residual": "none", "dwa": False},
}


@pytest.mark.parametrize("case", OUR_CONFIGS)
def test_damaged_configurations_of_ours_are_refused(
    case: str, copy: Callable[..., Path], good: dict[str, Path]
) -> None:
    source = copy("ours")
    config(**OUR_CONFIGS[case])(source)
    refused(lambda: inspect(source), source.parent)
    refused(lambda: revert(source, source.parent / "out"), source.parent)
    with suppress(CheckpointError):
        verify(good["ours"], source, verify="hashes")


def connections(change: Callable[[dict[str, torch.Tensor]], object]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "model-00002-of-00002.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)
        names = dict.fromkeys(found, path.name)
        kept = {name: f for name, f in json.loads((folder / INDEX).read_text())["weight_map"].items() if f != path.name}
        index(lambda content: content.update(weight_map={**kept, **names}))(folder)

    return damage


VALUES, DEPTH = "model.value_residual.bias", "model.depth_average.bias"
OUR_TENSORS: dict[str, tuple[Damage, str]] = {
    "missing": (connections(lambda t: t.pop(VALUES)), VALUES),
    "too-long": (connections(lambda t: t.update({VALUES: torch.zeros(1000)})), VALUES),
    "too-short": (connections(lambda t: t.update({VALUES: torch.zeros(1)})), VALUES),
    "integers": (connections(lambda t: t.update({VALUES: t[VALUES].to(torch.int32)})), VALUES),
    "one-more": (connections(lambda t: t.update({"model.value_residual.weight": torch.zeros(1)})), "value_residual"),
}


@pytest.mark.parametrize("case", OUR_TENSORS)
def test_damaged_connections_are_refused(case: str, copy: Callable[..., Path], good: dict[str, Path]) -> None:
    damage, name = OUR_TENSORS[case]
    source = copy("ours")
    damage(source)
    refused(lambda: inspect(source), source.parent, name)
    refused(lambda: revert(source, source.parent / "out"), source.parent, name)


@pytest.mark.parametrize("case", OUR_TENSORS)
@pytest.mark.parametrize("level", ["hashes", "logits"])
def test_verify_tells_of_damaged_connections(
    case: str, level: Any, copy: Callable[..., Path], good: dict[str, Path]
) -> None:
    damage, _ = OUR_TENSORS[case]
    source = copy("ours")
    damage(source)
    differs_or_refused(good["ours"], source, level)
    differs_or_refused(source, good["ours"], level)


def test_verify_takes_no_memory_for_connections_of_any_size(copy: Callable[..., Path], good: dict[str, Path]) -> None:
    source = copy("ours")
    path = source / "model-00002-of-00002.safetensors"
    entries, _ = taken_apart(path)
    end = 0
    for name in (DEPTH, VALUES):
        size = 2**42
        entries[name] = {"dtype": "F32", "shape": [size // 4], "data_offsets": [end, end + size]}
        end += size
    put_together(path, json.dumps(entries).encode(), b"")
    os.truncate(path, path.stat().st_size + end)
    differs_or_refused(good["ours"], source)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e-3])
def test_revert_names_connections_that_are_no_identity(value: float, copy: Callable[..., Path]) -> None:
    source = copy("ours")
    connections(lambda t: t[VALUES].add_(value))(source)
    refused(lambda: revert(source, source.parent / "out"), source.parent, "value_mixing_matrix")


@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b'{"family": {}}', b'{"family": "gpt2"}', b"{}"])
def test_revert_survives_any_record(content: bytes, copy: Callable[..., Path]) -> None:
    source = copy("ours")
    (source / "resformer_conversion.json").write_bytes(content)
    message = ""
    try:
        assert revert(source, source.parent / "out").family == "llama"
    except CheckpointError as error:
        message = str(error)
    assert message == "" or "resformer_conversion.json" in message


def test_a_model_of_as_many_layers_as_a_header_holds_is_refused_in_time(
    copy: Callable[..., Path], good: dict[str, Path]
) -> None:
    """2,800 layers of 7 tensors without an element each: they pass for a model until their shapes are looked at."""
    source = copy("ours")
    names = [f"model.layers.{layer}.{n}" for layer in range(2800) for n in range(7)]
    entries = {name: {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} for name in names}
    for path in source.glob("*.safetensors"):
        path.unlink()
    (source / INDEX).unlink()
    put_together(source / WEIGHTS, json.dumps(entries).encode(), b"")
    config(num_hidden_layers=2800)(source)
    refused(lambda: revert(source, source.parent / "out"), source.parent)
    refused(lambda: inspect(source), source.parent)


# Keys that would run code.

MARK = "import pathlib\npathlib.Path({!r}).touch()\nclass A: ...\n"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["llama", "ours"])
def test_no_code_of_the_source_runs(name: str, copy: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    source = copy(name)
    marker = source.parent / "it-ran"
    for module in ("modeling_evil", "configuration_evil", "tokenization_evil", "sitecustomize", "torch"):
        (source / f"{module}.py").write_text(MARK.format(str(marker)))
    (source / "__init__.py").write_text(MARK.format(str(marker)))
    (source / "custom_generate").mkdir()
    (source / "custom_generate" / "generate.py").write_text(MARK.format(str(marker)))
    code = {"AutoConfig": "configuration_evil.A", "AutoModelForCausalLM": "modeling_evil.A"}
    config(
        auto_map=code,
        trust_remote_code=True,
        architectures=["EvilForCausalLM"],
        _attn_implementation="evil/kernels:run",
        _attn_implementation_internal="evil/kernels",
        _experts_implementation="evil/kernels",
        attn_implementation="evil/kernels",
        _name_or_path="evil/model",
        use_kernels=True,
        num_labels=10**9,
        base_model_tp_plan={"layers": "evil"},
        dtype="evil",
        torch_dtype="os.system",
    )(source)
    for settings_file, key in (("tokenizer_config.json", "auto_map"), ("generation_config.json", "custom_generate")):
        edit_json(source / settings_file, lambda found, key=key: found.update({key: code, "auto_map": code}))
    monkeypatch.chdir(source)
    monkeypatch.setattr("builtins.input", lambda *words: pytest.fail("a question was asked"))
    report: Any = (retrofit if name == "llama" else revert)(source, source.parent / "out")
    inspect(source)
    verify(source, source.parent / "out")
    assert report.verification is not None
    assert report.verification.identical
    assert not marker.exists()
    written = {path.relative_to(source.parent / "out").as_posix() for path in (source.parent / "out").rglob("*")}
    assert not [path for path in written if path.endswith(".py")]
    for path in (source.parent / "out").glob("*.json"):
        for word in ("auto_map", "evil", "trust_remote_code", "os.system", "custom_generate"):
            assert word not in path.read_text(), path.name


DAMAGED_SETTINGS = {
    "empty": b"",
    "not-json": b"{",
    "a-list": b"[]",
    "not-utf-8": b"\xff",
    "deep": b'{"a":' * 10**5,
    "a-surrogate-beside-code": b'{"auto_map": 1, "x": "\\ud800"}',
    "a-git-lfs-pointer": LFS,
}


@pytest.mark.parametrize("name", ["tokenizer_config.json", "generation_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("case", DAMAGED_SETTINGS)
def test_damaged_settings_are_refused_or_left_behind(
    name: str, case: str, copy: Callable[..., Path], tmp_path: Path
) -> None:
    source = copy()
    (source / name).write_bytes(DAMAGED_SETTINGS[case])
    told = []
    try:
        told = retrofit(source, source.parent / "out", verify="headers").warnings
        assert "auto_map" not in "".join(path.read_text() for path in (source.parent / "out").glob("*.json"))
    except CheckpointError as error:
        told = [str(error)]
        shutil.rmtree(source)
    if not source.exists():
        assert list(tmp_path.iterdir()) == []
    assert any(name in words for words in told)


# What reaches the terminal.


def command(*arguments: object) -> tuple[int, str, str]:
    """(exit code, stdout, stderr) of `resformer ...`, in this process."""
    done = CliRunner().invoke(resformer.cli.app, [os.fspath(a) if isinstance(a, Path) else str(a) for a in arguments])
    assert done.exception is None or isinstance(done.exception, SystemExit), repr(done.exception)
    return done.exit_code, done.stdout, done.stderr


@pytest.fixture
def _signals_as_before() -> Iterator[None]:
    import signal

    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


HOSTILE_CLI = {
    "weights": ("llama", WEIGHT_CASES["cut-in-data"][0]),
    "escapes-in-a-tensor": ("llama", WEIGHT_CASES["one-more-name-with-escapes"][0]),
    "surrogate-in-a-tensor": ("llama", WEIGHT_CASES["one-more-name-with-a-lone-surrogate"][0]),
    "escapes-in-the-model-type": ("llama", config(model_type=ESCAPES)),
    "escapes-in-the-activation": ("llama", config(hidden_act=ESCAPES)),
    "escapes-in-the-rope-type": ("llama", config(rope_parameters={"rope_type": ESCAPES, "rope_theta": 1e4})),
    "wrong-type": ("llama", config(rms_norm_eps="x")),
    "index": ("sharded", INDEX_CASES["file-parent"][0]),
    "fifo": ("llama", lambda folder: NO_FILES["fifo"](folder, "config.json")),
    "escapes-in-a-file-name": (
        "llama",
        lambda folder: void(((folder / "config.json").unlink(), (folder / f"{ESCAPES}.gguf").touch())),
    ),
    "escapes-in-a-pickles-name": (
        "llama",
        lambda folder: void(((folder / WEIGHTS).unlink(), (folder / f"{ESCAPES}.bin").touch())),
    ),
}


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("case", HOSTILE_CLI)
def test_the_command_says_one_plain_line_and_exits_with_3(case: str, copy: Callable[..., Path]) -> None:
    name, damage = HOSTILE_CLI[case]
    source = copy(name)
    damage(source)
    for arguments in (("convert", source, source.parent / "out"), ("inspect", source), ("verify", source, source)):
        code, stdout, stderr = command(*arguments)
        assert (code, stdout) == (3, ""), arguments
        assert stderr.startswith("Error: ")
        assert stderr.count("\n") == 1
        assert_plain(stderr)


@pytest.mark.parametrize("case", ["weights", "escapes-in-a-tensor", "wrong-type"])
def test_the_command_says_one_plain_line_and_exits_with_3_as_a_process(case: str, copy: Callable[..., Path]) -> None:
    name, damage = HOSTILE_CLI[case]
    source = copy(name)
    damage(source)
    done = run("-m", "resformer", "convert", source, source.parent / "out")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr.startswith("Error: ")
    assert done.stderr.count("\n") == 1
    assert_plain(done.stderr)
    assert [path.name for path in source.parent.iterdir()] == ["source"]


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("what", [ESCAPES, SURROGATE], ids=["escapes", "surrogate"])
@pytest.mark.parametrize("json_", [(), ("--json",)], ids=["text", "json"])
def test_names_in_a_successful_report_are_plain(what: str, json_: tuple[str, ...], copy: Callable[..., Path]) -> None:
    """Of files that stay behind, of keys of config.json, of values in generation_config.json."""
    source = copy()
    os.close(os.open(os.fsencode(source) + b"/x" + (b"\xff" if what == SURROGATE else what.encode()), os.O_CREAT))
    config(**{f"x{what}": 1})(source)
    edit_json(source / "generation_config.json", lambda found: found.update(cache_implementation=what))
    code, stdout, stderr = command("convert", source, source.parent / "out", "--verify", "hashes", *json_)
    assert code == 0, stderr
    assert_plain(stdout + stderr)
    assert (source.parent / "out" / "config.json").is_file()


@pytest.mark.usefixtures("_signals_as_before")
@pytest.mark.parametrize("what", [ESCAPES, SURROGATE], ids=["escapes", "surrogate"])
def test_names_in_a_comparison_are_plain(what: str, copy: Callable[..., Path], good: dict[str, Path]) -> None:
    source = copy()
    added(f"x{what}", {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]})(source)
    code, stdout, stderr = command("verify", good["llama"], source, "--verify", "hashes")
    assert code in (3, 4), stderr
    assert_plain(stdout + stderr)
    code, stdout, stderr = command("verify", source, source, "--verify", "hashes")
    assert code in (0, 3), stderr
    assert_plain(stdout + stderr)


@pytest.mark.usefixtures("_signals_as_before")
def test_a_source_whose_name_is_not_utf_8_converts_or_is_refused(copy: Callable[..., Path]) -> None:
    source = copy()
    other = Path(os.fsdecode(os.fsencode(source.parent) + b"/na\xffme"))
    source.rename(other)
    try:
        retrofit(other, other.parent / "out")
    except CheckpointError:
        assert not (other.parent / "out").exists()


def test_shards_whose_names_are_not_utf_8_convert_or_are_refused(copy: Callable[..., Path]) -> None:
    source = copy("sharded")
    (source / INDEX).unlink()
    for path in shards_of(source):
        path.rename(Path(os.fsdecode(os.fsencode(source) + b"/\xff" + os.fsencode(path.name))))
    try:
        retrofit(source, source.parent / "out")
    except CheckpointError:
        assert not (source.parent / "out").exists()


@pytest.mark.parametrize("name", ["x" * 300, "x" * 5000, "a/" * 3000], ids=["300", "5000", "deep"])
def test_a_source_of_an_impossible_name_is_refused(name: str, tmp_path: Path) -> None:
    refused(lambda: retrofit(f"{tmp_path}/{name}", tmp_path / "out"), tmp_path, error=CheckpointError)


@pytest.mark.parametrize("suffix", ["", ".gguf"])
@pytest.mark.parametrize("kind", ["fifo", "socket", "link-to-zero", "link-to-itself"])
def test_a_source_that_is_no_file_is_refused(suffix: str, kind: str, tmp_path: Path) -> None:
    (tmp_path / f"source{suffix}").touch()
    NO_FILES[kind](tmp_path, f"source{suffix}")
    refused(lambda: retrofit(tmp_path / f"source{suffix}", tmp_path / "out"), tmp_path, "source")


# Pickles and GGUF.


class Evil:
    """What an unpickler would touch a file for."""

    def __init__(self, marker: Path):
        self.marker = marker

    def __reduce__(self) -> Any:
        return (Path.touch, (self.marker,))


PICKLES: dict[str, Callable[[Path], object]] = {
    "code": lambda marker: {NORM: Evil(marker)},
    "a-list": lambda marker: [torch.zeros(2)],
    "a-module": lambda marker: torch.nn.Linear(2, 2),
    "numbers": lambda marker: {NORM: 1},
    "keys-that-are-numbers": lambda marker: {1: torch.zeros(2)},
    "nothing": lambda marker: {},
    "integers": lambda marker: {NORM: torch.zeros(2, dtype=torch.int8)},
    "sparse": lambda marker: {NORM: torch.eye(3).to_sparse()},
    "on-no-device": lambda marker: {NORM: torch.zeros(3, device="meta")},
    "a-bomb": lambda marker: {NORM: torch.zeros(1).expand(2**50)},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", PICKLES)
def test_hostile_pickles_are_refused_and_never_run(case: str, copy: Callable[..., Path]) -> None:
    source = copy()
    marker = source.parent / "it-ran"
    (source / WEIGHTS).unlink()
    torch.save(PICKLES[case](marker), source / "pytorch_model.bin")
    refused_conversion(source, "pytorch_model.bin")
    refused_conversion(source, ".bin", allow_pickle=True)
    assert not marker.exists()


@pytest.mark.parametrize("content", [b"", b"\x80", b"PK\x03\x04", bytes(1000), LFS])
def test_damaged_pickles_are_refused(content: bytes, copy: Callable[..., Path]) -> None:
    source = copy()
    (source / WEIGHTS).unlink()
    (source / "pytorch_model.bin").write_bytes(content)
    refused_conversion(source, "pytorch_model.bin", allow_pickle=True)


def gguf_string(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def gguf_header(tensors: int, pairs: int, body: bytes, version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, tensors, pairs) + body


def gguf_number(name: str, value: int) -> bytes:
    return gguf_string(name.encode()) + struct.pack("<II", 4, value)


def gguf_model(layers: int, width: int) -> bytes:
    """A Llama's configuration, and no tensor at all."""
    sizes = {"block_count": layers, "embedding_length": width, "feed_forward_length": 4 * width, "vocab_size": 100}
    sizes |= {"attention.head_count": 4, "attention.head_count_kv": 4, "context_length": 64}
    pairs = [ARCHITECTURE, *(gguf_number(f"llama.{name}", value) for name, value in sizes.items())]
    return gguf_header(0, len(pairs), b"".join(pairs))


ARCHITECTURE = gguf_string(b"general.architecture") + struct.pack("<I", 8) + gguf_string(b"llama")
GGUFS: dict[str, bytes] = {
    "empty": b"",
    "magic-alone": b"GGUF",
    "random": bytes((n * 7919 + n // 256) % 256 for n in range(10_000)),
    "magic-and-random": b"GGUF" + bytes((n * 7919 + n // 256) % 256 for n in range(10_000)),
    "zeros": bytes(10_000),
    "a-git-lfs-pointer": LFS,
    "no-pairs": gguf_header(0, 0, b""),
    "version-0": gguf_header(0, 0, b"", version=0),
    "version-99": gguf_header(0, 0, b"", version=99),
    "2^60-tensors": gguf_header(2**60, 1, ARCHITECTURE),
    "2^60-pairs": gguf_header(0, 2**60, ARCHITECTURE),
    "a-string-of-2^60": gguf_header(0, 1, struct.pack("<Q", 2**60) + b"x"),
    "an-unknown-type": gguf_header(0, 1, gguf_string(b"a") + struct.pack("<I", 99)),
    "no-tensors": gguf_model(2, 32),
    "no-tensors-of-a-gigabyte": gguf_model(4, 2048),
    "an-array-of-2-million-that-is-not-there": gguf_header(
        0, 2, ARCHITECTURE + gguf_string(b"a") + struct.pack("<IIQ", 9, 0, 2 * 10**6)
    ),
    "arrays-nested-deeply": gguf_header(
        0, 2, ARCHITECTURE + gguf_string(b"a") + struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 5000
    ),
}


@pytest.mark.parametrize("case", GGUFS)
def test_hostile_gguf_files_are_refused(case: str, tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    (tmp_path / "model.gguf").write_bytes(GGUFS[case])
    refused(lambda: retrofit(tmp_path / "model.gguf", tmp_path / "out"), tmp_path, "model.gguf")


@pytest.mark.slow
def test_truncated_gguf_files_are_refused(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from test_convert_retrofit import write_gguf

    write_gguf(gguf, family_model("llama", vocab_size=258), tmp_path / "whole.gguf")
    content = (tmp_path / "whole.gguf").read_bytes()
    (tmp_path / "whole.gguf").unlink()
    for part in (0.001, 0.01, 0.1, 0.5, 0.999):
        (tmp_path / "model.gguf").write_bytes(content[: int(len(content) * part)])
        refused(lambda: retrofit(tmp_path / "model.gguf", tmp_path / "out"), tmp_path, "model.gguf")


# Whatever comes: the right result or `CheckpointError`, and no other exception.

SLOW_TO_DRAW = [HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.function_scoped_fixture]
NUMBERS = st.one_of(
    st.sampled_from([0, 1, -1, 2, 127, 128, 2**31, 2**32, 2**63 - 1, 2**63, 2**64, 10**299, True, False, 0.0, 1e308]),
    st.integers(-300, 300_000),
)
VALUES_OF_JSON = st.recursive(
    st.one_of(
        st.none(), st.booleans(), NUMBERS, st.floats(), st.text(max_size=8), st.sampled_from(["F32", "F4", ESCAPES])
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.one_of(st.text(max_size=8), st.sampled_from(["dtype", "shape"])), inner, max_size=4),
    ),
    max_leaves=8,
)


def places(value: object, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Every place in a JSON value, but the value itself."""
    inner = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, found in inner:
        yield (*path, key)
        yield from places(found, (*path, key))


@st.composite
def mutated(draw: Any, value: dict[str, Any], most: int = 3) -> dict[str, Any]:
    """A JSON object with values replaced, removed, doubled or renamed in up to `most` places."""
    value = json.loads(json.dumps(value))
    for _ in range(draw(st.integers(1, most))):
        every = list(places(value))
        if not every:
            break
        *way, last = draw(st.sampled_from(every))
        holder: Any = value
        for key in way:
            holder = holder[key]
        what = draw(st.sampled_from(["replace", "replace", "nudge", "remove", "rename", "copy"]))
        if what == "replace":
            holder[last] = draw(VALUES_OF_JSON)
        elif what == "nudge" and type(holder[last]) is int:
            holder[last] += draw(st.sampled_from([-128, -4, -1, 1, 4, 128]))
        elif what == "remove":
            del holder[last]
        elif what == "rename" and isinstance(holder, dict):
            holder[draw(st.text(max_size=12))] = holder.pop(last)
        elif what == "copy" and isinstance(holder, dict):
            holder[last] = json.loads(json.dumps(holder[draw(st.sampled_from(list(holder)))]))
    return value


def small_file() -> tuple[dict[str, Any], bytes]:
    """Four tensors, one of them empty: the header and the data."""
    entries = {
        "__metadata__": {"format": "pt"},
        "a": {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]},
        "b": {"dtype": "BF16", "shape": [4], "data_offsets": [24, 32]},
        "c": {"dtype": "I64", "shape": [0, 5], "data_offsets": [32, 32]},
        "d": {"dtype": "U8", "shape": [], "data_offsets": [32, 33]},
    }
    return entries, bytes(range(33))


def outcome_of(act: Callable[[], Any]) -> tuple[Any, str]:
    """(what it returns, ""), or (None, the message of its CheckpointError, which is fit to print)."""
    try:
        return act(), ""
    except CheckpointError as error:
        message = str(error)
    assert_plain(message)
    return None, message


def tiles_or_is_refused(path: Path) -> None:
    """Reads a header: what is accepted accounts for every byte, each once."""
    shard, message = outcome_of(lambda: read_shard(path))
    if shard is None:
        assert str(path) in message
        assert len(message) < 3000
        return
    content = path.read_bytes()
    position = 8 + int.from_bytes(content[:8], "little")
    for tensor in shard.tensors:
        assert isinstance(tensor.data, tuple)
        assert tensor.data[1] == position
        position += tensor.nbytes
    assert position == shard.size == len(content)
    assert len({tensor.name for tensor in shard.tensors}) == len(shard.tensors)


@settings(suppress_health_check=SLOW_TO_DRAW)
@given(header=mutated(small_file()[0]), trailing=st.integers(-33, 3))
def test_any_header_is_accounted_for_or_refused(
    header: dict[str, Any], trailing: int, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "header.safetensors"
    data = small_file()[1]
    if trailing not in (-1, 1, 3):  # most of the time the data stay as they are
        trailing = 0
    put_together(path, json.dumps(header).encode(), data[: len(data) + min(trailing, 0)] + bytes(max(trailing, 0)))
    tiles_or_is_refused(path)


@settings(suppress_health_check=SLOW_TO_DRAW)
@given(
    flips=st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6),
    stop=st.one_of(st.none(), st.integers(0, 400)),
)
def test_any_bytes_are_accounted_for_or_refused(
    flips: list[tuple[int, int]], stop: int | None, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.getbasetemp() / "bytes.safetensors"
    entries, data = small_file()
    put_together(path, json.dumps(entries).encode(), data)
    content = bytearray(path.read_bytes())
    for position, value in flips:
        content[position % len(content)] = value
    path.write_bytes(bytes(content[:stop]))
    tiles_or_is_refused(path)


@given(content=st.binary(max_size=200))
def test_no_json_raises_anything_else(content: bytes) -> None:
    found, message = outcome_of(lambda: parse_json(content, "here"))
    assert isinstance(found, dict) or message.startswith("here: ")


@settings(suppress_health_check=SLOW_TO_DRAW)
@given(data=st.data())
def test_any_index_gives_every_tensor_once_or_is_refused(
    data: st.DataObject, good: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "any-index"
    if not folder.exists():
        shutil.copytree(good["sharded"], folder)
    index_file = json.loads((good["sharded"] / INDEX).read_text())
    files = st.sampled_from(sorted(set(index_file["weight_map"].values())))
    changed = data.draw(mutated(index_file, most=2))
    if isinstance(changed.get("weight_map"), dict) and data.draw(st.booleans()):
        changed["weight_map"][data.draw(st.sampled_from(sorted(index_file["weight_map"])))] = data.draw(files)
    (folder / INDEX).write_text(json.dumps(changed))
    found, message = outcome_of(lambda: read_checkpoint(folder))
    if found is None:
        assert str(folder) in message
        return
    assert {name: tensor.data[0].name for name, tensor in found.tensors.items()} == changed["weight_map"]


OTHER_FIELDS = [
    *SIZES,
    *("sliding_window layer_types rope_scaling rope_theta use_sliding_window max_window_layers".split()),
    *("no_rope_layers partial_rotary_factor tie_word_embeddings".split()),
]


@settings(suppress_health_check=SLOW_TO_DRAW)
@given(data=st.data())
@pytest.mark.parametrize("name", ["llama", "ours"])
def test_any_configuration_is_read_or_refused(
    name: str, data: st.DataObject, good: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Dry runs: what is read is converted as far as the plan, from every family's keys."""
    folder = tmp_path_factory.getbasetemp() / f"any-configuration-{name}"
    if not folder.exists():
        shutil.copytree(good[name], folder)
    raw = json.loads((good[name] / "config.json").read_text())
    if name == "llama":
        raw["model_type"] = data.draw(st.sampled_from(["llama"] * 4 + ["qwen2", "qwen3", "mistral", "smollm3"]))
    raw |= {
        key: data.draw(VALUES_OF_JSON)
        for key in data.draw(
            st.lists(
                st.sampled_from(OTHER_FIELDS),
                max_size=1,
            )
        )
    }
    (folder / "config.json").write_text(json.dumps(data.draw(mutated(raw, most=2))))
    act: list[Callable[[], object]] = [lambda: inspect(folder)]
    if name == "llama":
        act.append(lambda: retrofit(folder, folder.parent / "out", "resformer-denseformer", dry_run=True))
    else:
        act.append(lambda: revert(folder, folder.parent / "out", dry_run=True))
    for attempt in act:
        _, message = outcome_of(attempt)
        assert len(message) < 5000
    assert not (folder.parent / "out").exists()
