"""A retrofit is a ResFormer checkpoint that computes what its source does, or it is refused and leaves nothing."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import EXACT, FAMILIES, byte_tokenizer, family_model, save_checkpoint, stored
from conftest import assert_answers
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import resformer.convert.retrofitting as retrofitting
from resformer import ResFormerConfig, ResFormerForCausalLM, retrofit
from resformer.convert import CheckpointError, VerificationError, inspect, revert
from resformer.convert.deciding import added_kinds, inexact_because
from resformer.convert.logits import compare_logits
from resformer.convert.reading import read_checkpoint
from resformer.names import LISTING
from resformer.safetensors_format import Tensor

PROMPT = torch.arange(1, 61).view(2, 30)


def same_logits(source: Any, folder: Path, dtype: torch.dtype = torch.float32) -> bool:
    for attention in ("sdpa", "eager"):
        source.set_attn_implementation(attention)
        converted = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attention)
        assert isinstance(converted, ResFormerForCausalLM)
        with torch.no_grad():
            if not torch.equal(source(PROMPT).logits, converted(PROMPT).logits):
                return False
    return True


@pytest.mark.parametrize("method", EXACT)
def test_exact_methods_leave_logits_bit_exact_and_can_be_reverted(method: str, tmp_path: Path) -> None:
    source = save_checkpoint(tmp_path / "llama")
    report = retrofit(tmp_path / "llama", tmp_path / "out", method)
    assert report.exact
    assert report.logits.identical
    assert same_logits(source, tmp_path / "out")
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    identity = torch.eye(6)
    if method == "resformer-gated":
        identity[1:, 0] = float("nan")
    assert torch.equal(model.model.value_mixing_matrix().nan_to_num(), identity.nan_to_num())
    assert torch.equal(model.model.depth_mixing_matrix(), torch.eye(6, 7).roll(1, dims=1))
    assert report.memory >= model.num_parameters() * 4
    assert revert(tmp_path / "out", tmp_path / "back").logits.identical
    # One file that was carried over both times is the same file, header and all.
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("llama", "back")]
    assert weights[0] == weights[1]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("tied", "dtype", "shards"),
    [
        (False, torch.float32, False),
        (True, torch.bfloat16, True),
        pytest.param(False, torch.float16, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_every_family_is_bit_exact_and_can_be_reverted(
    family: str, tied: bool, dtype: torch.dtype, shards: bool, tmp_path: Path
) -> None:
    source = save_checkpoint(tmp_path / "source", family, dtype=dtype, shards=shards, tie_word_embeddings=tied)
    report = retrofit(tmp_path / "source", tmp_path / "out", "resformer-denseformer")
    assert (report.family, report.dropped, report.logits.identical) == (source.config.model_type, [], True)
    assert ("config.json: residual_dropout" in report.left_behind) == family.startswith("seed_oss")
    assert dtype != torch.float32 or same_logits(source, tmp_path / "out")  # `.to(dtype)` rounds rotary frequencies
    reverted = revert(tmp_path / "out", tmp_path / "back", verify="hashes")
    assert reverted.family == report.family
    before, after = stored(tmp_path / "source"), stored(tmp_path / "back")
    if family == "exaone":  # Transformers loads its tensors under Llama's names, and they stay so
        before, after = (dict(enumerate(sorted(tensors.values()))) for tensors in (before, after))
    assert before == after
    unsaid = {"_name_or_path", "max_window_layers"}  # the latter only makes layer_types, which are there
    configs = [AutoConfig.from_pretrained(tmp_path / name).to_dict() for name in ("source", "back")]
    a, b = ({name: value for name, value in config.items() if name not in unsaid} for config in configs)
    assert a == b
    assert reverted.left_behind == ["README.md", "resformer_conversion.json"]
    names = {file.name for file in (tmp_path / "source").iterdir()}
    assert {file.name for file in (tmp_path / "back").iterdir()} == names | {LISTING, "resformer_revert.json"}
    assert json.loads((tmp_path / "back" / "resformer_revert.json").read_text()) == {"source": "out", "revision": None}


@pytest.mark.parametrize(
    ("old", "new", "method", "words"),
    [
        ("float32", "bfloat16", "resformer", "from float32 to bfloat16, which\nrounded {} numbers."),
        ("bfloat16", "float32", "resformer", "from bfloat16 to float32."),
        ("float32", "bfloat16", "svformer", "from float32 to bfloat16, which\nrounded {} numbers."),
    ],
)
def test_a_change_of_dtype_is_measured_and_not_called_identical(
    old: str, new: str, method: str, words: str, tmp_path: Path
) -> None:
    save_checkpoint(tmp_path / "llama", dtype=getattr(torch, old))
    report = retrofit(tmp_path / "llama", tmp_path / "out", method, dtype=new, lossy=True, verify="logits")
    source, converted = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("llama", "out"))
    assert (source.dtype, converted.dtype) == (getattr(torch, old), getattr(torch, new))
    assert report.logits == compare_logits(lambda: source, lambda: converted)
    assert not report.logits.identical
    assert not report.exact
    card = ModelCard.load(tmp_path / "out" / "README.md").text
    assert words.format(f"{report.rounding.changed:,}") in card
    assert (report.rounding.changed > 0) == (new == "bfloat16")
    assert f"differ from the source's (in {old}) by at most" in card
    assert "identical" not in card
    assert "the checkpoint computes what its source does" not in card


def test_tables_have_the_sources_dtype(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama", dtype=torch.bfloat16)
    report = retrofit(tmp_path / "llama", tmp_path / "out", "value-embeddings")
    stored = read_checkpoint(tmp_path / "out").tensors
    assert {name.split(".")[-2]: stored[name].dtype for name in report.added} == {"gate": "F32", "table": "BF16"}


def test_reasons_name_the_field() -> None:
    plain = ResFormerConfig(num_hidden_layers=4)

    def answer(fields: str) -> str:
        config = ResFormerConfig(num_hidden_layers=4, **json.loads(fields))
        return "; ".join(inexact_because(config, added_kinds(config, plain)))

    assert_answers("inexact", answer)


def test_a_wrong_result_is_caught_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: one coefficient off by 1e-3."""
    save_checkpoint(tmp_path / "llama")
    start = retrofitting.initial_connections

    def off(config: ResFormerConfig, dtype: torch.dtype) -> dict[str, Tensor]:
        tensors = start(config, dtype)
        torch.frombuffer(tensors["model.layers.1.value_residual.weight"].data, dtype=torch.float32)[0] += 1e-3
        return tensors

    monkeypatch.setattr(retrofitting, "initial_connections", off)
    with pytest.raises(VerificationError, match="not exact"):
        retrofit(tmp_path / "llama", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["llama"]


def test_gguf_files_are_dequantised_and_what_lies_beside_them_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    source = family_model("llama", vocab_size=258)
    write_gguf(gguf, source, tmp_path / "model.gguf")
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "nobody/nothing"}')
    (tmp_path / "README.md").write_text("---\nlicense: mit\n---\n")
    with monkeypatch.context() as patch:
        patch.setattr("resformer.convert.source.dequantise", None)  # neither needs the weights
        inspection = inspect(tmp_path / "model.gguf")
        assert inspection.parameters == source.num_parameters()
        assert inspection.bytes == (tmp_path / "model.gguf").stat().st_size
        dry = retrofit(tmp_path / "model.gguf", tmp_path / "out", "resformer-denseformer", dry_run=True)
        patch.setattr("resformer.convert.to_folder.free_memory", lambda: 0)
        assert "not compared" in retrofit(tmp_path / "model.gguf", tmp_path / "out", dry_run=True).warnings[0]
    assert dry.kept == len(source.state_dict())
    report = retrofit(tmp_path / "model.gguf", tmp_path / "out", "resformer-denseformer", verify="logits")
    assert report.exact
    assert report.tokens.identical
    card = ModelCard.load(tmp_path / "out" / "README.md").text
    assert "identical to the source's (which Transformers dequantises to float32) to the bit" in card
    assert "mit" not in ModelCard.load(tmp_path / "out" / "README.md").data.to_dict().values()
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        torch.testing.assert_close(converted(PROMPT).logits, source(PROMPT).logits)
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())
    assert AutoTokenizer.from_pretrained(tmp_path / "out").tokenize("cab") == ["c", "ab"]
    write_gguf(gguf, family_model("llama", vocab_size=258, attention_bias=True), tmp_path / "biased.gguf")
    with pytest.raises(CheckpointError, match="perhaps without biases"):
        retrofit(tmp_path / "biased.gguf", tmp_path / "other")


