"""The options of commands that train: a field's annotation is its option on the command line. Imports no torch."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from typer import Argument, Option

from resformer.errors import CheckpointError, first_names, one_line
from resformer.own_files import method_named

#: The file that says with what an unfinished run has begun.
BEGUN = "arguments.json"

_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
#: Rates of one kind of parameters, in training from scratch.
KIND_RATES = ("gate_learning_rate", "table_learning_rate", "embedding_learning_rate")
RATES = ("learning_rate", "connection_learning_rate", *KIND_RATES)


def count(text: str | int) -> int:
    """The number that a text such as 300k, 1.6B or 2,048 stands for; raises ValueError if it stands for none."""
    text = str(text)  # Typer passes defaults, too
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    value = float(number.replace(",", "").replace("_", "")) * unit
    if not (value > 0 and value == round(value)):
        raise ValueError(f"{text!r}: expected a whole number of more than 0, such as 300k or 1.6B.")
    return round(value)


def names(text: str) -> list[str]:
    """The names of a list such as `svformer,resformer:value_residual_init=2,1`; numbers belong to their value."""
    parts = re.split(r",(?![^\[]*\])(?!\s*[\d.eE+-]+\s*(?:[,:]|$))", text)
    return [name.strip() for name in parts if name.strip()]


def weighted_sources(sources: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Names of sources, and their shares of the documents where `name:weight` gives them, adding up to 1."""
    names, weights = list[str](), list[float]()
    for source in sources:
        name, _, weight = source.rpartition(":")
        if len(sources) > 1 and re.fullmatch(r"\d*\.?\d+", weight) and name and not Path(source).exists():
            names.append(name)
            weights.append(float(weight))
        else:
            names.append(source)
    if weights and (len(weights) < len(names) or not all(weights)):
        raise ValueError(f"data is {first_names(sources)}; give a weight above 0 to every source, or to none.")
    if twice := [name for name in dict.fromkeys(names) if names.count(name) > 1]:
        raise ValueError(f"data has {twice[0]!r} more than once; name it once, with a weight to read it more often.")
    return names, [weight / sum(weights) for weight in weights] or None


def read_begun(folder: Path, name: str = BEGUN) -> dict[str, Any]:
    """With what a folder was begun; raises CheckpointError if that cannot be read."""
    try:
        return dict(json.loads((folder / name).read_text(encoding="utf-8")))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{folder / name}: cannot be read ({one_line(error)}); remove its folder.") from error


def refuse_other(
    folder: Path, before: dict[str, Any], now: dict[str, Any], what: str, way_out: str = "Give another folder."
) -> None:
    """Raises CheckpointError if `before`, with which `folder` was begun, differs from `now`."""
    now = json.loads(json.dumps(now))
    if different := sorted(name for name in now if now[name] != before.get(name)):
        changes = ", ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in different)
        raise CheckpointError(f"{folder}: holds another {what}: {changes}. {way_out}")


def unfinished_of(output: str) -> Path:
    return Path(output).with_name(f"{Path(output).name}.training")


def shared(values: Any, kind: Any) -> dict[str, Any]:
    """What `values` has of the fields of the dataclass `kind`."""
    return {each.name: getattr(values, each.name) for each in fields(kind) if hasattr(values, each.name)}


#: What is expected of fields, whichever options have them.
_EXPECTED: list[tuple[str, Callable[[Any], bool], str]] = [
    (
        "an integer of more than 0",
        lambda value: isinstance(value, int) and value > 0,
        "accumulate batch evaluations held_out_blocks micro_batch seeds steps workers",
    ),
    ("more than 0", lambda value: 0 < value < math.inf, "epochs muon_learning_rate"),
    ("0 or more", lambda value: value >= 0, "seed spike warmup"),
    ("2 tokens at least, one to predict the other", lambda value: value > 1, "block"),
    ("a share from 0 to below 1", lambda value: 0 <= value < 1, "decay held_out"),
]
_CHOICES = {
    "sample_by": ("document", "paragraph", "line"),
    "save_dtype": ("float32", "bfloat16", "float16"),
    "schedule": ("cosine", "constant", "wsd"),
    "train": ("all", "connections"),
}


