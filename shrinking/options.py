"""The options of `resformer shrink`: a field's annotation is its option on the command line. Imports no torch."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Literal

from typer import Option


@dataclass(frozen=True, kw_only=True)
class ShrinkOptions:
    """Fields are the options of `resformer shrink`; exactly one of `cache`, `plan` and `method` is given."""

    calibrate: Annotated[
        list[str],
        Option(metavar="TEXT", help="Text like that the model is used for: a file, folder or Hub id; repeatable."),
    ]
    cache: Annotated[float | None, Option(help="The largest share of the cache to keep, for example 0.83.")] = None
    evaluate: Annotated[
        list[str],
        Option(metavar="TEXT", help="Text to measure the cost on.  [default: held-out documents of --calibrate]"),
    ] = field(default_factory=list)
    tokens: Annotated[int, Option(min=1, help="Tokens to calibrate on, at an even stride.")] = 32768
    block: Annotated[int, Option(min=2, help="Tokens of a sequence.")] = 512
    evaluation_tokens: int = 8192  # that losses are measured on
    plan: Annotated[
        Path | None, Option(help="JSON with key_sources and value_sources, of --dry-run --json, instead of --cache.")
    ] = None
    method: Annotated[str | None, Option(help="svformer, cla2 or fusedkv-lite, instead of --cache.")] = None
    share: Annotated[
        Literal["any", "values", "both"],
        Option(help="any, values (no keys), or both: keys and values of the same layer, which vLLM needs."),
    ] = "any"
    split: Annotated[str, Option(help="Split of a Hub dataset.")] = "train"
    text_column: Annotated[str, Option(help="Column with the text.")] = "text"
    sample_by: Annotated[
        str, Option(help="A document in a text file: the whole file (document), a paragraph, or a line.")
    ] = "document"
    force: Annotated[bool, Option("--force", help="Replace an earlier result.")] = False
    revision: Annotated[str | None, Option(help="Branch, tag or commit of a Hub id.")] = None
    durable: Annotated[bool, Option("--durable", help="Wait until the disk has all of it, against power failures.")] = (
        False
    )
    max_shard_size: int | str | None = None
    progress: bool = True
    dry_run: Annotated[
        bool, Option("--dry-run", help="Search and measure as usual, for minutes, and write nothing.")
    ] = False

    def __post_init__(self) -> None:
        if sum(each is not None for each in (self.cache, self.plan, self.method)) != 1:
            raise ValueError("Give one of --cache, --plan and --method.")
        if self.share not in ("any", "values", "both"):
            raise ValueError(f"share={self.share!r}: expected one of any, values, both.")
        if self.cache is not None and not 0 < self.cache < 1:
            raise ValueError(f"cache={self.cache}: expected a share of the source's cache, above 0 and below 1.")
