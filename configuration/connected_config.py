"""What every configuration with connections does, whatever its family."""

from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

from transformers.utils import logging

from resformer.configuration.connection_fields import ConnectionFields, check_connections
from resformer.configuration.methods import CONNECTION_FIELDS
from resformer.configuration.sources import block_starts
from resformer.errors import did_you_mean, had_two_meanings

logger = logging.get_logger(__name__)

_BEGINNINGS = tuple("_".join(name.split("_")[:2]) for name in CONNECTION_FIELDS)


class ConnectedConfig(ConnectionFields):
    """Mixed into the configuration of a family."""

    # V_0, shared keys and values, and earlier states do not cross a pipeline stage.
    base_model_pp_plan = None

    def __post_init__(self, **kwargs: Any) -> None:
        self._look_for_misspelt(kwargs)
        self.value_residual_init = [float(value) for value in self.value_residual_init]
        for name in ("neutreno_lambda", "depth_attention_init", "delta_attention_residual_init"):
            setattr(self, name, float(getattr(self, name)))
        super().__post_init__(**kwargs)  # type: ignore[misc]

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """As the base class, but connection fields given as keyword arguments replace those of the file before they are
        validated, and fewer layers are the first ones, with their connections."""
        cls._look_for_misspelt(kwargs)
        named = cls.attribute_map.get("num_hidden_layers", "num_hidden_layers")  # type: ignore[attr-defined]
        layers = named.replace("encoder", "decoder")  # BART's kin have both
        if layers == named != "num_hidden_layers" and "num_hidden_layers" in kwargs:
            kwargs[layers] = kwargs.pop("num_hidden_layers")
        overrides = {name: kwargs.pop(name) for name in {*CONNECTION_FIELDS, layers} & kwargs.keys()}
        fewer = _of_first_layers(config_dict, overrides, layers)
        return super().from_dict({**config_dict, **fewer, **overrides}, **kwargs)  # type: ignore[misc]

    @classmethod
    def _look_for_misspelt(cls, keys: Iterable[str]) -> None:
        for key in keys:  # Transformers keeps unknown ones as attributes that nothing reads
            if key in CONNECTION_FIELDS:
                continue
            if had_two_meanings(key):
                raise ValueError(f"`{key}` is no field.{did_you_mean(key, ())}")
            if close := did_you_mean(key, CONNECTION_FIELDS, 0.6 if key.startswith(_BEGINNINGS) else 0.9):
                logger.warning_once(f"{cls.__name__} has no field {key!r}, and nothing reads it.{close}")

    @property
    def kv_sharing_modes(self) -> list[str | None] | None:
        """`"reuse"` for a layer that stores neither keys nor values; Transformers' caches read it."""
        if self.value_sources is None or self.key_sources is None:
            return None
        text: Any = self.get_text_config(decoder=True)  # type: ignore[attr-defined]
        types = getattr(text, "layer_types", None) or ["attention"] * len(self.key_sources)
        pairs = zip(self.key_sources, self.value_sources, types, strict=True)
        # The cache of a layer that is more than an attention holds more than keys and values.
        return [
            ("reuse" if key != n and value != n else "store") if "attention" in kind else None
            for n, (key, value, kind) in enumerate(pairs)
        ]

    def validate_connections(self) -> None:
        text: Any = self.get_text_config(decoder=True)  # type: ignore[attr-defined]
        if getattr(text, "num_hidden_layers", None):
            check_connections(plain_view(self, text))


def plain_view(config: Any, text: Any) -> SimpleNamespace:
    """The fields of connections, and what their checks read of the text model's configuration."""
    return SimpleNamespace(
        **{name: getattr(config, name, default) for name, default in CONNECTION_FIELDS.items()},
        num_hidden_layers=text.num_hidden_layers,
        layer_types=getattr(text, "layer_types", None),
        no_rope_layers=getattr(text, "no_rope_layers", None),
    )


def _of_first_layers(config: dict[str, Any], overrides: dict[str, Any], count: str) -> dict[str, Any]:
    """The fields of `config` that name layers, for its first layers alone, if `overrides` asks for fewer.

    `count`: the family's name of their number.
    """
    layers, before = overrides.get(count), config.get(count)
    if not isinstance(layers, int) or not isinstance(before, int) or not 0 < layers < before:
        return {}
    first: dict[str, Any] = {}
    for name in ("layer_types", "no_rope_layers", "key_sources", "value_sources"):
        if isinstance(config.get(name), list) and name not in overrides:
            first[name] = config[name][:layers]
    for name in ("value_residual_layers", "value_embeddings"):
        if isinstance(config.get(name), list) and name not in overrides:
            first[name] = [layer for layer in config[name] if layer < layers]
    few = f"`{count}`={layers} of {before} layers:"
    if config.get("value_residual") == "learnable_plus" and "value_residual" not in overrides:
        raise ValueError(
            f"{few} in mode 'learnable_plus' all layers compete for V_0, so that the first ones are no model by "
            "themselves. Load all layers, or choose another mode (`value_residual`), which starts anew."
        )
    of_all = {
        "backout": "`backout` takes the middle of all layers out of the last",
        "attnres": "with `attnres` the final norm reads a softmax over all layers",
        "mudd": "`mudd` has other channels after the last layer than after others",
    }
    for name, why in of_all.items():
        if config.get(name) and name not in overrides and (name != "mudd" or config.get("mudd_channels") != "r"):
            raise ValueError(
                f"{few} {why}, so that the first ones are no model by themselves. Load all layers, or give "
                f"`{name}=False`."
            )
    delta = overrides.get("delta_attention_residuals", config.get("delta_attention_residuals"))
    if delta and "delta_attention_residual_blocks" not in overrides:
        blocks = config.get("delta_attention_residual_blocks", 8)
        starts = [start for start in block_starts(before, blocks) if start < layers]
        if starts != block_starts(layers, len(starts)):
            raise ValueError(
                f"{few} blocks of `delta_attention_residuals` begin at layers {starts}, which are no equal parts of "
                f"{layers} layers. Load as many layers as a block ends with, or give `delta_attention_residual_blocks`."
            )
        first["delta_attention_residual_blocks"] = len(starts)
    return first


__all__ = ["ConnectedConfig", "plain_view"]
