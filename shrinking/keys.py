r"""Fits the layers that read another layer's keys.

A map of keys that commutes with rotary position embeddings is one complex number for each head and frequency j. With
k_j = k[j] + i k[j + head_dim/2], the own keys are approximated as k ~ z s, where s are the keys of the source, so that

    q . k ~ q' . s,    q'_j = conj(z_j) q_j

which is an edit of q_proj. From there the weight of q_proj is trained for some steps on KL(A || A'), the divergence of
the layer's own attention weights from those with the source's keys. Nothing else of the model is run.
"""

from dataclasses import dataclass

import torch

from resformer.shrinking.calibration import Calibration

#: Blocks that scalars are fitted and heads assigned on, and blocks in one training step.
SCALAR_BLOCKS, BATCH = 2, 2
#: Learning rate, as a share of the root mean square of q_proj.
RATE = 0.2


@dataclass(frozen=True)
class KeyFit:
    """A reader's refitted query projection."""

    order: tuple[int, ...]  # group g of the reader reads head order[g] of the source
    weight: torch.Tensor  # of q_proj, query heads as in the reader's own checkpoint
    bias: torch.Tensor | None
    error: float  # held-out KL(A || A') per query head and token, in nats


def complex_scalars(own: torch.Tensor, source: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """z that minimises sum_s weight_s |own_s - z source_s|^2, `(..., head_dim / 2)`, complex.

    Args:
        own, source: keys, `(..., tokens, head_dim)`, rotated or not: z commutes with the rotation.
        weight: of each token, `(..., tokens)`.
    """
    k, s = as_complex(own), as_complex(source)
    norm = (weight[..., None] * s.abs().square()).sum(-2)
    return (weight[..., None] * k * s.conj()).sum(-2) / norm.clamp_min(torch.finfo(norm.dtype).tiny)


def as_complex(x: torch.Tensor) -> torch.Tensor:
    real, imaginary = x.float().unflatten(-1, (2, -1)).unbind(-2)
    return torch.complex(real, imaginary)


def fold_into_queries(queries: torch.Tensor, z: torch.Tensor) -> torch.Tensor:
    """conj(z) q, `(..., head_dim)`."""
    product = as_complex(queries) * z.conj()
    return torch.cat((product.real, product.imag), -1)


def key_costs(calibration: Calibration, n: int, sources: list[int]) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
    """Source -> (KL(A || A') of each group on each of its heads, `(groups, heads)`; z, `(groups, heads, head_dim/2)`).

    The divergences are those of the scalars, without training.
    """
    rows = calibration.fitted[:: max(1, len(calibration.fitted) // SCALAR_BLOCKS)][:SCALAR_BLOCKS]
    size = calibration.query_heads // calibration.groups
    projection = calibration.layers[n].self_attn.q_proj
    _, weights, keys, _ = calibration.attend(n, rows)
    queries = calibration.queries(n, rows, projection.weight, projection.bias)
    received = weights.float().sum(2).unflatten(1, (-1, size)).sum(2)  # rows, groups, tokens
    costs_of = {}
    for a in sources:
        shared = calibration.keys(a, rows)
        flat = [each.transpose(0, 1).flatten(1, 2) for each in (keys, shared)]
        z = complex_scalars(flat[0][:, None], flat[1][None], received.transpose(0, 1).flatten(1)[:, None])
        costs = torch.zeros(calibration.groups, calibration.groups)
        for head in range(calibration.groups):
            folded = fold_into_queries(queries, z[:, head].repeat_interleave(size, 0)[None, :, None])
            folded = calibration.rotated(n, folded.to(queries.dtype))
            scores = calibration.scores(n, folded, shared[:, head : head + 1])
            costs[:, head] = divergence(weights, scores).mean((0, 2)).view(-1, size).mean(1)
        costs_of[a] = costs, z
    return costs_of


def fit_keys(calibration: Calibration, n: int, a: int, order: list[int], z: torch.Tensor, steps: int) -> KeyFit:
    """Fits layer n to the keys of layer a; training that does not lower the held-out error is discarded.

    Args:
        order: group g reads head order[g] of the source.
        z: `(groups, head_dim / 2)`.
    """
    projection = calibration.layers[n].self_attn.q_proj
    size = calibration.query_heads // calibration.groups
    scalars = z.repeat_interleave(size, 0)

    def folded(parameter: torch.Tensor) -> torch.Tensor:
        by_head = parameter.detach().float().unflatten(0, (calibration.query_heads, -1))
        if parameter.dim() == 1:
            return fold_into_queries(by_head, scalars).flatten()
        return fold_into_queries(by_head.transpose(1, 2), scalars[:, None]).transpose(1, 2).flatten(0, 1)

    weight = folded(projection.weight)
    bias = None if projection.bias is None else folded(projection.bias)
    dtype = calibration.model.dtype

    def attend(rows: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """(rotated queries, shared keys, scores, A)"""
        queries = calibration.queries(n, rows, weight.to(dtype), None if bias is None else bias.to(dtype))
        queries = calibration.rotated(n, queries)
        with torch.no_grad():
            keys = calibration.keys(a, rows)[:, order].repeat_interleave(size, 1)
            return queries, keys, calibration.scores(n, queries, keys), calibration.weights(n, rows)

    def held_out_error() -> float:
        with torch.no_grad():
            attended = (attend([row])[2:] for row in calibration.held_out)
            errors = [divergence(weights, scores).mean() for scores, weights in attended]
            return float(torch.stack(errors).mean())

    untrained, untrained_error = weight, held_out_error()
    weight = untrained.clone().requires_grad_(True)
    rate = RATE * weight.detach().square().mean().sqrt().item()
    optimizer = torch.optim.Adam([weight], lr=rate, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: min(1, (step + 1) / 10) * (1 - step / (steps or 1))
    )
    generator = torch.Generator().manual_seed(n * calibration.config.num_hidden_layers + a)
    for _ in range(steps):
        picks = torch.randint(len(calibration.fitted), (BATCH,), generator=generator)
        queries, keys, scores, weights = attend([calibration.fitted[pick] for pick in picks])
        optimizer.zero_grad()
        # The gradient of KL(A || softmax(scores)) with respect to the scores is softmax(scores) - A.
        queries.backward((scores.softmax(-1) - weights) @ keys)
        optimizer.step()
        schedule.step()
    error = held_out_error()
    if not error < untrained_error:  # little text, or keys that the scalars alone fit
        weight, error = untrained, untrained_error
    return KeyFit(tuple(order), weight.detach().to(dtype), None if bias is None else bias.to(dtype), error)


def divergence(weights: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """KL(weights || softmax(scores)) for each token, `(rows, query heads, tokens)`."""
    weights = weights.float()
    # The score of a masked token may overflow to -inf, and 0 * -inf is NaN.
    logarithms = scores.float().log_softmax(-1).clamp_min(torch.finfo(torch.float32).min)
    return (torch.xlogy(weights, weights) - weights * logarithms).sum(-1)