class _Checked:
    """Options, whose fields are checked by their names."""

    def __post_init__(self) -> None:
        for what, check, names in _EXPECTED:
            self._expect(what, check, *names.split())
        for name, choices in _CHOICES.items():
            self._expect(f"one of {', '.join(choices)}", choices.__contains__, name)

    def _expect(self, what: str, check: Callable[[Any], bool], *names: str) -> None:
        for name in names:
            if (value := getattr(self, name, None)) is not None and not check(value):
                raise ValueError(f"{name} is {value!r}; expected {what}.")


@dataclass(frozen=True, kw_only=True)
class DataOptions(_Checked):
    """Text, as `load_documents` takes it."""

    data: Annotated[
        list[str],
        Option(help="File, folder, Hub id[:configuration], standard-library; repeatable, with weights as in a:0.7."),
    ] = field(default_factory=list)
    split: Annotated[str, Option(help="Split of a folder or of a Hub dataset.")] = "train"
    text_column: Annotated[str | None, Option(help="The column to read, whatever others are.  [default: text]")] = None
    sample_by: Annotated[str, Option(help="What of a text file is one: document (all), paragraph, line.")] = "document"

    def __post_init__(self) -> None:
        super().__post_init__()
        weighted_sources(self.data)

    @property
    def sources(self) -> list[str]:
        """`data` without weights."""
        return weighted_sources(self.data)[0]

    @property
    def reading(self) -> dict[str, Any]:
        """Arguments of `load_documents`."""
        return {"split": self.split, "text_column": self.text_column, "sample_by": self.sample_by}


ParseSpecial = Annotated[
    bool, Option("--parse-special", help="Special tokens that the text spells are tokens, not their letters.")
]
Bf16 = Annotated[bool | None, Option("--bf16/--no-bf16", help="Autocast.  [default: where the processor has bfloat16]")]
SeparateDocuments = Annotated[
    bool, Option("--separate-documents/--join-documents", help="Documents of a sequence apart, or joined.")
]
KeepOptimizer = Annotated[
    bool, Option("--keep-optimizer/--drop-optimizer", help="Whether --resume with more steps can go on after the end.")
]


