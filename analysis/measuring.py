"""`analyze`: what happens between the tokens of a trained model, layer by layer, over a stream of texts.

After "Value Residual Learning" (arXiv 2410.17897): attention concentration, value-state drains, hidden-state peaks,
and the over-smoothing that NeuTRENO (arXiv 2312.00751) is about.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from resformer.analysis.attention import IMPLEMENTATION
from resformer.analysis.running import Running
from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import method_of
from resformer.errors import CheckpointError, brief

__all__ = ["DEFINITIONS", "Analysis", "analyze"]

#: What is measured in each layer of each text.
DEFINITIONS = {
    "entropy": "e = -sum_j a'_j ln a'_j in nats; low means that attention is concentrated on few tokens. Token "
    "importance: a_j = (1/l) sum_i A_ij over the l queries, heads averaged; a' = a / sum a.",
    "first_importance": "a'_0, the share of the first token in what all tokens receive.",
    "importance_ratio": "a'_0 over the mean a'_j of the other tokens.",
    "first_value_norm": "Euclidean norm of the first token's value state V' as the layer attends to it (after value "
    "mixing or sharing), all key/value heads side by side.",
    "other_value_norm": "The mean of that norm over the other tokens.",
    "value_norm_ratio": "first_value_norm over other_value_norm; small means a value-state drain.",
    "first_hidden_norm": "Euclidean norm of the first token's hidden state X_{n+1}, the raw output of block n.",
    "other_hidden_norm": "The mean of that norm over the other tokens.",
    "hidden_norm_ratio": "first_hidden_norm over other_hidden_norm; large means a hidden-state peak.",
    "similarity": "Mean cosine between the hidden states X_{n+1} of different tokens; 1 means over-smoothing.",
}
_NAMES = list(DEFINITIONS)
#: So many positions have their importance reported one by one.
_POSITIONS = 64


@dataclass(frozen=True)
class Analysis:
    """What the texts show of one model. Means and deviations are over texts, each of them counting alike."""

    name: str
    checkpoint: str | None  # a folder or a Hub id; None for a model in memory
    model_type: str
    method: str | None  # the named method of its connections; "transformer" for another family
    layers: int
    parameters: int
    dtype: str
    device: str
    texts: int
    tokens: int
    skipped: int  # texts of fewer than two tokens
    quantities: dict[str, dict[str, list[float]]]  # name in DEFINITIONS -> "mean" and "deviation", per layer
    importance_by_position: list[list[float]]  # per layer, the mean a'_j of the first 64 positions
    uniform: dict[str, float]  # the importance's quantities if all attended alike to all that they may see
    value_mixing_matrix: list[list[float]]  # (N, N); NaN where a gate decides
    depth_mixing_matrix: list[list[float]]  # (N, N + 1)
    neutreno_lambda: float
    shares: bool  # layers read others' keys or values

    def mean(self, quantity: str) -> list[float]:
        """Per layer."""
        return self.quantities[quantity]["mean"]

    def as_dict(self) -> dict[str, Any]:
        """For JSON, which has no NaN: `None` in its place."""
        return _without_nan(asdict(self))

    @property
    def warnings(self) -> list[str]:
        told = f"{self.name}: texts left out for having fewer than two tokens: {self.skipped}"
        return [told] if self.skipped else []


def analyze(
    model: PreTrainedModel | str | Path,
    texts: Iterable[str | Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    max_tokens: int = 512,
    name: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
    progress: Callable[[], object] = lambda: None,
) -> Analysis:
    """Measures `DEFINITIONS` in each layer, a text at a time.

    Memory does not grow with the number of texts, nor with the square of their length.

    Args:
        model: a model, or the folder or Hub id of a checkpoint: ResFormer's, or any decoder whose `layers[i].self_attn`
            goes through Transformers' attention interface. Of a checkpoint, safetensors alone are read and no code is
            run.
        texts: strings, or token ids as they are.
        tokenizer: of the strings; of a checkpoint by default its own.
        max_tokens: the rest of a text is left out.
        name: what reports call it; the checkpoint's last part by default.
        device, dtype: where and in what a checkpoint is run; an accelerator if there is one, float32.
        progress: called after each text.

    Raises:
        CheckpointError: it cannot be loaded, is no such decoder, or gives numbers that are none.
        ValueError: there is no text of two tokens, a string and no tokenizer, or `max_tokens` is below two.
    """
    if max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens}: a first token and another one are needed.")
    checkpoint = None
    if not isinstance(model, PreTrainedModel):
        checkpoint = str(model)
        tokenizer = checkpoint if tokenizer is None else tokenizer
        model = _load(checkpoint, dtype, device)
    if isinstance(tokenizer, (str, Path)):
        tokenizer = _LazyTokenizer(str(tokenizer))
    name = name or (os.path.basename(os.path.normpath(checkpoint)) if checkpoint else type(model).__name__)
    base = model.base_model
    layers = _layers(base, name)
    values, positions, uniform = Running(len(layers), len(_NAMES)), Running(len(layers), _POSITIONS), Running(3)
    count = tokens = skipped = 0
    with _measured(model, layers) as measure:
        for text in texts:
            ids = _ids(text, tokenizer, max_tokens)
            if len(ids) < 2:
                skipped += 1
                continue
            measured, importance = measure(ids)
            if not np.isfinite(measured).all():
                layer, which = np.argwhere(~np.isfinite(measured))[0]
                raise CheckpointError(
                    f"{name}: {_NAMES[which]} of layer {layer} is {measured[layer, which]} on text {count + skipped}; "
                    "is it a trained model, and is its dtype wide enough?"
                )
            values.add(measured)
            positions.add(importance)
            uniform.add(_uniform(len(ids)))
            count, tokens = count + 1, tokens + len(ids)
            progress()
    if not count:
        raise ValueError(f"{name}: there is no text of at least two tokens ({skipped} shorter ones).")
    config = model.config
    ours = isinstance(config, ResFormerConfig)
    plain = torch.eye(len(layers), len(layers) + 1).roll(1, dims=1)
    return Analysis(
        name=name,
        checkpoint=checkpoint,
        model_type=config.model_type,
        method=method_of(config) if ours else "transformer",
        layers=len(layers),
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        texts=count,
        tokens=tokens,
        skipped=skipped,
        quantities={
            quantity: {"mean": mean.tolist(), "deviation": deviation.tolist()}
            for quantity, mean, deviation in zip(_NAMES, values.mean.T, values.deviation().T, strict=True)
        },
        importance_by_position=positions.mean[:, positions.count > 0].tolist(),
        uniform=dict(zip(_NAMES[:3], uniform.mean.tolist(), strict=True)),
        value_mixing_matrix=(base.value_mixing_matrix() if ours else torch.eye(len(layers))).tolist(),
        depth_mixing_matrix=(base.depth_mixing_matrix() if ours else plain).tolist(),
        neutreno_lambda=config.neutreno_lambda if ours else 0.0,
        shares=ours and (config.value_sources is not None or config.key_sources is not None),
    )


def of_importance(importance: torch.Tensor) -> torch.Tensor:
    """Entropy, share of the first token, and its ratio to the others' mean, of a', `(tokens,)`."""
    return torch.stack([torch.special.entr(importance).sum(), importance[0], importance[0] / importance[1:].mean()])


def of_norms(states: torch.Tensor) -> torch.Tensor:
    """Norm of the first token's state, mean norm of the others', and their ratio, of `(tokens, width)`."""
    norms = states.norm(dim=-1)
    return torch.stack([norms[0], norms[1:].mean(), norms[0] / norms[1:].mean()])


def similarity(states: torch.Tensor) -> torch.Tensor:
    """Mean cosine between different tokens' states, `(tokens, width)`: |sum of unit vectors|^2 has each pair twice."""
    tokens = len(states)
    units = nn.functional.normalize(states, dim=-1)
    return (units.sum(dim=0).square().sum() - units.square().sum()) / (tokens * (tokens - 1))


