"""nanochat's decoder as a family: its smear, its bound of the logits, and what others make of it.

Its caches are in test_modeling_generation.py; test_nanochat.py compares its logits and tokens with nanochat's own
equations.
"""

import copy
import pickle
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from command_server import python
from conftest import RAGGED, SMEAR, TINY, WINDOWS, family_config, randomise
from test_modeling_features import logits_of
from test_modeling_generation import generate
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    StaticCache,
    Trainer,
)
from transformers.modeling_utils import AttentionInterface

import resformer
from resformer.modeling.connecting import disconnect
from resformer.modeling.nanochat import Nanochat2026Config, Nanochat2026ForCausalLM
from resformer.modeling.versions import CACHE

IDS = RAGGED["input_ids"][:1]


def nanochat(method: str | None = "nanochat", *, attention: str = "sdpa", **fields: Any) -> Any:
    """A tiny model with a smear and windows, connected or not, with random parameters."""
    config = family_config("nanochat_2026", method, **{**SMEAR, **WINDOWS, **fields})
    config._attn_implementation = attention
    return randomise(AutoModelForCausalLM.from_config(config)).eval()


@torch.no_grad()
def test_a_token_takes_some_of_the_embedding_of_the_one_before_it() -> None:
    model, seen = nanochat(None), []
    model.model.layers[0].register_forward_pre_hook(lambda _module, args: seen.append(args[0]))
    model(**RAGGED)
    smear, table = model.model.smear, model.model.embed_tokens.weight
    for row, mask, got in zip(*RAGGED.values(), seen[0], strict=True):
        tokens = row[mask.bool()]
        expected = [table[tokens[0]]]
        for before, token in pairwise(tokens):
            gate = 1 / (1 + torch.exp(-(smear.gate.weight[0] @ table[token][:24])))
            expected.append(table[token] + smear.weight * gate * table[before])
        torch.testing.assert_close(got[mask.bool()], torch.stack(expected))
        assert (got[mask.bool()] - table[tokens]).abs().max() > 0.01


def test_a_quantized_cache_keeps_the_tokens_as_they_are() -> None:
    model = nanochat(sliding_window=None, layer_types=None)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    got, expected = generate(model, RAGGED, **options), generate(model, RAGGED, use_cache=False)
    torch.testing.assert_close(got.logits[0], expected.logits[0])
    assert torch.cosine_similarity(got.logits[1], expected.logits[1]).median() > 0.95
    assert torch.equal(got[CACHE].layers[-1].keys[:, 0, :11, 0], RAGGED["input_ids"])


def test_what_does_not_tell_the_tokens_before_is_refused() -> None:
    model = nanochat(None)
    with pytest.raises(ValueError, match=r"`smear` .* pass `input_ids` instead"):
        model(inputs_embeds=model.get_input_embeddings()(IDS))
    for wrong in ({}, {"input_ids": IDS, "inputs_embeds": torch.zeros(1, 11, 32)}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**wrong)
    windows = nanochat(layer_types=["sliding_attention"] * 6)
    with pytest.raises(ValueError, match="`smear` needs a layer with full attention in a static cache"):
        windows(IDS, **{CACHE: StaticCache(config=windows.config, max_cache_len=20)})


@pytest.mark.parametrize("method", [None, "nanochat"])
@pytest.mark.parametrize("attention", ["vllm", "paged|eager"])
def test_engines_that_do_not_keep_it_are_refused(method: str | None, attention: str, monkeypatch: Any) -> None:
    monkeypatch.setitem(AttentionInterface._global_mapping, "vllm", lambda *_, **__: None)
    with pytest.raises(ValueError, match=r"`smear` .*vLLM and continuous batching do not keep: use generate"):
        nanochat(method, attention=attention)
    assert nanochat(method, attention=attention, smear=False).config._attn_implementation == attention


def test_continuous_batching_is_refused_with_a_smear_and_right_without() -> None:
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}

    def batched(model: Any) -> Any:
        return model.generate_batch(
            inputs=IDS.tolist(),
            generation_config=GenerationConfig(**options),
            continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32, page_size=16),
        )

    plain = nanochat(smear=False, sliding_window=None, layer_types=None)
    (output,) = batched(plain).values()
    assert output.generated_tokens == plain.generate(IDS, **options)[0, 11:].tolist()
    with pytest.raises(ValueError, match="continuous batching do not keep"):
        batched(nanochat())


