"""What goes into the output: whole files where nothing changes, new ones where something does, byte for byte."""

import copy
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import any_decoder
import numpy as np
import pytest
import torch
from checkpoints import EXACT, change_json, contents, save_checkpoint
from default_load import look
from safetensors.torch import load_file, save_file
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    FineGrainedFP8Config,
    GenerationConfig,
    Mxfp4Config,
)

import resformer
from resformer import retrofit
from resformer.convert import CheckpointError, VerificationError, bundle, inspect, logits, revert, to_folder, verify
from resformer.environment import free_memory
from resformer.names import LISTING


def weights(folder: Path) -> dict[str, Path]:
    return {file.name: file for file in sorted(folder.glob("*.safetensors"))}


# Files that do not change


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_shards_that_do_not_change_are_carried_over_whole(link: bool, shards: bool, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", dtype=torch.bfloat16, shards=shards)
    status = {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "source").iterdir()}
    report = retrofit(tmp_path / "source", tmp_path / "out", link=link)
    assert {path: (path.stat().st_mtime_ns, path.stat().st_ino) for path in (tmp_path / "source").iterdir()} == status
    shared = {path.stat().st_ino for path in (tmp_path / "out").iterdir()} & {inode for _, inode in status.values()}
    assert len(shared) == (len(weights(tmp_path / "source")) if link else 0)
    before, after = weights(tmp_path / "source"), weights(tmp_path / "out")
    assert len(after) == len(before) + 1 == report.carried_files + report.written_files
    for one, other in zip(before.values(), after.values(), strict=False):
        assert one.read_bytes() == other.read_bytes()
        assert one.samefile(other) == link
    *_, new = after.values()
    assert sorted(load_file(new)) == [f"model.layers.{n}.value_residual.weight" for n in range(1, 6)]
    total = sum(file.stat().st_size for file in before.values())
    assert report.transfer.linked == (total if link else 0)
    assert link or report.transfer.copied >= total
    assert report.transfer.written < 1000
    stored = {name: file for file in after for name in load_file(tmp_path / "out" / file)}
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == stored
    assert list(index["weight_map"]) == sorted(stored)
    assert index["metadata"]["total_parameters"] == report.parameters
    added = sum(report.added.values())  # in float32, the rest in bfloat16
    assert index["metadata"]["total_size"] == 2 * (report.parameters - added) + 4 * added


def as_fp8(folder: Path) -> None:
    """Stores a projection in fp8, one scale for each block of 8 x 16."""
    tensors = load_file(folder / "model.safetensors")
    blocks = tensors[FP8].float().view(6, 8, 2, 16)
    scales = blocks.abs().amax((1, 3)) / 448
    tensors[FP8] = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(48, 32)
    tensors[f"{FP8}_scale_inv"] = scales
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    change_json(folder / "config.json", quantization_config={"quant_method": "fp8", "weight_block_size": [8, 16]})


