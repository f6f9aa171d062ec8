"""One flat source file out of the modules of a package that it imports, for remote code: Transformers copies a class's
file and those beside it to the Hub and from there, and knows no packages.

The source is cut by the positions of its syntax tree, never unparsed, so that comments and layout stay as they are.
"""

import ast
import builtins
import re
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from importlib.resources import files

__all__ = ["flatten", "package_source"]

WIDTH = 120
_RULE = "# " + "-" * (WIDTH - 2)


@dataclass
class _Flat:
    """What has been gathered so far."""

    package: str
    beside: Mapping[str, str]
    read: Callable[[str], str]
    without: set[str]
    sections: dict[str, str] = field(default_factory=dict)  # module -> its code; `""` while its imports are gathered
    public: set[str] = field(default_factory=set)  # what the modules' `__all__` hold
    #: Name -> what it is imported from, `("torch", "nn")`, or `("torch", None)` for `import torch`.
    imports: dict[str, tuple[str, str | None]] = field(default_factory=dict)
    homes: dict[str, str] = field(default_factory=dict)  # top-level name -> the module that defines or imports it


def package_source(module: str) -> str:
    """The source of an importable module, from a folder or a zip file."""
    package, _, name = module.rpartition(".")
    return files(package).joinpath(f"{name}.py").read_text("utf-8")


def flatten(
    module: str,
    *,
    head: str,
    tail: str = "",
    beside: Mapping[str, str] | None = None,
    without: Collection[str] = (),
    read: Callable[[str], str] = package_source,
) -> str:
    """The source of `module` and of all modules of its package that it imports, as one file.

    Modules follow those that they import, each under a comment that holds its docstring; imports are merged at the top
    and so are the `__all__`. Examples in docstrings that import the package are left out.

    Args:
        module: `"package.subpackage.module"`.
        head, tail: the first and the last lines of the file.
        beside: subpackage -> the flat file, beside this one, that its names are imported from.
        without: definitions to leave out, `"name"` or `"Class.name"`.
        read: gives a module's source.

    Raises:
        ValueError: the modules cannot stand in one file: two of them give one name different meanings, import each
            other, or import what is neither in their package nor `beside`; or there is nothing to leave out by a name.
    """
    flat = _Flat(module.rpartition(".")[0], beside or {}, read, set(without))
    _gather(module, flat)
    if flat.without:
        raise ValueError(f"{module}: defines no {', '.join(sorted(flat.without))} that could be left out.")
    parts = [*_imports(flat.imports), _listing("__all__ = [", sorted(flat.public, key=_by_kind), "]", quote='"')]
    sections = [f"{_comment(name, read(name))}\n\n\n{code}" for name, code in flat.sections.items()]
    top = "\n\n".join([head.strip("\n"), *parts])
    return "\n\n\n".join([top, *sections, *([tail.strip("\n")] if tail else [])]) + "\n"


def _gather(module: str, flat: _Flat) -> None:
    """Adds the modules that `module` imports, and then it."""
    flat.sections[module] = ""
    source = _without_examples(flat.read(module), flat.package.partition(".")[0])
    tree, dropped = ast.parse(source), list[ast.stmt]()
    for node in tree.body:
        if isinstance(node, ast.Import | ast.ImportFrom):
            _gather_import(node, module, flat)
            dropped.append(node)
        elif _is_docstring(node, tree):
            dropped.append(node)
        elif _names(node) == {"__all__"} and isinstance(node, ast.Assign):
            flat.public |= set(ast.literal_eval(node.value))
            dropped.append(node)
        else:
            dropped += _left_out(node, flat.without)
            for name in _names(node) if node not in dropped else ():
                _claim(name, module, flat)
    for inner in ast.walk(tree):
        if isinstance(inner, ast.Import | ast.ImportFrom) and inner not in tree.body and _own(inner, flat):
            raise ValueError(f"{module}, line {inner.lineno}: imports from its package within a block.")
    del flat.sections[module]
    flat.sections[module] = _cut(source, dropped)


def _gather_import(node: ast.Import | ast.ImportFrom, module: str, flat: _Flat) -> None:
    for alias in node.names:
        name = alias.asname or alias.name
        if isinstance(node, ast.Import):
            origin: tuple[str, str | None] = (alias.name, None)
        else:
            origin = (node.module or "", alias.name)
        if _own(node, flat):
            flat_file = next(
                (file for package, file in flat.beside.items() if f"{origin[0]}.".startswith(f"{package}.")), None
            )
            if flat_file is not None:
                origin = (f".{flat_file}", alias.name)
            elif isinstance(node, ast.ImportFrom) and origin[0].rpartition(".")[0] == flat.package and not alias.asname:
                if flat.sections.get(origin[0]) == "":
                    raise ValueError(f"{module} and {origin[0]} import each other.")
                if origin[0] not in flat.sections:
                    _gather(origin[0], flat)
                if flat.homes.get(name) != origin[0]:
                    raise ValueError(f"{module}: imports {name} from {origin[0]}, which does not define it.")
                continue
            else:
                raise ValueError(f"{module}, line {node.lineno}: cannot stand in one file: {ast.unparse(node)}")
        if flat.imports.get(name) != origin:
            _claim(name, module, flat)
        flat.imports[name] = origin


