"""Kernels and bytes are those of the equations; published rows are those of the records; the plan's commands run."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import import_module
from io import BytesIO
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoints import byte_tokenizer, save_checkpoint, save_notes
from command_server import python
from scipy import stats

from resformer.training.study.report import read_record

#: The methods of the study that answers question a of the plan.
PLANNED = "transformer resformer svformer value-embeddings attnres mudd".split()
BENCHMARKS = Path(__file__).parents[1] / "benchmarks"
PAGE = BENCHMARKS.parent / "docs" / "results.md"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """A script of `benchmarks` as a module."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return import_module


@pytest.mark.slow
def test_kernels_and_bytes_are_counted_beside_llama(tmp_path: Path) -> None:
    output = tmp_path / "traffic.json"
    python(BENCHMARKS / "traffic.py", output, "1B", "resformer", "svformer", "denseformer")
    counted = json.loads(output.read_text())["counted"]["1B"]
    llama, layers, state = counted["llama"], 16, 8192 * 2048 * 2
    assert counted["svformer"]["forward"]["kernels"] == llama["forward"]["kernels"] - (layers - 1)  # projections
    added = {step: counted["resformer"][step]["kernels"] - llama[step]["kernels"] for step in ("forward", "backward")}
    assert added["forward"] == 2 * (layers - 1)
    assert added["backward"] == 5 * (layers - 1) + 1  # and what layer 0 itself has of V_0's gradient
    values = 8192 * 512 * 2
    least = [counted["resformer"][step]["minimum"] for step in ("forward", "backward")]
    assert least == [3 * (layers - 1) * values, 6 * (layers - 1) * values]
    moved = counted["resformer"]["backward"]["bytes"] - llama["backward"]["bytes"]
    assert 0 <= moved - (least[1] + (3 * (layers - 1) + 2) * values) < 0.01 * moved  # dV'_n is read four times
    averages = layers * (layers + 1) // 2 + 2 * layers  # with their results
    assert counted["denseformer"]["forward"]["minimum"] == averages * 8192 * 2048 * 2
    shares = 2  # l1 of all layers, and its products with V_0
    assert counted["resformer"]["decode"]["kernels"] == llama["decode"]["kernels"] + layers - 1 + shares
    more = counted["denseformer"]["forward"]["bytes"] - llama["forward"]["bytes"]
    sums = layers * (layers + 3) // 2 + 2 * layers  # reads and writes, of the own state twice
    assert 0 < more - (sums + 3 * (layers + 1)) * state < 0.01 * more  # and a copy, written twice


@pytest.mark.slow
def test_what_a_compiler_makes_is_counted(script: Callable[[str], Any], monkeypatch: pytest.MonkeyPatch) -> None:
    traffic = script("traffic")
    monkeypatch.setitem(traffic.SHAPES, "tiny", dict(zip("LDFHKV", (4, 512, 64, 2, 2, 32), strict=True)))
    llama, mudd = (traffic.counted_compiled(each, "tiny") for each in ("llama", "mudd"))
    for step in ("forward", "backward"):
        assert 0.8 < (mudd[step]["bytes"] - llama[step]["bytes"]) / mudd[step]["minimum"] < 1.3
        assert mudd[step]["kernels"] > llama[step]["kernels"] > 20


def test_a_stranger_recomputes_each_published_row(tmp_path: Path, script: Callable[[str], Any]) -> None:
    recompute, page = script("recompute"), PAGE.read_text(encoding="utf-8")
    assert "resformer" not in re.findall(r"(?:from|import) (\w+)", Path(recompute.__file__).read_text(encoding="utf-8"))
    assert recompute.main(PAGE) == 0
    wrong = []
    for start in (
        "b12 | svformer minus",
        "n20 | value-embeddings minus",
        "resformer-gated",
        "text | resformer |",
    ):
        (row,) = re.findall(rf"^\| {re.escape(start)}.*", page, re.M)[:1]
        wrong.append(re.sub(r"(\.\d\d)(\d)", lambda digits: f"{digits[1]}{9 - int(digits[2])}", row, count=1))
        page = page.replace(row, wrong[-1])
    (tmp_path / "page.md").write_text(page, encoding="utf-8")
    assert sorted(recompute.main(tmp_path / "page.md").splitlines()) == sorted(row[2:-2] for row in wrong)


