"""The options of commands that train: a field's annotation is its option on the command line. Imports no torch."""

from dataclasses import dataclass, field
from typing import Annotated, Any

from typer import Argument, Option

__all__ = ["DataOptions", "NewOptions", "PretrainOptions", "TokenizeOptions", "count"]


_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}


def count(text: str | int) -> int:
    """The number that a text such as 300k, 1.6B or 2,048 stands for.

    Raises:
        ValueError: it stands for none.
    """
    text = str(text)  # Typer passes defaults, too
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    value = float(number.replace(",", "").replace("_", "")) * unit
    if not (value > 0 and value == round(value)):
        raise ValueError(f"{text!r}: expected a whole number of more than 0, such as 300k or 1.6B.")
    return round(value)


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
            help="bytes; bpe:N, trained on --data; folder or Hub id.  [default: that of --data, if they are tokens; "
            "else bpe:4096 up to 10m, bpe:32768 above]"
        ),
    ] = None
    block: Annotated[
        int | None, Option(help="Tokens a sequence, and positions.  [default: 512 up to 10m, else 2048]")
    ] = None
    fields: Annotated[
        dict[str, Any], Option("--set", metavar="FIELD=VALUE", help="A field of ResFormerConfig; repeatable.")
    ] = field(default_factory=dict)
    seed: Annotated[int, Option(help="Of the random numbers.")] = 0
    force: Annotated[bool, Option("--force", help="Replace an earlier result.")] = False

    def __post_init__(self) -> None:
        if self.block is not None and self.block < 2:
            raise ValueError(f"block is {self.block}; a sequence needs 2 tokens at least, one to predict the other.")


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(NewOptions):
    """What `resformer pretrain` takes.

    Raises:
        ValueError: a value is out of its range, or `data` is empty.
    """

    tokens: Annotated[
        int | None, Option(parser=count, metavar="TOKENS", help="300k, 1.6B.  [default: 20 for each parameter]")
    ] = None
    batch_tokens: Annotated[
        int | None,
        Option(parser=count, metavar="TOKENS", help="A step's, on all devices.  [default: follows from the size]"),
    ] = None
    micro_batch: Annotated[
        int | None, Option(min=1, help="Sequences per device and pass.  [default: 16,384 tokens or fewer]")
    ] = None
    learning_rate: Annotated[
        float | None, Option(help="The highest; it ends at a tenth.  [default: follows from the size]")
    ] = None
    connection_learning_rate: Annotated[
        float | None, Option(help="Of the connections.  [default: --learning-rate]")
    ] = None
    schedule: Annotated[str, Option(help="cosine, constant or wsd: warm-up, stable, decay.")] = "cosine"
    warmup: Annotated[float, Option(min=0, max=1, help="Share of the steps.")] = 0.05
    weight_decay: Annotated[float, Option(help="Of matrices; never of connections.")] = 0.1
    streaming: Annotated[bool, Option("--streaming", help="Read as it trains, never all.")] = False
    held_out: Annotated[float, Option(help="Share of the documents to evaluate on.")] = 0.01
    held_out_blocks: Annotated[int, Option(min=1, help="Evaluate on at most this many blocks.")] = 256
    evaluations: Annotated[int, Option(min=1, help="At even intervals; each saves a checkpoint.")] = 10
    bf16: Annotated[
        bool | None, Option("--bf16/--no-bf16", help="Autocast.  [default: where the processor has bfloat16]")
    ] = None
    gradient_checkpointing: Annotated[bool, Option("--gradient-checkpointing", help="Less memory, more time.")] = False
    compile: Annotated[bool, Option("--compile", help="Use torch.compile.")] = False
    attn_implementation: Annotated[
        str | None, Option(help="sdpa, eager, flash_attention_2, flex_attention.  [default: sdpa]")
    ] = None
    report_to: Annotated[list[str], Option(help="tensorboard, trackio, wandb; repeatable.  [default: none]")] = field(
        default_factory=list
    )
    push: Annotated[str | None, Option(metavar="REPO", help="Push the finished OUTPUT to this Hub id.")] = None
    resume: Annotated[bool, Option("--resume", help="Go on with a run that was stopped.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ValueError("data is empty; name some with --data.")
        if self.schedule not in ("cosine", "constant", "wsd"):
            raise ValueError(f"schedule is {self.schedule!r}; expected cosine, constant or wsd.")


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(DataOptions):
    """What `resformer tokenize` takes.

    Raises:
        ValueError: a value is out of its range.
    """

    data: Annotated[list[str], Argument(help="Files, folders, Hub ids, standard-library.")]
    output: Annotated[str, Argument(help="The folder to write, or to go on with.")]
    tokenizer: Annotated[str, Option(help="bytes; bpe:N, trained on DATA; folder or Hub id.")]
    workers: Annotated[int, Option(min=1, help="Processes.")] = 1
    shard: Annotated[
        str, Option(metavar="I/N", help="Only the I-th of N parts of the documents, 1/4 for one; one machine each.")
    ] = "1/1"
    tokens_per_file: Annotated[
        int,
        Option(parser=count, metavar="TOKENS", help="A file ends after so many.  [default: 64M]", show_default=False),
    ] = 64_000_000
    held_out: Annotated[float, Option(help="Share of the documents to evaluate on.")] = 0.01

    def __post_init__(self) -> None:
        part, slash, parts = self.shard.partition("/")
        if not (part.isdecimal() and slash and parts.isdecimal() and 1 <= int(part) <= int(parts)):
            raise ValueError(f"shard is {self.shard!r}; expected I/N, with I from 1 to N.")
        if not 0 <= self.held_out < 1:
            raise ValueError(f"held_out is {self.held_out}; expected a share of the documents from 0 to less than 1.")

    @property
    def part(self) -> tuple[int, int]:
        """(I, N) of `shard`."""
        part, _, parts = self.shard.partition("/")
        return int(part), int(parts)
