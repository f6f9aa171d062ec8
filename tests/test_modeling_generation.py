"""Cached generation is uncached generation, in every mode and with every cache, and caches hold what they should."""

import copy
import functools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from conftest import FAMILIES, RAGGED, Batch, moved, tiny_model, windowed_model
from transformers import (
    Cache,
    ContinuousBatchingConfig,
    DynamicCache,
    GenerationConfig,
    LlamaConfig,
    PreTrainedModel,
    QuantizedCache,
    StaticCache,
)
from transformers.cache_utils import QuantizedLayer

from resformer import GrowingCache
from resformer.configuration import key_sources, value_sources
from resformer.modeling.connections.sharing import update_cache
from resformer.modeling.versions import CACHE

NEW_TOKENS = 8
#: The first prompt, which has no padding.
FIRST = {name: tensor[:1] for name, tensor in RAGGED.items()}

#: Values alone, keys and values of different layers, and both with all else.
SHARING = ["svformer", "crossed-sharing", "kitchen-sink"]


def generate(model: PreTrainedModel, inputs: Batch, **options: Any) -> Any:
    torch.manual_seed(5)
    options = {"do_sample": False, "max_new_tokens": NEW_TOKENS, "num_beams": 1, **options}
    return model.generate(**inputs, output_logits=True, return_dict_in_generate=True, **options)


def assert_same_generation(got: Any, expected: Any) -> None:
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.logits) == len(expected.logits) > 0
    for step, (mine, naive) in enumerate(zip(got.logits, expected.logits, strict=True)):
        torch.testing.assert_close(mine, naive, rtol=1e-4, atol=1e-4, msg=lambda text, at=step: f"step {at}: {text}")


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    return (mask.cumsum(-1) - 1).clamp(min=0)


def uncached_logits(model: PreTrainedModel, batch: Batch) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch, position_ids=positions_of(batch["attention_mask"]), use_cache=False).logits


def logits_in_chunks(model: PreTrainedModel, batch: Batch, sizes: list[int], cache: Cache) -> torch.Tensor:
    """Feeds `sizes` tokens at a time and returns all logits."""
    assert sum(sizes) == batch["input_ids"].shape[1]
    positions = positions_of(batch["attention_mask"])
    parts, start = [], 0
    for size in sizes:
        part = slice(start, start + size)
        with torch.no_grad():
            parts.append(
                model(
                    batch["input_ids"][:, part],
                    attention_mask=batch["attention_mask"][:, : part.stop],
                    position_ids=positions[:, part],
                    **{CACHE: cache},
                    use_cache=True,
                ).logits
            )
        start = part.stop
    return torch.cat(parts, dim=1)


def assert_same_on_real_tokens(got: torch.Tensor, expected: torch.Tensor, mask: torch.Tensor) -> None:
    real = mask.bool()
    torch.testing.assert_close(got[real], expected[real], rtol=1e-4, atol=1e-4)


def caches_of(model: PreTrainedModel, length: int = 20) -> dict[str, Cache]:
    caches = {
        "growing": GrowingCache(model.config),
        "dynamic": DynamicCache(config=model.config),
        "static": StaticCache(config=model.config, max_cache_len=length),
    }
    if model.device.type == "cuda":
        caches["offloaded"] = GrowingCache(model.config, offloading=True)
    if getattr(model.config, "sliding_window", None) is None:  # or it holds more than Transformers' masks expect
        caches["dynamic without a configuration"] = DynamicCache()
    return caches


MODES: dict[str, dict[str, Any]] = {
    "eager, static": {"attention": "eager", "cache_implementation": "static"},
    "chunked prefill": {"prefill_chunk_size": 4, "disable_compile": True},
    "beams": {"num_beams": 3, "num_return_sequences": 3},
    "beams, dynamic": {"num_beams": 3, "num_return_sequences": 3, "cache_implementation": "dynamic"},
    "beams, static": {"num_beams": 3, "num_return_sequences": 3, "cache_implementation": "static"},
    "sampling": {"do_sample": True, "temperature": 1.5, "top_k": 20, "num_return_sequences": 2},
}
CACHES = {None: GrowingCache, "dynamic": DynamicCache, "static": StaticCache}


def default_cache(decoder: str, model: PreTrainedModel) -> dict[str, Cache]:
    """Families by themselves have another default than models with connections."""
    alone = decoder in FAMILIES and FAMILIES[decoder][1] is None
    return {CACHE: GrowingCache(model.config)} if alone else {}


@functools.cache
def uncached(variant: str, options: tuple[tuple[str, Any], ...]) -> Any:
    """What several modes are compared with."""
    return generate(tiny_model(variant), RAGGED, use_cache=False, **dict(options))


