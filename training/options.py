"""The options of commands that train: a field's annotation is its option on the command line. Imports no torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from typer import Argument, Option

__all__ = ["DataOptions", "NewOptions"]


@dataclass(frozen=True, kw_only=True)
class DataOptions:
    """Text, as `load_documents` takes it."""

    data: Annotated[
        list[str],
        Option(
            help="Text, JSON, CSV, parquet file; folder; Hub id[:configuration]; standard-library; repeatable, with "
            "weights as in a:0.7."
        ),
    ] = field(default_factory=list)
    split: Annotated[str, Option(help="Split of a Hub dataset.")] = "train"
    text_column: Annotated[str, Option(help="Column that holds the text.")] = "text"
    sample_by: Annotated[
        str, Option(help="A document in a text file: the whole file (document), a paragraph, or a line.")
    ] = "document"


@dataclass(frozen=True, kw_only=True)
class NewOptions(DataOptions):
    """What `resformer new` takes.

    Raises:
        ValueError: a value is out of its range.
    """

    output: Annotated[str, Argument(help="The folder to write; new or empty.")]
    size: Annotated[str, Option(help="tiny, 10m, 82m, 180m, 320m or 468m.")] = "tiny"
    method: Annotated[str, Option(help="A named method: see `resformer methods`.")] = "resformer"
    tokenizer: Annotated[
        str | None,
        Option(
            help="bytes; bpe:N, trained on --data; folder or Hub id.  [default: bpe:4096 up to 10m, else bpe:32768]"
        ),
    ] = None
    block: Annotated[
        int | None, Option(help="Tokens a sequence, and positions.  [default: 512 up to 10m, else 2048]")
    ] = None
    fields: Annotated[
        dict[str, Any], Option("--set", metavar="FIELD=VALUE", help="A field of ResFormerConfig; repeatable.")
    ] = field(default_factory=dict)
    seed: Annotated[int, Option(help="Of the random numbers.")] = 0

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 2:
            raise ValueError(f"block is {self.block}; a sequence needs 2 tokens at least, one to predict the other.")
