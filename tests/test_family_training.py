"""Each family of the table trains: it is built for our tokenizers, planned, grouped, and takes a step."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow, training_arguments
from small_decoders import small_decoder
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

import resformer
from resformer.configuration.methods import connections_of
from resformer.modeling.any_decoder import text_config
from resformer.modeling.measured import MEASURED
from resformer.training.flops import meta_model
from resformer.training.optimizer import (
    CONNECTIONS,
    ConnectionTrainer,
    check_muon,
    connections_by_kind,
    is_connection,
    is_decayed,
    scratch_rates,
)
from resformer.training.options import PretrainOptions
from resformer.training.pretraining import plan_pretraining
from resformer.training.sizes import known_fields, scratch_config
from resformer.training.tokenizers import make_tokenizer

_OF_THE_FILE = ("transformers_version", "architectures", "_name_or_path", "dtype")
#: Families whose layers have no matrix that is one token's at a time, or of which others are half.
SHARES = {"bamba": 0.9}
QUICK = ["bamba", "falcon_h1", "gemma4_text", "gpt2", "llama", "mixtral", "qwen3_moe", "smollm3"]


#: Families that need more than a size, or a mending elsewhere -> why.
OPEN = {
    **dict.fromkeys(
        "dots1 gpt_neo lfm2_moe mamba2 zamba2 zaya".split(), "its own fields must agree with the size: --set"
    ),
    **dict.fromkeys("cohere_compass_text gemma3n_text qwen4_exp_text".split(), "its own defaults build no model"),
    **dict.fromkeys("dbrx moshi".split(), "a part of its configuration is another once it is read"),
    **dict.fromkeys(
        "bert bert-generation big_bird camembert cpmant data2vec-text electra ernie hrm_text longcat_flash "
        "megatron-bert rembert roberta roberta-prelayernorm roc_bert roformer xlm-roberta xlm-roberta-xl".split(),
        "its layers are not found where the model is built with connections",
    ),
    "mistral4": "connecting: its class is not found by name",
    "dots3_note_text": "its layers have other numbers of heads",
    "xlnet": "it has no positions to be limited",
}


def opened(names: list[str]) -> list[Any]:
    """Strict: who mends one takes it off the list."""
    slow = others_slow(names, QUICK)
    return [
        pytest.param(name, marks=[pytest.mark.slow, pytest.mark.xfail(reason=OPEN[name], strict=True)])
        if name in OPEN
        else each
        for name, each in zip(names, slow, strict=True)
    ]


@pytest.mark.parametrize("family", opened(sorted(MEASURED)))
def test_a_family_is_built_for_our_tokenizers_and_planned(family: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bytes", {}, 0)
    default = CONFIG_MAPPING[family]()
    if text_config(default) is not default:
        with pytest.raises(ValueError, match="which is more than a decoder; take its decoder"):
            scratch_config("transformer", "tiny", tokenizer, 64, family)
        return
    config = scratch_config("transformer", "tiny", tokenizer, 64, family)
    ids = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    assert all(each is None or each < len(tokenizer) for each in ids)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is type(config)
    written, read = config.to_dict(), again.to_dict()
    assert not {name for name, value in written.items() if name not in _OF_THE_FILE and read[name] != value}
    meta_model(config)
    data = {"output": "a", "data": ["d"], "tokenizer": "bytes", "block": 64}
    plan = plan_pretraining(PretrainOptions(**data, method="transformer", backbone=family))
    assert plan.tokens > 19 * plan.plain_parameters
    if "num_key_value_heads" in known_fields(family) and {"num_attention_heads", "head_dim"} <= known_fields(family):
        few = scratch_config("transformer", "tiny:num_attention_heads=2", tokenizer, 64, family)
        assert few.to_dict()["num_key_value_heads"] == few.num_attention_heads == 2


def trainable(family: str) -> PreTrainedModel:
    model = small_decoder(family)
    try:
        return resformer.connect(copy.deepcopy(model), "denseformer")
    except ValueError:
        return model


#: Those that take a step in seconds and are used most; each other family was not seen to the end.
STEPPING = [*QUICK, *"mistral qwen2 qwen3 olmo2 phi3 mixtral gpt_neox falcon bloom glm4 smollm3 granite".split()]


@pytest.mark.parametrize("family", others_slow(dict.fromkeys(STEPPING), QUICK))
def test_a_family_is_grouped_and_takes_a_step(family: str, tmp_path: Path) -> None:
    model = trainable(family)
    ids = torch.randint(3, 99, (4, 9), generator=torch.Generator().manual_seed(0))
    rows = [{"input_ids": row, "labels": row} for row in ids]
    note = check_muon(model)
    share = float(re.findall(r"muon: ([\d.]+)%", note)[0]) / 100
    assert share >= SHARES.get(family, 0.5), note
    arguments = training_arguments(tmp_path, learning_rate=1e-2, weight_decay=0.1, max_steps=1, warmup_steps=0)
    rates = scratch_rates(1e-2, None)
    trainer = ConnectionTrainer(
        model=model, args=arguments, train_dataset=rows, connection_learning_rate=rates, muon_learning_rate=2e-2
    )
    by_kind = connections_by_kind(model)
    assert sum(map(len, by_kind.values())) == sum(is_connection(name) for name, _ in model.named_parameters())
    assert bool(by_kind["coefficients"]) == bool(connections_of(model.config))
    groups = {id(p): group for group in trainer.create_optimizer().param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        group = groups[id(parameter)]
        decayed = parameter.ndim > 1 and not re.search("norm|sink|lambda|A_log", name) and not is_connection(name)
        assert (group["weight_decay"] > 0) == decayed == is_decayed(name, parameter), name
        kind = next((kind for kind in CONNECTIONS if any(parameter is p for p in by_kind[kind])), None)
        assert group["lr"] == (rates[kind] if kind else 2e-2 if group["muon"] else 1e-2), name
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert len(moved) > 0.5 * len(before)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not {name for name in before if is_connection(name)} - moved