@pytest.mark.parametrize("mode", MODES)
def test_generation_with_a_cache_equals_generation_without(decoder: str, mode: str) -> None:
    options = dict(MODES[mode])
    model = tiny_model(decoder, attention=options.pop("attention", "sdpa"))
    of_caches = ("cache_implementation", "prefill_chunk_size", "disable_compile")
    without = {name: value for name, value in options.items() if name not in of_caches}
    expected = uncached(decoder, tuple(without.items()))
    own = {} if "cache_implementation" in options else default_cache(decoder, model)
    got = generate(model, RAGGED, **options, **own)
    assert getattr(expected, CACHE) is None
    assert type(getattr(got, CACHE)) is CACHES[options.get("cache_implementation")]
    assert_same_generation(got, expected)
    if decoder in FAMILIES and "static" in mode:  # the cache is used again, with the tokens of the first time in it
        assert_same_generation(generate(model, RAGGED, **options), expected)
    # Control: the continuations vary and depend on the prompt, so that a wrong cache would show.
    assert len(got.sequences[:, -NEW_TOKENS:].unique()) > 5
    assert len({tuple(row) for row in got.sequences[:, -NEW_TOKENS:].tolist()}) == len(got.sequences)


@pytest.mark.parametrize("sizes", [[1] * 11, [4, 4, 3], [1, 9, 1]])
def test_chunked_prefill_equals_one_pass(decoder: str, sizes: list[int], device: str) -> None:
    model, batch = tiny_model(decoder).to(device), moved(RAGGED, device)
    expected = uncached_logits(model, batch)
    for cache in caches_of(model).values():
        got = logits_in_chunks(model, batch, sizes, cache)
        assert_same_on_real_tokens(got, expected, batch["attention_mask"])


@pytest.mark.parametrize("drafts", ["itself", "alike", "small", "lookup", "first layers"])
def test_generation_from_drafts_equals_greedy(decoder: str, drafts: str) -> None:
    model, prompt = tiny_model(decoder), FIRST
    options: dict[str, Any] = {}
    if drafts == "lookup":
        ids = torch.randperm(97)[None]  # every token, so that whatever comes is found there
        prompt, options = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, {"prompt_lookup_num_tokens": 3}
    elif drafts == "first layers":
        options = {"assistant_early_exit": 2}
    else:
        small = tiny_model("resformer", num_hidden_layers=2, seed=4)
        options["assistant_model"] = {"itself": model, "alike": copy.deepcopy(model), "small": small}[drafts]
    expected = generate(model, prompt, use_cache=False)
    if drafts == "alike":  # never guesses the third token, so that some guesses are kept and the rest is cropped
        third, helper = expected.sequences[0, 13].item(), options["assistant_model"]
        helper.lm_head.register_forward_hook(
            lambda _module, _args, logits: logits.index_fill(-1, torch.tensor(third), -99)
        )
        helper.generation_config.assistant_confidence_threshold = 0.0
        helper.generation_config.num_assistant_tokens = 4
        helper.generation_config.num_assistant_tokens_schedule = "constant"
    passes: list[int] = []  # how many tokens each saw
    whole: list[int] = []
    model.model.embed_tokens.register_forward_pre_hook(lambda _module, args: passes.append(args[0].shape[1]))
    model.model.layers[-1].register_forward_hook(lambda *_: whole.append(1))
    assert_same_generation(generate(model, prompt, **options, **default_cache(decoder, model)), expected)
    if drafts == "alike":
        assert len(passes) < NEW_TOKENS  # some guesses were right
    if drafts in ("alike", "lookup"):
        assert sum(passes) > prompt["input_ids"].shape[1] + NEW_TOKENS - 1  # some were wrong, and cropped
    if drafts == "first layers":
        assert len(whole) < len(passes), "no pass ended early"


def test_a_second_turn_on_a_returned_cache_equals_one_pass(decoder: str) -> None:
    model, batch = tiny_model(decoder), RAGGED
    generator = torch.Generator().manual_seed(7)
    caches = {"default": None} | {kind: caches_of(model, 40)[kind] for kind in ("growing", "dynamic", "static")}
    for turn in range(3):
        expected = generate(model, batch, use_cache=False)
        for kind, past in caches.items():
            got = generate(model, batch, **({} if past is None else {CACHE: past}))
            assert_same_generation(got, expected)
            assert past is None or got[CACHE] is past
            caches[kind] = got[CACHE]
            assert caches[kind].get_seq_length() == got.sequences.shape[1] - 1, f"{kind}, turn {turn}"
        # What was generated, and what the user says next: the last new token and these are not in the cache yet.
        said = torch.randint(3, 97, (3, 2), generator=generator)
        ids = torch.cat((expected.sequences, said), dim=1)
        mask = torch.cat((batch["attention_mask"], torch.ones(3, NEW_TOKENS + 2, dtype=torch.long)), dim=1)
        batch = {"input_ids": ids, "attention_mask": mask}


