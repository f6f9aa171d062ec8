"""Bundles: a ResFormer checkpoint with the code that loads it, for those who have Transformers and not this package.

The code is the package's modules that the model needs, each a file of its own, their imports of each other made
relative: Transformers follows those.
"""

import ast
import inspect
import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedConfig

from resformer.configuration.connected_config import ConnectedConfig
from resformer.convert.carrying import File
from resformer.convert.judging import without_code
from resformer.convert.reading import side_file
from resformer.convert.to_folder import Decision, Options, Report, carry_out
from resformer.errors import CheckpointError, quoted
from resformer.modeling.connection import KINDS
from resformer.names import DESCRIPTIONS
from resformer.untrusted import names_in
from resformer.version import __version__

#: The Auto classes that load a bundle, where the family has a model for them.
_AUTO_CLASSES = (
    "AutoModel AutoModelForCausalLM AutoModelForImageTextToText AutoModelForQuestionAnswering "
    "AutoModelForSequenceClassification AutoModelForTokenClassification"
).split()
_CONNECTIONS = "resformer.modeling.connections"
_IMPORT = re.compile(r"^([ \t]*)from (resformer(?:\.\w+)*) import (\([^)]*\)|[^\n]+)", re.MULTILINE)
#: The first lines of each file; the module as it is in the package follows.
_HEAD = """\
# SPDX-License-Identifier: Apache-2.0
# A module of resformer {version}, put here by `resformer bundle`: changes belong in the package.
"""
#: Makes Transformers save this code with every model of these classes.
_REGISTER = '\n{name}.register_for_auto_class("{auto_class}")\n'
#: Beside their models: Transformers makes a copy of all modules for each file that `auto_map` names.
_CONFIG = "\n{name}.__module__ = __name__"
#: Heads of Transformers ask AutoModel for the decoder of a configuration.
_DECODER = """
from transformers import AutoModel

AutoModel.register({name}.config_class, {name}, exist_ok=True)
"""


@dataclass(frozen=True, kw_only=True)
class BundleReport(Report):
    """The result of a bundling, or the forecast of a dry run."""

    code: dict[str, int]  # file that was added -> its bytes
    auto_map: dict[str, str]  # in config.json


def bundle(
    source: str | Path, output: str | Path, *, force: bool = False, revision: str | None = None, **options: Any
) -> BundleReport:
    """Writes a checkpoint with connections with its code, so that it loads where this package is not installed.

    `AutoModelForCausalLM.from_pretrained(output, trust_remote_code=True)` then needs only torch and Transformers, and
    so do the other Auto classes. Weights, tokenizer and model card go along byte for byte; config.json gets an
    `auto_map`. Where the package is imported its own classes are used, with or without `trust_remote_code`.

    Args:
        source: a folder or a Hub id; a bundle may be bundled again, with the code of this version.
        output: a new or empty folder.
        force, revision: as for `resformer.retrofit`.
        options: `dry_run`, `link`, `verify`, `progress`, as for `resformer.retrofit`.

    Raises:
        CheckpointError: the source is no language model with connections, a class of connections that it has cannot go
            along, or `output` is in the way.
        OutputError, VerificationError: as for `resformer.retrofit`.
    """
    settings = Options(made_by="bundle", force=force, **options)
    target, opened = settings.start(source, output, revision, heads=True)
    known = {"model_type": opened.config.model_type, **without_code(opened.raw_config)}
    config = config_with_code(known, opened.config, opened.name)
    code = {name: text.encode() for name, text in remote_code(opened.config).items()}
    fetched = opened.fetch(headers_only=settings.dry_run)
    if fetched.config.tie_word_embeddings and not fetched.built.tied:
        config["tie_word_embeddings"] = False
    # What describes it goes along.
    described = [side_file(opened.folder, name) for name in names_in(opened.folder) if DESCRIPTIONS.fullmatch(name)]
    decision = Decision(
        source=fetched,
        config=json.dumps(config, indent=2, sort_keys=True) + "\n",
        side_files=(*described, *(File(name, (content,)) for name, content in code.items())),
    )
    sizes = {name: len(content) for name, content in code.items()}
    return carry_out(decision, target, settings, partial(BundleReport, code=sizes, auto_map=config["auto_map"]))


def config_with_code(raw_config: Mapping[str, Any], config: Any, name: str) -> dict[str, Any]:
    """A config.json, read as `config`, with what makes Transformers load `remote_code(config)`."""
    if not isinstance(config, ConnectedConfig):
        raise CheckpointError(
            f"{name}: is a checkpoint of {quoted(raw_config.get('model_type'))}, which Transformers loads by itself. "
            "`resformer convert` gives it connections."
        )
    classes = auto_map(config)
    bundled = [
        classes[each].partition(".")[2]
        for each in ("AutoModelForCausalLM", "AutoModelForImageTextToText")
        if each in classes
    ]
    if (architectures := raw_config.get("architectures", bundled[:1])) not in [[each] for each in bundled]:
        raise CheckpointError(
            f"{name}: config.json has architectures={quoted(architectures)}; only {' or '.join(bundled)} can be "
            "bundled. Train the other heads from a bundle, with trust_remote_code=True: what that saves holds the code."
        )
    return {**raw_config, "auto_map": classes}


def auto_map(config: Any) -> dict[str, str]:
    """What stands in config.json: Auto class -> the class, in the files of `remote_code`."""
    classes = _classes(config)
    home = _file(classes["AutoModel"].__module__)
    return {name: f"{home}.{made.__name__}" for name, made in classes.items()}


