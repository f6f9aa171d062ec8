"""Linear layers that read their weight as fast as the memory gives it, which is what decoding spends its time on.

The product of a few tokens with a weight takes as long as the weight takes to be read. PyTorch hands a float32 product
to MKL, which reads with one core on CPUs that are not Intel's; oneDNN, which PyTorch takes for bfloat16, reads with all
of them, in about half the time on 2 cores. It sums in another order, so the last bits may differ from MKL's.
"""

import torch
from torch import nn

__all__ = ["Linear"]

#: The smallest weight that is worth it, in numbers: 256 KiB.
SMALLEST_WEIGHT = 2**16
#: With more sequences than this in a batch, arithmetic takes longer than reading.
LARGEST_BATCH = 64


class Linear(nn.Linear):
    """`nn.Linear`, and quick with one token for each sequence, in float32 on a CPU, where gradients are off."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # First what is quick to ask and often not so.
        if (
            not torch.compiler.is_compiling()
            and hidden_states.dim() == 3
            and hidden_states.shape[1] == 1
            and not torch.is_grad_enabled()
            and self._is_read_by_onednn(hidden_states)
        ):
            return torch.ops.mkldnn._linear_pointwise(hidden_states, self.weight, self.bias, "none", [], "")
        return nn.functional.linear(hidden_states, self.weight, self.bias)

    def _is_read_by_onednn(self, hidden_states: torch.Tensor) -> bool:
        weight = self.weight
        return (
            weight.dtype == hidden_states.dtype == torch.float32
            and weight.device.type == hidden_states.device.type == "cpu"
            and weight.numel() >= SMALLEST_WEIGHT
            and hidden_states.shape[0] <= LARGEST_BATCH
            # Quantised and distributed weights bring their own product, as does a tensor that is no plain one.
            and type(weight) is nn.Parameter
            and type(hidden_states) is torch.Tensor
            and torch.backends.mkl.is_available()
            and torch.backends.mkldnn.is_available()
            and bool(torch.backends.mkldnn.enabled)
            and not torch.is_autocast_enabled("cpu")
        )
