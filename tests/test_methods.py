"""One snapshot for each named method: what it sets, adds, computes and keeps. Read its diff before you commit it."""

import functools

import torch
from conftest import TINY, assert_snapshot
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from resformer import METHODS, ResFormerConfig, ResFormerForCausalLM
from resformer.configuration import cache_bytes_by_method, mixing_layers
from resformer.configuration.methods import CONNECTION_FIELDS
from resformer.training.flops import forward_flops
from resformer.training.optimizer import is_connection

#: The shape of the models that are trained, with little of a head, which all models have alike.
TRAINED = {"hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 12, "num_attention_heads": 4,
           "num_key_value_heads": 2, "vocab_size": 16}  # fmt: skip
TOKENS = 96


def kept_per_token(model: PreTrainedModel, dtype: torch.dtype) -> float:
    """Numbers a token in the distinct memory, parameters aside, that autograd keeps after a forward pass."""
    model = model.to(dtype).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # alive, so that no other gets its place
        return tensor

    ids = torch.randint(16, (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    nbytes = sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters)
    return nbytes / TOKENS / dtype.itemsize


@functools.cache
def kept_by_llama(dtype: torch.dtype) -> float:
    return kept_per_token(LlamaForCausalLM(LlamaConfig(**TRAINED)), dtype)


def described(method: str) -> str:
    tiny, deep = (ResFormerConfig.for_method(method, **{**TINY, "num_hidden_layers": n}) for n in (6, 48))
    with torch.device("meta"):
        added = sum(p.numel() for name, p in ResFormerForCausalLM(deep).named_parameters() if is_connection(name))
    lines: dict[str, object] = {f"fields of {n} layers": METHODS[method](n) for n in (8, 24)}
    lines["layers that mix, of 6"] = mixing_layers(tiny)
    lines["layers that store, of 6"] = tiny.kv_sharing_modes
    lines["parameters added to 48 layers"] = added
    lines["bytes of cache a token"] = cache_bytes_by_method(tiny)[method]
    lines |= {f"operations, {part}": number for part, number in forward_flops(tiny, 16).items()}
    for dtype in (torch.float32, torch.bfloat16):
        kept = kept_per_token(ResFormerForCausalLM(ResFormerConfig.for_method(method, **TRAINED)), dtype)
        lines[f"numbers kept a token beyond Llama's, {dtype}"] = round(kept - kept_by_llama(dtype))
    return "\n".join([method, *(f"  {name}: {value}" for name, value in lines.items())])


def test_methods_are_those_of_the_snapshot() -> None:
    config = ResFormerConfig()
    defaults = [f"  {name}: {getattr(config, name)}" for name in CONNECTION_FIELDS]
    assert_snapshot("methods.txt", "\n".join(["plain Llama", *defaults, *map(described, METHODS), ""]))