@dataclass(frozen=True, kw_only=True)
class RunOptions(DataOptions):
    """What `finetune` and `pretrain` have in common."""

    parse_special: ParseSpecial = False
    streaming: Annotated[bool, Option("--streaming", hidden=True)] = False
    held_out: Annotated[float, Option(help="Share of the documents to evaluate on; 0: none.")] = 0.02
    held_out_data: Annotated[
        list[str], Option(help="Evaluate on all of these instead, and on no share of --data; repeatable.")
    ] = field(default_factory=list)
    held_out_blocks: Annotated[int, Option(help="Evaluate on at most this many blocks.")] = 256
    seed: Annotated[int, Option(help="Of the random numbers: weights, order of the data, dropout.")] = 0
    bf16: Bf16 = None
    gradient_checkpointing: Annotated[bool, Option("--gradient-checkpointing", help="Less memory, more time.")] = False
    compile: Annotated[bool, Option("--compile", help="Compile each layer with torch.compile.")] = False
    attn_implementation: Annotated[str | None, Option(help="sdpa, eager, flash_attention_2.  [default: sdpa]")] = None
    report_to: Annotated[list[str], Option(help="tensorboard, trackio, wandb; repeatable.")] = field(
        default_factory=list
    )
    optim: Annotated[str | None, Option(help="muon, or one of Transformers.  [default: adamw_torch_fused]")] = None
    muon_learning_rate: Annotated[float | None, Option(help="Of the matrices.  [default: --learning-rate]")] = None
    spike: Annotated[float, Option(help="Stop if the loss stays so far above its lowest; 0: never.")] = 2.0
    keep_optimizer: KeepOptimizer = False
    resume: Annotated[bool, Option("--resume", help="Go on with a run that was stopped.")] = False
    force: Annotated[bool, Option("--force", help="Replace an earlier result, and discard an unfinished run.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ValueError("There is nothing to train on: name a file, a folder or a Hub id with --data.")
        if self.streaming:
            raise ValueError(
                "Streams are not trained on: a run could not go on where it was. Write their tokens first: "
                "resformer tokenize DATA... tokens --tokenizer MODEL, then --data tokens."
            )


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(_Checked):
    """What `pretrain` and `compare` have in common.

    AdamW (0.9, 0.95), gradients clipped at 1. Norms, biases and cross-layer connections are not decayed.
    """

    micro_batch: Annotated[
        int | None, Option(help="Sequences per device and pass.  [default: all, or 16,384 tokens]")
    ] = None
    tokens: Annotated[
        int | None, Option(parser=count, metavar="TOKENS", help="Of a run: 300k, 1.6B.  [default: 20 a parameter]")
    ] = None
    learning_rate: Annotated[
        float | None,
        Option("--learning-rate", "--lr", help="The highest.  [default: the size's; of compare --from: 5e-5]"),
    ] = None
    connection_learning_rate: Annotated[
        float | None,
        Option(help="Of coefficients.  [default: 50 x --learning-rate, at most 0.2; of compare --from: 3e-4]"),
    ] = None
    gate_learning_rate: Annotated[float | None, Option(help="Of gates and queries.  [default: --learning-rate]")] = None
    table_learning_rate: Annotated[
        float | None, Option(help="Of value embeddings.  [default: --learning-rate; nanochat: 19 times it]")
    ] = None
    embedding_learning_rate: Annotated[
        float | None, Option(help="Of the token embedding, then not decayed.  [default: --learning-rate]")
    ] = None
    warmup: Annotated[float, Option(help="Share of the steps, or how many.")] = 0.05
    schedule: Annotated[str, Option(help="cosine, constant, or wsd: down in the last --decay of the steps.")] = "cosine"
    decay: Annotated[float, Option(help="Share of the steps, with --schedule wsd.")] = 0.2
    weight_decay: Annotated[float, Option(help="Of matrices; never of connections.")] = 0.1
    evaluations: Annotated[int, Option(help="Evaluations in a run, at even intervals; each saves a checkpoint.")] = 10

    def __post_init__(self) -> None:
        super().__post_init__()
        # Those of a method are what its text says, perhaps no number.
        self._expect("more than 0", lambda rate: isinstance(rate, (int, float)) and 0 < rate < math.inf, *RATES)
        if self.schedule == "wsd" and 1 > self.warmup > 1 - self.decay:
            raise ValueError(f"warmup is {self.warmup} and decay {self.decay}; expected at most all steps together.")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions):
    """Options of `resformer finetune`."""

    model: Annotated[str, Argument(help="A checkpoint folder or a Hub id.")]
    output: Annotated[str, Argument(help="The folder to write; new or empty.")]
    steps: Annotated[int | None, Option(help="Optimizer steps.")] = None
    epochs: Annotated[float | None, Option(help="Passes over the data.  [default: 1]")] = None
    block: Annotated[int | None, Option(help="Tokens per sequence.  [default: 1024, or all positions]")] = None
    separate_documents: SeparateDocuments = True
    batch: Annotated[int, Option(help="Sequences per device and pass.")] = 8
    accumulate: Annotated[int, Option(help="Passes per step.")] = 1
    learning_rate: Annotated[float, Option("--learning-rate", "--lr", help="Of the backbone.")] = 5e-5
    connection_learning_rate: Annotated[float, Option(help="Of the cross-layer connections.")] = 3e-4
    truncate: Annotated[bool, Option("--truncate", help="Cut chats that are longer than --block.")] = False
    train: Annotated[str, Option(help="all parameters, or connections: those that connections add.")] = "all"
    save_dtype: Annotated[str | None, Option(help="Of the weights as saved.  [default: float32]")] = None
    tokenizer: Annotated[str | None, Option(help="Checkpoint with the tokenizer.  [default: MODEL]")] = None
    trainer: Annotated[
        dict[str, Any], Option("--set", metavar="NAME=VALUE", help="Any field of TrainingArguments; repeatable.")
    ] = field(default_factory=dict)
    dry_run: Annotated[bool, Option("--dry-run", help="Pack the data, measure one step; write nothing.")] = False
    branch: str | None = None  # the folder of a run that this one goes on from
    rates: dict[str, float] | None = None  # of each kind of connections' parameters: see `optimizer.CONNECTIONS`

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("0 or more", lambda rate: rate >= 0, "learning_rate", "connection_learning_rate")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps is {self.steps} and epochs {self.epochs}; give one of them.")
        if self.separate_documents and self.batch > 1 and "flash" in (self.attn_implementation or ""):
            raise ValueError(
                f"batch is {self.batch}; with FlashAttention, documents of a block are kept apart in batches of one "
                "alone. Use --batch 1 and --accumulate (pretrain: --micro-batch 1), --join-documents, or sdpa."
            )

    @property
    def unfinished(self) -> Path:
        """The folder beside the output that holds the checkpoints until the run ends."""
        return unfinished_of(self.output)

    @property
    def run(self) -> dict[str, Any]:
        """What decides the result: all but how this process was started."""
        return {name: value for name, value in asdict(self).items() if name not in ("resume", "force", "dry_run")}


Backbone = Annotated[
    str | None,
    Option(metavar="FAMILY|CONFIG.JSON", help="The decoder of another family, qwen3_moe for one.  [default: ours]"),
]


@dataclass(frozen=True, kw_only=True)
class NewOptions(DataOptions):
    """What `resformer new` takes."""

    output: Annotated[str, Argument(help="The folder to write; new or empty.")]
    size: Annotated[str, Option(help="tiny, 10m, 82m, 180m, 320m or 468m, with :FIELD=VALUE... or without.")] = "tiny"
    method: Annotated[str, Option(help="A named method: see `resformer methods`. Or FILE.py:NAME.")] = "resformer"
    backbone: Backbone = None
    tokenizer: Annotated[
        str | None,
        Option(help="bytes; bpe:N, trained on --data; folder; Hub id.  [default: of --data, or bpe:4096, bpe:32768]"),
    ] = None
    block: Annotated[int | None, Option(help="Tokens a sequence.  [default: 512 up to 10m, else 2048]")] = None
    fields: Annotated[
        dict[str, Any],
        Option("--set", metavar="FIELD=VALUE", help="A field of ResFormerConfig, or the backbone's; repeatable."),
    ] = field(default_factory=dict)
    seed: Annotated[int, Option(help="Of the random numbers.")] = 0
    force: Annotated[bool, Option("--force", help="Replace an earlier result.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "method", method_named(self.method))


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(NewOptions, RunOptions, ScheduleOptions):
    """What `resformer pretrain` takes."""

    batch_tokens: Annotated[
        int | None, Option(parser=count, metavar="TOKENS", help="A step's.  [default: follows from the size]")
    ] = None
    separate_documents: SeparateDocuments = True
    start: Annotated[
        str | None, Option("--from", help="Go on from the last step of this OUTPUT, which had a constant rate.")
    ] = None
    held_out: Annotated[float, Option(help="Share of the documents to evaluate on; 0: none.")] = 0.01
    keep_optimizer: KeepOptimizer = True
    trainer: Annotated[
        dict[str, Any], Option("--trainer", metavar="NAME=VALUE", help="Any field of TrainingArguments; repeatable.")
    ] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(DataOptions):
    """What `resformer tokenize` takes."""

    data: Annotated[list[str], Argument(help="Files, folders, Hub ids, standard-library.")]
    output: Annotated[str, Argument(help="The folder to write, or to go on with.")]
    tokenizer: Annotated[str, Option(help="bytes; bpe:N, trained on DATA; folder or Hub id.")]
    parse_special: ParseSpecial = False
    workers: Annotated[int, Option(help="Processes.")] = 1
    tokens_per_file: Annotated[
        int, Option(parser=count, metavar="TOKENS", help="Of a file.  [default: 64M]", show_default=False)
    ] = 64_000_000
    held_out: Annotated[float, Option(help="Share of the documents to evaluate on.")] = 0.01


@dataclass(frozen=True, kw_only=True)
class StudyOptions(ScheduleOptions, DataOptions):
    """What `resformer compare` takes; what is not said follows from the size, as in `pretrain`."""

    output: Annotated[str, Argument(help="The folder of the study; new, empty, or one to go on with.")]
    data: Annotated[list[str], Option(help="As of finetune; repeatable.  [default: standard-library]")] = field(
        default_factory=list
    )
    methods: Annotated[
        list[str],
        Option(help="NAME or FILE.py:NAME, [:FIELD=VALUE...], separated by commas; transformer is always one."),
    ] = field(default_factory=lambda: ["resformer,denseformer,svformer"])
    baseline: Annotated[str | None, Option(help="What is compared with.  [default: the first transformer]")] = None
    start: Annotated[str | None, Option("--from", help="Continue this checkpoint, converted to each method.")] = None
    backbone: Backbone = None
    sizes: Annotated[
        list[str], Option("--sizes", "--size", help="As --size of pretrain; commas between.  [default: tiny]")
    ] = field(default_factory=list)
    seeds: Annotated[int, Option(help="Paired runs of each method.")] = 3
    first_seed: Annotated[int, Option(min=0, help="The first run's; the others count on from it.")] = 0
    steps: Annotated[int | None, Option(help="Of each run.  [default: those of --tokens]")] = None
    batch: Annotated[int | None, Option(help="Sequences per step.  [default: the size's; --from: 8]")] = None
    tokenizer: Annotated[str | None, Option(help="As of pretrain.  [default: bpe:4096, or the checkpoint's]")] = None
    block: Annotated[int, Option(help="Tokens per sequence.")] = 512
    parse_special: ParseSpecial = False
    separate_documents: SeparateDocuments = True
    bf16: Bf16 = None
    held_out: Annotated[float, Option(help="Share of the documents of --data to evaluate on.")] = 0.02
    held_out_blocks: Annotated[int, Option(help="The most that is evaluated on before a run's end.")] = 128
    save_models: Annotated[bool, Option("--save-models", help="Keep the models of the first seed.")] = False

    def __post_init__(self) -> None:
        if self.steps is not None and self.tokens is not None:
            raise ValueError(f"--steps is {self.steps} and --tokens {self.tokens}: give one of them.")
        if self.start is not None and self.steps is None and self.tokens is None:
            raise ValueError("The length of the runs is open: give --steps or --tokens.")
        for name in ("methods", "sizes"):
            object.__setattr__(self, name, [each for text in getattr(self, name) for each in names(text)])
        object.__setattr__(self, "methods", [*map(method_named, self.methods)])
        object.__setattr__(self, "baseline", self.baseline and method_named(self.baseline))
        super().__post_init__()
        self._expect("a share of more than 0", bool, "held_out")
        self._expect(f"one of {', '.join(self.all_methods)}", self.all_methods.__contains__, "baseline")
        if self.batch is not None and self.batch % (self.micro_batch or self.batch):
            raise ValueError(f"micro_batch is {self.micro_batch}; expected a divisor of the batch, {self.batch}.")
        if self.start is not None and self.backbone is not None:
            raise ValueError(f"backbone is {self.backbone}, but the decoder is that of {self.start}; give one of them.")
        if self.start is not None and self.sizes:
            raise ValueError(f"sizes are {', '.join(self.sizes)}, but {self.start} has its own; give one of them.")

    @property
    def of_runs(self) -> dict[str, Any]:
        """What runs have in common, and a study cannot change."""
        more = ("steps", "tokens", "batch", "block", "separate_documents", "bf16", "held_out", "held_out_blocks")
        return shared(self, ScheduleOptions) | {name: getattr(self, name) for name in more}

    @property
    def all_seeds(self) -> range:
        return range(self.first_seed, self.first_seed + self.seeds)

    @property
    def all_methods(self) -> list[str]:
        plain = PLAIN in map(architecture, self.methods)
        return list(dict.fromkeys(self.methods if plain else (PLAIN, *self.methods)))

    @property
    def compared_with(self) -> str:
        return self.baseline or next(method for method in self.all_methods if architecture(method) == PLAIN)


#: Plain Llama, which every study has.
PLAIN = "transformer"
#: Settings that a method of a study may have for itself.
OF_A_METHOD = (*RATES, "steps")


def architecture(method: str) -> str:
    """A method of a study without the settings of its training."""
    return ":".join(part for part in method.split(":") if part.partition("=")[0] not in OF_A_METHOD)