def as_mxfp4(folder: Path) -> None:
    """Stores the experts as gpt-oss is published: 32 numbers in 16 bytes and a scale."""
    save_checkpoint(folder, "gpt_oss", dtype=torch.bfloat16, hidden_size=32, intermediate_size=32)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if name.endswith("_proj") and "experts" in name]:
        experts, inputs, outputs = tensors.pop(name).shape
        tensors[f"{name}_blocks"] = torch.arange(16, dtype=torch.uint8).expand(experts, outputs, inputs // 32, 16)
        tensors[f"{name}_scales"] = torch.full((experts, outputs, inputs // 32), 125, dtype=torch.uint8)
    save_file({name: each.contiguous() for name, each in tensors.items()}, folder / "model.safetensors")
    change_json(folder / "config.json", quantization_config={"quant_method": "mxfp4"})


def as_pickle(folder: Path) -> None:
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()


FP8 = "model.layers.0.mlp.up_proj.weight"
UNPLAIN: dict[str, Callable[[Path], object]] = {
    "fp8": as_fp8,
    "mxfp4": as_mxfp4,
    "pickle": as_pickle,
    "no index": lambda folder: (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors"),
}


@pytest.mark.parametrize("kind", UNPLAIN)
def test_the_lines_of_a_refusal_make_the_source_plain(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    save_checkpoint(Path("source"), dtype=torch.bfloat16)
    UNPLAIN[kind](Path("source"))
    with pytest.raises(CheckpointError) as refused:
        retrofit("source", "out")
    lines = re.search(r"convert that: (.*\))\.", str(refused.value))
    used = (AutoConfig, AutoModelForCausalLM, AutoTokenizer, FineGrainedFP8Config, Mxfp4Config)
    classes = {each.__name__: each for each in used}
    exec(lines[1], {**classes, "SOURCE": "source", "Path": Path, "load_file": load_file})
    assert retrofit("plain", "out").logits.identical


# What Transformers loads is what counts

HEAD, EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"


@pytest.mark.parametrize(
    ("change", "tied"),
    [
        (lambda t: t.update({HEAD: t[EMBEDDING].clone()}), True),
        (lambda t: t.update({HEAD: t[EMBEDDING] + 1}), False),
        (lambda t: t.update({HEAD: t.pop(EMBEDDING)}), True),
        (lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}), True),
    ],
    ids=["head-stored-too", "head-that-differs", "only-the-head", "old-rotary-buffers"],
)
def test_tensors_count_as_transformers_loads_them(change: Callable[[Any], object], tied: bool, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "source" / "model.safetensors", metadata={"format": "pt"})
    assert retrofit(tmp_path / "source", tmp_path / "out").logits.identical
    assert look(tmp_path / "source") == look(tmp_path / "out")
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert (converted.lm_head.weight is converted.model.embed_tokens.weight) == tied


# Side files


def test_side_files_go_along_and_the_rest_is_named(tmp_path: Path) -> None:
    source = tmp_path / "source"
    save_checkpoint(source)
    (source / "chat_templates").mkdir()
    (source / "onnx").mkdir()
    carried = "LICENSE USE_POLICY.md tokenizer.model chat_templates/tools.jinja".split()
    left = "README.md modeling_x.py optimizer.pt training_args.bin run.sh secret".split()
    left += "LICENSE.py NOTICE_of_it.py COPYING.bin USE_POLICY.exe notice.so tokenizer.py chat_template.py".split()
    for name in (*carried, *left):
        (source / name).write_text(f"raise SystemExit({name!r})")
    change_json(source / "config.json", dtype="float16")
    report = retrofit(source, tmp_path / "out")
    for name in (*carried, "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert GenerationConfig.from_pretrained(tmp_path / "out").temperature == 0.7
    assert set(report.left_behind) == {*left, "onnx/"}
    assert {path.name for path in (tmp_path / "out").iterdir()}.isdisjoint({*left} - {"README.md"})
    assert "SystemExit" not in (tmp_path / "out" / "README.md").read_text()
    dtypes = {AutoModelForCausalLM.from_pretrained(folder).dtype for folder in (source, tmp_path / "out")}
    assert dtypes == {torch.float16}  # as config.json states, whatever the weights are stored in


def test_weights_and_configuration_may_be_links_to_a_store(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", shards=True)
    store = tmp_path / "store"
    store.mkdir()
    for number, path in enumerate(sorted((tmp_path / "source").iterdir())):
        if path.suffix == ".safetensors" or path.name in ("config.json", "model.safetensors.index.json"):
            path.rename(store / f"{number}")
            path.symlink_to(store / f"{number}")
    report = retrofit(tmp_path / "source", tmp_path / "out")
    assert report.warnings == report.left_behind == []
    assert verify(tmp_path / "source", tmp_path / "out").same
    assert not any(path.is_symlink() for path in (tmp_path / "out").iterdir())


@pytest.mark.parametrize(
    ("file", "content", "words"),
    [
        ("model.safetensors.index.json", "nonsense", "is ignored"),
        ("generation_config.json", '{"do_sample": false, "temperature": 0.5}', "generation_config.json"),
        ("tokenizer.json", None, "no tokenizer that can be read"),
    ],
)
def test_what_transformers_ignores_or_does_not_save_again_is_a_warning(
    file: str, content: str | None, words: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "source")
    if content is None:
        (tmp_path / "source" / file).unlink()
    else:
        (tmp_path / "source" / file).write_text(content)
    (warning,) = retrofit(tmp_path / "source", tmp_path / "out").warnings
    assert words in warning


# Verification, with its negative controls


@pytest.fixture
def tampered(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[Path], object]], None]:
    """`tampered(act)`: `act(folder)` runs after the result was written."""
    write = to_folder.write_settings

    def patch(act: Callable[[Path], object]) -> None:
        monkeypatch.setattr(to_folder, "write_settings", lambda folder, *rest: (write(folder, *rest), act(folder)))

    return patch


@pytest.mark.parametrize(("mode", "offset"), [("hashes", -5), ("logits", 5000), ("hashes", -1)])
def test_one_wrong_byte_is_found(mode: str, offset: int, tmp_path: Path, tampered: Callable[..., None]) -> None:
    save_checkpoint(tmp_path / "source")

    def corrupt(folder: Path) -> None:
        file = max(folder.glob("*.safetensors"), key=lambda path: path.stat().st_size)
        file = folder / "tokenizer.json" if offset == -1 else file
        content = bytearray(file.read_bytes())
        content[offset + 8 + int.from_bytes(content[:8], "little") if offset > 0 else offset] ^= 1
        file.write_bytes(content)

    tampered(corrupt)
    with pytest.raises(VerificationError, match="its bytes are not those that were written"):
        retrofit(tmp_path / "source", tmp_path / "out", verify=mode)
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_tensor_of_another_shape_is_found_by_the_headers(tmp_path: Path, tampered: Callable[..., None]) -> None:
    save_checkpoint(tmp_path / "source")
    name = "model.layers.1.value_residual.weight"
    tampered(lambda folder: save_file({name: torch.zeros(3)}, folder / "model-00002-of-00002.safetensors"))
    with pytest.raises(CheckpointError, match=r"has shape \[3\], config.json asks for \[2\]"):
        retrofit(tmp_path / "source", tmp_path / "out", verify="headers", value_residual_layers=[1])


def test_logits_are_the_default_where_the_model_fits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_checkpoint(tmp_path / "source")
    assert retrofit(tmp_path / "source", tmp_path / "one").verified == "logits"
    monkeypatch.setattr(logits, "free_memory", lambda: 10**6)
    report = retrofit(tmp_path / "source", tmp_path / "two")
    assert (report.verified, report.logits) == ("hashes", None)
    assert "GB are free" in report.warnings[0]


# verify and inspect


def test_verify_measures_what_differs(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "one")
    with torch.no_grad():
        model.model.norm.weight[3] += 0.25
    model.save_pretrained(tmp_path / "two")
    comparison = verify(tmp_path / "one", tmp_path / "two")
    assert not comparison.same
    assert comparison.different == {"model.norm.weight": pytest.approx(0.25)}
    assert comparison.logits.max_difference > 0
    assert not verify(tmp_path / "one", tmp_path / "two", verify="hashes").same
    assert verify(tmp_path / "one", tmp_path / "two", verify="headers").same is None
    name, empty = "model.rotary_emb.inv_freq", torch.zeros(0)  # of an old checkpoint
    for folder, dtype in (("one", torch.float32), ("two", torch.float16)):
        weights = load_file(tmp_path / folder / "model.safetensors")
        save_file({**weights, name: empty.to(dtype)}, tmp_path / folder / "model.safetensors", {"format": "pt"})
    assert verify(tmp_path / "one", tmp_path / "two", verify="hashes").different[name] == 0
    model.to(torch.bfloat16).save_pretrained(tmp_path / "three")
    assert len(verify(tmp_path / "one", tmp_path / "three", verify="headers").different) == 57
    with torch.no_grad():
        model.model.norm.weight[3] = float("nan")
    model.float().save_pretrained(tmp_path / "broken")
    found = json.loads(json.dumps(verify(tmp_path / "three", tmp_path / "broken").as_dict(), allow_nan=False))
    assert found["different"]["model.norm.weight"] is found["logits"]["max_difference"] is None


@pytest.mark.parametrize(
    ("field", "value", "family"),
    [
        ("rope_parameters", {"rope_type": "default", "rope_theta": 5e5}, "llama"),
        ("num_key_value_heads", 1, "mistral"),
        ("dtype", "bfloat16", "llama"),
    ],
)
def test_verify_compares_configurations(field: str, value: Any, family: str, tmp_path: Path) -> None:
    """The tensors are the same files; heads that are shared twice as much have the same shapes at half the width."""
    more = {"head_dim": 8} if field == "num_key_value_heads" else {}
    save_checkpoint(tmp_path / "one", family, num_hidden_layers=2, **more)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    change_json(tmp_path / "two" / "config.json", **{field: value})
    if more:
        change_json(tmp_path / "two" / "config.json", num_attention_heads=2, head_dim=16)
    found = verify(tmp_path / "one", tmp_path / "two", verify="hashes")
    assert (found.same, found.same_tensors) == (False, True)
    assert field in found.configuration


@pytest.mark.parametrize("method", ["neutreno", "mudd"])
def test_verify_tells_connections_without_effect(method: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one", num_hidden_layers=3)
    retrofit(tmp_path / "one", tmp_path / "two", method, lossy=True)
    comparison = verify(tmp_path / "one", tmp_path / "two", verify="hashes")
    assert comparison.same_tensors
    assert comparison.same == (method in EXACT)
    assert verify(tmp_path / "one", tmp_path / "two").logits.identical == (method in EXACT)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    any_decoder.move(model)
    model.save_pretrained(tmp_path / "two")
    assert verify(tmp_path / "one", tmp_path / "two", verify="hashes").same is False


WINDOWS = (
    "mistral 4096 gemma3 4096 inkling_text 512 gpt_neo 256 recurrent_gemma 2048 llama4 8192 modernbert-decoder 128 "
    "blt 512 deepseek_v4 128 unlimited_ocr 128 llama 0 qwen2_moe 0 dots1 0 qwen3_next 0 jamba 0"
).split()


@pytest.mark.parametrize(("model_type", "window"), zip(WINDOWS[::2], WINDOWS[1::2], strict=True))
def test_the_window_of_a_family_is_found(model_type: str, window: str) -> None:
    assert logits.window_of(CONFIG_MAPPING[model_type]()) == int(window)


def test_logits_are_compared_beyond_the_window_padded_and_with_a_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = save_checkpoint(tmp_path / "one", "mistral", sliding_window=64)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    change_json(tmp_path / "two" / "config.json", sliding_window=None)
    comparison = verify(tmp_path / "one", tmp_path / "two")
    assert comparison.logits.row > 64
    assert comparison.logits.window is None
    assert not comparison.logits.identical
    two = AutoModelForCausalLM.from_pretrained(tmp_path / "two")
    monkeypatch.setattr(logits, "load", lambda model, name: (copy.deepcopy(model), {}))
    short = logits.compare_logits(("one", one), ("two", two), window=64, longest=32)
    assert (short.identical, short.window) == (True, 64)
    assert "on 128 tokens, within the sliding window of 64" in str(short)
    # A mask that is dropped, and a cache that is one token behind, change no logits of the first reading.
    forward = two.forward
    for wrong in ({"attention_mask": None}, {"position_ids": None}):
        two.forward = lambda wrong=wrong, **inputs: forward(**{**inputs, **wrong})
        assert not logits.compare_logits(("one", one), ("two", two)).identical


def test_a_mixture_that_was_trained_with_a_balancing_loss_is_compared(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", "qwen3_moe")
    change_json(tmp_path / "source" / "config.json", output_router_logits=True)
    assert retrofit(tmp_path / "source", tmp_path / "out").logits.identical


def test_logits_are_compared_on_a_text(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "one")
    (tmp_path / "text.txt").write_text("The first layer's values reach every layer. " * 3)
    comparison = verify(tmp_path / "one", tmp_path / "one", text=tmp_path / "text.txt", tokens=64, device="cpu")
    assert (comparison.same, comparison.logits.tokens, comparison.logits.row) == (True, 64, 32)


def test_verify_takes_a_tied_head_that_is_stored_for_one_that_is_not(tmp_path: Path) -> None:
    model = save_checkpoint(tmp_path / "one", tie_word_embeddings=True)
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    tensors = {**model.state_dict(), "lm_head.weight": model.lm_head.weight.detach().clone()}
    save_file(tensors, tmp_path / "two" / "model.safetensors", metadata={"format": "pt"})
    assert verify(tmp_path / "one", tmp_path / "two").same
    assert verify(tmp_path / "two", tmp_path / "one", verify="hashes").same
    assert {inspect(tmp_path / name).parameters for name in ("one", "two")} == {model.num_parameters()}


@pytest.mark.parametrize(
    ("membership", "files"),
    [
        ("0::/user.slice/job", {"user.slice/job/memory.": ("max", 0, 0), "user.slice/memory.": (5000, 3000, 1000)}),
        ("0::/system/scope", {"system/scope/memory.": (4000, 1000, 0), "system/memory.": ("max", 9, 0)}),
        ("0::/../outside", {"memory.": (3000, 0, 0)}),
    ],
)
def test_free_memory_is_that_of_the_processes_own_control_group(
    membership: str, files: dict[str, tuple[object, int, int]], tmp_path: Path
) -> None:
    (tmp_path / "proc/self").mkdir(parents=True)
    (tmp_path / "proc/self/cgroup").write_text(membership)
    for prefix, (limit, used, cached) in files.items():
        path = tmp_path / "sys/fs/cgroup" / prefix
        path.parent.mkdir(parents=True, exist_ok=True)
        for name, text in (("max", limit), ("current", used), ("stat", f"inactive_file {cached}")):
            path.with_name(f"memory.{name}").write_text(str(text))
    assert free_memory(tmp_path) == 3000


@pytest.mark.parametrize(
    "method", ["transformer", "resformer", "neutreno", "resformer-gated", "resformer-sparse", "denseformer-4x5"]
)
def test_inspect_recognises_the_method(method: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", "mistral", dtype=torch.bfloat16)
    report = retrofit(tmp_path / "source", tmp_path / "out", method, lossy=True, verify="headers")
    found = inspect(tmp_path / "out")
    assert (found.method, found.family, found.parameters) == (method, "mistral", report.parameters)
    assert {name: int(np.prod(shape)) for name, shape in found.added.items()} == report.added
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    values, depth = resformer.value_mixing_matrix(model), resformer.depth_mixing_matrix(model)
    for matrix, told in ((values, found.value_mixing_matrix), (depth, found.depth_mixing_matrix)):
        expected = torch.eye(*matrix.shape).roll(matrix.shape[1] - matrix.shape[0], dims=1)
        told_matrix = expected if told is None else torch.tensor(told)
        assert torch.equal(told_matrix.nan_to_num(7), matrix.nan_to_num(7))
    assert json.loads(json.dumps(found.as_dict(), allow_nan=False))


# Outputs


def trained(folder: Path) -> str:
    """Changes the last weight in place: the file's size and header stay."""
    path = sorted(folder.glob("*.safetensors"))[-1]
    *_, name = tensors = load_file(path)
    before = path.stat().st_size
    save_file({**tensors, name: tensors[name] + 1}, path, metadata={"format": "pt"})
    assert path.stat().st_size == before
    return path.name


def put(name: str, make: Callable[[Path], object]) -> Callable[[Path], str]:
    return lambda folder: (make(folder / name), name)[1]


#: What is no result of a command any more -> how it came about; returns what the refusal names.
FOREIGN: dict[str, Callable[[Path], str]] = {
    "trained": trained,
    "notes": put("notes.txt", Path.touch),
    "checkpoint": put("checkpoint-5", Path.mkdir),
    "inner": put("additional_chat_templates/notes", lambda path: (path.parent.mkdir(), path.touch())),
    "link": put("more", lambda path: path.symlink_to("config.json")),
    "edited": put("config.json", lambda path: path.write_text(path.read_text() + " ")),
    "deep": put("deep.safetensors", lambda path: path.write_bytes(bytes([255] * 3 + [0] * 5) + b'{"a":' * 10**5)),
    "listing": put(LISTING, lambda path: path.write_text("{}")),
    "unlisted": put(LISTING, Path.unlink),
}


def test_force_replaces_an_earlier_result_and_nothing_else(tmp_path: Path) -> None:
    """Of the same command: what others wrote is not its own."""
    source, models = tmp_path / "llama", tmp_path / "models"
    save_checkpoint(source, num_hidden_layers=2)
    retrofit(source, models / "one", verify="headers")
    retrofit(source, models / "one", verify="headers", force=True)
    with pytest.raises(CheckpointError, match="replace it with --force"):
        retrofit(source, models / "one")
    refused = {models: LISTING, source: LISTING}
    for command, made in ((revert, tmp_path / "reverted"), (bundle, tmp_path / "bundled")):
        command(models / "one", made, verify="headers")
        command(models / "one", made, verify="headers", force=True)
        refused[made] = LISTING
    for name, change in FOREIGN.items():
        shutil.copytree(models / "one", tmp_path / name)
        refused[tmp_path / name] = change(tmp_path / name)
    before = contents(tmp_path)
    for force in (False, True):
        for output, named in refused.items():
            with pytest.raises(CheckpointError, match=re.escape(named)) as caught:
                retrofit(source if output != source else models / "one", output, verify="headers", force=force)
            assert caught.value.option is None
    assert contents(tmp_path) == before


def test_the_source_is_not_replaced(tmp_path: Path) -> None:
    llama = tmp_path / "models" / "llama"
    save_checkpoint(llama, num_hidden_layers=2)
    (tmp_path / "link").symlink_to("models/llama")
    before = contents(tmp_path)
    for source, output, words in (
        (llama, "models/llama", "holds the source"),
        (llama, "link", "holds the source"),
        (llama, "models", "holds the source"),
        (llama, "models/llama/out", "lies in the source folder"),
        (llama, ".", "holds the source"),
    ):
        with pytest.raises(CheckpointError, match=words) as caught:
            retrofit(source, tmp_path / output, force=True)
        assert caught.value.option is None
    assert contents(tmp_path) == before
