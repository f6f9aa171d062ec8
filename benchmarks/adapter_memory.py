"""The memory of LoRA in 4 bits, of a model of Llama-3.1-8B's shape: computed, not run.

    python benchmarks/adapter_memory.py --output benchmarks/results/adapter_memory.json

A pass over tensors that have a size and a lifetime but no data, in bfloat16, with gradient checkpointing.
"""

import argparse
import weakref
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from decode import run_facts, write
from peft import LoraConfig, get_peft_model
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from resformer import ResFormerConfig, ResFormerForCausalLM

LLAMA_8B: dict[str, Any] = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
#: bitsandbytes: 4 bits a weight, and a float32 scale for each 64, which nested quantisation stores in 8 bits.
BYTES_4_BIT = 0.5 + 1 / 64 + 4 / 64 / 256


def adapter_of_8b(method: str, batch: int, block: int, rank: int) -> dict[str, Any]:
    """Bytes of LoRA in all linear layers, of 4-bit weights, with the connections trained whole."""
    config = ResFormerConfig.for_method(method, **LLAMA_8B)
    lora = LoraConfig(target_modules="all-linear", r=rank, modules_to_save=["value_residual", "depth_average"])

    def build() -> nn.Module:
        torch.set_default_dtype(torch.bfloat16)
        # Tensors without data cannot be moved to where they are.
        with patch.object(nn.Module, "to", lambda module, *_, **__: module):
            model = get_peft_model(ResFormerForCausalLM(config), lora, autocast_adapter_dtype=False)
        torch.set_default_dtype(torch.float32)
        model.gradient_checkpointing_enable()
        model.enable_input_require_grads()
        return model

    with FakeTensorMode(allow_non_fake_inputs=True):
        model = build().train()
        ids = torch.zeros(batch, block, dtype=torch.long)
        with _Allocations() as allocations:
            loss = model(input_ids=ids, labels=ids, use_cache=False).loss
            activations = allocations.live
            loss.backward()
        held = sum(tensor.nbytes for tensor in (*model.parameters(), *model.buffers()))
        gradients = sum(parameter.nbytes for parameter in model.parameters() if parameter.requires_grad)
    with torch.device("meta"):
        layers = ResFormerForCausalLM(config).model.layers
    linear = [module.weight.numel() for module in layers.modules() if type(module) is nn.Linear]
    # What autograd sees is in bfloat16: each weight is dequantised for its product, one at a time.
    saved = round(sum(linear) * (2 - BYTES_4_BIT)) - 2 * max(linear)
    weights = held - round(sum(linear) * (2 - BYTES_4_BIT))
    run = {"method": method, "batch": batch, "block": block, "rank": rank, "computed": True}
    parts = {"weights": weights, "gradients": gradients, "optimizer": 2 * gradients, "activations": activations}
    return {**run, **parts, "peak": held + 2 * gradients + allocations.peak - saved}


class _Allocations(TorchDispatchMode):
    """Bytes of the storages that operations allocate, while they live."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self._known: dict[int, weakref.ref] = {}

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = {
            id(tensor.untyped_storage()) for tensor in tree_iter((args, kwargs)) if isinstance(tensor, torch.Tensor)
        }
        result = function(*args, **(kwargs or {}))
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if id(storage) not in given and id(storage) not in self._known:
                    self._add(storage)
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        key, size = id(storage), storage.nbytes()

        def freed(_: object) -> None:
            del self._known[key]
            self.live -= size

        self._known[key] = weakref.ref(storage, freed)
        self.live += size
        self.peak = max(self.peak, self.live)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    arguments = parser.parse_args()
    facts = argparse.Namespace(device="cpu", dtype="bfloat16", threads=1, clock="none")
    runs = [adapter_of_8b("resformer", 1, block, 16) for block in (2048, 4096)]
    write({**run_facts(facts, {}), "adapters of 8B": runs}, arguments.output)


if __name__ == "__main__":
    main()
