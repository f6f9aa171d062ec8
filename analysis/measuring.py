"""`analyze`: attention, value states and hidden states of a trained model, layer by layer, averaged over texts.

Definitions follow "Value Residual Learning" (arXiv 2410.17897), for attention concentration, value-state drains and
hidden-state peaks, and NeuTRENO (arXiv 2312.00751), for over-smoothing.
"""

import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, AttentionMaskInterface
from transformers.modeling_utils import AttentionInterface

from resformer.configuration.methods import method_of
from resformer.environment import usable_device
from resformer.errors import CheckpointError, one_line
from resformer.files import AsDict
from resformer.loading import load_config
from resformer.modeling.connecting import depth_mixing_matrix, value_mixing_matrix
from resformer.modeling.families import language_model_class

#: The name of `_attention` for Transformers' attention interface.
_IMPLEMENTATION = "resformer_analysis"
#: What is measured in each layer of each text: see docs/comparing.md.
QUANTITIES = (
    "entropy first_importance importance_ratio first_value_norm other_value_norm value_norm_ratio first_hidden_norm "
    "other_hidden_norm hidden_norm_ratio similarity"
).split()


@dataclass(frozen=True)
class Analysis(AsDict):
    """The quantities of one model. Means and standard deviations are over texts, all with the same weight."""

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
    quantities: dict[str, dict[str, list[float]]]  # name in QUANTITIES -> "mean" and "deviation", per layer
    uniform: dict[str, float]  # the quantities of importance under uniform attention to all visible tokens
    value_mixing_matrix: list[list[float]]  # (N, N); NaN where a gate decides for each token
    depth_mixing_matrix: list[list[float]]  # (N, N + 1)

    def mean(self, quantity: str) -> list[float]:
        """Per layer."""
        return self.quantities[quantity]["mean"]

    @property
    def warnings(self) -> list[str]:
        return [f"{self.name}: texts of fewer than two tokens left out: {self.skipped}"] if self.skipped else []


def analyze(
    model: PreTrainedModel | str | Path,
    texts: Iterable[str | Sequence[int]],
    *,
    tokenizer: PreTrainedTokenizerBase | str | Path | None = None,
    max_tokens: int = 512,
    name: str | None = None,
    device: str | torch.device | None = None,
    dtype: torch.dtype = torch.float32,
) -> Analysis:
    """Measures `QUANTITIES` in each layer, one text at a time.

    Args:
        model: a model, or the folder or Hub id of a checkpoint, whose `layers[i].self_attn` go through Transformers'
            attention interface. Checkpoints are read from safetensors only, and none of their code is run.
        texts: strings, or sequences of token ids; longer ones than `max_tokens` or the model's positions are cut.
        tokenizer: for the strings; default: the checkpoint's.
        name: in reports; default: the last part of the checkpoint's path or id.
        device, dtype: of a checkpoint; default: an accelerator if there is one, float32.

    Raises:
        CheckpointError: the checkpoint cannot be loaded, is not such a decoder, or gives NaN or infinity.
        ValueError: no text has two tokens, there are strings but no tokenizer, `max_tokens` is below two, or `device`
            cannot be used.
    """
    if max_tokens < 2:
        raise ValueError(f"max_tokens={max_tokens}: a first token and another one are needed.")
    checkpoint = None
    if not isinstance(model, PreTrainedModel):
        checkpoint = str(model)
        tokenizer = checkpoint if tokenizer is None else tokenizer
        model = _load(checkpoint, dtype, device)
    max_tokens = min(max_tokens, getattr(model.config.get_text_config(), "max_position_embeddings", None) or max_tokens)
    name = name or (os.path.basename(os.path.abspath(checkpoint)) if checkpoint else type(model).__name__)
    base = model.get_decoder()
    layers = list(getattr(base, "layers", []))
    if not layers or not all(hasattr(layer, "self_attn") for layer in layers):
        raise CheckpointError(f"{name}: {type(base).__name__} has no `layers` that each have a `self_attn`.")
    per_text: list[np.ndarray] = []  # (layers, quantities) each
    lengths: list[int] = []
    skipped, loaded = 0, cast(Any, tokenizer)
    with _measured(model, layers) as measure:
        for text in texts:
            if isinstance(text, str):
                if loaded is None:
                    raise ValueError("A model in memory needs tokenizer= for texts that are strings.")
                if isinstance(loaded, (str, Path)):  # texts of token ids need none
                    from resformer.training.tokenizers import load_tokenizer

                    remedy = "name another with --tokenizer (tokenizer=)"
                    loaded = load_tokenizer(loaded, model.config.get_text_config().vocab_size, remedy)
                text = loaded(text, truncation=True, max_length=max_tokens)["input_ids"]
            ids = list(text[:max_tokens])
            if len(ids) < 2:
                skipped += 1
                continue
            values = measure(ids)
            if not np.isfinite(values).all():
                layer, which = np.argwhere(~np.isfinite(values))[0]
                raise CheckpointError(
                    f"{name}: {QUANTITIES[which]} of layer {layer} is {values[layer, which]} on text "
                    f"{len(lengths) + skipped}; is it a trained model, and is its dtype wide enough?"
                )
            per_text.append(values)
            lengths.append(len(ids))
    if not lengths:
        raise ValueError(f"{name}: there is no text of at least two tokens ({skipped} shorter ones).")
    stacked = np.stack(per_text)
    deviation = stacked.std(axis=0, ddof=1) if len(lengths) > 1 else np.full(stacked.shape[1:], np.nan)
    return Analysis(
        name=name,
        checkpoint=checkpoint,
        model_type=model.config.model_type,
        method=method_of(model.config),
        layers=len(layers),
        parameters=model.num_parameters(),
        dtype=str(model.dtype).removeprefix("torch."),
        device=model.device.type,
        texts=len(lengths),
        tokens=sum(lengths),
        skipped=skipped,
        quantities={
            quantity: {"mean": stacked[..., i].mean(axis=0).tolist(), "deviation": deviation[:, i].tolist()}
            for i, quantity in enumerate(QUANTITIES)
        },
        uniform=dict(
            zip(QUANTITIES[:3], np.mean([_uniform(length) for length in lengths], axis=0).tolist(), strict=True)
        ),
        value_mixing_matrix=value_mixing_matrix(model).tolist(),
        depth_mixing_matrix=depth_mixing_matrix(model).tolist(),
    )