def test_pictures_show_the_records(script: Callable[[str], Any]) -> None:
    pictures, page = script("pictures"), PAGE.read_text(encoding="utf-8")
    lines = (BENCHMARKS / "results" / "study" / "b12.jsonl").read_text(encoding="utf-8").splitlines()
    ends = {run["method"]: run["curve"][-1] for run in map(json.loads, lines) if run.get("seed") == 0}
    first, own = ends["resformer"]["coefficients"]["model.layers.5.value_residual.weight"]
    depth = ends["denseformer"]["coefficients"]["model.layers.5.depth_average.weight"]
    assert pictures.value_map()[5].tolist() == [first, 0, 0, 0, 0, own, *[0] * 6]
    assert pictures.depth_map()[5].tolist() == [*depth, *[0] * 6]
    b12, n20, others = pictures.gains().values()
    for study, methods in (("b12", b12), ("n20", n20)):
        for method, mean, (low, high) in methods:
            assert f"| {study} | {method} | {mean:+.4f} [{low:+.4f}, {high:+.4f}] |" in page
    assert {("mudd", -0.071, None), ("mhc", -0.0396, None)} < {*others}
    table = (BENCHMARKS.parent / "docs" / "methods.md").read_text(encoding="utf-8")
    moved = {
        name: [float(cells.split(" | ")[place]) for place in (2, 5)]  # of the forward and the backward pass
        for name, cells in re.findall(r"^\| (Llama itself|`mudd`)( \| [\d,]+ \| .*) \|$", table, re.M)
    }
    more = 100 * sum(moved["`mudd`"]) / sum(moved["Llama itself"])
    assert pictures.costs()["mudd"] == pytest.approx(more, rel=1e-2)
    for draw in pictures.PICTURES.values():
        draw().savefig(picture := BytesIO())
        assert picture.tell() > 10_000


def test_sign_flips_give_a_p_where_it_can_be_significant(script: Callable[[str], Any]) -> None:
    tables, draw = script("tables"), np.random.default_rng(0).normal
    for values in (draw(-0.02, 0.02, 8), draw(0, 0.02, 7), -abs(draw(0, 0.02, 6))):
        exact = stats.permutation_test((values,), np.mean, permutation_type="samples", n_resamples=np.inf)
        assert tables.sign_flip(values.tolist()) == pytest.approx(exact.pvalue)
    assert tables.sign_flip([-0.1] * 8) == 2**-7
    assert tables.sign_flip([-0.1] * 5) is None
    assert "no p below 0.062 with five and 0.25 with three seeds" in tables.scratch("budget20,c")


