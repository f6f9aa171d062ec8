"""Weighted sums of states, as the connections need them."""

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.autograd import forward_ad
from transformers.utils.generic import maybe_autocast


def weighted_sum(states: Sequence[torch.Tensor], weights: torch.Tensor | Sequence[Any]) -> torch.Tensor:
    """Returns sum_k weights[k] states[k], in the dtype of the states.

    A weight of exactly 0 adds nothing and a weight of exactly 1 changes nothing, for finite states; -0 becomes +0 where
    0 is added to it.

    Args:
        states: K >= 1 tensors of one shape and dtype.
        weights: K numbers or scalars, of any floating dtype; tensors get gradients. A tensor `(K, ...)` holds K that
            broadcast to the states.
    """
    if isinstance(weights, torch.Tensor):
        # Scalars take part in products in their own dtype, without a copy.
        weights = (weights if weights.dim() == 1 else weights.to(states[0])).unbind()
    total = states[0] * weights[0]
    for state, weight in zip(states[1:], weights[1:], strict=True):  # in place: autograd saves no sum
        if isinstance(weight, torch.Tensor):
            total.addcmul_(state, weight)
        else:
            total.add_(state, alpha=weight)
    return total


def weighted_sums(states: Sequence[torch.Tensor], weights: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields sum_k weights[.., s, k] states[k] of each s.

    Args:
        states: K tensors `(.., width)` of one shape and dtype.
        weights: `(.., sums, K)`.
    """
    if products_pay(states):
        return iter(Products.apply(weights, *states).unbind(-2))
    return (weighted_sum(states, each.movedim(-1, 0).unsqueeze(-1)) for each in weights.unbind(-2))


def plus_outer(states: torch.Tensor, weights: torch.Tensor, state: torch.Tensor) -> torch.Tensor:
    """Returns states[k] + weights[.., k] state of each k.

    Args:
        states: `(.., K, width)`.
        weights: `(.., K)`, or `(K,)`.
        state: `(.., width)`.
    """
    if not one_function_pays(states):
        return torch.addcmul(states, weights.unsqueeze(-1), state.unsqueeze(-2))
    columns = weights.expand(states.shape[:-1]).reshape(-1, states.shape[-2], 1)
    return torch.baddbmm(states.flatten(0, -3), columns, state.reshape(-1, 1, state.shape[-1])).view_as(states)


def is_ordinary(states: Sequence[torch.Tensor], weights: Iterable[torch.Tensor] = ()) -> bool:
    """Whether these are plain tensors on one device, the states of one dtype, outside of torch.compile, torch.jit
    tracing and transforms.

    Compilers fuse plain operations by themselves, and tracers and transforms do not support Python autograd functions.
    """
    tensors = [*states, *weights]
    return not (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._are_functorch_transforms_active()
        or len({tensor.device for tensor in tensors}) > 1
        or len({state.dtype for state in states}) > 1
        or not {*map(type, tensors)} <= {torch.Tensor, nn.Parameter}
        or forward_ad._current_level >= 0  # tangents may begin later
    )


def is_differentiated(gradient: torch.Tensor) -> bool:
    """Within a backward pass, whether it is differentiated again or has a batch of gradients: `create_graph=True`,
    `is_grads_batched=True`. Then nothing may be written in place."""
    batched = torch._C._are_functorch_transforms_active() or "Batched" in repr(torch._C._dispatch_keys(gradient))
    return torch.is_grad_enabled() or batched


def derivatives(
    function: Callable[..., Sequence[torch.Tensor]],
    inputs: Sequence[torch.Tensor],
    gradients: Sequence[torch.Tensor | None],
) -> tuple[torch.Tensor | None, ...]:
    """Within a backward pass that `is_differentiated`, the gradients of `inputs` by those of `function`'s outputs, as
    autograd makes them: they have gradients too. `None` for an input that needs none."""
    with torch.enable_grad():
        inputs = [each.view_as(each) for each in inputs]  # one may be made of another, through which nothing flows here
        needed = [each for each in inputs if each.requires_grad]
        pairs = zip(function(*inputs), gradients, strict=True)
        outputs = {output: given for output, given in pairs if output.requires_grad and given is not None}
        options = {"create_graph": True, "allow_unused": True}
        made = iter(torch.autograd.grad([*outputs], needed, [*outputs.values()], **options) if outputs else ())
    return tuple(next(made, None) if each.requires_grad else None for each in inputs)


def products_pay(states: Sequence[torch.Tensor]) -> bool:
    """Whether one product for all sums costs less than each by itself: it moves a quarter of the bytes, by small
    matrices, many of which are slow on CPUs. Compilers fuse sums."""
    return is_ordinary(states) and (not states[0].is_cpu or math.prod(states[0].shape[:-1]) <= 256)


def one_function_pays(state: torch.Tensor) -> bool:
    """Whether a function with few kernels backward costs less than a sum with few forward; on CPUs it does not, and
    compilers fuse sums."""
    return torch.is_grad_enabled() and not state.is_cpu and is_ordinary([state])


def mean_square(states: torch.Tensor) -> torch.Tensor:
    """Returns the mean of the squares over the last dimension, `(.., 1)`, in float32 or wider: RMSNorm's."""
    is_one = torch.is_grad_enabled() and is_ordinary([states])
    made: torch.Tensor = (MeanSquare.apply if is_one else _mean_square)(states)
    return made


def _mean_square(states: torch.Tensor) -> torch.Tensor:
    dtype = torch.promote_types(states.dtype, torch.float32)  # without a copy in it
    return torch.linalg.vector_norm(states, dim=-1, keepdim=True, dtype=dtype).square() / states.shape[-1]


class MeanSquare(torch.autograd.Function):
    """`mean_square`, whose derivative by autograd is a dozen kernels on copies of the states in float32."""

    @staticmethod
    def forward(ctx: Any, states: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(states)
        return _mean_square(states)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        (states,) = ctx.saved_tensors
        result: torch.Tensor = states * (gradient * (2 / states.shape[-1])).to(states.dtype)
        return result


class Products(torch.autograd.Function):
    """`weighted_sums` by a matrix product for each token. What is saved is the states."""

    @staticmethod
    def forward(ctx: Any, weights: torch.Tensor, *states: torch.Tensor) -> torch.Tensor:
        """Returns `(.., sums, width)`."""
        ctx.save_for_backward(weights, *states)
        with maybe_autocast(device_type=weights.device.type, enabled=False):
            return weights @ torch.stack(states, dim=-2)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, ...]:
        weights, *states = ctx.saved_tensors
        with maybe_autocast(device_type=weights.device.type, enabled=False):
            of_weights = gradient @ torch.stack(states, dim=-2).mT
            return of_weights, *(weights.mT @ gradient).unbind(-2)
