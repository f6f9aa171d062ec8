"""Fits the layers that read another layer's keys or values, and builds the student that a plan describes."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, reduce
from operator import add
from typing import Any

import torch

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import without_connections
from resformer.modeling import ResFormerForCausalLM
from resformer.shrinking.calibration import Calibration, Progress, student_of
from resformer.shrinking.keys import KeyFit, fit_keys, key_costs
from resformer.shrinking.refit import Moments, assign_heads, fit, fold_heads

#: Blocks that heads are assigned on: a head has few unknowns.
FOLD_BLOCKS = 4
#: The least error of a share.
TINY = 1e-12


@dataclass(frozen=True)
class Plan:
    """Which layer each one reads, as in `ResFormerConfig`."""

    key_sources: tuple[int, ...]
    value_sources: tuple[int, ...]

    @property
    def kept(self) -> int:
        """How many layers' keys and values are stored, of 2N."""
        return len(set(self.key_sources)) + len(set(self.value_sources))

    @property
    def readers(self) -> list[int]:
        """The layers that read another's keys or values."""
        pairs = zip(self.key_sources, self.value_sources, strict=True)
        return [n for n, pair in enumerate(pairs) if pair != (n, n)]

    def fields(self) -> dict[str, list[int]]:
        """The fields of the configuration; none for what is not shared."""
        own = tuple(range(len(self.key_sources)))
        return {name: list(sources) for name, sources in vars(self).items() if sources != own}


@dataclass(frozen=True)
class ReaderFit:
    """The refitted projections of a reader; query heads are in the order of its own checkpoint."""

    output: torch.Tensor  # of o_proj
    output_bias: torch.Tensor | None
    strength: float  # of the ridge
    error: float  # held-out squared error over the held-out square of the attention's output
    keys: KeyFit | None  # q_proj, if the keys are another layer's


def allowed_sources(config: Any, n: int, kind: str) -> list[int]:
    """The layers whose keys, values or both layer n can read: earlier ones of the same type."""
    rope = None if kind == "value" else config.no_rope_layers
    return [
        a for a in range(n) if config.layer_types[a] == config.layer_types[n] and (rope is None or rope[a] == rope[n])
    ]


