"""Each family of the table trains: it is built for our tokenizers, planned, grouped, and takes a step."""

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import others_slow, training_arguments
from small_decoders import small_decoder
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoConfig, PreTrainedModel

import resformer
from resformer.configuration.methods import connections_of
from resformer.convert.connections import meta_model
from resformer.modeling.any_decoder import text_config
from resformer.modeling.measured import MEASURED
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
from resformer.training.tokenizers import make_tokenizer
from resformer.training.trainer import balancing
from resformer.training.untrained import known_fields, scratch_config, why_not_trained

_OF_THE_FILE = ("transformers_version", "architectures", "_name_or_path", "dtype")
#: Families whose layers have no matrix that is one token's at a time, or of which others are half.
SHARES = {"bamba": 0.9, "rembert": 0.3, "roc_bert": 0.005}
QUICK = ["bamba", "falcon_h1", "gemma4_text", "gpt2", "llama", "mixtral", "qwen3_moe", "smollm3"]


#: What has to be said beside the size, since Transformers' own defaults build no model, or none of eight layers.
SAID: dict[str, dict[str, Any]] = {
    "cohere_compass_text": {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 10000.0}}},
    "dbrx": {"attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2}},
    "dots1": {"n_shared_experts": 1},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global", "local"], 4]]},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 4},
    "mamba2": {"num_heads": 16},
    "qwen4_exp_text": {
        "indexer_n_heads": 2,
        "indexer_kv_heads": 1,
        "indexer_head_dim": 64,
        "indexer_budget": 8,
        "indexer_compress_ratio": 4,
    },
    "zamba2": {"layers_block_type": ["linear_attention", "hybrid"] * 4},
}
#: Those in whose configuration a part is another once it is read, in Transformers too: an empty one is filled.
PARTS = ("dbrx", "moshi")
#: Those that are refused -> with what words.
REFUSED = {
    **dict.fromkeys("hrm_text longcat_flash".split(), "it has no list of `num_hidden_layers`"),
    **dict.fromkeys("cpmant prophetnet trocr xlm xlnet".split(), "is not that of the next token"),
}


def unlike_as_read(config: Any, folder: Path) -> set[str]:
    """The fields that are others once the configuration is written and read."""
    config.save_pretrained(folder)
    again = AutoConfig.from_pretrained(folder)
    assert type(again) is type(config)
    written, read = config.to_dict(), again.to_dict()
    return {name for name, value in written.items() if name not in _OF_THE_FILE and read[name] != value}


@pytest.mark.parametrize("family", others_slow(sorted(MEASURED), QUICK))
def test_a_family_is_built_for_our_tokenizers_and_planned(family: str, tmp_path: Path) -> None:
    tokenizer = make_tokenizer("bytes", {}, 0)
    default, said = CONFIG_MAPPING[family](), SAID.get(family, {})
    if text_config(default) is not default:
        with pytest.raises(ValueError, match="which is more than a decoder; take its decoder"):
            scratch_config("transformer", "tiny", tokenizer, 64, family)
        return
    if family in REFUSED:
        with pytest.raises(ValueError, match=REFUSED[family]):
            meta_model(scratch_config("transformer", "tiny", tokenizer, 64, family))
        return
    config = scratch_config("transformer", "tiny", tokenizer, 64, family, **said)
    ids = [getattr(config, f"{name}_token_id", None) for name in ("bos", "eos", "pad")]
    assert all(each is None or each < len(tokenizer) for each in ids)
    if family not in PARTS:
        assert not unlike_as_read(config, tmp_path)
    meta_model(config)
    data = {"output": "a", "data": ["d"], "tokenizer": "bytes", "block": 64, "fields": said}
    plan = plan_pretraining(PretrainOptions(**data, method="transformer", backbone=family))
    assert plan.tokens > 19 * plan.plain_parameters
    if "num_key_value_heads" in known_fields(family) and {"num_attention_heads", "head_dim"} <= known_fields(family):
        few = scratch_config("transformer", "tiny:num_attention_heads=2", tokenizer, 64, family, **said).to_dict()
        assert few["num_key_value_heads"] == few["num_attention_heads"] == 2


def trainable(family: str) -> PreTrainedModel:
    model = small_decoder(family)
    try:
        return resformer.connect(copy.deepcopy(model), "denseformer")
    except ValueError:
        return model


@pytest.mark.parametrize("family", others_slow(sorted(MEASURED), QUICK))
def test_a_family_is_grouped_and_takes_a_step(family: str, tmp_path: Path) -> None:
    config = CONFIG_MAPPING[family]()
    if text_config(config) is not config or why_not_trained(config):
        pytest.skip("it is no decoder whose loss is that of the next token")
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
        own_name = ".".join(name.split(".")[-2:])
        decayed = parameter.ndim > 1 and not re.search("norm|sink|lambda|A_log", own_name) and not is_connection(name)
        assert (group["weight_decay"] > 0) == decayed == is_decayed(name, parameter), name
        kind = next((kind for kind in CONNECTIONS if any(parameter is p for p in by_kind[kind])), None)
        assert group["lr"] == (rates[kind] if kind else 2e-2 if group["muon"] else 1e-2), name
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    trainer.train()
    moved = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert len(moved) > 0.5 * len(before)
    assert all(parameter.isfinite().all() for parameter in model.parameters())
    assert not {name for name in before if is_connection(name)} - moved
    # Of some families files have other names than the model: the stock Trainer leaves those weights as they were.
    model.save_pretrained(tmp_path / "saved")
    trained = {name: each.clone() for name, each in model.state_dict().items()}
    model.load_state_dict(before, strict=False)
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    assert all(torch.equal(each, trained[name]) for name, each in model.state_dict().items())


#: Families that weigh a balancing loss of experts; the two that have the field and no such loss are left out.
WEIGHED = [
    family
    for family in sorted(MEASURED)  # a set, whose order differs between the processes of a run
    if {"router_aux_loss_coef", "aux_loss_coef"} & {*CONFIG_MAPPING[family].__annotations__}
    and family not in ("doge", "llama4_text")
]


@pytest.mark.parametrize("family", others_slow(WEIGHED, ["jetmoe"]))
def test_what_the_balancing_loss_weighs_is_found(family: str) -> None:
    model = small_decoder(family).eval()
    text_config(model.config).output_router_logits = True
    ids = torch.arange(3, 27)[None]
    with torch.no_grad():
        outputs = model(input_ids=ids, labels=ids, use_cache=False)
    expected = cross_entropy(outputs.logits[0, :-1], ids[0, 1:]) + balancing(model) * outputs.aux_loss
    assert outputs.loss.item() == pytest.approx(expected.item(), rel=1e-6)
