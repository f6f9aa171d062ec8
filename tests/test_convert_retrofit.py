"""A retrofit is the source's files and one file of connections, and computes what its source does; or it is refused."""

import json
import re
from itertools import chain
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from any_decoder import move
from checkpoints import EXACT, FAMILIES, byte_tokenizer, family_model, save_checkpoint, stored
from command_server import python
from conftest import assert_answers, others_slow
from default_load import look, publish
from safetensors.torch import load_file, save_file
from small_decoders import SEEING, seeing_model, small_config
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedModel,
)

import resformer
import resformer.convert.retrofitting as retrofitting
from resformer import ResFormerConfig, connected_config, retrofit
from resformer.convert import CheckpointError, VerificationError, inspect, revert, verify
from resformer.convert.connected_families import connection_config, view
from resformer.convert.connections import added_kinds
from resformer.convert.reading import read_checkpoint
from resformer.modeling.measured import MEASURED
from resformer.names import LISTING

#: Families whose decoders differ from Llama's: windows, experts, fused projections, images, names on the disk.
OTHERS = "gemma3_text gemma3 llava qwen3_5 qwen3_moe gpt_oss gpt2 deepseek_v3 phi3 glm4 bloom qwen3_next jamba".split()
#: Those that the default walk leaves to the slow one.
REST = sorted(MEASURED - {*OTHERS} - {name.partition("-")[0] for name in FAMILIES})


@pytest.mark.parametrize("method", others_slow(EXACT[1:], ["resformer", "denseformer-4x5", "mudd", "mhc"]))
def test_exact_methods_are_what_the_source_is_and_can_be_reverted(method: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama")
    report = retrofit(tmp_path / "llama", tmp_path / "out", method)
    assert report.exact
    assert report.logits.identical
    assert look(tmp_path / "llama") == look(tmp_path / "out")
    model, loading = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]
    assert not loading["unexpected_keys"]
    identity = torch.eye(6)
    if method == "resformer-gated":
        identity[1:, 0] = float("nan")
    assert torch.equal(resformer.value_mixing_matrix(model).nan_to_num(), identity.nan_to_num())
    assert torch.equal(resformer.depth_mixing_matrix(model), torch.eye(6, 7).roll(1, dims=1))
    assert report.memory >= model.num_parameters() * 4
    assert revert(tmp_path / "out", tmp_path / "back").logits.identical
    # One file that was carried over both times is the same file, header and all.
    weights = [(tmp_path / folder / "model.safetensors").read_bytes() for folder in ("llama", "back")]
    assert weights[0] == weights[1]


def saved(folder: Path, family: str) -> PreTrainedModel:
    """A checkpoint of a family, with a tokenizer, as published."""
    model = save_checkpoint(folder, family, dtype=torch.bfloat16)
    publish(folder)
    return model


@pytest.mark.parametrize("family", others_slow([*FAMILIES, *OTHERS, *REST], [*FAMILIES, *OTHERS]))
def test_every_family_as_published_is_what_transformers_makes_of_it(family: str, tmp_path: Path) -> None:
    try:
        connected_config(saved(tmp_path / "source", family).config)
        expected = look(tmp_path / "source")
    except Exception as error:  # no causal model, or one that this configuration does not make
        pytest.skip(f"Transformers makes none: {error!r:.200}")
    try:
        report = retrofit(tmp_path / "source", tmp_path / "out", "denseformer", verify="hashes", progress=False)
    except CheckpointError as error:
        assert family in REST
        assert re.search(r"cannot (be converted|have)|has no list of", str(error)), error  # noqa: PT017
        return
    assert (report.dropped, report.carried_files, report.written_files) == ([], 1, 1)
    assert look(tmp_path / "out") == expected
    before, after = stored(tmp_path / "source"), stored(tmp_path / "out")
    assert {name: after[name] for name in before} == before, "every tensor, under its name on the disk"
    assert {*after} - {*before} == {*report.added}
    reverted = revert(tmp_path / "out", tmp_path / "back", verify="hashes", progress=False)
    assert reverted.family == report.family
    # All that Transformers reads is the source's.
    config, back = (json.loads((tmp_path / folder / "config.json").read_text()) for folder in ("source", "back"))
    del config["auto_map"]
    assert back == {**config, "dtype": expected["dtype"].removeprefix("torch.")}
    assert stored(tmp_path / "back") == before
    assert json.loads((tmp_path / "back" / "resformer_revert.json").read_text()) == {"source": "out", "revision": None}
    names = {file.name for file in (tmp_path / "source").iterdir()} - {"modeling_x.py"}
    assert {file.name for file in (tmp_path / "back").iterdir()} == names | {LISTING, "resformer_revert.json"}


