"""One card for each named method, from `facts.yaml`, the method's configuration, and results."""

from collections.abc import Iterable

from resformer.configuration import ResFormerConfig, cache_bytes_by_method
from resformer.model_cards.cards import added_parameters, render
from resformer.model_cards.facts import FACTS, PAPERS
from resformer.model_cards.metrics import Metric, notes_of, table_rows
from resformer.modeling.modeling_resformer import KINDS

_SMOLLM2_135M = {
    "num_hidden_layers": 30,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "vocab_size": 49152,
    "tie_word_embeddings": True,
}


def method_card(method: str, metrics: Iterable[Metric] = ()) -> str:
    """The card of a named method, with the entries of `metrics` whose `Metric.method` it is.

    Raises:
        ValueError: there is no such method.
    """
    connected, shape = ResFormerConfig.for_method(method, **_SMOLLM2_135M), ResFormerConfig(**_SMOLLM2_135M)
    facts = FACTS[method]
    cache = cache_bytes_by_method(shape)
    results = [metric for metric in metrics if metric.method == method]
    return render(
        "method.md.jinja",
        name=method,
        facts=facts,
        shape=shape,
        exact=not any(kind.fixed_effects(connected) for kind in KINDS),
        count=added_parameters(connected),
        share=cache[method] / cache["transformer"],
        cache=cache[method],
        papers=[PAPERS[key] for key in facts.papers],
        results=table_rows(results),
        notes=notes_of(results),
    )