def read_texts(files: Iterable[Path], *, texts: int, max_tokens: int) -> Iterator[str]:
    """The first `texts` texts of UTF-8 files, cut at line ends, each of 8 characters a token or a file's last.

    Raises:
        CheckpointError: a file cannot be read as text.
    """
    return islice((text for file in files for text in _cut(file, 8 * max_tokens)), texts)


def _cut(file: Path, size: int) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8") as opened:
            while text := opened.read(size):
                yield text + opened.readline(size)
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{file}: cannot be read as text: {error}") from error


def standard_texts(texts: int) -> Iterator[str]:
    """The first `texts` held-out source files of Python's standard library."""
    from resformer.training.data import STANDARD_HELD_OUT, is_held_out, standard_library  # imports `datasets`

    held_out = (file["text"] for file in standard_library() if is_held_out(file["group"], STANDARD_HELD_OUT))
    return islice(held_out, texts)


def _importance_quantities(importance: torch.Tensor) -> torch.Tensor:
    """Entropy, the first token's share, and its ratio to the others' mean, from a', `(tokens,)`."""
    return torch.stack([torch.special.entr(importance).sum(), importance[0], importance[0] / importance[1:].mean()])


def _norm_quantities(states: torch.Tensor) -> torch.Tensor:
    """The norm of the first token's state, the others' mean norm, and their ratio, from `(tokens, width)`."""
    norms = states.norm(dim=-1)
    return torch.stack([norms[0], norms[1:].mean(), norms[0] / norms[1:].mean()])


def _similarity(states: torch.Tensor) -> torch.Tensor:
    """Mean cosine between different tokens' states, `(tokens, width)`.

    |sum of unit vectors|^2 is the sum of all cosines, each pair twice, and each token's with itself.
    """
    tokens = len(states)
    units = nn.functional.normalize(states, dim=-1)
    return (units.sum(dim=0).square().sum() - units.square().sum()) / (tokens * (tokens - 1))


def _uniform(tokens: int) -> np.ndarray:
    """`_importance_quantities` if token i gave 1/(i+1) to itself and to each token before it."""
    received = (1 / torch.arange(1, tokens + 1, dtype=torch.float64)).flip(0).cumsum(0).flip(0)
    return _importance_quantities(received / tokens).numpy()


