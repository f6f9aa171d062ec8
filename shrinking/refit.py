r"""Least squares of an attention output on another layer's values.

Layer n has the attention weights A^i and the values V^g, where query head i belongs to group g(i). Its output is

    y = sum_i A^i V^g(i) W_O^i            tokens x hidden_size

A reader attends to the values S of an earlier layer instead. Its group g reads the source's head order[g]:

    y ~ sum_i Z^i W^i,    Z^i = A^i S^order[g(i)]

First each group is fitted by itself, V^g ~ S^h M: the head-wise fold, W^i = M W_O^i. It says which source's head suits
which group, since groups can be permuted freely. Then all of W is solved for at once, by ridge towards the fold.
"""

from dataclasses import dataclass

import torch

#: Ridge strengths to choose from, as shares of the mean square of a regressor.
STRENGTHS = (1e-8, 1e-4, 1e-3, 1e-2, 3e-2, 1e-1, 3e-1, 1.0)


@dataclass
class Moments:
    """The sums that a regression of Y on Z needs: the rows themselves are not kept."""

    gram: torch.Tensor  # Z^T Z, (inputs, inputs)
    cross: torch.Tensor  # Z^T Y, (inputs, outputs)
    square: torch.Tensor  # sum of Y^2, ()

    @classmethod
    def of(cls, z: torch.Tensor, y: torch.Tensor) -> "Moments":
        """Args: z `(..., rows, inputs)`, y `(..., rows, outputs)`."""
        z_t = z.transpose(-1, -2)
        return cls(z_t @ z, z_t @ y, y.square().sum((-1, -2)))

    def __add__(self, other: "Moments") -> "Moments":
        return Moments(self.gram + other.gram, self.cross + other.cross, self.square + other.square)

    def error(self, weight: torch.Tensor) -> torch.Tensor:
        """The sum of (Y - Z W)^2."""
        weight = weight.to(self.gram.dtype)
        return self.square - 2 * (weight * self.cross).sum((-1, -2)) + (weight * (self.gram @ weight)).sum((-1, -2))


def ridge(moments: Moments, prior: torch.Tensor, strength: float) -> torch.Tensor:
    """W that minimises |Y - Z W|^2 + penalty |W - prior|^2, in float64.

    Args:
        prior: `(..., inputs, outputs)`.
        strength: the penalty as a share of the mean of the Gram matrix's diagonal.
    """
    gram, cross, prior = (each.double() for each in (moments.gram, moments.cross, prior))
    penalty = strength * gram.diagonal(dim1=-2, dim2=-1).mean(-1).clamp_min(torch.finfo(gram.dtype).tiny)
    eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device) * penalty[..., None, None]
    # A Gram matrix of fewer rows than inputs is singular but for the penalty.
    factor, failed = torch.linalg.cholesky_ex(gram + eye)
    residual = cross - gram @ prior
    if failed.any():
        return (
            prior + torch.linalg.lstsq(gram + eye, residual, driver="gelsd" if gram.device.type == "cpu" else None)[0]
        )
    return prior + torch.cholesky_solve(residual, factor)


def fit(train: Moments, held_out: Moments, prior: torch.Tensor) -> tuple[torch.Tensor, float, float]:
    """(the weight, its ridge strength, its error on held-out rows): the strength with the least held-out error."""
    candidates = [(ridge(train, prior, strength), strength) for strength in STRENGTHS]
    errors = [float(held_out.error(weight)) for weight, _ in candidates]
    best = min(range(len(errors)), key=errors.__getitem__)
    return *candidates[best], errors[best]


def fold_heads(moments: Moments, output: torch.Tensor, strength: float = 1e-3) -> tuple[torch.Tensor, torch.Tensor]:
    """Fits every group on every head of the source.

    Args:
        moments: of A^i V^g(i) on A^i S^h, `(query heads, heads, ...)`.
        output: W_O^i, `(query heads, head_dim, hidden_size)`.

    Returns:
        M, `(groups, heads, inputs, head_dim)`, and the squared errors `(groups, heads)`, each query head's weighted
        by the mean square of its W_O^i.
    """
    size = moments.gram.shape[0] // moments.gram.shape[1]  # query heads in a group
    weight = output.square().mean((-1, -2)).to(moments.square.dtype)[:, None]

    def by_group(each: torch.Tensor) -> torch.Tensor:
        return each.unflatten(0, (-1, size)).sum(1)

    grouped = Moments(by_group(moments.gram), by_group(moments.cross), by_group(moments.square))
    maps = ridge(grouped, torch.zeros_like(grouped.cross), strength)
    return maps, by_group(moments.error(maps.repeat_interleave(size, 0)) * weight)


def assign_heads(costs: torch.Tensor) -> list[int]:
    """order: group g reads source head order[g], each head once, at the least total cost."""
    from scipy.optimize import linear_sum_assignment

    return linear_sum_assignment(costs.cpu().numpy())[1].tolist()
