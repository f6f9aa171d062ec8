"""The documentation builds without a warning, its table of methods is what the code does, its links lead somewhere."""

import re
from configparser import ConfigParser
from pathlib import Path

import pytest
import typer
import yaml
from checkpoints import SMOLLM2_135M
from command_server import python
from conftest import WRITE_SNAPSHOTS, starting_as_llama

from resformer import METHODS, ResFormerConfig
from resformer.cli import app
from resformer.commands.terminal import FAILED, INTERRUPTED, INVALID_INPUT, USAGE, VERIFICATION_FAILED
from resformer.configuration import cache_bytes_by_method
from resformer.configuration.methods import FIRST
from resformer.convert.connected_families import view
from resformer.model_cards.cards import added_parameters
from resformer.modeling.connection import kinds_in

ROOT = Path(__file__).resolve().parents[1]
#: The methods of the README's table: gains at a cost that most would pay.
IN_README = ("mudd", "attnres", "svformer", "resformer", "denseformer")
DOCUMENTS = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/*.md"), *ROOT.glob(".github/**/*.md")])


@pytest.mark.slow
def test_documentation_builds_without_warnings(tmp_path: Path) -> None:
    command = "-m sphinx -W --keep-going -n -q -b html -d".split()
    python(*command, tmp_path / "doctrees", ROOT / "docs", tmp_path / "html")
    pages = [*ROOT.glob("docs/*.md"), *ROOT.glob("docs/*.ipynb")]
    assert {page.stem for page in pages} <= {page.stem for page in (tmp_path / "html").glob("*.html")}
    index = (tmp_path / "html" / "index.html").read_text(encoding="utf-8")
    for page in pages:
        assert f'href="{page.stem}.html"' in index or page.stem == "index", f"{page.name} is in no table of contents"
    assert (tmp_path / "html" / "tour.html").read_text(encoding="utf-8").count("<img ") == 3  # figures
    methods = (tmp_path / "html" / "methods.html").read_text(encoding="utf-8")
    assert "<math " in methods
    assert [left for left in ("mathjax@", "<mi>&<", "<mi>\\\\", "\\begin") if left in methods] == [], "not drawn"
    api = (tmp_path / "html" / "api.html").read_text(encoding="utf-8")
    text = re.sub(r"<[^>]+>", "", api)
    assert "value_residual_layers" in text
    assert not re.findall(r"``|\[`|\.\. code", text), "markup that was not understood"
    commands = (tmp_path / "html" / "cli.html").read_text(encoding="utf-8")
    for name, command in typer.main.get_command(app).commands.items():
        shown = [each for each in command.params if not each.hidden]
        options = [option for each in shown for option in each.opts if option.startswith("--")]
        assert [each for each in (f'id="{name}"', *options) if each not in commands] == []


def test_the_page_of_commands_has_every_exit_code() -> None:
    page = (ROOT / "docs" / "cli.md").read_text(encoding="utf-8")
    codes = {0, FAILED, USAGE, INVALID_INPUT, VERIFICATION_FAILED, INTERRUPTED}
    assert {int(code) for code in re.findall(r"^\| (\d+) \|", page, re.MULTILINE)} == codes


