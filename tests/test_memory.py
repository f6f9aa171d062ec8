"""The memory report is what caches hold, to the byte, and needs no model."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from conftest import COMBINATIONS, tiny_model, windowed_model
from small_decoders import small_decoder
from transformers import Cache, DynamicCache, LlamaConfig, StaticCache

from resformer import GrowingCache, ResFormerConfig
from resformer.configuration import cache_bytes, cache_bytes_by_method, cache_bytes_per_token
from resformer.convert.connected_families import cache_size
from resformer.modeling.connecting import connected_config
from resformer.modeling.versions import CACHE


@pytest.mark.parametrize("variant", ["transformer", "svformer", "cla2", *COMBINATIONS], indirect=True)
@pytest.mark.parametrize("new_cache", [DynamicCache, GrowingCache, partial(StaticCache, max_cache_len=11)])
@pytest.mark.parametrize(("dtype", "window"), [(torch.float32, None), (torch.bfloat16, 4)], ids=str)
def test_report_is_what_a_cache_holds(
    variant: str, dtype: torch.dtype, window: int | None, new_cache: Callable[..., Cache]
) -> None:
    model = tiny_model(variant, dtype=dtype) if window is None else windowed_model(variant, window).to(dtype)
    cache = new_cache(config=model.config)
    with torch.no_grad():
        model(torch.randint(3, 97, (2, 11)), **{CACHE: cache})
    held = 0
    for layer in cache.layers:
        for tensor in (getattr(layer, "keys", None), getattr(layer, "values", None)):
            if tensor is not None:  # a static window holds one token more, which the next one overwrites
                spare = isinstance(cache, StaticCache) and layer.is_sliding
                held += tensor[..., spare:, :].nbytes
    assert cache_bytes(model.config, tokens=11, batch_size=2, dtype=dtype) == held
    if window is None:
        assert cache_bytes_per_token(model.config, dtype) * 22 == held
    assert cache_bytes_per_token(model.config, str(dtype).removeprefix("torch.")) == cache_bytes(
        model.config, tokens=1, dtype=dtype
    )


def test_other_llama_style_configurations_are_read_too() -> None:
    shape = {"num_hidden_layers": 3, "hidden_size": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
    expected = 3 * 2 * (2 * 8) * 2
    assert cache_bytes_per_token(LlamaConfig(**shape)) == cache_bytes_per_token(ResFormerConfig(**shape)) == expected
    assert cache_bytes_by_method(LlamaConfig(**shape)) == cache_bytes_by_method(ResFormerConfig(**shape))


@pytest.mark.parametrize("family", ["jamba", "lfm2_moe", "gemma3n_text", "nemotron_h"])
def test_layers_that_cache_nothing_are_not_counted(family: str) -> None:
    model = small_decoder(family)
    held = []
    for tokens in (3, 5):
        with torch.no_grad():
            cache = model(torch.randint(3, 97, (1, tokens)), use_cache=True)[CACHE]
        rows = [each for each in cache.layers if getattr(each, "keys", None) is not None]
        held.append(sum(each.keys.nbytes + each.values.nbytes for each in rows))
    stored = (held[1] - held[0]) // 2
    assert cache_size(connected_config(model.config, "transformer"), torch.float32) == (stored, stored)
    if family in ("lfm2_moe", "nemotron_h"):  # two layers of attention
        shared = connected_config(model.config, "svformer")
        assert cache_size(shared, torch.float32) == (stored * 3 // 4, stored)


def test_unknown_dtypes_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match=r"`dtype` is 'int8'.*bfloat16"):
        cache_bytes_per_token(ResFormerConfig(), "int8")
