"""Imports run one way: a module imports from its own package and from the lines above its own in CONTRIBUTING.md."""

import ast
import pkgutil
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

import resformer

CONTRIBUTING = (Path(__file__).parents[1] / "CONTRIBUTING.md").read_text(encoding="utf-8")
#: A package stands for all its modules. Names that share a line do not import each other.
ORDER = CONTRIBUTING.partition("```text\n")[2].partition("\n```")[0]
LEVELS = {name: level for level, line in enumerate(ORDER.split("\n")) for name in line.split(", ")}
MODULES = ["resformer", *(module.name for module in pkgutil.walk_packages(resformer.__path__, "resformer."))]


def name_in_order(module: str) -> str:
    """`convert` of `resformer.convert.reading`; `training.study` of `resformer.training.study.table`."""
    name = module.partition(".")[2] or "__init__"
    while name not in LEVELS:
        assert "." in name, f"{module} has no place in CONTRIBUTING.md: name it there"
        name = name.rpartition(".")[0]
    return name


def imported(tree: ast.AST) -> Iterator[str]:
    """Every module of ours that is imported, within functions too, but for type checkers alone."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test).endswith("TYPE_CHECKING"):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name.partition(".")[0] == "resformer")
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "resformer":
            for alias in node.names:
                yield name if (name := f"{node.module}.{alias.name}") in MODULES else node.module
        yield from imported(node)


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_from_below(module: str) -> None:
    spec = find_spec(module)
    place = name_in_order(module)
    names = {name_in_order(name) for name in imported(ast.parse(Path(spec.origin).read_text(encoding="utf-8")))}
    assert {name for name in names - {place} if LEVELS[name] >= LEVELS[place]} == set()