def test_an_encoder_is_compared_without_a_cache(tmp_path: Path) -> None:
    saved(tmp_path / "bert", "bert")  # `is_decoder` is false
    report = retrofit(tmp_path / "bert", tmp_path / "out", "denseformer")
    assert report.logits.identical


@torch.no_grad()
@pytest.mark.parametrize("family", others_slow(SEEING, ["llava", "qwen3_5"]))
def test_a_model_that_sees_images_is_what_connect_makes_of_it(family: str, tmp_path: Path) -> None:
    model, inputs = seeing_model(family)
    model.save_pretrained(tmp_path / "source")
    retrofit(tmp_path / "source", tmp_path / "out", "denseformer", progress=False)
    source, out = (AutoModelForImageTextToText.from_pretrained(tmp_path / name).eval() for name in ("source", "out"))
    assert torch.equal(out(**inputs).logits, source(**inputs).logits)
    resformer.connect(source, "denseformer").save_pretrained(tmp_path / "connected")
    contents = [json.loads((tmp_path / name / "config.json").read_text()) for name in ("out", "connected")]
    plain = [{name: value for name, value in each.items() if not isinstance(value, dict)} for each in contents]
    assert plain[0] == plain[1] | {"transformers_version": plain[0]["transformers_version"]}
    assert stored(tmp_path / "out") == stored(tmp_path / "connected")
    if type(out.config) in AutoModelForCausalLM._model_mapping:  # of a Qwen3.5, the text model alone
        move(out)
        out.save_pretrained(tmp_path / "moved")
        text, ids = AutoModelForCausalLM.from_pretrained(tmp_path / "moved"), torch.arange(3, 40)[None]
        assert torch.allclose(text.eval()(input_ids=ids).logits, out(input_ids=ids).logits, atol=1e-6)


def test_a_configuration_is_the_sources_with_what_is_added(tmp_path: Path) -> None:
    saved(tmp_path / "source", "qwen3")
    report = retrofit(tmp_path / "source", tmp_path / "out", "denseformer")
    source, out = (json.loads((tmp_path / name / "config.json").read_text()) for name in ("source", "out"))
    model = type(AutoModelForCausalLM.from_pretrained(tmp_path / "out"))
    assert issubclass(model, MODEL_FOR_CAUSAL_LM_MAPPING[type(family_model("qwen3").config)])
    del source["auto_map"]
    changed = {"model_type": model.config_class.model_type, "architectures": [model.__name__], "dtype": "bfloat16"}
    base_model = {"base_model": {"name": "source", "revision": None, "family": "qwen3"}}
    assert out == {**source, **changed, **base_model, "dwa": True}
    assert report.left_behind == ["modeling_x.py", "config.json: auto_map"]
    assert any("rotary_emb.inv_freq" in each for each in report.warnings) != model._keys_to_ignore_on_load_unexpected


