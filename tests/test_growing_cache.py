"""A `GrowingCache` does all that a `DynamicCache` does, to the bit, in place and with bounded slack."""

import copy
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from conftest import RAGGED, tiny_model
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn
from transformers import AutoConfig, Cache, DynamicCache, LlamaConfig
from transformers.exporters.utils import get_leaf_tensors

from resformer import GrowingCache, connected_config
from resformer.modeling.growing_cache import GrowingLayer
from resformer.modeling.versions import CACHE

HEADS, HEAD_DIM = 2, 4


def config_of(layers: int = 2) -> LlamaConfig:
    return LlamaConfig(num_hidden_layers=layers, hidden_size=16, num_attention_heads=4, num_key_value_heads=HEADS)


def states(batch: int, tokens: int, generator: torch.Generator | None = None) -> torch.Tensor:
    return torch.randn(batch, HEADS, tokens, HEAD_DIM, generator=generator)


@torch.no_grad()
def fed(cache: Cache, tokens: int, batch: int = 1, layer: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Appends tokens and returns the keys and values of all."""
    return cache.update(states(batch, tokens), states(batch, tokens), layer)


def held(cache: Cache) -> list[torch.Tensor]:
    return [tensor for layer in cache.layers for tensor in (layer.keys, layer.values) if tensor is not None]


def slack(cache: Cache) -> int:
    """Bytes that the cache keeps alive beyond what it holds."""
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in held(cache)}
    return sum(storages.values()) - sum(tensor.nbytes for tensor in held(cache))


def assert_alike(mine: Cache, naive: Cache) -> None:
    assert mine.get_seq_length() == naive.get_seq_length()
    assert mine.get_max_length() == naive.get_max_length()
    for layer in range(len(naive.layers)):
        assert mine.get_mask_sizes(3, layer) == naive.get_mask_sizes(3, layer)
    assert len(held(mine)) == len(held(naive))
    for a, b in zip(held(mine), held(naive), strict=True):
        assert torch.equal(a, b)


def shallow(cache: Cache) -> Cache:
    twin = copy.copy(cache)
    twin.layers = [copy.copy(layer) for layer in cache.layers]
    return twin


COPIES = {"deepcopy": copy.deepcopy, "pickle": lambda cache: pickle.loads(pickle.dumps(cache)), "shallow": shallow}
STEP = st.one_of(
    st.tuples(st.just("update"), st.integers(1, 300)),
    st.tuples(st.just("update"), st.just(1)),
    st.tuples(st.just("crop"), st.integers(0, 40)),
    st.tuples(st.just("crop"), st.integers(100, 800)),
    st.tuples(st.just("reorder"), st.integers(0, 5)),
    st.tuples(st.just("repeat"), st.integers(1, 2)),
    st.tuples(st.just("select"), st.integers(0, 5)),
    st.tuples(st.sampled_from([*COPIES]), st.just(0)),
    st.tuples(st.just("assign"), st.integers(1, 5)),
    st.tuples(st.just("reset"), st.just(0)),
    st.tuples(st.just("offload"), st.just(0)),
)


@torch.no_grad()
def act(cache: Any, what: str, number: int, rows: torch.Tensor, tokens: list[torch.Tensor]) -> None:
    layers = [layer for layer in cache.layers if layer.keys is not None]
    if what == "update":
        for layer in range(2):
            keys, values = cache.update(tokens[2 * layer].clone(), tokens[2 * layer + 1].clone(), layer)
            assert keys is cache.layers[layer].keys
            assert values is cache.layers[layer].values
    elif what == "crop" and number > 0:
        cache.crop(-number)
    elif what == "assign":  # what libraries do that compress caches
        for layer in layers:
            layer.keys, layer.values = layer.keys[..., :number, :], layer.values[..., :number, :]
    elif what == "reset":
        cache.reset()
    elif what == "offload":
        for layer in layers:
            layer.offload()
            layer.prefetch()
    elif what == "reorder":
        cache.reorder_cache(rows)
    elif what == "select":
        cache.batch_select_indices(rows)
    elif what == "repeat":
        cache.batch_repeat_interleave(number)


@settings(max_examples=150, deadline=None)
@given(steps=st.lists(STEP, max_size=14))
@example(steps=[("shallow", 0), ("update", 1), ("deepcopy", 0), ("update", 1)])
@example(steps=[("shallow", 0), ("crop", 1), ("update", 1)])
@example(steps=[("pickle", 0), ("update", 1), ("shallow", 0), ("update", 1)])
def test_any_sequence_of_operations_leaves_what_it_leaves_of_a_dynamic_cache(
    device: str, steps: list[tuple[str, int]]
) -> None:
    generator = torch.Generator().manual_seed(0)
    mine: Any = GrowingCache(config_of())
    naive: Any = DynamicCache(config=config_of())
    batch, others = 3, list[tuple[Any, list[torch.Tensor]]]()
    for what, number in [("update", 5), *steps]:
        if what in COPIES:  # go their own ways
            mine, other = COPIES[what](mine), mine
            act(other, "update", 1, torch.empty(0), [torch.ones(batch, HEADS, 1, HEAD_DIM, device=device)] * 4)
            others.append((other, [tensor.clone() for tensor in held(other)]))
        else:
            number = min(number, naive.get_seq_length() - 1) if what == "crop" else number
            rows = torch.randint(0, batch, (batch if what == "reorder" else number + 1,), generator=generator)
            tokens = [states(batch, number, generator).to(device) for _ in range(4 * (what == "update"))]
            for cache in (mine, naive):
                act(cache, what, number, rows, tokens)
        if naive.get_seq_length():
            if len(naive.layers[0].keys) > 12:
                for cache in (mine, naive):
                    cache.batch_select_indices(torch.arange(3))
            batch = len(naive.layers[0].keys)
            assert_alike(mine, naive)
    for other, expected in others:
        assert all(torch.equal(a, b) for a, b in zip(held(other), expected, strict=True))


@pytest.mark.parametrize("start", [1, 100, 4096, 20000])
def test_slack_is_at_most_64_tokens_or_a_sixteenth_and_copies_are_few(start: int) -> None:
    cache, places = GrowingCache(config_of(layers=1)), set()
    token = 2 * HEADS * HEAD_DIM * 4
    fed(cache, start)
    for tokens in range(start + 1, start + 1001):
        keys, _ = fed(cache, 1)
        places.add(keys.data_ptr())
        assert keys.shape[-2] == tokens
        assert slack(cache) <= (1 + max(64, tokens // 16)) * token
    assert len(places) <= 16


def test_layers_follow_the_configuration_and_come_as_they_are_needed_without_one() -> None:
    windows = AutoConfig.for_model("qwen3", num_hidden_layers=4, use_sliding_window=True, max_window_layers=1)
    shared = connected_config(windows, {"key_sources": [0, 1, 2, 1], "value_sources": [0, 1, 2, 1]})
    kinds = [type(layer).__name__ for layer in GrowingCache(shared).layers]
    assert kinds == ["GrowingLayer", *["DynamicSlidingWindowLayer"] * 2, "DummyLayer"]
    cache = GrowingCache()
    assert len(cache) == 0
    fed(cache, 3, layer=2)
    assert [type(layer) for layer in cache.layers] == [GrowingLayer] * 3
    assert [cache.get_seq_length(n) for n in range(4)] == [0, 0, 3, 0]
    assert isinstance(cache, DynamicCache)
    assert not cache.is_compileable
    assert cache.is_croppable


@pytest.mark.parametrize("variant", ["resformer", "svformer", "crossed-sharing", "kitchen-sink"], indirect=True)
def test_gradients_flow_through_the_cache(variant: str) -> None:
    model = tiny_model(variant, dtype=torch.float64).train()
    ids = RAGGED["input_ids"][:1]
    gradients = []
    for cache in (None, GrowingCache(model.config), DynamicCache(config=model.config)):
        model.zero_grad()
        if cache is None:
            logits = model(ids, use_cache=False).logits
        else:
            parts = (slice(0, 5), slice(5, 6), slice(6, 7), slice(7, 11))
            logits = torch.cat([model(ids[:, part], **{CACHE: cache}).logits for part in parts], dim=1)
        nn.functional.cross_entropy(logits[0, :-1], ids[0, 1:]).backward()
        gradients.append([parameter.grad.clone() for parameter in model.parameters()])
    for got in gradients[1:]:
        for a, b in zip(got, gradients[0], strict=True):
            torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-8)


def test_gradients_of_a_step_outlive_later_steps_without_gradients() -> None:
    # Writing in place to what autograd has saved would raise, or give a wrong gradient.
    model = tiny_model("resformer", dtype=torch.float64)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("q_proj" in name)  # keys and values of layer 0 need no gradient, its queries do
    ids = RAGGED["input_ids"][:1]
    results = []
    for new_cache in (lambda: GrowingCache(model.config), lambda: DynamicCache(config=model.config)):
        cache = new_cache()
        model.zero_grad()
        with torch.no_grad():
            model(ids[:, :5], **{CACHE: cache})
            model(ids[:, 5:6], **{CACHE: cache})
        loss = model(ids[:, 6:8], **{CACHE: cache}).logits.square().mean()
        with torch.no_grad():
            model(ids[:, 8:9], **{CACHE: cache})
            last = model(ids[:, 9:10], **{CACHE: cache}).logits
        loss.backward()
        results.append((last, [parameter.grad for parameter in model.parameters() if parameter.requires_grad]))
    torch.testing.assert_close(results[0][0], results[1][0], rtol=1e-9, atol=1e-9)
    for mine, naive in zip(results[0][1], results[1][1], strict=True):
        torch.testing.assert_close(mine, naive, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("inside", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("outside", [torch.inference_mode, torch.no_grad, torch.enable_grad])
def test_a_cache_made_in_one_mode_is_continued_in_another(
    inside: Callable[[], Any], outside: Callable[[], Any]
) -> None:
    model = tiny_model("svformer").requires_grad_(False)
    ids = RAGGED["input_ids"][:1]
    expected = model(ids, use_cache=False).logits
    cache = GrowingCache(model.config)
    with inside():
        model(ids[:, :4], **{CACHE: cache})
        model(ids[:, 4:6], **{CACHE: cache})
    with outside():
        got = model(ids[:, 6:9], **{CACHE: cache}).logits
    torch.testing.assert_close(got, expected[:, 6:9], rtol=1e-4, atol=1e-4)
    with inside():
        got = model(ids[:, 9:], **{CACHE: cache}).logits
    torch.testing.assert_close(got, expected[:, 9:], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("variant", ["resformer", "svformer", "crossed-sharing", "kitchen-sink"], indirect=True)
def test_it_has_the_leaves_of_a_dynamic_cache(variant: str) -> None:
    # Exporters and pytrees must find the cached tokens, and not the free memory behind them.
    model = tiny_model(variant)
    caches = GrowingCache(model.config), DynamicCache(config=model.config)
    with torch.no_grad():
        for cache in caches:
            model(RAGGED["input_ids"][:, :8], **{CACHE: cache})
            model(RAGGED["input_ids"][:, 8:9], **{CACHE: cache})
    mine, naive = map(get_leaf_tensors, caches)
    assert mine.keys() == naive.keys()
    for name, tensor in naive.items():
        assert mine[name].shape == tensor.shape, name
    states = [[vars(layer).keys() for layer in cache.layers] for cache in caches]
    assert states[0] == states[1]


def test_what_does_not_fit_is_refused() -> None:
    cache = GrowingCache(config_of(layers=1))
    fed(cache, 3, batch=2)
    fed(cache, 1, batch=2)
    with pytest.raises(RuntimeError, match="must match"):  # copying would broadcast it
        fed(cache, 1, batch=1)
    assert cache.get_seq_length() == 4
    with pytest.raises(ValueError, match=r"(?i)crop.*positive"):
        cache.crop(1)
