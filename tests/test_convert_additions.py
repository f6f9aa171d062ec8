"""A ResFormer checkpoint gets further connections: what it has learned stays, and what was added can be taken out."""

import json
from pathlib import Path
from typing import Any

import any_decoder
import pytest
import torch
from checkpoints import save_checkpoint, stored
from conftest import others_slow
from huggingface_hub import ModelCard
from transformers import AutoConfig, AutoModelForCausalLM

from resformer import retrofit
from resformer.configuration.methods import method_of
from resformer.convert import CheckpointError, revert

RECORD = "resformer_conversion.json"


def trained(folder: Path, method: str, dtype: torch.dtype = torch.float32, **fields: Any) -> Path:
    """A retrofit whose connections have moved, as a training would save it: without a record."""
    save_checkpoint(folder / "llama", dtype=dtype)
    retrofit(folder / "llama", folder / "retrofit", method, verify="headers", lossy=True, **fields)
    move(folder / "retrofit", folder / "trained", "")
    return folder / "trained"


def move(source: Path, output: Path, kind: str) -> None:
    """Saves the model with random coefficients of this kind; of none: of all."""
    model = AutoModelForCausalLM.from_pretrained(source)
    any_decoder.move(model, kind)
    model.save_pretrained(output)


PAIRS = [
    "resformer denseformer",
    "resformer resformer-denseformer bfloat16",
    "resformer-gated denseformer-4x5",
    "denseformer resformer-dense",
    "denseformer resformer-gated",
    "delta-attention-residuals denseformer",
    "mudd resformer-denseformer",
    "depth-attention value-embeddings",
    "mhc resformer-denseformer bfloat16",
    "value-embeddings resformer bfloat16",
]


@pytest.mark.parametrize("pair", others_slow(PAIRS, PAIRS[1::3]))
def test_connections_are_added_to_a_trained_model_and_taken_out_again(pair: str, tmp_path: Path) -> None:
    first, second, *dtype = pair.split()
    source = trained(tmp_path, first, getattr(torch, *dtype or ["float32"]))
    report = retrofit(source, tmp_path / "both", second)
    assert report.exact
    assert report.logits.identical
    before, both = stored(source), stored(tmp_path / "both")
    assert {name: both[name] for name in before} == before
    assert sorted(both.keys() - before.keys()) == sorted(report.added)
    assert report.written_files == 1
    card = ModelCard.load(tmp_path / "both" / "README.md")
    words = f"own connections stay as they are: `{json.dumps(report.source_fields, sort_keys=True)}`"
    assert words in " ".join(card.text.split())
    assert report.method == method_of(AutoConfig.from_pretrained(tmp_path / "both"))
    assert ("A combination of connections that has no name" in card.text) == (report.method is None)
    back = revert(tmp_path / "both", tmp_path / "back")
    assert back.logits.identical
    assert back.remaining == report.source_fields != {}
    assert stored(tmp_path / "back") == before
    one, other = (AutoConfig.from_pretrained(folder).to_dict() for folder in (source, tmp_path / "back"))
    assert {**one, "_name_or_path": None} == {**other, "_name_or_path": None}


def test_what_was_added_and_has_learned_is_not_taken_out(tmp_path: Path) -> None:
    retrofit(trained(tmp_path, "resformer"), tmp_path / "both", "denseformer", verify="headers")
    move(tmp_path / "both", tmp_path / "again", "depth_average")
    (tmp_path / "again" / RECORD).write_bytes((tmp_path / "both" / RECORD).read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.layers\.\d\.depth_average\[\d\] is .* from the plain model"):
        revert(tmp_path / "again", tmp_path / "back")
    with pytest.raises(CheckpointError, match="from the plain model"):
        revert(tmp_path / "both", tmp_path / "back", all=True)