def test_tables_of_the_planned_study_are_recomputed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[[str], Any]
) -> None:
    """Of eight seeds, which a sign-flip test can tell apart, and one that not every method has."""
    tables, recompute, draw = script("tables"), script("recompute"), np.random.default_rng(0).normal
    facts = {"bytes_per_token": 1.0, "block": 8, "batch": 2, "steps": 20, "data": {"held_out_documents": 3}}
    lines: list[dict[str, Any]] = [{"study": facts}]
    for seed, text in enumerate(draw(1.3, 0.1, 9)):
        for place, method in enumerate(PLANNED if seed < 8 else PLANNED[:2]):
            loss = text + draw(-0.01 * place, 0.005)
            rates = {"learning_rate": 4e-3, "connection_learning_rate": 0.2, "gate_learning_rate": None}
            curve = [
                {"step": step, "tokens": 16 * step, "validation_loss": loss + 1 / (step + 1)}
                for step in range(0, 21, 2)
            ]
            costs = {"parameters": 9, "training_flops": 2.0, "cache_bytes_per_token": 64}
            costs["tokens_per_second"] = 10 - place
            run = {"size": "small", "method": method, "architecture": method, "seed": seed, "steps": 20, **rates}
            lines.append({**run, "loss": loss, "curve": curve, "held_out": {"tokens": 9}, "environment": {}, **costs})
    (tmp_path / "study").mkdir()
    (tmp_path / "study" / "n20.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(recompute, "STUDY", tmp_path / "study")
    made = {name: tables.TABLES[name]("n20") for name in ("scratch", "curves", "tried")}
    page = "\n".join(f"<!-- table: {name} n20 -->\n{table}\n\n<!-- end -->" for name, table in made.items())
    (tmp_path / "page.md").write_text(page)
    assert recompute.main(tmp_path / "page.md") == 0
    assert [len(table.splitlines()) for table in made.values()] == [2 + 6, 2 + 5, 2 + 6]
    assert made["scratch"].count("| 0.047 |") == 6  # 6 / 128: all eight seeds agree
    assert made["curves"].splitlines()[0].endswith("| 90 % | 100 % |")
    assert tables.costs("n20").splitlines()[-1] == "| mudd | 9 | 64 B | 1.00 | 2.00 |"
    tables.write_reports(tmp_path / "reports")
    assert made["curves"] in (tmp_path / "reports" / "n20.md").read_text(encoding="utf-8")


@pytest.mark.slow
def test_the_commands_of_the_plan_are_accepted(
    tmp_path: Path, invoke: Callable[..., Any], script: Callable[[str], Any]
) -> None:
    save_notes(tmp_path)
    plan = (BENCHMARKS / "study.md").read_text(encoding="utf-8").partition("## 2026-11-26: the new connections")[2]
    blocks = [each for each in re.findall(r"^```bash\n(.*?)^```", plan, re.M | re.S) if "python - <<" not in each]
    shell = 'resformer() { printf \'%s\\0\' "$@" END; }\npython() { test -f "../$1"; }\n'
    ran = subprocess.run(["bash", "-ec", shell + "".join(blocks)], cwd=BENCHMARKS, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    commands = [each.split("\0")[:-1] for each in ran.stdout.split("END\0")[:-1]]
    studies: dict[str, list[dict[str, Any]]] = {}
    more = "--data notes.txt --sample-by paragraph --held-out 0.1 --seeds 1 --dry-run --json".split()
    for command in commands:
        if command[1][-5:] in ("gpu-1", "gpu-2"):  # the same with other seeds
            continue
        planned = invoke(tmp_path, *command, *more)
        assert planned.exit_code == 0, planned.output
        studies.setdefault(command[1], []).extend(json.loads(planned.stdout)["runs"])
    assert [*studies][:4] == ["n-rates", "n20", "n-kinds", "n20-12"]
    by = {run["method"]: run for run in studies["n20"]}
    assert [*by] == PLANNED
    assert {(run["learning_rate"], run["embedding_learning_rate"], run["steps"]) for run in by.values()} == {
        (4e-3, 4e-2, 2080)
    }
    assert {name for pair in script("tables").CONTRASTS["n20"].values() for name in pair} <= {*by}


@pytest.mark.slow
def test_adapters_are_trained_once_and_go_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Callable[[str], Any]
) -> None:
    adapters, tables, recompute = map(script, ("adapters", "tables", "recompute"))
    shapes = [layer.self_attn.v_proj.weight.shape for layer in save_checkpoint(tmp_path / "base").model.layers]
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for each in messages %}{{ each.role }}: {{ each.content }}\n{% endfor %}"
    tokenizer.chat_template += "{% if add_generation_prompt %}assistant: {% endif %}"
    tokenizer.save_pretrained(tmp_path / "base")
    text = 'def add{0}(a, b=1):\n    """Adds {0} to the sum."""\n\ndef _hidden():\n    """Not asked for."""\n'
    modules = [{"group": f"module{number}.py", "text": text.format(number)} for number in range(40)]
    for name, value in {"standard_library": lambda: modules, "BLOCK": 96, "RATES": (1e-3, 1e-2)}.items():
        monkeypatch.setattr(adapters, name, value)
    for name, numbers in {"CHOOSING": (200, 2), "SEEDS": ((0,), 3), "BATCH": (4, 1)}.items():
        monkeypatch.setattr(adapters, name, numbers)
    monkeypatch.setattr(sys, "argv", ["adapters.py", str(tmp_path / "study"), "--model", str(tmp_path / "base")])
    evaluated, calls = adapters.evaluated, count(1)

    def stopped(trainer: Any) -> Any:
        if next(calls) == 5:  # at the end of a training, before it is recorded
            raise KeyboardInterrupt
        return evaluated(trainer)

    monkeypatch.setattr(adapters, "evaluated", stopped)
    with pytest.raises(KeyboardInterrupt):
        adapters.main()
    shutil.rmtree(tmp_path / "study" / "resformer-gated")  # as on another machine
    adapters.main()
    begun = (tmp_path / "study" / "runs.jsonl").read_text()
    adapters.main()
    assert (tmp_path / "study" / "runs.jsonl").read_text() == begun
    asked = [(tmp_path / "study" / f"{part}.jsonl").read_text().splitlines() for part in ("train", "held_out")]
    assert len(asked[0]) > len(asked[1]) == 40 - len(asked[0]) > 0

    (tmp_path / "study" / "adapters.jsonl").write_text(begun)
    ((study, (bare, *runs)),) = read_record(tmp_path / "study" / "adapters.jsonl")
    assert study["questions"] == {"train": len(asked[0]), "held_out": len(asked[1])}
    arms = ["resformer-gated", "resformer-gated and LoRA", "LoRA"]
    assert [run["arm"] for run in runs] == [*(arm for arm in arms for _ in range(2)), *arms, "LoRA of equal time"]
    assert [run["step_seconds"] is None for run in runs].index(True) == 3  # it had ended, and is not trained again
    trained = {run["arm"]: run["trained"] for run in runs}
    lora = 2 * sum(rows + columns for rows, columns in shapes)
    assert trained["LoRA"] == trained["LoRA of equal time"] == trained[arms[1]] - trained[arms[0]] == lora
    assert max(run["loss"] for run in runs if run["rate"] == 1e-2) < bare["loss"]
    assert bare["loss"] == pytest.approx(runs[0]["curve"][0]["loss"])  # connections begin as the plain model

    monkeypatch.setattr(tables, "RESULTS", tmp_path)
    monkeypatch.setattr(recompute, "STUDY", tmp_path / "study")
    named = "adapters:tiny,adapters:tiny_minus_LoRA:LoRA"
    page = f"<!-- table: frozen {named} -->\n{tables.frozen(named)}\n\n<!-- end -->"
    (tmp_path / "page.md").write_text(page)
    assert (recompute.main(tmp_path / "page.md"), page.count("\n| tiny")) == (0, 4 + 3)