def write_gguf(gguf: Any, model: Any, path: Path, **changes: Any) -> None:
    """What llama.cpp's own converter writes of a Llama: its names, and q and k permuted to its rotary layout.

    `changes` are other metadata; `None` leaves one out.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, "llama")
    for name, value in {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "head_count": config.num_attention_heads,
        "head_count_kv": config.num_key_value_heads,
        "layer_norm_rms_eps": config.rms_norm_eps,
        "rope_freq_base": config.rope_parameters["rope_theta"],
        "rope_dimension_count": config.head_dim,
        "vocab_size": config.vocab_size,
        "bos_token_id": 0,
        "eos_token_id": 0,
        **changes,
    }.items():
        if value is not None:
            getattr(writer, f"add_{name}")(value)
    vocabulary = [token for token, _ in sorted(byte_tokenizer().get_vocab().items(), key=lambda item: item[1])]
    vocabulary.append("ab")
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(vocabulary)
    writer.add_token_types([gguf.TokenType.CONTROL] + [gguf.TokenType.NORMAL] * (len(vocabulary) - 1))
    writer.add_token_merges(["a b"])
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    for name, tensor in model.state_dict().items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            heads = tensor.shape[0] // config.head_dim
            pairs = tensor.view(heads, 2, config.head_dim // 2, -1)
            tensor = pairs.transpose(1, 2).reshape(tensor.shape)
        writer.add_tensor(names.get_name(name, try_suffixes=(".weight", ".bias")), tensor.numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