def _own(node: ast.Import | ast.ImportFrom, flat: _Flat) -> bool:
    """Whether this imports from the package."""
    modules = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
    level = node.level if isinstance(node, ast.ImportFrom) else 0
    return level > 0 or flat.package.partition(".")[0] in {module.partition(".")[0] for module in modules}


def _claim(name: str, module: str, flat: _Flat) -> None:
    """Notes what a top-level name means, once."""
    if flat.homes.get(name, module) != module or name in flat.imports:
        raise ValueError(f"{module} and {flat.homes[name]} mean different things by {name}: rename one of them.")
    if hasattr(builtins, name):
        raise ValueError(f"{module}: {name} would hide Python's own {name} from the other modules: rename it.")
    flat.homes[name] = module


def _names(node: ast.stmt) -> set[str]:
    """The names that a top-level statement binds."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return {node.name}
    return {name.id for name in ast.walk(node) if isinstance(name, ast.Name) and isinstance(name.ctx, ast.Store)}


def _left_out(node: ast.stmt, without: set[str]) -> Iterator[ast.stmt]:
    """The definitions in this statement, or it itself, that are named in `without`, which they are taken from."""
    for name in sorted(_names(node) & without):
        without.remove(name)
        yield node
    if isinstance(node, ast.ClassDef):
        for inner in node.body:
            for name in sorted({f"{node.name}.{name}" for name in _names(inner)} & without):
                without.remove(name)
                yield inner


def _first_line(node: ast.stmt) -> int:
    """Its number, from 0, decorators included."""
    return min([node.lineno, *(decorator.lineno for decorator in getattr(node, "decorator_list", ()))]) - 1


def _cut(source: str, dropped: list[ast.stmt]) -> str:
    """The source without these statements and the comments right above them."""
    lines = source.splitlines()
    for node in sorted(dropped, key=_first_line, reverse=True):
        first, last = _first_line(node), node.end_lineno or 0
        while first > 0 and lines[first - 1].lstrip().startswith("#"):
            first -= 1
        above = next((n for n in range(first) if lines[first - 1 - n]), first)
        below = next((n for n in range(len(lines) - last) if lines[last + n]), len(lines) - last)
        lines[first - above : last + below] = [""] * max(above, below)
    return "\n".join(lines).strip("\n")


def _without_examples(source: str, package: str) -> str:
    """The source without those examples, at the end of docstrings, that import the package."""
    lines = source.splitlines()
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.ClassDef | ast.FunctionDef)]
    for node in sorted(nodes, key=lambda node: node.lineno, reverse=True):
        if ast.get_docstring(node) is None:
            continue
        first, last = node.body[0].lineno - 1, node.body[0].end_lineno or 0
        fences = [n for n in range(first, last) if lines[n].strip() == "```python"]
        if not fences or not lines[last - 1].endswith('```"""'):
            continue
        if not any(re.match(rf"\s*>>> (from|import) {package}\b", line) for line in lines[fences[-1] : last]):
            continue
        text = "\n".join(lines[first : fences[-1]]).rstrip()
        close = '"""' if "\n" not in text else f'\n{" " * node.body[0].col_offset}"""'
        lines[first:last] = (text + close).split("\n")
    return "\n".join(lines)


def _is_docstring(node: ast.stmt, tree: ast.Module) -> bool:
    return node is tree.body[0] and ast.get_docstring(tree) is not None


def _comment(module: str, source: str) -> str:
    """The name of a module, and its docstring."""
    docstring = ast.get_docstring(ast.parse(source), clean=False) or ""
    text = [module, *(["", *docstring.strip().splitlines()] if docstring else [])]
    return "\n".join([_RULE, *(f"# {line}".rstrip() for line in text), _RULE])


def _imports(imports: Mapping[str, tuple[str, str | None]]) -> Iterator[str]:
    """The import statements: the standard library's, others, and those from files beside this one."""
    groups: dict[int, list[str]] = {0: [], 1: [], 2: []}
    members: dict[str, list[str]] = {}
    aliased: list[tuple[str, list[str]]] = []
    for bound, (module, name) in imports.items():
        if name is None:
            shown = module if bound == module else f"{module} as {bound}"
            groups[_group(module)].append(f"import {shown}")
        elif bound == name:
            members.setdefault(module, []).append(name)
        else:
            aliased.append((module, [f"{name} as {bound}"]))
    for group in groups.values():
        group.sort()
    statements = [*((module, sorted(names, key=_by_kind)) for module, names in members.items()), *aliased]
    for module, names in sorted(statements, key=lambda statement: (statement[0], _by_kind(statement[1][0]))):
        groups[_group(module)].append(_listing(f"from {module} import ", names))
    return ("\n".join(group) for group in groups.values() if group)


def _group(module: str) -> int:
    if module.startswith("."):
        return 2
    return 0 if module.partition(".")[0] in sys.stdlib_module_names else 1


def _by_kind(name: str) -> tuple[int, str]:
    """Constants, classes, the rest."""
    kind = 0 if name.isupper() and len(name) > 1 else 1 if name[0].isupper() else 2
    return kind, name


def _listing(start: str, names: list[str], end: str = "", quote: str = "") -> str:
    """A list in one line, or with a line for each where that is too long."""
    shown = [f"{quote}{name}{quote}" for name in names]
    line = f"{start}{', '.join(shown)}{end}"
    if len(line) <= WIDTH:
        return line
    opening, closing = (start, end) if end else (f"{start}(", ")")
    return "\n".join([opening, *(f"    {name}," for name in shown), closing])