@pytest.mark.parametrize("case", ["embeddings", "first shard", "index"])
def test_the_dtype_is_the_one_that_transformers_gives(case: str, tmp_path: Path) -> None:
    """It takes that of config.json, else that of the index, else that of the first tensor of the first file."""
    source = tmp_path / "source"
    save_checkpoint(source, dtype=torch.float16 if case == "index" else torch.bfloat16, shards=case != "embeddings")
    content = json.loads((source / "config.json").read_text())
    del content["dtype"]
    (source / "config.json").write_text(json.dumps(content))
    if case == "index":
        index = json.loads((source / "model.safetensors.index.json").read_text())
        index["metadata"]["dtype"] = "float32"
        (source / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        file = sorted(source.glob("*.safetensors"))[0]
        wide = case == "first shard"
        tensors = {k: v.float() if wide or "embed" in k or "lm_head" in k else v for k, v in load_file(file).items()}
        save_file(tensors, file, {"format": "pt"})
    report = retrofit(source, tmp_path / "out", "resformer-denseformer")
    assert report.dtype == "float32"
    assert look(source) == look(tmp_path / "out")
    revert(tmp_path / "out", tmp_path / "back")
    assert look(source) == look(tmp_path / "back")
    assert verify(source, tmp_path / "out").same


def test_the_method_transformer_writes_the_plain_family(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", "qwen3")
    retrofit(tmp_path / "source", tmp_path / "out", "transformer")
    assert json.loads((tmp_path / "out" / "config.json").read_text())["model_type"] == "qwen3"
    assert look(tmp_path / "out") == look(tmp_path / "source")
    assert stored(tmp_path / "out") == stored(tmp_path / "source")


#: What somebody does one after the other: `connect` is a model in memory that is connected, saved and loaded.
WAYS = {
    "convert, connect": "",
    "connect, convert": "",
    "convert, convert": "",
    "connect, connect": "",
    "convert, convert again": "has these connections already",
    "connect, convert, revert": "",
    "convert, revert, connect": "",
}


@pytest.mark.parametrize("way", WAYS)
def test_commands_take_the_folders_of_each_other(way: str, tmp_path: Path) -> None:
    """The table in docs/converting.md."""
    saved(tmp_path / "0", "gemma3_text")
    expected, last, methods = look(tmp_path / "0")["logits"], tmp_path / "0", iter(("denseformer", "resformer"))

    def act(step: str, source: Path, output: Path) -> None:
        if step == "connect":
            model = resformer.connect(AutoModelForCausalLM.from_pretrained(source), next(methods))
            model.save_pretrained(output)
            byte_tokenizer().save_pretrained(output)
        elif step == "convert":
            retrofit(source, output, next(methods), progress=False)
        elif step == "convert again":
            retrofit(source, output, "denseformer", progress=False)
        else:
            revert(source, output, all=True, progress=False)

    steps = way.split(", ")
    for number, step in enumerate(steps, start=1):
        output = tmp_path / str(number)
        if number == len(steps) and WAYS[way]:
            with pytest.raises((CheckpointError, ValueError), match=WAYS[way]):
                act(step, last, output)
            return
        act(step, last, output)
        assert look(output)["logits"] == expected
        assert inspect(output).family == "gemma3_text"
        last = output


@pytest.mark.parametrize(("dtype", "code"), [(torch.bfloat16, "BF16"), (torch.float64, "F64")])
def test_tables_have_the_sources_dtype(dtype: torch.dtype, code: str, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama", dtype=dtype)
    report = retrofit(tmp_path / "llama", tmp_path / "out", "value-embeddings")
    stored = read_checkpoint(tmp_path / "out").tensors
    assert {name.split(".")[-2]: stored[name].dtype for name in report.added} == {"gate": "F32", "table": code}


def test_reasons_name_the_field() -> None:
    plain = ResFormerConfig(num_hidden_layers=4)

    def answer(fields: str) -> str:
        config = ResFormerConfig(num_hidden_layers=4, **json.loads(fields))
        reasons = (kind.inexact_because(view(config)) for kind in added_kinds(config, plain))
        return "; ".join(dict.fromkeys(chain.from_iterable(reasons)))

    assert_answers("inexact", answer)


def test_a_wrong_result_is_caught_and_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative controls: a coefficient off by 1e-3, another dtype, another number in config.json."""
    save_checkpoint(tmp_path / "llama")
    start, write = retrofitting.initial_connections, retrofitting.config_text

    def off(config: Any, dtype: torch.dtype) -> dict[str, torch.Tensor]:
        tensors = start(config, dtype)
        next(iter(tensors.values()))[0] += 1e-3
        return tensors

    def stating(**values: Any) -> Any:
        return lambda *arguments: json.dumps({**json.loads(write(*arguments)), **values})

    for name, wrong, words in (
        ("initial_connections", off, "not exact"),
        ("config_text", stating(dtype="bfloat16"), "reads dtype as 'float32' in the source and as 'bfloat16'"),
        ("config_text", stating(rms_norm_eps=1e-3), "reads rms_norm_eps"),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(retrofitting, name, wrong)
            with pytest.raises(VerificationError, match=words):
                retrofit(tmp_path / "llama", tmp_path / "out")
        assert [path.name for path in tmp_path.iterdir()] == ["llama"]


@pytest.mark.parametrize("link", [False, True])
@pytest.mark.parametrize("shards", [False, True])
def test_what_a_connected_model_lacks_is_taken_out_of_its_file(
    link: bool, shards: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sharing is such a method. Here the family's last layer has no bias any more when it is connected."""
    save_checkpoint(tmp_path / "llama", "llama-biases", shards=shards)
    gone = "model.layers.5.mlp.down_proj.bias"
    connected = MODEL_FOR_CAUSAL_LM_MAPPING[type(connection_config(family_model("llama-biases").config))]
    build = connected.__init__

    def without_a_bias(model: Any, *arguments: Any, **options: Any) -> None:
        build(model, *arguments, **options)
        if getattr(model.config, "dwa", False):
            model.model.layers[5].mlp.down_proj.bias = None

    monkeypatch.setattr(connected, "__init__", without_a_bias)
    report = retrofit(tmp_path / "llama", tmp_path / "out", "denseformer", lossy=True, link=link, verify="hashes")
    assert report.dropped == [gone]
    assert report.written_files == (1 if link else 2)
    before, after = stored(tmp_path / "llama"), stored(tmp_path / "out")
    assert (gone in after) == link
    assert {name: after[name] for name in before if name != gone} == {n: t for n, t in before.items() if n != gone}
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config.get("unused_weights") == ([gone] if link else None)
    assert not any(gone in warning for warning in report.warnings)
    compared = verify(tmp_path / "llama", tmp_path / "out", verify="hashes")
    assert compared.only_in_one == [gone]
    assert not compared.same
    more = retrofit(tmp_path / "out", tmp_path / "more", "resformer", link=link, verify="hashes")
    assert not [warning for warning in more.warnings if gone in warning]
    assert (gone in stored(tmp_path / "more")) == link


def test_what_sharing_drops_may_have_its_name_in_the_model(tmp_path: Path) -> None:
    """Other libraries save a LLaVA so, and Transformers loads it."""
    model, _ = seeing_model("llava")
    model.save_pretrained(tmp_path / "source")
    save_file({name: each.clone() for name, each in model.state_dict().items()}, tmp_path / "source/model.safetensors")
    report = retrofit(tmp_path / "source", tmp_path / "out", "svformer", lossy=True, verify="hashes")
    assert report.dropped == [f"model.language_model.layers.{n}.self_attn.v_proj.weight" for n in (1, 2, 3)]


@pytest.mark.slow
def test_a_mixture_of_many_experts_is_read_in_seconds(tmp_path: Path) -> None:
    """As many tensors as Qwen3-235B has: 36,000."""
    config = small_config("qwen3_moe")
    sizes = {"num_hidden_layers": 94, "num_experts": 128, "hidden_size": 8, "moe_intermediate_size": 8, "head_dim": 8}
    sizes |= {"num_attention_heads": 1, "num_key_value_heads": 1, "intermediate_size": 8}
    for name, value in sizes.items():
        setattr(config, name, value)
    config.layer_types = None
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(tmp_path / "source", max_shard_size="2MB")
    report = retrofit(tmp_path / "source", tmp_path / "out", dry_run=True)
    assert report.kept > 36_000


def test_a_gguf_file_is_refused_with_the_two_lines_that_make_a_checkpoint_of_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gguf = pytest.importorskip("gguf")
    monkeypatch.chdir(tmp_path)
    source = family_model("llama", vocab_size=258)
    (tmp_path / "given").mkdir()
    write_gguf(gguf, source, tmp_path / "given/model.gguf")
    for output, asked in (("of_file", "given/model.gguf"), ("of_folder", "given")):
        with pytest.raises(CheckpointError) as refused:
            retrofit(asked, "out")
        lines = re.search(r"installed\): (.*\))\. Then", str(refused.value))
        exec(lines[1], {name: getattr(transformers, name) for name in re.findall(r"\b(?:Auto|Gguf)\w+", lines[1])})
        report = retrofit("plain", output, "resformer-denseformer")
        assert report.logits.identical
        assert report.tokens.identical
    ids = torch.arange(1, 61).view(2, 30)
    with torch.no_grad():
        expected = source(ids).logits
        torch.testing.assert_close(AutoModelForCausalLM.from_pretrained("of_folder")(ids).logits, expected)


@pytest.mark.slow
@pytest.mark.parametrize("asked", [{"dtype": "bfloat16"}, {"max_shard_size": "5GB"}])
def test_the_lines_that_change_dtype_and_shards_run_in_a_new_interpreter(asked: dict[str, str], tmp_path: Path) -> None:
    """Which knows no connected family."""
    save_checkpoint(tmp_path / "source")
    retrofit(tmp_path / "source", tmp_path / "out")
    with pytest.raises(ValueError, match="is not of a conversion") as refused:
        retrofit(tmp_path / "source", tmp_path / "other", **asked)
    lines = str(refused.value).partition("Afterwards: ")[2].rstrip(".")
    names = f"OUTPUT, FOLDER = {str(tmp_path / 'out')!r}, {str(tmp_path / 'saved')!r}"
    python("-c", f"from transformers import AutoModelForCausalLM, AutoTokenizer; {names}; {lines}")
    config = json.loads((tmp_path / "saved/config.json").read_text())
    assert config["dtype"] == asked.get("dtype", "float32")


def write_gguf(gguf: Any, model: Any, path: Path) -> None:
    """What llama.cpp's own converter writes of a Llama: its names, and q and k permuted to its rotary layout."""
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
    }.items():
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