@pytest.mark.parametrize("page", DOCUMENTS, ids=lambda path: path.name)
def test_code_of_the_pages_takes_what_is_public(page: Path) -> None:
    """The names of the reference: all else may change in any version."""
    reference = re.findall(
        r"^\.\. auto\w+:: (\S+)$", (ROOT / "docs" / "api.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    for code in re.findall(r"^```python.*?\n(.*?)^```", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL):
        imports = re.findall(r"^from (resformer[\w.]*) import (.+)$", code, re.MULTILINE)
        taken = [f"{module}.{name}" for module, names in imports for name in names.split(", ")]
        taken += re.findall(r"\bresformer(?:\.\w+)+", re.sub(r"^(from|import) .*", "", code, flags=re.MULTILINE))
        assert [name for name in taken if name not in reference] == []


def test_tables_of_methods_are_made_of_the_methods() -> None:
    """SNAPSHOTS=write writes them."""
    headers = (
        "| method | loss minus plain Llama's | exact | added parameters | cache | kernels in decoding | what it does |"
        "\n|---|---|---|---|---|---|---|\n",
        "| method | paper | exact | added parameters | cache |\n|---|---|---|---|---|\n",
        "| method | paper | loss minus plain Llama's | added parameters | cache | kernels in decoding |\n"
        "|---|---|---|---|---|---|\n",
    )
    paths = [ROOT / "docs" / "methods.md"] * 2 + [ROOT / "README.md"]
    kernels = dict(
        re.findall(
            r"^\| `([\w-]+)` \|(?: [-.,\d]* \|){6} [-,\d]+ \((.+)\) \| .*$", paths[0].read_text("utf-8"), re.MULTILINE
        )
    )
    tables = [*headers]
    for method in {**FIRST, **METHODS}:
        config = ResFormerConfig(**SMOLLM2_135M, **starting_as_llama(method, 30))
        cache = cache_bytes_by_method(config)
        shape = view(config)
        exact = "no" if any(kind.inexact_because(shape) for kind in kinds_in(shape)) else "yes"
        added, share = f"{added_parameters(config):,}", f"{100 * cache[method] / cache['transformer']:.1f} %"
        papers = ", ".join(f"[{each.arxiv}](https://arxiv.org/abs/{each.arxiv})" for each in METHODS[method].papers)
        gain, cost = FIRST.get(method, (papers, ""))
        decoding = kernels[method] if cost else ""
        assert cost in ("", f"{added} parameters, {share} of the cache, {decoding} kernels in decoding")
        cells = [f"`{method}`", gain, exact, added, share, *([decoding, METHODS[method].summary] if cost else [])]
        tables[not cost] += f"| {' | '.join(cells)} |\n"
        if method in IN_README:
            tables[2] += f"| `{method}` | {papers} | {gain} | {added} | {share} | {decoding} |\n"
    if WRITE_SNAPSHOTS:
        for path, header, table in zip(paths, headers, tables, strict=True):
            before, _, behind = path.read_text(encoding="utf-8").partition(header)
            path.write_text(before + table + "\n" + behind.partition("\n\n")[2], encoding="utf-8")
    assert [table for path, table in zip(paths, tables, strict=True) if table not in path.read_text("utf-8")] == []


def test_gains_of_methods_are_those_of_the_results_and_in_their_order() -> None:
    results = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    by_source: dict[str, list[float]] = {}
    for method, (gain, _) in FIRST.items():
        first, *others = gain.split("; ")
        by_source.setdefault(first.rpartition(", ")[2], []).append(float(first.partition(" ")[0]))
        for part in (first, *others):
            if study := re.fullmatch(r"(.+), ours \((\w+)\)", part):
                assert f"| {study[2]} | {method} | {study[1]} |" in results
    assert [*by_source] == ["others'", "ours (b12)", "ours (n20)", "ours (main)"]
    assert [sorted(numbers) for numbers in by_source.values()] == [*by_source.values()]


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


def test_messages_of_troubleshooting_are_those_that_the_code_gives() -> None:
    page = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("**/*.py") if ".venv" not in path.parts)
    sources = re.sub(r'"\n\s+f?"', "", sources)  # a text that goes on
    for message in (
        "The adapter does not train the connections",
        "has these connections already",
        "is asked for: connections that are there",
        "The result would not compute what",
        "cannot be reverted, its connections have an effect",
        "cannot be pushed to while HF_HUB_OFFLINE is set",
        "was written or edited by hand",
        "Commands need transformers",
        "cannot be reached",
        "no token",
    ):
        assert message in page
        assert message in sources.replace((ROOT / "tests" / "test_docs.py").read_text(encoding="utf-8"), "")


def test_extras_have_a_row_each() -> None:
    config = ConfigParser()
    config.read(ROOT / "setup.cfg", encoding="utf-8")
    page = (ROOT / "docs" / "stability.md").read_text(encoding="utf-8")
    assert [extra for extra in config["options.extras_require"] if f"`{extra}`" not in page] == []
    pins = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().splitlines() if "==" in line)
    for package in ("transformers", "torch"):
        assert f"{pins[package]} with every test" in page


def test_the_readme_says_what_the_demo_printed() -> None:
    printed = (ROOT / "benchmarks" / "results" / "demo.txt").read_text(encoding="utf-8")
    before, after = (
        re.findall(rf"^perplexity {when} +(\S+) +(\S+)$", printed, re.MULTILINE)[0] for when in ("before", "after")
    )
    assert before[0] == before[1]
    said = f"perplexity fell here from {before[0]} to {after[0]}, with connections to {after[1]}"
    assert said in " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def test_citation_names_the_papers_and_the_version() -> None:
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "type", "license"} <= set(citation)
    cited = {reference["identifiers"][0]["value"] for reference in citation["references"]}
    pages = "".join((ROOT / name).read_text(encoding="utf-8") for name in ("README.md", "docs/methods.md"))
    named = {
        *re.findall(r"arxiv\.org/abs/([\d.]+\d)", pages),
        *(paper.arxiv for each in METHODS.values() for paper in each.papers),
    }
    assert {f"arXiv:{number}" for number in named} <= cited


def test_tables_and_cards_are_made_of_the_results() -> None:
    python(ROOT / "benchmarks" / "tables.py", "--check")
