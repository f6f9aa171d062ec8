"""What `ResFormerConfig` promises: Llama by default, every method by name, and an error that helps for every misuse."""

import itertools
import json
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import change_json
from conftest import COMBINATIONS, assert_answers, tiny_config
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, LlamaConfig, LlamaForCausalLM

import resformer
from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.configuration import key_sources, value_sources
from resformer.configuration.connection_fields import ConnectionFields
from resformer.configuration.methods import CONNECTION_FIELDS, without_connections
from resformer.errors import CheckpointError

#: Small enough to build a model from.
SMALL: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
}
FIELD_NAMES = [field.name for field in fields(ResFormerConfig)]
refused = partial(pytest.raises, (StrictDataclassError, ValueError))


@pytest.fixture
def warned(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The configurations' warnings."""
    messages: list[str] = []
    monkeypatch.setattr("resformer.configuration.connected_config.logger.warning_once", messages.append)
    return messages


def small(**config_fields: Any) -> ResFormerConfig:
    return ResFormerConfig(**{**SMALL, **config_fields})


def test_every_llama_field_is_here_with_llamas_default() -> None:
    config, llama = ResFormerConfig(), LlamaConfig()
    assert {field.name for field in fields(LlamaConfig)} <= set(FIELD_NAMES)
    assert {field.name: getattr(config, field.name) for field in fields(LlamaConfig)} == {
        field.name: getattr(llama, field.name) for field in fields(LlamaConfig)
    }


def test_every_field_is_documented() -> None:
    own = set(FIELD_NAMES) - {field.name for field in fields(LlamaConfig)}
    documented = f"{ResFormerConfig.__doc__}{ConnectionFields.__doc__}"
    assert [name for name in sorted(own) if name not in documented] == []


def test_arguments_go_on_top_of_a_methods_fields() -> None:
    config = ResFormerConfig.for_method("resformer-constant", **SMALL, value_residual_init=[5, 1], dwa=True)
    assert (config.value_residual, config.value_residual_init, config.dwa) == ("constant", [5.0, 1.0], True)


@pytest.mark.parametrize("num_layers", [0, 2.0, None])
def test_a_method_refuses_a_bad_number_of_layers_by_name(num_layers: Any) -> None:
    with refused(match=f"num_hidden_layers.*{num_layers}"):
        ResFormerConfig.for_method("svformer", num_hidden_layers=num_layers)


def test_method_fits_every_depth(method: str) -> None:
    for num_layers in range(1, 49):
        ResFormerConfig.for_method(method, **{**SMALL, "num_hidden_layers": num_layers})


#: No combination sets where coefficients start.
STARTS = {name: 1 / 3 for name in CONNECTION_FIELDS if name.endswith("_init")}
STARTS["value_residual_init"] = [1 / 3, 0.1 + 0.2]


@pytest.mark.parametrize("use_diff", [True, False], ids=["differences", "everything"])
def test_every_field_survives_json_without_a_warning(use_diff: bool, warned: list[str]) -> None:
    never = {*CONNECTION_FIELDS} - {"connections"}  # of classes of others: test_connection.py
    for name in COMBINATIONS:
        rope = {"rope_type": "linear", "factor": 2.5, "rope_theta": 5e5}
        config = tiny_config(name, rope_parameters=rope, eos_token_id=[2, 3], **STARTS)
        again = ResFormerConfig.from_dict(json.loads(config.to_json_string(use_diff=use_diff)))
        assert again.to_dict() == config.to_dict()
        assert again.value_residual_init == [1 / 3, 0.1 + 0.2]
        never -= {field for field in never if getattr(again, field) != getattr(ResFormerConfig(), field)}
    assert never == set(), "no row of COMBINATIONS sets them"
    assert warned == []


def test_misuse_is_refused_by_name_and_what_does_nothing_is_warned_of(warned: list[str]) -> None:
    """Fields on top of `SMALL`, in `snapshots/configuration.json`; the last ones are of published config.json files."""

    def answer(asked: str) -> str:
        warned.clear()
        try:
            ResFormerConfig.from_dict({**SMALL, **yaml.safe_load(asked)})
        except (StrictDataclassError, ValueError) as error:
            return "refused: " + " ".join(str(error).split())
        return "\n".join(f"warned: {message}" for message in warned) or "taken"

    assert_answers("configuration", answer)


def test_a_family_of_ones_own_gets_no_warning(tmp_path: Path, warned: list[str]) -> None:
    class Mine(ResFormerConfig):
        model_type = "mine"

    Mine(**SMALL).save_pretrained(tmp_path)
    assert Mine.from_pretrained(tmp_path).model_type == "mine"
    assert without_connections(Mine(**SMALL)).hidden_size == SMALL["hidden_size"]
    assert warned == []


def test_field_misspelt_in_a_file_or_an_override_is_pointed_out(tmp_path: Path, warned: list[str]) -> None:
    small().save_pretrained(tmp_path)
    ResFormerConfig.from_pretrained(tmp_path, value_residul="identity")
    assert "'value_residul', and nothing reads it. Did you mean 'value_residual'?" in warned[-1]
    change_json(tmp_path / "config.json", value_source=[0] * 8)
    ResFormerConfig.from_pretrained(tmp_path)
    assert "'value_source', and nothing reads it. Did you mean 'value_sources'?" in warned[-1]


def test_the_name_that_delta_attention_residuals_had_is_refused_with_theirs_and_kimis(tmp_path: Path) -> None:
    model, other = (LlamaForCausalLM(LlamaConfig(**SMALL)) for _ in range(2))
    resformer.save_connections(resformer.connect(other, "denseformer"), tmp_path / "saved")
    small().save_pretrained(tmp_path / "model")
    small().save_pretrained(tmp_path / "plain")
    old = {"attention_residuals": True}
    for file in ("saved/config.json", "model/config.json"):
        change_json(tmp_path / file, **old)
    for ask in (
        lambda: ResFormerConfig.for_method("attention-residuals", **SMALL),
        lambda: small(attention_residual_init=0.5),
        lambda: ResFormerConfig.from_pretrained(tmp_path / "model"),
        lambda: ResFormerConfig.from_pretrained(tmp_path / "plain", **old),
        lambda: resformer.connect(model, "attention-residuals"),
        lambda: resformer.connect(model, **old),
        lambda: resformer.connect(model, f"{tmp_path}/saved"),
        lambda: resformer.retrofit("none", tmp_path / "out", "attention-residuals"),
        lambda: resformer.retrofit("none", tmp_path / "out", **old),
        lambda: resformer.inspect(tmp_path / "model"),
    ):
        with pytest.raises((ValueError, CheckpointError), match=r"`delta-attention-residuals` now.*`attnres`"):
            ask()


def test_llama_checkpoint_read_as_resformer_is_a_resformer(tmp_path: Path) -> None:
    llama = LlamaConfig(**SMALL, num_key_value_heads=2, rope_parameters={"rope_type": "default", "rope_theta": 5e5})
    llama.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "llama"
    config = ResFormerConfig.from_pretrained(tmp_path, value_residual="learnable", value_residual_init=[0, 1])
    assert config.model_type == "resformer"
    assert "model_type" not in vars(config)
    assert json.loads(config.to_json_string())["model_type"] == "resformer"
    assert (config.value_residual, config.value_residual_init) == ("learnable", [0.0, 1.0])
    names = {field.name for field in fields(LlamaConfig)} - {"transformers_version"}
    assert {name: getattr(config, name) for name in names} == {name: getattr(llama, name) for name in names}


def test_depth_can_be_overridden_while_reading(tmp_path: Path) -> None:
    small().save_pretrained(tmp_path)
    assert ResFormerConfig.from_pretrained(tmp_path, num_hidden_layers=3).num_hidden_layers == 3
    config, unused = ResFormerConfig.from_pretrained(
        tmp_path, num_hidden_layers=3, value_sources=[0] * 3, return_unused_kwargs=True, something_else=1
    )
    assert config.value_sources == [0] * 3
    assert unused == {"something_else": 1}
    config = AutoConfig.from_pretrained(tmp_path, num_hidden_layers=3, dwa=True)
    assert (type(config), config.num_hidden_layers, config.dwa) == (ResFormerConfig, 3, True)
    small(value_sources=[0, 1, *[0] * 6], value_embeddings=[1]).save_pretrained(tmp_path)
    config = ResFormerConfig.from_pretrained(tmp_path, num_hidden_layers=3)
    assert (config.value_sources, config.value_embeddings) == ([0, 1, 0], [1])
    with refused(match="`value_sources` has 8 entries, but `num_hidden_layers` is 9"):
        ResFormerConfig.from_pretrained(tmp_path, num_hidden_layers=9)


LATE: dict[str, Any] = {"value_sources": [0, 2, 2, 3, 4, 5, 6, 7], "neutreno_lambda": -1.0, "backout_init": "half"}


@pytest.mark.parametrize(("name", "value"), LATE.items(), ids=LATE)
def test_bad_late_value_is_refused_when_used(name: str, value: Any, tmp_path: Path) -> None:
    for use in (ResFormerForCausalLM, partial(ResFormerConfig.save_pretrained, save_directory=tmp_path)):
        config = small()
        with refused(match=name):
            setattr(config, name, value)
            use(config)
    assert not (tmp_path / "config.json").exists()


@pytest.mark.parametrize("name", ["value_sources", "key_sources"])
def test_sources_are_accepted_exactly_if_each_is_its_own_and_no_later_than_its_reader(name: str) -> None:
    read = {"value_sources": value_sources, "key_sources": key_sources}[name]
    for sources in map(list, [*itertools.product(range(-1, 4), repeat=4), (0, 0, 0), (0, 0, 0, 0, 0)]):
        if len(sources) == 4 and all(
            0 <= source <= n and sources[source] == source for n, source in enumerate(sources)
        ):
            assert read(small(**{"num_hidden_layers": 4, name: sources})) == sources
        else:
            with refused(match=f"`{name}`"):
                small(**{"num_hidden_layers": 4, name: sources})
