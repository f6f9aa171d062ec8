"""In a real vLLM every method gives `generate`'s tokens and log probabilities, and shared layers take no memory."""

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMBINATIONS, tiny_model
from small_decoders import small_config
from transformers import AutoModelForCausalLM

from resformer import METHODS, ResFormerConfig, ResFormerModel, connected_config
from resformer.configuration import key_sources, value_sources

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"),
]

#: Shapes that vLLM's kernels for CPUs have: 6 layers, 4 query and 2 key/value heads of width 32.
SHAPE = {"hidden_size": 64, "head_dim": 32, "max_position_embeddings": 256, "tie_word_embeddings": False}
#: Some layers read the keys and values of an earlier one.
SHARED = {"key_sources": [0, 1, 1, 3, 4, 4], "value_sources": [0, 1, 1, 3, 4, 4]}
#: What becomes of a nanochat run, but for its smear.
NANOCHAT = {
    "gated_mlp": False,
    "hidden_act": "relu2",
    "qk_norm": True,
    "sliding_window": 4,
    "layer_types": ["sliding_attention"] * 5 + ["full_attention"],
    "final_logit_softcapping": 3.0,
    "embedding_residual": True,
    "value_embeddings": [1, 3, 5],
    "value_embeddings_gate_channels": 12,
    "value_embeddings_gate_limit": 3.0,
    "backout": True,
}
PLANS: dict[str, dict[str, Any]] = {name: plan for name, plan in COMBINATIONS.items() if not plan.get("smear")}
PLANS |= {"share-both": SHARED, "nanochat-run": NANOCHAT}
BLOCK = 128  # tokens of a page; pages are shared between prompts, and 64 tokens are computed at a time
MEMORY = 2**30
TOKENS = 16
IDS = torch.randint(3, 97, (200,), generator=torch.Generator().manual_seed(1)).tolist()
PROMPTS = [IDS[:7], IDS[20:60], IDS[:130], IDS[:BLOCK] + IDS[150:160]]


@pytest.fixture(autouse=True)
def _vllm_in_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CPU_KVCACHE_SPACE": str(MEMORY // 2**30),
        "VLLM_DISABLE_COMPILE_CACHE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        monkeypatch.setenv(name, value)


@contextmanager
def engine(checkpoint: Path, **options: Any) -> Iterator[Any]:
    from vllm import LLM

    bases, own = ResFormerModel.__bases__, dict(vars(ResFormerModel))
    defaults = {"dtype": "float32", "enforce_eager": True, "max_num_batched_tokens": 64, "max_num_seqs": 8}
    llm = None
    try:
        llm = LLM(str(checkpoint), skip_tokenizer_init=True, **{**defaults, **options})
        yield llm
    finally:
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        # vLLM decorates the class for its compiler. Other tests of this process want it as it was.
        ResFormerModel.__bases__, ResFormerModel.__init__ = bases, own["__init__"]
        for name in vars(ResFormerModel).keys() - own.keys():
            delattr(ResFormerModel, name)


def answers(llm: Any, prompts: list[list[int]], **options: Any) -> list[Any]:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **{"max_tokens": TOKENS, **options})
    return llm.generate([{"prompt_token_ids": each} for each in prompts], asked, use_tqdm=False)


@dataclass(frozen=True)
class Reference:
    """A model with random parameters, coefficients among them, and what Transformers makes of it."""

    folder: Path
    config: ResFormerConfig
    generated: list[tuple[list[int], torch.Tensor]]  # for each prompt: greedy tokens, their log probabilities


@pytest.fixture(scope="module")
def references(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reference]:
    made = {}
    for variant in (*METHODS, *PLANS):
        folder = tmp_path_factory.mktemp(variant)
        plan = {} if variant in METHODS else PLANS[variant]
        model = tiny_model(variant if variant in METHODS else "transformer", **{**plan, **SHAPE})
        model.save_pretrained(folder)
        generated = []
        for prompt in PROMPTS:
            ids = torch.tensor([prompt])
            options = {"max_new_tokens": TOKENS, "do_sample": False, "return_dict_in_generate": True}
            output = model.generate(ids, output_logits=True, **options)
            tokens = output.sequences[0, len(prompt) :].tolist()
            generated.append((tokens, torch.cat(output.logits).log_softmax(-1)[range(TOKENS), tokens]))
        made[variant] = Reference(folder, model.config, generated)
    return made


