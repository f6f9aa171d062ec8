"""The data of a study: packed text of any source, and a tokenizer trained on its training part alone."""

import hashlib
import platform
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerBase

from resformer.training.data import STANDARD_HELD_OUT, STANDARD_LIBRARY, load_documents
from resformer.training.options import StudyOptions
from resformer.training.packing import Blocks, bytes_per_token, pack_documents
from resformer.training.tokenizers import make_tokenizer


@dataclass(frozen=True)
class StudyData:
    """Blocks to train on and held-out ones, and the tokenizer that made them."""

    name: str  # for tables and cards
    blocks: Blocks
    tokenizer: PreTrainedTokenizerBase
    bytes_per_token: float  # of all held-out blocks

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """Differs if other tokens are trained or evaluated on; covers the first 2**26 of each side, and the length."""
        digest = hashlib.sha256()
        for side in (self.blocks.train, self.blocks.held_out):
            for chunk in side.tokens.slice(0, 2**26).chunks:
                digest.update(chunk.to_numpy().astype("<i8"))
        curve, whole = self.blocks.held_out, self.blocks.held_out.whole
        return {
            "training_tokens": len(self.blocks.train) * self.blocks.train.block,
            "held_out_tokens": len(whole) * whole.block,
            "held_out_documents": len(whole.documents),
            "curve_tokens": len(curve) * curve.block,
            "curve_documents": len(curve.documents),
            "sha256": digest.hexdigest(),
            **({"separate_documents": True} if whole.separate else {}),
        }


def study_data(options: StudyOptions, tokenizer: str) -> StudyData:
    """Packs the data, or Python's standard library if there are none; of this one module in ten is held out."""
    sources, held_out = options.data, options.held_out
    name = ", ".join(Path(source).name if Path(source).exists() else source for source in sources)
    if not sources:
        sources, held_out = [STANDARD_LIBRARY], STANDARD_HELD_OUT
        name = f"the sources of the standard library of Python {platform.python_version()}"
    documents = load_documents(sources, **options.reading, held_out=held_out)
    name += "".join(f" ({note})" for note in documents.notes)
    fitted = make_tokenizer(tokenizer, documents, held_out)
    blocks = pack_documents(
        documents,
        fitted,
        block=options.block,
        held_out=held_out,
        held_out_blocks=options.held_out_blocks,
        parse_special=options.parse_special,
        separate=options.separate_documents,
    )
    return StudyData(name, blocks, fitted, bytes_per_token(blocks.held_out.whole, fitted))
