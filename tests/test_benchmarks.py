"""Benchmarks run from their command line to their results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from conftest import TINY
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from resformer import METHODS, ResFormerConfig, ResFormerForCausalLM

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
def test_training_is_timed_and_weighed_against_llama(tmp_path: Path) -> None:
    output = tmp_path / "train.json"
    common = [sys.executable, str(BENCHMARKS / "train.py"), "--shapes", "tiny", "--tokens", "32", "--threads", "1"]
    common += ["--output", str(output)]
    options = ["--clock", "cpu", "--rounds", "3", "--methods", "resformer", "svformer", "--modes", "eager", "layers"]
    subprocess.run([*common, *options, "--parts", "time"], check=True, capture_output=True)
    subprocess.run([*common, "--parts", "memory", "--update"], check=True, capture_output=True)
    results = json.loads(output.read_text())

    for case in ("tiny", "tiny, layers"):
        timed = results["time"][case]
        assert timed["rounds"] == 3
        assert list(timed["arms"]) == ["llama", "llama again", "resformer", "svformer"]
        assert all(arm["ms with AdamW"] > arm["ms"] > 0 for arm in timed["arms"].values())

    weighed = results["memory"]["tiny"]["arms"]
    assert weighed.keys() == {"llama", *METHODS}
    assert weighed["transformer"]["of llama"] == 1
    assert weighed["svformer"]["of llama"] < 1 < weighed["denseformer"]["of llama"]
    assert [each["what"].split(":")[0] for each in results["targets"]] == [
        *("resformer", "svformer") * 2,
        *(method for method in METHODS if method != "value-embeddings"),
    ]
    assert len(results["commands before"]) == 1


@pytest.mark.slow
def test_smaller_caches_are_compared_and_nothing_is_measured_twice(tmp_path: Path) -> None:
    torch.manual_seed(0)
    source = LlamaForCausalLM(LlamaConfig(**{**TINY, "vocab_size": 256}))
    for parameter in source.parameters():
        parameter.data.mul_(3)
    for layer in source.model.layers:  # two heads that are one: fitting them loses nothing, their mean is lost
        for projection in (layer.self_attn.k_proj, layer.self_attn.v_proj):
            projection.weight.data[8:] = -projection.weight.data[:8]
    source.save_pretrained(tmp_path / "source")
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = Tokenizer(models.BPE({letter: token for token, letter in enumerate(alphabet)}, []))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "source")
    shared = ResFormerForCausalLM(ResFormerConfig(**{**TINY, "vocab_size": 256}, value_sources=[0, 0, 2, 2, 4, 4]))
    shared.load_state_dict(source.state_dict(), strict=False)
    shared.save_pretrained(tmp_path / "shared" / "0.75")
    text = BENCHMARKS.joinpath("shrink.py").read_text()
    (tmp_path / "calibration.txt").write_text(text[:9000])
    (tmp_path / "held-out.txt").write_text(text[9000:])
    output = tmp_path / "shrink.json"
    command = [sys.executable, str(BENCHMARKS / "shrink.py"), "--source", str(tmp_path / "source"), "--threads", "1"]
    command += ["--calibrate", str(tmp_path / "calibration.txt"), "--text", f"code={tmp_path / 'held-out.txt'}"]
    command += ["--shrunken", f"shared={tmp_path / 'shared'}", "--blocks", "2", "--tokens", "300"]
    command += ["--order-blocks", "1", "--fit-blocks", "4", "--output", str(output)]
    command += ["--parts", "merged", "dropped", "quantised", "shrunken"]  # what edits the source's weights first
    subprocess.run(command, check=True, capture_output=True)
    first = json.loads(output.read_text())
    again = subprocess.run(command, check=True, capture_output=True, text=True)
    assert (again.stdout, json.loads(output.read_text())["rows"]) == ("", first["rows"])
    assert output.with_suffix(".png").stat().st_size

    rows = {(row["method"], row["setting"]): row for row in first["rows"]}
    cache = {name: row["cache"] for name, row in rows.items()}
    assert cache["shared", "0.75"] == 0.75
    assert cache["shared, int4", "0.75"] == round(0.75 * 4.5 / 16, 4)
    assert cache["int8", "stock"] == round(8.5 / 16, 4)
    assert cache["drop, by loss", "2 layers"] == cache["drop, by cosine", "2 layers"] == round(4 / 6, 4)
    assert cache["merge heads, fitted", "2 heads in 6 layers"] == 0.5
    divergence = {name: row["KL"] for name, row in rows.items()}
    assert divergence["int8", "stock"] < divergence["int4", "stock"] < divergence["drop, by loss", "2 layers"]
    assert divergence["shared", "0.75"] == pytest.approx(divergence["shared, int4", "0.75"], rel=0.01)
    assert divergence["merge heads, fitted", "2 heads in 6 layers"] == pytest.approx(0, abs=1e-4)
    assert divergence["merge heads, mean", "2 heads in 6 layers"] > 0.1