@pytest.mark.parametrize("window", [4, 13])
@pytest.mark.parametrize("variant", SHARING, indirect=True)
def test_sliding_windows_with_shared_keys_and_values_generate_as_uncached(variant: str, window: int) -> None:
    model, full = windowed_model(variant, window), tiny_model(variant)
    assert not torch.allclose(generate(full, RAGGED).logits[-1], generate(model, RAGGED).logits[-1], atol=1e-2)

    expected = generate(model, RAGGED, use_cache=False)
    for cache in (None, "dynamic", "static"):
        assert_same_generation(generate(model, RAGGED, cache_implementation=cache), expected)
    beams = generate(model, RAGGED, num_beams=3, use_cache=False)
    assert_same_generation(generate(model, RAGGED, num_beams=3), beams)

    one_pass = uncached_logits(model, RAGGED)
    for sizes in ([1] * 11, [4, 4, 3], [1, 9, 1]):
        for cache in caches_of(model).values():
            got = logits_in_chunks(model, RAGGED, sizes, cache)
            assert_same_on_real_tokens(got, one_pass, RAGGED["attention_mask"])

    greedy = generate(model, FIRST, use_cache=False).sequences
    assert torch.equal(generate(model, FIRST, assistant_model=model).sequences, greedy)
    assert torch.equal(generate(model, FIRST, prompt_lookup_num_tokens=2).sequences, greedy)


@pytest.mark.parametrize("variant", ["resformer", *SHARING], indirect=True)
def test_quantized_caches_hold_what_layers_make(variant: str) -> None:
    model = tiny_model(variant)
    options = {"cache_implementation": "quantized", "cache_config": {"backend": "fp8"}}
    got = generate(model, RAGGED, **options)
    expected = generate(model, RAGGED, use_cache=False)
    torch.testing.assert_close(got.logits[0], expected.logits[0])
    assert torch.cosine_similarity(got.logits[1], expected.logits[1]).median() > 0.95
    sources = key_sources(model.config), value_sources(model.config)
    for layer, cached in enumerate(got[CACHE].layers):
        parts = [part[0] for part in (cached._quantized_keys, cached._quantized_values) if part is not None]
        assert sum(part.numel() > 0 for part in parts) == sum(each[layer] == layer for each in sources)


class LosslessLayer(QuantizedLayer):
    """Quantises to what it is given, and takes no empty tensor, as the integer backends take none."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> torch.Tensor:
        assert tensor.numel()
        return tensor

    def _dequantize(self, stored: torch.Tensor) -> torch.Tensor:
        return stored


@pytest.mark.parametrize("beams", [1, 3])
@pytest.mark.parametrize("variant", ["crossed-sharing", "svformer"], indirect=True)
def test_group_wise_quantized_caches_take_layers_that_store_one_tensor(variant: str, beams: int) -> None:
    model = tiny_model(variant)
    cache = QuantizedCache("fp8", config=LlamaConfig(num_hidden_layers=model.config.num_hidden_layers))
    cache.layers = [LosslessLayer(residual_length=3) for _ in cache.layers]
    got = generate(model, RAGGED, **{CACHE: cache}, num_beams=beams)
    assert_same_generation(got, generate(model, RAGGED, use_cache=False, num_beams=beams))


@pytest.mark.parametrize("variant", [*SHARING, "depth-sink"], indirect=True)
def test_continuous_batching_gives_the_tokens_of_generate(variant: str) -> None:
    model = tiny_model(variant)
    prompts = [ids[mask.bool()] for ids, mask in zip(RAGGED["input_ids"], RAGGED["attention_mask"], strict=True)]
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": -1, "pad_token_id": 0}
    alone = [model.generate(prompt[None], **options)[0, len(prompt) :].tolist() for prompt in prompts]
    finished = model.generate_batch(
        inputs=[prompt.tolist() for prompt in prompts],
        generation_config=GenerationConfig(**options),
        continuous_batching_config=ContinuousBatchingConfig(num_blocks=16, max_batch_tokens=32, page_size=16),
    )
    by_request = sorted(finished.items(), key=lambda item: int(item[0].rpartition("_")[2]))
    assert [output.generated_tokens for _, output in by_request] == alone


@pytest.mark.parametrize("own", [(True, True), (True, False), (False, True), (False, False)])
def test_layers_that_share_give_flash_attention_what_they_attend_to(own: tuple[bool, bool]) -> None:
    """On a GPU, continuous batching has flash attention store it in the layer's own blocks."""
    asked, made = {"block_table": torch.zeros(1)}, torch.randn(2, 1, 2, 3, 4)
    cache = SimpleNamespace(update=lambda *given, kwargs: kwargs.update(given=given) or given[:2])
    mine = [each if has else None for each, has in zip(made, own, strict=True)]
    theirs = [None if has else each for each, has in zip(made, own, strict=True)]
    torch.testing.assert_close(update_cache(cache, 5, *mine, *theirs, asked), tuple(made))
    torch.testing.assert_close(asked["given"], (*made, 5))
