"""Runs docs/tour.ipynb with a Hub on loopback; as a script, on the demo's model, and keeps the outputs."""

import hashlib
import os
import tempfile
from pathlib import Path

import nbformat
from demo import smollm2
from hub_server import HubServer
from nbclient import NotebookClient

TOUR = Path(__file__).parents[1] / "docs" / "tour.ipynb"


def source_hash(notebook: nbformat.NotebookNode) -> str:
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\n\n".join(code).encode()).hexdigest()


def executed(model: Path, folder: Path) -> tuple[nbformat.NotebookNode, HubServer]:
    """The notebook with new outputs, and the Hub that it was run with; `model` is the folder of its source.

    Raises:
        CellExecutionError: a cell fails.
    """
    notebook = nbformat.read(TOUR, as_version=4)
    with HubServer() as hub:
        hub.add("HuggingFaceTB/SmolLM2-135M-Instruct", model)
        variables = {**os.environ, **hub.environment(folder / "home"), "IPYTHONDIR": str(folder)}
        client = NotebookClient(notebook, record_timing=False, resources={"metadata": {"path": str(folder)}})
        client.execute(env=variables)
    for cell in notebook.cells:
        if cell.cell_type == "code":  # bars and warnings go to stderr
            cell.outputs = [output for output in cell.outputs if output.get("name") != "stderr"]
    notebook.metadata["executed"] = source_hash(notebook)
    return notebook, hub


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as scratch:
        nbformat.write(executed(Path(smollm2()), Path(scratch))[0], TOUR)