def _uniform(tokens: int) -> np.ndarray:
    """`of_importance` if token i gave 1/(i+1) to itself and each of those before it."""
    received = (1 / torch.arange(1, tokens + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)
    return of_importance(received / tokens).numpy()


@contextmanager
def _measured(
    model: PreTrainedModel, layers: Sequence[nn.Module]
) -> Iterator[Callable[[list[int]], tuple[np.ndarray, np.ndarray]]]:
    """A function from token ids to the quantities, `(layers, quantities)`, and the first positions' importance."""
    base, was, training = model.base_model, model.config._attn_implementation, model.training
    attention: dict[int, torch.Tensor] = {}
    hidden: dict[int, torch.Tensor] = {}
    shares: dict[int, torch.Tensor] = {}

    def take_attention(layer: int, importance: torch.Tensor, value: torch.Tensor) -> None:
        share = importance[0] / importance[0].sum()
        states = value[0].transpose(0, 1).flatten(1).to(share.dtype)
        attention[layer] = torch.cat([of_importance(share), of_norms(states)])
        shares[layer] = share[:_POSITIONS]

    def take_hidden(layer: int, output: Any) -> None:
        states = (output if isinstance(output, torch.Tensor) else output[0])[0]
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        hidden[layer] = torch.cat([of_norms(states), similarity(states)[None]])

    def measure(ids: list[int]) -> tuple[np.ndarray, np.ndarray]:
        with torch.inference_mode():
            base(
                input_ids=torch.tensor([ids], device=base.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=base.device),
                use_cache=False,
                importance_taker=take_attention,
            )
        if missing := [n for n in range(len(layers)) if n not in attention]:
            raise CheckpointError(
                f"{type(model).__name__}: the attention of layer {missing[0]} does not go through Transformers' "
                "attention interface."
            )
        rows = [torch.cat([attention[n].cpu(), hidden[n].cpu()]).double() for n in range(len(layers))]
        return torch.stack(rows).numpy(), torch.stack([shares[n].cpu().double() for n in range(len(layers))]).numpy()

    hooks = [
        layer.register_forward_hook(lambda module, args, output, n=n: take_hidden(n, output))
        for n, layer in enumerate(layers)
    ]
    try:
        model.eval()
        model.set_attn_implementation(IMPLEMENTATION)
        yield measure
    except NotImplementedError as error:
        raise CheckpointError(f"{type(model).__name__}: {brief(error)}.") from error
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(was)
        model.train(training)


def _layers(base: nn.Module, name: str) -> list[nn.Module]:
    layers = list(getattr(base, "layers", []))
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
        raise CheckpointError(f"{name}: {type(base).__name__} has no `layers` that each have a `self_attn`.")
    return layers


def _load(checkpoint: str, dtype: torch.dtype, device: str | torch.device | None) -> PreTrainedModel:
    try:
        model, loading = AutoModelForCausalLM.from_pretrained(
            checkpoint, dtype=dtype, use_safetensors=True, trust_remote_code=False, output_loading_info=True
        )
    except ImportError:
        raise
    except Exception as error:  # Transformers and safetensors raise nearly anything for a bad file
        raise CheckpointError(f"{checkpoint}: cannot be loaded: {brief(error)}") from error
    if missing := sorted(loading["missing_keys"]):
        raise CheckpointError(f"{checkpoint}: {missing[0]} is missing, with {len(missing) - 1} other tensors.")
    return model.to(device or torch.accelerator.current_accelerator(check_available=True) or "cpu")


class _LazyTokenizer:
    """A checkpoint's tokenizer, loaded at the first string: token ids need none."""

    def __init__(self, source: str):
        self.source = source
        self._loaded: PreTrainedTokenizerBase | None = None

    def __call__(self, text: str, **kwargs: Any) -> Any:
        if self._loaded is None:
            try:
                self._loaded = AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)
            except Exception as error:  # as above
                raise CheckpointError(
                    f"{self.source}: has no tokenizer that Transformers reads: {brief(error)} Name another one's with "
                    "--tokenizer (tokenizer=)."
                ) from error
        return self._loaded(text, **kwargs)


def _ids(text: str | Sequence[int], tokenizer: Callable[..., Any] | None, max_tokens: int) -> list[int]:
    if not isinstance(text, str):
        return list(text[:max_tokens])
    if tokenizer is None:
        raise ValueError("A model in memory needs tokenizer= for texts that are strings.")
    return tokenizer(text, truncation=True, max_length=max_tokens)["input_ids"]


def _without_nan(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nan(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_without_nan(entry) for entry in value]
    return None if isinstance(value, float) and value != value else value