def _attention(
    module: nn.Module,
    *inputs: Any,
    measured: list[tuple[int, torch.Tensor]] | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, torch.Tensor]:
    """What the family's eager attention returns of queries, keys and values, `(batch, heads, tokens, head_dim)`.

    Adds to `measured`, with the layer's index, the quantities of a_j = (1/l) sum_i A_ij, the attention of l queries to
    token j averaged over heads, `(tokens,)`, and of the value states, those of the first sequence.
    """
    attention = type(getattr(module, "_module", module))  # of a layer with connections it is behind another
    own = (vars(sys.modules[each.__module__]).get("eager_attention_forward") for each in attention.__mro__)
    eager = next(filter(None, own), None)
    if eager is None:
        raise NotImplementedError("its attention has no eager form to be analysed")
    output, weights = eager(module, *inputs, **kwargs)
    if measured is not None:
        received = weights[0].mean(dim=(0, 1), dtype=torch.promote_types(weights.dtype, torch.float32))
        share = received / received.sum()
        states = inputs[2][0].transpose(0, 1).flatten(1).to(share.dtype)
        layer: Any = module.layer_idx
        measured.append((layer, torch.cat([_importance_quantities(share), _norm_quantities(states)])))
    return output, weights


AttentionInterface.register(_IMPLEMENTATION, _attention)
AttentionMaskInterface.register(_IMPLEMENTATION, ALL_MASK_ATTENTION_FUNCTIONS["eager"])


@contextmanager
def _measured(model: PreTrainedModel, layers: Sequence[nn.Module]) -> Iterator[Callable[[list[int]], np.ndarray]]:
    """A function from token ids to the quantities, `(layers, quantities)`."""
    base, was, training = model.get_decoder(), model.config._attn_implementation, model.training
    hidden: dict[int, torch.Tensor] = {}

    def take_hidden(layer: int, module: nn.Module, args: Any, output: Any) -> None:
        states = (output if isinstance(output, torch.Tensor) else output[0])[0]
        if states.dim() != 2:
            raise NotImplementedError("its residual stream has several lanes")
        states = states.to(torch.promote_types(states.dtype, torch.float32))
        hidden[layer] = torch.cat([_norm_quantities(states), _similarity(states)[None]])

    def measure(ids: list[int]) -> np.ndarray:
        measured: list[tuple[int, torch.Tensor]] = []
        with torch.inference_mode():
            base(
                input_ids=torch.tensor([ids], device=base.device),
                attention_mask=torch.ones(1, len(ids), dtype=torch.long, device=base.device),
                use_cache=False,
                measured=measured,
            )
        if len(measured) > len(layers):
            raise NotImplementedError("its layers attend more than once in a pass")
        attention = dict(measured)
        if missing := [n for n in range(len(layers)) if n not in attention]:
            raise CheckpointError(
                f"{type(model).__name__}: the attention of layer {missing[0]} does not go through Transformers' "
                "attention interface."
            )
        rows = [torch.cat([attention[n].cpu(), hidden[n].cpu()]) for n in range(len(layers))]
        return np.stack([row.double().numpy() for row in rows])

    hooks = [layer.register_forward_hook(partial(take_hidden, n)) for n, layer in enumerate(layers)]
    try:
        model.eval()
        model.set_attn_implementation(_IMPLEMENTATION)
        yield measure
    except NotImplementedError as error:
        raise CheckpointError(f"{type(model).__name__}: {one_line(error)}.") from error
    finally:
        for hook in hooks:
            hook.remove()
        model.set_attn_implementation(was)
        model.train(training)


def _load(checkpoint: str, dtype: torch.dtype, device: str | torch.device | None) -> PreTrainedModel:
    device = usable_device(device)
    try:
        config = load_config(checkpoint)
        model, loading = language_model_class(config).from_pretrained(
            checkpoint, config=config, dtype=dtype, use_safetensors=True, output_loading_info=True
        )
    except (ImportError, CheckpointError):
        raise
    except Exception as error:  # Transformers and safetensors raise many types of exceptions for a bad file
        raise CheckpointError(f"{checkpoint}: cannot be loaded: {one_line(error)}") from error
    prefix = f"{model.base_model_prefix}."  # the head, which a classifier has not, is not run
    if missing := sorted(name for name in loading["missing_keys"] if name.startswith(prefix)):
        raise CheckpointError(f"{checkpoint}: {missing[0]} is missing, with {len(missing) - 1} other tensors.")
    return model.to(device)
