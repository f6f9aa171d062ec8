"""Linear layers that read their weight with every core, which is what decoding spends its time on.

The product of a few tokens with a weight takes as long as the weight takes to be read. PyTorch hands a float32 product
to MKL, which reads with one core on CPUs that are not Intel's. As a batch of products, each with some of the weight's
rows, it is spread over the cores: on 2 cores half the time for one token, two thirds for 8. Every number is the same
sum as before; MKL may round it otherwise where it takes another kernel for the smaller product.
"""

import torch
from torch import nn

__all__ = ["Linear", "product_by_rows"]

#: The smallest weight that is worth spreading, in numbers: 256 KiB.
SMALLEST_WEIGHT = 2**16
#: With more sequences than this in a batch, arithmetic takes longer than reading and MKL spreads it by itself.
LARGEST_BATCH = 64
#: Parts are of whole blocks of rows, for which MKL takes the same kernel as for all of them.
BLOCK = 64
#: Parts for each core, so that one core that is held up does not hold up the rest.
PARTS_PER_THREAD = 4


def product_by_rows(
    states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, parts: int = 2
) -> torch.Tensor:
    """Returns what `nn.functional.linear` does, worked out in `parts` parts of the weight's rows.

    Args:
        states: `(batch, 1, in_features)`.
        weight: `(out_features, in_features)`, contiguous, with at least `BLOCK` rows a part.
        bias: `(out_features,)`.
    """
    batch, _, width = states.shape
    rows = weight.shape[0] // (parts * BLOCK) * BLOCK
    spread = parts * rows
    each = states.reshape(1, batch, width).expand(parts, batch, width)
    transposed = weight[:spread].view(parts, rows, width).transpose(1, 2)
    if bias is None:
        output = torch.bmm(each, transposed)
    else:
        output = torch.baddbmm(bias[:spread].view(parts, 1, rows), each, transposed)
    output = output.transpose(0, 1).reshape(batch, 1, spread)
    if spread == weight.shape[0]:
        return output
    rest = nn.functional.linear(states, weight[spread:], None if bias is None else bias[spread:])
    return torch.cat((output, rest), dim=-1)


class Linear(nn.Linear):
    """`nn.Linear`, and quick with one token for each sequence, in float32 on a CPU, where gradients are off."""

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        # First what is quick to ask and often not so.
        if (
            not torch.compiler.is_compiling()
            and hidden_states.dim() == 3
            and hidden_states.shape[1] == 1
            and not torch.is_grad_enabled()
            and torch.get_num_threads() > 1
            and (parts := self._parts(hidden_states)) > 1
        ):
            return product_by_rows(hidden_states, self.weight, self.bias, parts)
        return nn.functional.linear(hidden_states, self.weight, self.bias)

    def _parts(self, hidden_states: torch.Tensor) -> int:
        """How many parts to work the product out in; 1 if in one."""
        weight = self.weight
        if (
            hidden_states.shape[0] > LARGEST_BATCH
            or not weight.dtype == hidden_states.dtype == torch.float32
            or not weight.device.type == hidden_states.device.type == "cpu"
            or weight.numel() < SMALLEST_WEIGHT
            or type(weight) is not nn.Parameter  # quantised and distributed weights bring their own product
            or not weight.is_contiguous()
            or not torch.backends.mkl.is_available()
            or torch.is_autocast_enabled("cpu")
        ):
            return 1
        return min(torch.get_num_threads() * PARTS_PER_THREAD, weight.shape[0] // BLOCK)
