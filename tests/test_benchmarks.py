"""The benchmark of training runs from its command line to its results."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from resformer import METHODS

SCRIPT = Path(__file__).parents[1] / "benchmarks" / "train.py"


@pytest.mark.slow
def test_training_is_timed_and_weighed_against_llama(tmp_path: Path) -> None:
    output = tmp_path / "train.json"
    common = [sys.executable, str(SCRIPT), "--shapes", "tiny", "--tokens", "32", "--threads", "1"]
    common += ["--output", str(output)]
    options = ["--clock", "cpu", "--rounds", "3", "--methods", "resformer", "svformer"]
    subprocess.run([*common, *options, "--parts", "time"], check=True, capture_output=True)
    subprocess.run([*common, "--parts", "memory", "--update"], check=True, capture_output=True)
    results = json.loads(output.read_text())

    timed = results["time"]["tiny"]
    assert timed["rounds"] == 3
    assert list(timed["arms"]) == ["llama", "llama again", "resformer", "svformer"]
    assert all(arm["ms with AdamW"] > arm["ms"] > 0 for arm in timed["arms"].values())

    weighed = results["memory"]["tiny"]["arms"]
    assert weighed.keys() == {"llama", *METHODS}
    assert weighed["transformer"]["of llama"] == 1
    assert weighed["svformer"]["of llama"] < 1 < weighed["denseformer"]["of llama"]
    assert [each["what"].split(":")[0] for each in results["targets"]] == ["resformer", "svformer", *METHODS]
    assert len(results["commands before"]) == 1
