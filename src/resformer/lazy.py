"""Packages whose names are imported when they are first used: torch and Transformers take seconds."""

from collections.abc import Callable, Collection, Mapping
from importlib import import_module
from typing import Any


def on_demand(
    package: dict[str, Any], homes: Mapping[str, str], subpackages: Collection[str] = ()
) -> tuple[list[str], Callable[[str], Any], Callable[[], list[str]]]:
    """`__all__`, `__getattr__` and `__dir__` of a package, from its `globals()`; `dir` lists public names alone.

    Args:
        homes: module -> its public names, separated by spaces.
        subpackages: attributes that are packages within this one.
    """
    modules = {name: module for module, names in homes.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in subpackages:
            return import_module(f"{package['__name__']}.{name}")
        if name not in modules:
            raise AttributeError(f"module {package['__name__']!r} has no attribute {name!r}")
        value = package[name] = getattr(import_module(modules[name]), name)
        return value

    special = [name for name in package if name.startswith("__")]
    return [*modules], get, lambda: sorted({*special, *modules, *subpackages})
