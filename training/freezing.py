"""Which parameters a training changes; the others are frozen and have no optimizer state."""

from transformers import PreTrainedModel

from resformer.configuration import ResFormerConfig, key_sources, value_sources
from resformer.errors import CheckpointError
from resformer.training.optimizer import is_connection

_OF_READERS = ("self_attn.q_proj", "self_attn.o_proj", "input_layernorm")


def trained_parameters(model: PreTrainedModel, train: str = "all") -> list[str]:
    """The names of the parameters that are trained, in the model's order.

    Args:
        train: "all"; "connections", the parameters that connections add; or "sharing", these and
            what sharing keys or values touches: `q_proj`, `o_proj` and `input_layernorm` of layers that read another
            layer's keys or values, `k_proj` of the layers whose keys they read, `v_proj` of those whose values.

    Raises:
        CheckpointError: no layer shares, or there are no connections with parameters.
    """
    names = [name for name, _ in model.named_parameters()]
    if train == "all":
        return names
    modules: set[str] = set()
    if train == "sharing":
        config = model.config
        if isinstance(config, ResFormerConfig):
            for projection, sources in (("k_proj", key_sources(config)), ("v_proj", value_sources(config))):
                for reader, source in enumerate(sources):
                    if source != reader:
                        modules |= {f"layers.{reader}.{module}" for module in _OF_READERS}
                        modules.add(f"layers.{source}.self_attn.{projection}")
        if not modules:
            raise CheckpointError(
                "train is 'sharing', but no layer of the model reads another's keys or values (`key_sources` and "
                "`value_sources`); convert it to a method that shares, or use --train all."
            )
    prefix = f"{model.base_model_prefix}."
    chosen = [name for name in names if is_connection(name) or name.removeprefix(prefix).rpartition(".")[0] in modules]
    if not chosen:
        raise CheckpointError(
            "train is 'connections', but the connections of the model have no parameters; "
            "convert it to a method that has, such as resformer, or use --train all."
        )
    return chosen
