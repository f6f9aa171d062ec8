"""In a real vLLM, connected families give tokens and log probabilities of `generate`; shared layers take no room."""

import json
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from command_server import python

from resformer import ResFormerConfig

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(find_spec("vllm") is None, reason="vLLM has an environment of its own: make test-vllm"),
]

SERVE = Path(__file__).parents[1] / "benchmarks" / "serve.py"
FAMILIES = ("llama", "gemma3_text", "qwen3_moe")
METHODS = ("resformer-denseformer", "value-embeddings", "cla2", "mhc")


def served(cases: list[tuple[str, str, str]], folder: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """(family, method) -> what vLLM gives beside `generate`, in a process of its own: it decorates our classes."""
    chosen = [each for case in cases for each in ("--case", *case)]
    python(SERVE, "families", *chosen, "--output", folder / "rows.json")
    rows = json.loads((folder / "rows.json").read_text())["rows"]
    return {(row["family"], row["method"]): row for row in rows}


def assert_generated(row: dict[str, Any]) -> None:
    """Of several lengths in one batch, 64 tokens at a time; the last prompt has a page of the third."""
    assert (row["equal"], row["of"], row["of pages"]) == (64, 64, 128)
    assert row["largest"] < 1e-3


def test_tokens_and_log_probabilities_are_those_of_generate(tmp_path: Path) -> None:
    rows = served([(family, method, "eager") for family in FAMILIES for method in METHODS], tmp_path)
    for row in rows.values():
        assert_generated(row)
    for family in FAMILIES:
        own, shared = (rows[family, method]["tokens of cache"] for method in ("value-embeddings", "cla2"))
        assert shared // 128 == pytest.approx(2 * own // 128, abs=1)


def test_the_compiled_model_and_two_ranks_give_the_same_and_a_head_that_does_more_is_refused(tmp_path: Path) -> None:
    compiled = [("llama", "resformer-denseformer", "compiled"), ("qwen3", "value-embeddings", "compiled")]
    cases = [("hyperclovax", "resformer", "eager"), *compiled, ("qwen3", "resformer-gated", "two ranks")]
    refused, *rows = served(cases, tmp_path).values()
    for row in rows:
        assert_generated(row)
    assert refused["error"].startswith("hyperclovax: vLLM computes logits as `lm_head`")


@pytest.mark.parametrize(
    ("method", "said"),
    [
        ("resformer", ""),
        ("cla2", "Layers 1, 3, 5 read the keys and values of one earlier layer: the cache holds 3 of 6 layers."),
        ("svformer", "Sharing saves no memory in layers 1, 2, 3, 4, 5: vLLM stores the keys and the values"),
    ],
)
def test_the_start_says_what_sharing_saves(method: str, said: str, caplog: pytest.LogCaptureFixture) -> None:
    from resformer.vllm import WhatSharingSaves, logger

    config = ResFormerConfig.for_method(method, num_hidden_layers=6)
    logger.addHandler(caplog.handler)
    try:
        with caplog.at_level("INFO", logger.name):
            WhatSharingSaves.verify_and_update_config(
                SimpleNamespace(model_config=SimpleNamespace(hf_text_config=config))
            )
    finally:
        logger.removeHandler(caplog.handler)
    ours = {record.getMessage() for record in caplog.records if record.name == logger.name}
    assert len(ours) == bool(said)
    assert "".join(ours).startswith(said)