def remote_code(config: Any) -> dict[str, str]:
    """File name -> text of the code that goes along: always the same for one family and version of this package.

    Connections that a user has defined go along with their files, and are refused where these cannot.
    """
    classes = _classes(config)
    own = {Path(_source(kind)).stem: kind for kind in KINDS if kind.fields_of is None and kind.is_in(config)}
    modules = list(dict.fromkeys([*(made.__module__ for made in classes.values()), _CONNECTIONS]))
    # A family of this package's: its classes are looked up by their names, as Transformers' are.
    bases = {each.__module__ for each in type(config).__mro__[1:] if issubclass(each, PreTrainedConfig)}
    families = [module for module in sorted(bases) if module.startswith("resformer.")]
    modules += families
    code = {name: _own_text(kind, modules) for name, kind in own.items()}
    for module in modules:  # it grows
        name = _file(module)
        if name in own:
            raise CheckpointError(f"{_source(own[name])}: the package has a module of this name: rename the file.")
        text = Path(_source(import_module(module))).read_text(encoding="utf-8")
        code[name] = _HEAD.format(version=__version__) + _relative(text, modules)
    connections = _file(_CONNECTIONS)
    code[connections] += "".join(f"from .{name} import __doc__ as of_{name}\n" for name in own)
    home = classes["AutoModel"].__module__
    code[_file(home)] += "".join(f"\nfrom .{_file(each)} import __doc__ as of_family\n" for each in families)
    for auto_class, made in classes.items():
        name = made.__name__ if hasattr(import_module(home), "__all__") else f'__getattr__("{made.__name__}")'
        special = {"AutoConfig": _CONFIG, "AutoModel": _DECODER}.get(auto_class, "")
        code[_file(home)] += (special + _REGISTER).format(name=name, auto_class=auto_class)
    return {f"{name}.py": text for name, text in sorted(code.items())}


def _classes(config: Any) -> dict[str, Any]:
    """Auto class -> the configuration's class, and those of its models."""
    mappings = {name: getattr(transformers, name)._model_mapping for name in _AUTO_CLASSES}
    models = {name: mapping[type(config)] for name, mapping in mappings.items() if type(config) in mapping}
    return {"AutoConfig": type(config), **models}


def _file(module: str) -> str:
    return module.rpartition(".")[2]


def _source(thing: Any) -> str:
    try:
        found = inspect.getsourcefile(thing)
    except (OSError, TypeError):
        found = None
    if found is None or getattr(thing, "__module__", "") == "__main__" or not Path(found).is_file():
        raise CheckpointError(
            f"{thing.__qualname__}: this class of connections has no file of its own, which has to go along: put it "
            "into a module that is imported."
        )
    return found


def _own_text(kind: Any, modules: list[str]) -> str:
    """The text of a user's module, without what it runs as a script; `resformer` has the names that it reads of it."""
    path = Path(_source(kind))
    lines = path.read_text(encoding="utf-8").split("\n")
    tree = ast.parse("\n".join(lines))
    scripts = [each for each in tree.body if isinstance(each, ast.If) and "__main__" in ast.unparse(each.test)]
    for script in scripts:
        tree.body.remove(script)
        lines[script.lineno - 1 : script.end_lineno] = [""] * len(lines[script.lineno - 1 : script.end_lineno])
    _check_imports(path, tree)
    names = [each for each in ast.walk(tree) if isinstance(each, ast.Attribute)]
    used = {each.attr for each in names if isinstance(each.value, ast.Name) and each.value.id == "resformer"}
    imported = [f"from resformer import {name} as resformer_{name}" for name in sorted(used)]
    package = f"resformer = SimpleNamespace({', '.join(f'{name}=resformer_{name}' for name in sorted(used))})"
    imports = "\n".join(["from types import SimpleNamespace", *imported, package])
    text = re.sub(r"^import resformer$", imports, "\n".join(lines).rstrip() + "\n", flags=re.MULTILINE)
    if (left := re.search(r"^[ \t]*(import [^#\n]*\bresformer\b|from \.).*$", text, re.MULTILINE)) is not None:
        raise CheckpointError(
            f"{path}: `{left[0].strip()}` cannot go along. Write `import resformer` or `from resformer import NAME`, "
            "and keep the class of connections in one file."
        )
    return _relative(text, modules)


def _check_imports(path: Path, tree: ast.Module) -> None:
    """Refuses imports of modules that no package brings: files beside the user's."""
    known = {*sys.stdlib_module_names, *packages_distributions(), "resformer"}
    for node in ast.walk(tree):
        names = [each.name for each in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) and not node.level else []
        if not {name.partition(".")[0] for name in names} <= known:
            raise CheckpointError(
                f"{path}: `{ast.unparse(node)}` cannot go along: it is of no installed package. Keep what the class of "
                "connections needs in its file."
            )


def _relative(text: str, modules: list[str]) -> str:
    """A module whose imports from the package are relative; `modules` gets what it imports."""

    def relative(match: re.Match[str]) -> str:
        indent, package, names = match.groups()
        if not hasattr(import_module(package), "__path__"):
            _add(package)
            return f"{indent}from .{_file(package)} import {names}"
        lines = []
        for each in re.findall(r"\w+(?: as \w+)?", names.partition("#")[0]):
            name = each.partition(" as ")[0]
            if find_spec(f"{package}.{name}") is not None:
                _add(f"{package}.{name}")
                lines.append(f"{indent}from .{name} import __doc__  # Transformers follows this one")
                lines.append(f"{indent}from . import {each}")
            else:
                home = getattr(getattr(import_module(package), name), "__module__", package)
                _add(home)
                lines.append(f"{indent}from .{_file(home)} import {each}")
        return "\n".join(lines)

    def _add(module: str) -> None:
        if module not in modules:
            modules.append(module)

    return _IMPORT.sub(relative, text)
