"""Models of Transformers' classes: loaded without adapters, remote code or the network, or on the meta device."""

from typing import Any

import torch
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

from resformer.configuration import ResFormerConfig
from resformer.errors import CheckpointError, first_names, one_line, plain
from resformer.modeling import ResFormerForCausalLM

__all__ = ["load_model", "model_on_meta"]

#: Where PEFT is installed, Transformers applies the adapter that it finds in this sub-folder: no folder is called so.
#: It would read a generation_config.json of any size.
_UNREAD = {"adapter_kwargs": {"subfolder": "\0"}, "generation_config": GenerationConfig()}


def load_model(where: object, config: PreTrainedConfig, **arguments: Any) -> PreTrainedModel:
    """The causal language model of `config`, in evaluation mode, with every weight from the checkpoint.

    Args:
        where: the checkpoint, for messages.
        arguments: further ones of `from_pretrained`.

    Raises:
        CheckpointError: Transformers does not load it, or not all of it.
    """
    try:
        # The class itself, because AutoModel looks for remote code and adapters.
        model, loading = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)].from_pretrained(
            **arguments, config=config, local_files_only=True, output_loading_info=True, **_UNREAD
        )
    except ImportError:
        raise  # a missing package, which the message names
    except Exception as error:  # Transformers, safetensors and gguf raise nearly anything for a bad file
        raise CheckpointError(f"{plain(where)}: cannot be loaded: {one_line(error)}") from error
    for kind in ("missing_keys", "unexpected_keys", "mismatched_keys", "error_msgs"):
        if problems := loading.get(kind):
            raise CheckpointError(f"{plain(where)}: {kind.replace('_', ' ')}: {first_names(set(map(str, problems)))}.")
    return model.eval()


def model_on_meta(config: ResFormerConfig, dtype: torch.dtype = torch.float32) -> ResFormerForCausalLM:
    """The model, without memory for it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, dtype=dtype)