def assert_generated(llm: Any, reference: Reference, prompts: slice) -> list[Any]:
    """vLLM's greedy tokens are `generate`'s, and their log probabilities differ by rounding."""
    got = answers(llm, PROMPTS[prompts], logprobs=0)
    for answer, (tokens, expected) in zip(got, reference.generated[prompts], strict=True):
        assert answer.outputs[0].token_ids == tokens
        found = [step[token].logprob for step, token in zip(answer.outputs[0].logprobs, tokens, strict=True)]
        torch.testing.assert_close(torch.tensor(found), expected, atol=1e-3, rtol=0)
    return got


@pytest.mark.parametrize("variant", [*METHODS, *PLANS])
def test_tokens_and_log_probabilities_are_those_of_generate(variant: str, references: dict[str, Reference]) -> None:
    reference = references[variant]
    config = reference.config
    with engine(reference.folder) as llm:
        assert_generated(llm, reference, slice(3))  # of several lengths in one batch; the last in three chunks
        again = assert_generated(llm, reference, slice(3, 4))
        if config.sliding_window is None:
            assert again[0].num_cached_tokens == BLOCK
            read = enumerate(zip(key_sources(config), value_sources(config), strict=True))
            stored = 6 - sum(key == value != n for n, (key, value) in read)
            page = stored * 2 * BLOCK * config.num_key_value_heads * 32 * 4
            assert llm.llm_engine.vllm_config.cache_config.num_gpu_blocks == MEMORY // page


@pytest.mark.parametrize("variant", ["denseformer", "kitchen-sink"])
def test_the_compiled_model_gives_the_same(variant: str, references: dict[str, Reference]) -> None:
    with engine(references[variant].folder, enforce_eager=False) as llm:
        assert_generated(llm, references[variant], slice(3))


@pytest.mark.parametrize("variant", ["kitchen-sink", "resformer-gated"])
def test_two_ranks_give_the_same(
    variant: str, references: dict[str, Reference], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "|".join(map(str, sorted(os.sched_getaffinity(0))[:2])))
    with engine(references[variant].folder, tensor_parallel_size=2) as llm:
        assert_generated(llm, references[variant], slice(3))


def configured(reference: Reference, **options: Any) -> Any:
    """What vLLM does before it starts processes and loads weights."""
    from vllm.engine.arg_utils import EngineArgs

    return EngineArgs(str(reference.folder), skip_tokenizer_init=True, **options).create_engine_config()


REFUSED = [
    ("resformer", {"pipeline_parallel_size": 2}, "earlier layers do not reach another stage"),
    ("value-embeddings", {"tensor_parallel_size": 2}, "cannot split .*value_embedding"),
    ("depth-attention", {"tensor_parallel_size": 2}, "cannot split `value_residual`"),
    ("transformer", {"tensor_parallel_size": 4}, "`num_key_value_heads` is 2, not a multiple"),
]


@pytest.mark.parametrize(("variant", "options", "words"), REFUSED, ids=[case[0] for case in REFUSED])
def test_what_cannot_be_split_is_refused_before_weights_are_loaded(
    variant: str, options: dict[str, int], words: str, references: dict[str, Reference]
) -> None:
    with pytest.raises(ValueError, match=words):
        configured(references[variant], **options)


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("transformer", ""),
        ("cla2", "Layers 1, 3, 5 read the keys and values of one earlier layer: the cache holds 3 of 6 layers."),
        ("svformer", "Sharing saves no memory in layers 1, 2, 3, 4, 5: vLLM stores the keys and the values"),
        ("fusedkv-lite", "Sharing saves no memory in layers 3, 4, 5: vLLM stores the keys and the values"),
    ],
)
def test_the_start_says_what_sharing_saves(
    method: str, said: str, references: dict[str, Reference], caplog: pytest.LogCaptureFixture
) -> None:
    from resformer.vllm import logger

    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", logger.name):
            configured(references[method])
    finally:
        logger.removeHandler(caplog.handler)
    ours = {record.getMessage() for record in caplog.records if record.name == logger.name}
    assert len(ours) == bool(said)
    assert "".join(ours).startswith(said)


@pytest.mark.parametrize("family", ["gemma3_text", "qwen3", "qwen3_moe"])
def test_connected_families_are_refused_at_start_up(family: str, tmp_path: Path) -> None:
    config = connected_config(small_config(family), "resformer-denseformer")
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"past the connections. `resformer serve"), engine(tmp_path):
        pass
