"""Models of Transformers' classes, loaded without adapters, remote code or the network."""

from typing import Any

from transformers import MODEL_FOR_CAUSAL_LM_MAPPING, GenerationConfig, PreTrainedConfig, PreTrainedModel

from resformer.errors import CheckpointError, first_names, one_line, plain

#: Where PEFT is installed, Transformers applies the adapter that it finds in this sub-folder: no folder is called so.
#: It would read a generation_config.json of any size.
_UNREAD = {"adapter_kwargs": {"subfolder": "\0"}, "generation_config": GenerationConfig()}


def load_model(where: object, config: PreTrainedConfig, **arguments: Any) -> PreTrainedModel:
    """The causal language model of `config`, in evaluation mode, with every weight from the checkpoint.

    Args:
        where: the checkpoint, for messages.
        arguments: further ones of `from_pretrained`.
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
