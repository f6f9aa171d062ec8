"""`resformer new`: an untrained checkpoint that any engine starts from, of a size with a known shape."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import byte_tokenizer, save_notes
from transformers import AutoModelForCausalLM, AutoTokenizer

from resformer import ResFormerConfig
from resformer.convert.connections import meta_model
from resformer.training.untrained import budget, scratch_config

NARROW = ["--tokenizer", "bytes", "--set", "hidden_size=32", "--set", "num_hidden_layers=3", "--set", "vocab_size=320"]


def test_a_new_checkpoint_loads_as_any_other(tmp_path: Path, invoke: Callable[..., Any]) -> None:
    for name, seed in (("a", 3), ("same", 3), ("other", 4)):
        done = invoke(tmp_path, "new", name, "--method", "svformer", *NARROW, "--seed", seed)
        assert done.exit_code == 0, done.output
    weights, same, other = (
        AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("a", "same", "other")
    )
    assert all(torch.equal(tensor, same[name]) for name, tensor in weights.items())
    assert not torch.equal(weights["model.embed_tokens.weight"], other["model.embed_tokens.weight"])
    assert {tensor.dtype for tensor in weights.values()} == {torch.float32}
    config = ResFormerConfig.from_pretrained(tmp_path / "a")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "a")
    assert (config.value_sources, config.vocab_size, config.hidden_size) == ([0, 0, 0], 320, 32)
    assert (config.max_position_embeddings, tokenizer.model_max_length) == (512, 512)
    assert (config.eos_token_id, len(tokenizer)) == (tokenizer.eos_token_id, 257)
    assert abs(weights["model.embed_tokens.weight"].std() - (2 / (5 * 32)) ** 0.5) < 0.005


def test_without_weights_there_are_none(tmp_path: Path, invoke: Callable[..., Any]) -> None:
    save_notes(tmp_path)
    arguments = ["new", "a", "--size", "468m", "--tokenizer", "bpe:300", "--data", "notes.txt", "--no-weights"]
    planned = invoke(tmp_path, *arguments, "--dry-run")
    assert (planned.exit_code, (tmp_path / "a").exists()) == (0, False), planned.output
    done = invoke(tmp_path, *arguments, "--json")
    assert done.exit_code == 0, done.output
    assert {path.suffix for path in (tmp_path / "a").iterdir()} == {".json"}
    assert len(AutoTokenizer.from_pretrained(tmp_path / "a")) == 300
    config = json.loads((tmp_path / "a" / "config.json").read_text())
    assert (config["architectures"], config["initializer_range"]) == (["ResFormerForCausalLM"], 0.02)
    assert (
        json.loads(done.stdout)["parameters"]
        == meta_model(ResFormerConfig.from_pretrained(tmp_path / "a")).num_parameters()
    )


@pytest.mark.parametrize(("size", "millions"), [("82m", 82), ("180m", 180), ("320m", 320), ("468m", 468)])
def test_sizes_have_the_parameters_of_their_names(size: str, millions: int) -> None:
    config = scratch_config("transformer", size, byte_tokenizer(), vocab_size=50_277)
    assert meta_model(config).num_parameters() == pytest.approx(millions * 1e6, rel=0.01)
    assert config.head_dim == 64
    assert config.intermediate_size == 3.5 * config.hidden_size


def test_the_budget_follows_the_published_fits() -> None:
    """The batch and the rate of DeepSeek LLM's fit at 1e20 operations, by hand; 20 tokens a parameter."""
    tokens, batch, rate = budget(10**9, 5e9)
    assert tokens == 20 * 10**9  # 1e20 operations
    assert batch == pytest.approx(0.292 * 10 ** (20 * 0.3271), rel=1e-6)
    assert rate == pytest.approx(0.3118 * 10**-2.5)
    assert budget(10**6, 6e6, tokens=1000)[::2] == (1000, pytest.approx(0.3118 * 6e9**-0.125))
