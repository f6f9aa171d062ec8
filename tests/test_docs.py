"""The documentation builds without a warning, its table of methods is what the code does, its links lead somewhere."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SMOLLM2_135M
from conftest import starting_as_llama

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.configuration import cache_bytes_by_method
from resformer.configuration.methods import without_connections
from resformer.convert.deciding import inexact_because
from resformer.model_cards.facts import PAPERS
from resformer.training.study.table import rows_of

ROOT = Path(__file__).resolve().parents[1]
STUDIES = sorted((ROOT / "benchmarks" / "results" / "study").glob("*.json"))
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.md")])


@pytest.mark.slow
def test_documentation_builds_without_warnings(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "sphinx", "-W", "--keep-going", "-n", "-q", "-b", "html"]
    command += ["-d", str(tmp_path / "doctrees"), str(ROOT / "docs"), str(tmp_path / "html")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.ipynb")]
    assert {page.stem for page in pages} <= {page.stem for page in (tmp_path / "html").glob("*.html")}
    index = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    for page in pages:
        assert f'href="{page.stem}.html"' in index or page.stem == "index", f"{page.name} is in no table of contents"
    assert (tmp_path / "html" / "tour.html").read_text(encoding="utf-8").count("<img ") == 3  # figures
    api = (tmp_path / "html" / "api.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", api)
    assert "value_residual_layers" in text
    assert not re.findall(r"``|\[`|\.\. code", text), "markup that was not understood"


def test_table_of_methods_says_what_the_code_does(method: str) -> None:
    config = ResFormerConfig(**SMOLLM2_135M, **starting_as_llama(method, 30))
    with torch.device("meta"):
        added = ResFormerForCausalLM(config).num_parameters() - 134_515_008
    cache = cache_bytes_by_method(config)
    exact = "no" if inexact_because(config, without_connections(config)) else "yes"
    row = f"| `{method}` | {exact} | {added:,} | {cache[method] / cache['transformer']:.1%} |".replace("%", " %")
    assert row in (ROOT / "docs" / "methods.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_relative_links_lead_to_files(document: Path) -> None:
    text = re.sub(r"^```.*?^```", "", document.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    links = [link for link in re.findall(r"\]\(([^)\s]+)\)", text) if not re.match(r"https?://|#", link)]
    assert [link for link in links if not (document.parent / link.partition("#")[0]).exists()] == []


def test_tests_that_documents_name_are_there() -> None:
    files = [*(ROOT / "tests").glob("test_*.py")]
    names = {name for file in files for name in [file.stem, *re.findall(r"def (test_\w+)", file.read_text())]}
    for document in DOCUMENTS:
        named = re.findall(r"`(?:tests/)?(test_\w+)(?:\.py)?`", document.read_text(encoding="utf-8"))
        assert set(named) <= names, document


def test_the_readme_shows_what_the_demo_printed() -> None:
    printed = (ROOT / "benchmarks" / "results" / "demo.txt").read_text(encoding="utf-8")
    shown = re.search(
        r"^```text\n(.*?)^```", (ROOT / "README.md").read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert shown is not None
    assert "perplexity after" in shown[1]
    assert shown[1] in printed


def test_citation_names_the_papers_and_the_version() -> None:
    yaml = pytest.importorskip("yaml")
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type", "license"} <= set(citation)
    cited = {reference["identifiers"][0]["value"] for reference in citation["references"]}
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/methods.md"))
    named = {*re.findall(r"arxiv\.org/abs/([\d.]+\d)", pages), *(paper.arxiv for paper in PAPERS.values())}
    assert {f"arXiv:{number}" for number in named} <= cited


def test_papers_that_pages_name_are_in_the_citation_or_the_code() -> None:
    files = [ROOT / "CITATION.cff", *ROOT.glob("training/*.py"), *ROOT.glob("benchmarks/*.py")]
    code, pages = ("".join(path.read_text(encoding="utf-8") for path in paths) for paths in (files, DOCUMENTS))
    assert {*re.findall(r"\d{4}\.\d{5}", pages)} <= {*re.findall(r"\d{4}\.\d{5}", code)}


def rounded(row: dict[str, Any]) -> Any:
    """Versions of scipy differ in the last digits of an integral."""
    return json.loads(json.dumps(row), parse_float=lambda number: round(float(number), 5))


@pytest.mark.parametrize("study", STUDIES, ids=lambda path: path.stem)
def test_results_are_those_of_the_runs(study: Path) -> None:
    report = json.loads(study.read_text(encoding="utf-8"))
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in study.with_suffix("").glob("runs/**/*.json")]
    remade = {
        size: {row["method"]: row for row in rows}
        for size, rows in rows_of(
            sorted(runs, key=lambda run: run["seed"]), report["baseline"], report["held_out_groups"]
        ).items()
    }
    for size, rows in report["sizes"].items():
        assert {row["method"] for row in rows} == set(remade[size])
        for row in rows:
            computed = remade[size][row["method"]]
            assert rounded({key: row[key] for key in computed}) == rounded(computed)


def test_tables_and_cards_are_made_of_the_results() -> None:
    done = subprocess.run(
        [sys.executable, ROOT / "benchmarks" / "tables.py", "--check"], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr


def test_results_are_in_generated_tables_and_not_in_sentences() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    prose = re.sub(
        r"<!-- table.*?<!-- end -->|\]\([^)]*\)|`[^`]*`|^    .*$|\[\d{4}\.\d{5}", "", page, flags=re.M | re.S
    )
    assert re.findall(r"\d+\.\d{2,}|\d[\d,]{4,}", prose) == []
