"""The kinds of connections, one file each: a file that is put here adds its own to `KINDS`."""

from importlib import import_module
from pkgutil import iter_modules

from resformer.modeling.connection import KINDS

for _module in iter_modules(__path__):
    import_module(f"{__name__}.{_module.name}")

__all__ = ["KINDS"]
