"""A retrofit that has learned nothing goes back to what it was, byte for byte; one that has is refused."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint, stored
from conftest import SNAPSHOTS, assert_one_said
from transformers import AutoModelForCausalLM

from resformer import retrofit
from resformer.convert import CheckpointError, revert


def test_a_model_saved_by_transformers_can_be_reverted(tmp_path: Path) -> None:
    """Then added parameters lie among the others, there is no record, and files have to be written anew."""
    save_checkpoint(tmp_path / "source", "qwen3", dtype=torch.bfloat16)
    retrofit(tmp_path / "source", tmp_path / "out", "resformer-gated")
    AutoModelForCausalLM.from_pretrained(tmp_path / "out").save_pretrained(tmp_path / "saved", max_shard_size="40KB")
    report = revert(tmp_path / "saved", tmp_path / "back")
    assert report.family == "qwen3"
    assert report.written_files > 0
    assert stored(tmp_path / "source") == stored(tmp_path / "back")


@pytest.mark.parametrize("case", json.loads((SNAPSHOTS / "learned.json").read_text(encoding="utf-8")))
def test_what_was_learned_is_refused_and_measured(case: str, tmp_path: Path) -> None:
    """A method, the parameter whose first number moved, and how far: `snapshots/learned.json`."""
    method, parameter, amount = case.split()
    save_checkpoint(tmp_path / "source")
    retrofit(tmp_path / "source", tmp_path / "out", method, verify="headers")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    with torch.no_grad():
        model.get_parameter(parameter).view(-1)[0] += float(amount)
    model.save_pretrained(tmp_path / "trained")
    with pytest.raises(CheckpointError) as caught:
        revert(tmp_path / "trained", tmp_path / "back")
    assert_one_said("learned", case, str(caught.value).replace(str(tmp_path), "<tmp>"))
    assert not (tmp_path / "back").exists()


def test_dry_run_writes_nothing_and_links_lead_back_to_the_first_file(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source")
    arguments: dict[str, Any] = {"link": True, "verify": "headers"}
    retrofit(tmp_path / "source", tmp_path / "out", **arguments)
    report = revert(tmp_path / "out", tmp_path / "back", dry_run=True)
    assert (report.carried_files, report.written_files, report.verified) == (1, 0, "")
    assert report.removed == [f"model.layers.{n}.value_residual.weight" for n in range(1, 6)]
    assert json.dumps(report.as_dict())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out", "source"]
    revert(tmp_path / "out", tmp_path / "back", **arguments)
    assert (tmp_path / "back" / "model.safetensors").samefile(tmp_path / "source" / "model.safetensors")
