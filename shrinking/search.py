"""Chooses which layers read another's keys or values, for a given size of the cache.

A share is one layer that reads another's keys, or values, or both of the same layer. Its cost alone is measured end to
end, for the source with the least error; other sources cost in proportion to their errors. Costs of several shares do
not add up, so shares are then accepted a few at a time, and what comes next is measured on top of them.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from resformer.shrinking.readers import TINY, Plan, Readers, allowed_sources

#: Candidates measured in a round, and how many of them are accepted.
TRIED, ACCEPTED = 5, 2
#: Alternatives to each share that are measured at the end.
SWAPPED = 1
#: What a share takes off the 2N layers' keys and values.
SAVED = {"key": 1, "value": 1, "both": 2}

Progress = Callable[[str], object]
Slot = tuple[str, int]  # ("key", "value" or "both", the layer that reads another's)
Costs = dict[Slot, dict[int, float]]  # slot -> source -> cost


def smallest(config: Any, kinds: Collection[str]) -> int:
    """The least number of layers' keys and values that can be stored, of 2N, if `kinds` are shared."""
    layers = config.num_hidden_layers
    saved = (SAVED[kind] for kind in kinds for n in range(layers) if allowed_sources(config, n, kind))
    return 2 * layers - sum(saved)


def single_costs(
    readers: Readers, kinds: Sequence[str], measure: Callable[[Plan], float], progress: Progress = lambda stage: None
) -> Costs:
    """The cost of every share by itself, as `measure` has it: measured for the best source, scaled for the others."""
    layers = readers.calibration.model.config.num_hidden_layers
    costs: Costs = {}
    for kind in kinds:
        for n in range(layers):
            if errors := readers.errors(n, kind):
                best = min(errors, key=errors.__getitem__)
                cost = max(measure(_plan(layers, {(kind, n): best})), TINY)  # rounding can make it negative
                costs[kind, n] = {a: cost * each / errors[best] for a, each in errors.items()}
            progress(f"shares of layer {n}")
    return costs


def best_plan(
    layers: int, kept: int, costs: Costs, measure: Callable[[Plan], float], progress: Progress = lambda stage: None
) -> Plan:
    """The plan that stores at most `kept` layers' keys and values, of 2N, at the least cost that the search finds.

    Args:
        costs: of each share by itself.
        measure: the cost of a whole plan.
    """
    chosen: frozenset[Slot] = frozenset()

    @cache
    def score(slots: frozenset[Slot]) -> float:
        return measure(_plan(layers, _sources(slots, costs)))

    def by_sum(slots: frozenset[Slot]) -> list[frozenset[Slot]]:
        """`slots` and one more, by the sum of their costs."""
        larger = [slots | {slot} for slot in costs.keys() - slots]
        return sorted(
            larger, key=lambda each: (sum(costs[s][a] for s, a in _sources(each, costs).items()), sorted(each))
        )

    while (missing := 2 * layers - kept - sum(SAVED[kind] for kind, _ in chosen)) > 0:
        ranked = sorted(by_sum(chosen)[:TRIED], key=score)
        accepted = min(ACCEPTED, -(-missing // max(SAVED[kind] for kind, _ in costs)))
        chosen = frozenset().union(chosen, *ranked[:accepted])
        progress(f"{len(chosen)} shares")
    # One pass of swaps: each share, the dearest first, against what would take its place.
    for slot in sorted(chosen, key=lambda slot: min(costs[slot].values()), reverse=True):
        others = [each for each in by_sum(chosen - {slot}) if each != chosen][:SWAPPED]
        if others:
            chosen = min([chosen, *others], key=score)
        progress("swaps")
    return _plan(layers, _sources(chosen, costs))


def _sources(slots: Collection[Slot], costs: Costs) -> dict[Slot, int]:
    """Each slot's cheapest source among the layers that keep their own."""
    return {
        (kind, n): min((a for a in costs[kind, n] if (kind, a) not in slots), key=costs[kind, n].__getitem__)
        for kind, n in slots
    }


def _plan(layers: int, sources: Mapping[Slot, int]) -> Plan:
    keys, values = (
        [sources.get((kind, n), sources.get(("both", n), n)) for n in range(layers)] for kind in ("key", "value")
    )
    return Plan(tuple(keys), tuple(values))
