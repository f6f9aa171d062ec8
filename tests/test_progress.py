"""Long work shows a bar on a terminal and in notebooks, and lines in a log."""

import sys

import pytest
from tqdm.auto import tqdm

import resformer.progress as progress
from resformer.progress import progress_bar


def work(steps: int = 4, show: bool = True) -> None:
    with progress_bar(total=steps, desc="out", unit="B", show=show) as bar:
        for _ in range(steps):
            bar.update()


def test_a_log_gets_a_line_now_and_then(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("TQDM_DISABLE", "1")  # as the commands do, for libraries' bars
    work()
    assert capsys.readouterr().err == ""  # it took no 10 seconds
    monkeypatch.setattr(progress, "_SECONDS", 0.0)
    work()
    lines = capsys.readouterr().err.split("\n")
    assert [line[:11] for line in lines] == [*(f"out: {n} of 4" for n in range(5)), ""]
    with progress_bar(desc="out") as bar:
        bar.update()
    assert capsys.readouterr().err.split("\n") == ["out: 0 [00:00]", "out: 1 [00:00]", ""]
    work(show=False)
    assert capsys.readouterr().err == ""


def test_a_terminal_and_a_notebook_get_a_bar(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    work()
    assert "\rout: 100%" in capsys.readouterr().err
    monkeypatch.setattr(sys.stderr, "isatty", lambda: False)
    monkeypatch.setattr(progress, "tqdm", type("notebook", (tqdm,), {}))
    work()
    assert "\rout: 100%" in capsys.readouterr().err