class Readers:
    """The fits of all readers that a search asks for, each made once.

    An order tells for each group of query heads which head of the source it reads. Groups of a layer are permuted when
    the checkpoint is written, which changes nothing that it computes.
    """

    def __init__(
        self, calibration: Calibration, steps: int, plan: Plan | None = None, progress: Progress = lambda done: None
    ):
        """Args:
        steps: of training each query projection.
        plan: the only one that will be asked for, if that is known: other sources are then not looked at.
        progress: called after each fit.
        """
        self.calibration, self.steps, self.plan, self.progress = calibration, steps, plan, progress
        self.size = calibration.query_heads // calibration.groups  # query heads in a group
        self.reader_fit = cache(self._reader_fit)
        self.value_folds = cache(self._value_folds)
        self.key_costs = cache(lambda n: key_costs(calibration, n, self.sources(n, "key")))

    def sources(self, n: int, kind: str) -> list[int]:
        """The layers whose keys or values layer n may read."""
        if self.plan is not None:
            source = (self.plan.key_sources if kind == "key" else self.plan.value_sources)[n]
            return [source] if source != n else []
        return allowed_sources(self.calibration.config, n, kind)

    def errors(self, n: int, kind: str) -> dict[int, float]:
        """Source -> the error of its best head-wise map alone, comparable between the sources of one reader.

        For values the squared error of the fold; for keys KL(A || A') of the complex scalars; for both, each relative
        to its mean over the sources.
        """
        parts = []
        for each in ("key", "value") if kind == "both" else (kind,):
            costs = {a: (self.key_costs if each == "key" else self.value_folds)(n)[a][0] for a in self.sources(n, kind)}
            # Rounding can make the error of an exact share negative.
            errors = {a: max(float(c[range(len(c)), assign_heads(c)].sum()), TINY) for a, c in costs.items()}
            scale = sum(errors.values()) / len(errors) if kind == "both" and errors else 1.0
            parts.append({a: error / scale for a, error in errors.items()})
        return {a: sum(part[a] for part in parts) for a in parts[0]}

    def fit(self, plan: Plan) -> dict[int, tuple[list[int], ReaderFit]]:
        """Reader -> (the slot in which each of its groups is stored, its fit)."""
        slots = {n: list(range(self.calibration.groups)) for n in range(len(plan.key_sources))}
        fits = {}
        for n in plan.readers:
            key_source, value_source = plan.key_sources[n], plan.value_sources[n]
            # Costs of storing group g in slot s, where the sources' groups are in their own slots already.
            costs: torch.Tensor = torch.zeros(())
            for kind, source in (("key", key_source), ("value", value_source)):
                if source != n:
                    by_head = (self.key_costs if kind == "key" else self.value_folds)(n)[source][0].cpu()
                    by_slot = by_head[:, [slots[source].index(slot) for slot in range(len(by_head))]]
                    costs = costs + by_slot / by_slot.mean().clamp_min(torch.finfo(by_slot.dtype).tiny)
            slots[n] = assign_heads(costs)
            key_order, value_order = (
                None if source == n else tuple(slots[source].index(slot) for slot in slots[n])
                for source in (key_source, value_source)
            )
            fits[n] = slots[n], self.reader_fit(n, key_source, value_source, key_order, value_order)
        return fits

    def student(self, plan: Plan) -> ResFormerForCausalLM:
        """The model with the plan's connections and the refitted weights."""
        config, changed = self.result(plan)
        return student_of(self.calibration.model, config, changed)

    def result(self, plan: Plan) -> tuple[ResFormerConfig, dict[str, torch.Tensor]]:
        """(the configuration, the tensors that differ from the source's)."""
        changed: dict[str, torch.Tensor] = {}
        config = without_connections(self.calibration.model.config, **plan.fields())
        for n, (slots, fitted) in self.fit(plan).items():
            parameters: dict[str, torch.Tensor] = {}
            groups = [slots.index(slot) for slot in range(len(slots))]
            if groups != sorted(groups):  # permuted: what is not refitted too
                attention = self.calibration.layers[n].self_attn
                parameters.update((name, each) for name, each in attention.named_parameters() if "norm" not in name)
            if fitted.keys is not None:
                parameters["q_proj.weight"] = fitted.keys.weight
                if fitted.keys.bias is not None:
                    parameters["q_proj.bias"] = fitted.keys.bias
            parameters["o_proj.weight"] = fitted.output
            if fitted.output_bias is not None:
                parameters["o_proj.bias"] = fitted.output_bias
            for name, parameter in parameters.items():
                kind = name.split(".")[0]
                if (kind == "k_proj" and plan.key_sources[n] != n) or (kind == "v_proj" and plan.value_sources[n] != n):
                    continue
                if kind in ("q_proj", "k_proj", "v_proj"):
                    parameter = parameter.unflatten(0, (len(slots), -1))[groups].flatten(0, 1)
                elif name == "o_proj.weight":
                    parameter = parameter.unflatten(1, (len(slots), -1))[:, groups].flatten(1, 2)
                changed[f"model.layers.{n}.self_attn.{name}"] = parameter.detach().contiguous()
        return config, changed

    def _reader_fit(
        self,
        n: int,
        key_source: int,
        value_source: int,
        key_order: Sequence[int] | None,
        value_order: Sequence[int] | None,
    ) -> ReaderFit:
        calibration = self.calibration
        projection = calibration.layers[n].self_attn.o_proj
        keys = None
        if key_order is not None:
            z = self.key_costs(n)[key_source][1][range(len(key_order)), key_order]
            with torch.inference_mode(False):
                keys = fit_keys(calibration, n, key_source, list(key_order), z, self.steps)
        prior = projection.weight.T.double()
        intercept = None if projection.bias is None else projection.bias.double()
        if value_order is not None:
            maps = self.value_folds(n)[value_source][1][range(len(value_order)), value_order]
            by_head = prior.unflatten(0, (calibration.query_heads, -1))
            folded = maps.repeat_interleave(self.size, 0) @ by_head
            prior = folded[:, : calibration.head_dim].flatten(0, 1)
            if intercept is not None:
                intercept = intercept + folded[:, calibration.head_dim].sum(0)
        if intercept is not None:
            prior = torch.cat((prior, intercept[None]))

        dtype = torch.promote_types(calibration.model.dtype, torch.float32)

        def moments(row: int) -> Moments:
            output, weights, _, own = calibration.attend(n, [row])
            if keys is not None:
                weights = calibration.weights(n, [row], keys, key_source)
            values = own if value_order is None else calibration.values(value_source, [row])[:, list(value_order)]
            z = (weights @ values.repeat_interleave(self.size, 1)).transpose(1, 2).flatten(2)[0].to(dtype)
            if projection.bias is not None:
                z = torch.cat((z, z.new_ones(len(z), 1)), -1)
            return Moments.of(z, output[0].to(dtype))

        train, held_out = (reduce(add, map(moments, rows)) for rows in (calibration.fitted, calibration.held_out))
        weight, strength, error = fit(train, held_out, prior)
        self.progress(1)
        bias = None
        if projection.bias is not None:
            weight, bias = weight[:-1], weight[-1].to(calibration.model.dtype)
        output = weight.T.to(calibration.model.dtype).contiguous()
        square = max(float(held_out.square), torch.finfo(torch.float64).tiny)  # 0 where the layer puts nothing out
        return ReaderFit(output, bias, strength, error / square, keys)

    def _value_folds(self, n: int) -> dict[int, tuple[torch.Tensor, torch.Tensor]]:
        """Source -> (costs, `(groups, heads)`; maps M, `(groups, heads, head_dim, head_dim)`).

        With an output bias, M has one more row: the constant that it can add, as the rows of A sum to 1.
        """
        calibration = self.calibration
        projection = calibration.layers[n].self_attn.o_proj
        output = projection.weight.T.unflatten(0, (calibration.query_heads, -1)).double()
        sums: dict[int, Moments] = {}
        for row in calibration.fitted[:: max(1, len(calibration.fitted) // FOLD_BLOCKS)]:
            _, weights, _, own = calibration.attend(n, [row])
            target = (weights @ own.repeat_interleave(self.size, 1)).transpose(0, 1).float()
            for a in self.sources(n, "value"):
                z = weights[0][:, None] @ calibration.values(a, [row])  # query heads, heads, tokens, head_dim
                if projection.bias is not None:
                    z = torch.cat((z, torch.ones_like(z[..., :1])), -1)
                part = Moments.of(z.float(), target)
                sums[a] = part if a not in sums else sums[a] + part
        folds = {}
        for a, moments in sums.items():
            maps, costs = fold_heads(moments, output)
            folds[a] = costs.cpu(), maps
        return folds
