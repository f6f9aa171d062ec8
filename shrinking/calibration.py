"""Runs a plain model on calibration text, a layer at a time, and compares a student with it."""

import math
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from copy import deepcopy
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from transformers.masking_utils import LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from resformer.configuration import ResFormerConfig
from resformer.files import writing
from resformer.modeling import ResFormerForCausalLM
from resformer.modeling.versions import CACHE

if TYPE_CHECKING:
    from resformer.shrinking.keys import KeyFit

Progress = Callable[[int], object]

#: Every so many blocks, one is held out of the fits.
HELD_OUT = 5


class Calibration:
    """A plain model and the input of each of its layers on the calibration text.

    Attributes:
        model: with eager attention, so that it returns the attention weights.
        blocks: token ids, `(blocks, tokens)`.
        hidden: X_0 .. X_N, each `(blocks, tokens, hidden_size)`, in a temporary file.
        fitted, held_out: the blocks that weights are fitted on, and those that settings are chosen on.
    """

    def __init__(self, model: ResFormerForCausalLM, blocks: torch.Tensor, hidden: list[torch.Tensor]):
        self.model, self.blocks, self.hidden = model, blocks, hidden
        self.layers: Any = model.model.layers
        config: Any = model.config
        self.config = config
        self.groups: int = config.num_key_value_heads
        self.head_dim: int = config.head_dim
        self.query_heads: int = config.num_attention_heads
        self.held_out = list(range(HELD_OUT - 1, len(blocks), HELD_OUT))
        self.fitted = [row for row in range(len(blocks)) if row % HELD_OUT != HELD_OUT - 1]
        example = torch.empty(1, blocks.shape[1], config.hidden_size, dtype=model.dtype, device=model.device)
        positions = torch.arange(blocks.shape[1], device=model.device)[None]
        self.position_embeddings = model.model.rotary_emb(example, position_ids=positions)
        self.masks = {
            kind: LAYER_PATTERN_TO_MASK_FUNCTION_MAPPING[kind](
                config=config, inputs_embeds=example, attention_mask=None, position_ids=positions, **{CACHE: None}
            )
            for kind in set(config.layer_types)
        }

    @torch.no_grad()
    def inputs(self, n: int, rows: list[int]) -> torch.Tensor:
        """What the attention of layer n reads: its normed input, `(rows, tokens, hidden_size)`."""
        return self.layers[n].input_layernorm(self.hidden[n][rows].to(self.model.device))

    def values(self, n: int, rows: list[int]) -> torch.Tensor:
        """V_n, `(rows, heads, tokens, head_dim)`."""
        inputs = self.inputs(n, rows)
        return self.layers[n].self_attn.v_proj(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def attend(self, n: int, rows: list[int]) -> tuple[torch.Tensor, ...]:
        """(y, A, keys as attended to, V_n) of layer n."""
        output, weights, made = self.layers[n].self_attn(
            self.inputs(n, rows),
            position_embeddings=self.position_embeddings,
            attention_mask=self.masks[self.config.layer_types[n]],
        )
        return output, weights, made["keys"], made["values"]

    def queries(self, n: int, rows: list[int], weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """The queries of layer n before rotation, by this projection: `(rows, query heads, tokens, head_dim)`."""
        projected = torch.nn.functional.linear(self.inputs(n, rows), weight, bias)
        return projected.unflatten(-1, (self.query_heads, -1)).transpose(1, 2)

    def keys(self, n: int, rows: list[int]) -> torch.Tensor:
        """The keys of layer n as attended to, `(rows, heads, tokens, head_dim)`."""
        keys = self.layers[n].self_attn.k_proj(self.inputs(n, rows)).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        return self.rotated(n, keys)

    def scores(self, n: int, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """The masked attention scores of layer n, of rotated queries and keys."""
        scores = (queries * self.layers[n].self_attn.scaling) @ keys.transpose(-1, -2)
        return scores + self.masks[self.config.layer_types[n]]

    def weights(
        self, n: int, rows: list[int], fitted: "KeyFit | None" = None, source: int | None = None
    ) -> torch.Tensor:
        """A, the attention weights of layer n; with `fitted`, A', those on the keys of another layer."""
        projection = fitted or self.layers[n].self_attn.q_proj
        queries = self.rotated(n, self.queries(n, rows, projection.weight, projection.bias))
        keys = self.keys(n if source is None else source, rows)
        if fitted is not None:
            keys = keys[:, list(fitted.order)]
        scores = self.scores(n, queries, keys.repeat_interleave(self.query_heads // self.groups, 1))
        return scores.softmax(-1, dtype=torch.float32).to(queries.dtype)

    def rotated(self, n: int, states: torch.Tensor) -> torch.Tensor:
        """Applies the rotary position embeddings, if layer n has any: `(rows, heads, tokens, head_dim)`."""
        if not self.layers[n].self_attn.use_rope:
            return states
        return apply_rotary_pos_emb(states, states[:, :1], *self.position_embeddings)[0]

    @torch.inference_mode()
    def divergence(self, student: ResFormerForCausalLM, rows: list[int]) -> float:
        """The mean of KL(model || student) over every second token of these blocks, in nats."""
        total, head = 0.0, self.model.lm_head
        for row in rows:
            expected = self.hidden[-1][row, ::2].to(self.model.device)
            ids = self.blocks[row : row + 1].to(self.model.device)
            states = student.model(ids, use_cache=False).last_hidden_state[0, ::2]
            for part in range(0, len(states), 512):
                log_p = head(expected[part : part + 512]).float().log_softmax(-1)
                log_q = student.lm_head(states[part : part + 512]).float().log_softmax(-1)
                total += (log_p.exp() * (log_p - log_q)).sum().item()
        return total / (len(rows) * len(expected))


@contextmanager
def calibrating(
    model: ResFormerForCausalLM, blocks: torch.Tensor, progress: Progress = lambda done: None
) -> Iterator[Calibration]:
    """Runs the model on the blocks.

    The inputs of all layers are in a temporary file that is mapped into memory: the system keeps of it what fits.
    X_N is normed: it is what the head reads.
    """
    config: Any = model.config
    model.set_attn_implementation("eager")
    layers: Any = model.model.layers
    for layer in layers:
        layer.self_attn.returned = ("keys", "values")
    shape = (*blocks.shape, config.hidden_size)
    with tempfile.TemporaryDirectory() as folder:
        hidden = [_mapped(Path(folder) / f"{n}", shape, model.dtype) for n in range(config.num_hidden_layers + 1)]
        calibration = Calibration(model, blocks, hidden)
        with torch.inference_mode():
            for begin in range(0, len(blocks), 2):
                rows = slice(begin, begin + 2)
                states = model.model.embed_tokens(blocks[rows].to(model.device))
                for n, layer in enumerate(layers):
                    hidden[n][rows] = states
                    states, *_ = layer(
                        states,
                        position_embeddings=calibration.position_embeddings,
                        attention_mask=calibration.masks[config.layer_types[n]],
                    )
                    progress(len(blocks[rows]))
                hidden[-1][rows] = model.model.norm(states)
        yield calibration


def _mapped(path: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor in a file whose space is taken at once: a full disk is an error here, and a crash later."""
    size = math.prod(shape)
    with writing(path), path.open("wb") as file:
        if hasattr(os, "posix_fallocate"):
            os.posix_fallocate(file.fileno(), 0, size * dtype.itemsize)
    return torch.from_file(str(path), shared=True, size=size, dtype=dtype).view(shape)


def student_of(
    model: ResFormerForCausalLM, config: ResFormerConfig, changed: Mapping[str, torch.Tensor]
) -> ResFormerForCausalLM:
    """The model of `config`, with the tensors in `changed`, and the others shared with `model`."""
    with torch.device("meta"):
        student = ResFormerForCausalLM._from_config(deepcopy(config), dtype=model.dtype, attn_implementation="sdpa")
    tensors = {**model.state_dict(), **changed}
    student.load_state_dict({name: tensors[name] for name in student.state_dict()}, assign=True)
    student.model.rotary_emb = model.model.rotary_emb
    return student.eval()
