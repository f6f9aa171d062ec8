"""A pickled tiktoken `Encoding` as a fast tokenizer. Nothing is unpickled: the opcodes are read, few are known.

An `Encoding` is the text of a regular expression that splits words, a map from bytes to ranks, and one from special
tokens to numbers.
"""

import io
import pickletools
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer
from transformers.convert_slow_tokenizer import TikTokenConverter

from resformer.errors import CheckpointError, quoted
from resformer.untrusted import MIB, read_bounded

_MOST_BYTES = 64 * MIB
_MOST_TOKENS = 2**20
#: The class that is pickled; the only name that may be in the file.
_CLASS = ("tiktoken.core", "Encoding")
#: Opcodes that put their argument on the stack.
_VALUES = set("SHORT_BINUNICODE BINUNICODE SHORT_BINBYTES BINBYTES BININT BININT1 BININT2".split())
_FIELDS = {"name": str, "pat_str": str, "mergeable_ranks": dict, "special_tokens": dict}


@dataclass(frozen=True)
class Encoding:
    pattern: str
    ranks: dict[bytes, int]
    special: dict[str, int]

    @property
    def size(self) -> int:
        return len(self.ranks) + len(self.special)


def read_encoding(path: Path) -> Encoding:
    """Reads a pickle of an `Encoding` by pickle's protocols 4 and 5, and refuses what is, or holds, anything else."""
    state = _interpreted(path, read_bounded(path, _MOST_BYTES))
    if state.keys() != _FIELDS.keys() or any(type(state[name]) is not kind for name, kind in _FIELDS.items()):
        raise CheckpointError(f"{path}: an Encoding of tiktoken has {', '.join(_FIELDS)}; found {quoted([*state])}.")
    ranks, special = state["mergeable_ranks"], state["special_tokens"]
    for entries, kind in ((ranks, bytes), (special, str)):
        if not all(type(key) is kind and key and type(number) is int for key, number in entries.items()):
            raise CheckpointError(f"{path}: holds a token that is no {kind.__name__} with a number.")
    numbers = [*ranks.values(), *special.values()]
    if sorted(numbers) != list(range(len(numbers))) or len(numbers) > _MOST_TOKENS:
        raise CheckpointError(f"{path}: its {len(numbers):,} tokens are not numbered from 0 on, each once.")
    if missing := [byte for byte in range(256) if bytes([byte]) not in ranks]:
        raise CheckpointError(f"{path}: has no token for the byte {missing[0]}, so that some texts have no tokens.")
    return Encoding(state["pat_str"], ranks, special)


def _interpreted(path: Path, content: bytes) -> dict[Any, Any]:
    """What the pickle sets as the state of its one object."""
    stack: list[Any] = []
    memo: list[Any] = []
    marks: list[int] = []
    made = object()  # in place of the Encoding
    state: dict[Any, Any] = {}
    try:
        for code, given, position in pickletools.genops(io.BytesIO(content)):
            argument: Any = given
            match code.name:
                case "PROTO" | "FRAME":
                    pass
                case name if name in _VALUES:
                    stack.append(argument)
                case "EMPTY_DICT":
                    stack.append({})
                case "EMPTY_TUPLE":
                    stack.append(())
                case "MARK":
                    marks.append(len(stack))
                case "MEMOIZE":
                    memo.append(stack[-1])
                case "BINGET" | "LONG_BINGET":
                    stack.append(memo[argument])
                case "SETITEM" | "SETITEMS":
                    start = marks.pop() if code.name == "SETITEMS" else len(stack) - 2
                    entries = stack[start:]
                    del stack[start:]
                    stack[-1].update(zip(entries[::2], entries[1::2], strict=True))
                case "STACK_GLOBAL" if tuple(stack[-2:]) == _CLASS:
                    stack[-2:] = [_CLASS]
                case "NEWOBJ" if stack[-2:] == [_CLASS, ()]:
                    stack[-2:] = [made]
                case "BUILD" if stack[-2] is made:
                    state = stack.pop()
                case "STOP" if stack == [made] and type(state) is dict:
                    return state
                case _:
                    raise CheckpointError(
                        f"{path}: has {code.name} {quoted(argument) if argument is not None else ''} at byte "
                        f"{position}, which no pickled Encoding of tiktoken has, and nothing else is read."
                    )
    except (ValueError, IndexError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: is no pickle of an Encoding of tiktoken: {quoted(str(error))}.") from error
    raise CheckpointError(f"{path}: is no pickle of an Encoding of tiktoken: it has no end.")


def fast_tokenizer(encoding: Encoding) -> Tokenizer:
    """The same tokens for every text."""
    special = sorted(encoding.special, key=encoding.special.__getitem__)
    converter: Any = TikTokenConverter(None, encoding.pattern, extra_special_tokens=special)
    converter.load_tiktoken_bpe = lambda file: encoding.ranks  # in place of a file of ranks, which needs tiktoken
    tokenizer: Tokenizer = converter.converted()
    return tokenizer
