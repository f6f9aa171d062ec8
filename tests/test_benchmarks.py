"""Kernels and bytes are those of the equations."""

import json
from pathlib import Path

import pytest
from command_server import python

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


@pytest.mark.slow
def test_kernels_and_bytes_are_counted_beside_llama(tmp_path: Path) -> None:
    output = tmp_path / "traffic.json"
    python(BENCHMARKS / "traffic.py", output, "1B", "resformer", "svformer", "denseformer")
    counted = json.loads(output.read_text())["counted"]["1B"]
    llama, layers, state = counted["llama"], 16, 8192 * 2048 * 2
    assert counted["svformer"]["forward"]["kernels"] == llama["forward"]["kernels"] - (layers - 1)  # projections
    shares = 2  # l1 of all layers, and its products with V_0
    assert counted["resformer"]["decode"]["kernels"] == llama["decode"]["kernels"] + layers - 1 + shares
    more = counted["denseformer"]["forward"]["bytes"] - llama["forward"]["bytes"]
    sums = layers * (layers + 3) // 2 + 2 * layers  # reads and writes, of the own state twice
    assert 0 < more - (sums + 3 * (layers + 1)) * state < 0.01 * more  # and a copy, written twice
