"""The notebook runs, and what it shows is what it gives."""

from base64 import b64decode
from pathlib import Path

import nbformat
import pytest
from checkpoints import save_checkpoint
from tour import TOUR, executed, source_hash


def kinds(notebook: nbformat.NotebookNode) -> list[set[str]]:
    """For each cell, the kinds of its outputs: streams and MIME types."""
    return [
        {kind for output in cell.get("outputs", []) for kind in output.get("data", [output.get("name")])}
        for cell in notebook.cells
    ]


def test_the_outputs_are_of_this_source_and_small() -> None:
    notebook = nbformat.read(TOUR, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata["executed"] == source_hash(notebook), "run `make tour`"
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    figures = [b64decode(output.data["image/png"]) for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == 3
    assert sum(map(len, figures)) < 150 * 1024


@pytest.mark.slow
def test_the_tour_runs_as_it_is(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source", tie_word_embeddings=True)
    notebook, hub = executed(tmp_path / "source", tmp_path)
    assert kinds(notebook) == kinds(nbformat.read(TOUR, as_version=4))
    assert {"README.md", "config.json", "model.safetensors"} <= set(hub.repositories["you/smollm2-finetuned"])
