"""Text that every machine has: the sources of Python's standard library, about 24 MB."""

import hashlib
import random
import sysconfig
from collections.abc import Iterable, Iterator
from pathlib import Path

from datasets import Dataset
from transformers import PreTrainedTokenizerBase

__all__ = ["pack", "standard_library"]

_SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idle_test", "__pycache__", "pydoc_data"}


def standard_library(*, held_out: bool, seed: int = 0) -> Iterator[str]:
    """The texts of the standard library's modules in a shuffled order; one module in ten is held out, by its name.

    A module is a top-level file or package, so that no held-out file has a training file beside it.
    """
    root = Path(sysconfig.get_path("stdlib"))
    files = []
    for path in sorted(root.rglob("*.py")):
        relative = path.relative_to(root)
        if _SKIPPED.isdisjoint(relative.parts):
            digest = hashlib.sha256(relative.parts[0].encode()).digest()
            if (digest[0] % 10 == 0) == held_out:
                files.append(path)
    random.Random(seed).shuffle(files)
    for path in files:
        yield path.read_text(encoding="utf-8", errors="replace")


def pack(
    texts: Iterable[str], tokenizer: PreTrainedTokenizerBase, *, block: int, count: int, blocks_per_text: int = 4
) -> Dataset:
    """Packs texts, each ended by the end-of-sequence token, into at most `count` blocks of `block` tokens.

    Args:
        blocks_per_text: at most so many blocks' worth of tokens are taken of one text, from its start.

    Returns:
        A dataset of `input_ids` and `labels`, both lists of `block` token ids.

    Raises:
        ValueError: the texts do not fill one block.
    """
    end = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    blocks: list[list[int]] = []
    pending: list[int] = []
    for text in texts:
        # No token has less than one byte, so this much text is enough; very long lines of it would only be thrown away.
        tokens = tokenizer(text[: 8 * blocks_per_text * block], add_special_tokens=False)["input_ids"]
        pending += tokens[: blocks_per_text * block] + end
        while len(pending) >= block and len(blocks) < count:
            blocks.append(pending[:block])
            pending = pending[block:]
        if len(blocks) == count:
            break
    if not blocks:
        raise ValueError(f"The texts have {len(pending)} tokens, too few for one block of {block}.")
    return Dataset.from_dict({"input_ids": blocks, "labels": blocks})