def test_a_new_smear_changes_nothing_and_is_no_connection() -> None:
    config = Nanochat2026Config(**TINY, head_dim=8, smear=True)
    model = AutoModelForCausalLM.from_config(config).eval()
    plain = AutoModelForCausalLM.from_config(Nanochat2026Config(**TINY, head_dim=8)).eval()
    plain.load_state_dict({name: each for name, each in model.state_dict().items() if "smear" not in name})
    assert torch.equal(logits_of(model, IDS), logits_of(plain, IDS))
    decayed = Trainer.get_decay_parameter_names(None, model)  # type: ignore[arg-type]
    assert not [name for name in decayed if "smear" in name]
    assert "model.layers.0.mlp.up_proj.weight" in decayed
    randomise(model)
    before = logits_of(model, IDS)
    connected = resformer.connect(model, ["resformer", "denseformer"])
    assert torch.equal(logits_of(connected, IDS), before)
    assert type(disconnect(connected)) is Nanochat2026ForCausalLM
    assert torch.equal(logits_of(model, IDS), before)


@pytest.mark.parametrize("method", [None, "nanochat", "svformer"])
def test_save_reload_copy_and_pickle(method: str | None, tmp_path: Path) -> None:
    model = nanochat(method)
    model.save_pretrained(tmp_path)
    expected = logits_of(model, **RAGGED)
    for again in (
        AutoModelForCausalLM.from_pretrained(tmp_path),
        copy.deepcopy(model),
        pickle.loads(pickle.dumps(model)),
    ):
        assert type(again) is type(model)
        assert type(again.config) is type(model.config)
        assert torch.equal(logits_of(again.eval(), **RAGGED), expected)
    assert torch.equal(AutoModel.from_pretrained(tmp_path).smear.weight, model.model.smear.weight)
    half = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    assert {each.dtype for name, each in half.named_parameters() if "smear" in name} == {torch.float32}
    assert half.lm_head.weight.dtype == torch.bfloat16


def test_the_auto_classes_know_it_when_they_are_asked(tmp_path: Path) -> None:
    nanochat().save_pretrained(tmp_path / "connected")
    nanochat(None).save_pretrained(tmp_path / "plain")
    (tmp_path / "config.pkl").write_bytes(pickle.dumps(nanochat().config))
    code = """
import pickle, sys, resformer
assert "torch" not in sys.modules
from transformers import AutoConfig, AutoModelForCausalLM
assert "resformer.modeling" not in sys.modules
print(AutoConfig.for_model("nanochat_2026").model_type)
for folder in ("plain", "connected"):
    print(type(AutoModelForCausalLM.from_pretrained(folder)).__name__)
print(pickle.load(open("config.pkl", "rb")).model_type)
"""
    printed = python("-c", code, cwd=tmp_path, PYTHONPATH=str(Path(resformer.__file__).parents[1]))
    classes = ["Nanochat2026ForCausalLM", "ResFormerNanochat2026ForCausalLM"]
    assert printed.split() == ["nanochat_2026", *classes, "resformer_nanochat_2026"]


@pytest.mark.parametrize("method", [None, "nanochat"])
def test_a_bound_of_the_logits_is_never_kept_and_ignored(method: str | None, tmp_path: Path) -> None:
    model, free = nanochat(method, final_logit_softcapping=2.0), nanochat(method, final_logit_softcapping=1e30)
    hidden = free.lm_head(free.model(IDS).last_hidden_state)
    assert hidden.abs().max() > 4
    bounded = model(IDS, labels=IDS)
    torch.testing.assert_close(bounded.logits, 2 * torch.tanh(hidden / 2), rtol=0, atol=0)
    expected = torch.nn.functional.cross_entropy(bounded.logits[:, :-1].flatten(0, 1), IDS[:, 1:].flatten())
    torch.testing.assert_close(bounded.loss, expected)
    placed = model(IDS, None, None, None, None, IDS, return_dict=False)  # labels by their place
    assert torch.equal(placed[0], bounded.loss)
    assert torch.equal(placed[1], bounded.logits)
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    again.resize_token_embeddings(99)
    assert torch.equal(again(IDS).logits[..., :97], bounded.logits)
    assert model.bfloat16()(IDS).logits.dtype == torch.float32
    with pytest.raises(Exception, match="above 0"):
        Nanochat2026Config(final_logit_softcapping=-1.0)


@pytest.mark.slow
def test_one_compiled_graph_computes_the_same() -> None:
    model = nanochat(num_hidden_layers=2, layer_types=["sliding_attention", "full_attention"])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    for options in ({"use_cache": False}, {CACHE: DynamicCache(config=model.config)}):
        torch.testing.assert_close(logits_of(compiled, IDS, **options), logits_of(model, IDS))


def test_a_smear_is_of_its_own_family_alone() -> None:
    with pytest.raises(ValueError, match=r"`smear`=True is no field of Llama's decoder.*'nanochat_2026'"):
        resformer.ResFormerConfig(smear=True)
