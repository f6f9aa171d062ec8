"""Connections in files of one's own: `FILE.py:NAME` where a method is named, and `resformer --import FILE.py`."""

import re
import sys
from importlib import import_module, invalidate_caches
from importlib.util import find_spec
from pathlib import Path

from resformer.errors import did_you_mean, one_line

#: A file, and what comes after it unless that is FIELD=VALUE.
_IN_A_FILE = re.compile(r"(?P<file>[^:=]+\.py)(:(?P<name>[^:=]*)(?![^:]*=))?(?=:|$)")


def method_named(text: str) -> str:
    """The name of a method, and what else stands there; of `FILE.py:NAME`, or `FILE.py` with one, after its import.

    Raises:
        ValueError: the file cannot be imported, or has no such class of connections.
    """
    match = _IN_A_FILE.match(text)
    if match is None:
        return text
    names = import_connections(Path(match["file"]).expanduser())
    name = match["name"] or (names[0] if len(names) == 1 else "")
    if name not in names:
        told = f"has no connection {name!r}" if name else "has several connections"
        raise ValueError(
            f"{match['file']}: {told}; expected {match['file']}:NAME, with one of {', '.join(names)}."
            f"{did_you_mean(name, names)}"
        )
    return name + text[match.end() :]


def import_connections(file: Path) -> list[str]:
    """Imports a file, once; returns the names of the connections that it defines.

    Raises:
        ValueError: it cannot be imported, or defines none.
    """
    path, name = file.resolve(), file.stem
    if not path.is_file():
        raise ValueError(f"{file}: there is no such file.")
    known = find_spec(name) if name.isidentifier() else None
    if not name.isidentifier() or (known is not None and Path(known.origin or "").resolve() != path):
        raise ValueError(f"{file}: its name is not free for a module of its own: rename it.")
    if name not in sys.modules:
        sys.path += dict.fromkeys([str(file.absolute().parent), str(path.parent)])  # the second: of what it imports
        invalidate_caches()  # the file may be new
    try:
        module = import_module(name)
    except Exception as error:  # any of the file's
        raise ValueError(f"{file}: cannot be imported: {type(error).__name__}: {one_line(error)}") from error
    from resformer.modeling.connection import KINDS

    defined = {id(each) for each in vars(module).values()}
    names = [kind.name for kind in KINDS if kind.fields_of is None and id(kind) in defined]
    if not names:
        raise ValueError(f"{file}: defines no `resformer.Connection` with a name.")
    return names
