"""The options of commands that train: a field has its option on the command line with it. Imports no torch."""

import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

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
    try:
        value = float(number.replace(",", "").replace("_", "")) * unit
    except ValueError:
        value = math.nan
    if not (0 < value < math.inf and value == round(value)):
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
    """The attributes of `values` that are fields of the dataclass `kind`."""
    return {each.name: getattr(values, each.name) for each in fields(kind) if hasattr(values, each.name)}


#: (what is expected, whether a value is that, the names of fields), whichever options have them.
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


#: In the metadata of a field: its option or argument on the command line. Other fields are for Python alone.
TYPED = "typer"


def option(default: Any, help: str | None, *names: str, **settings: Any) -> Any:
    """A field with an option on the command line; `...`: it must be given. `names` and `settings` are Typer's."""
    metadata = {TYPED: Option([] if default == {} else default, *names, help=help, **settings)}
    if isinstance(default, (list, dict)):
        return field(default_factory=default.copy, metadata=metadata)
    return field(default=MISSING if default is ... else default, metadata=metadata)


def argument(help: str) -> Any:
    """A field that is an argument of the command."""
    return field(metadata={TYPED: Argument(..., help=help)})


_TOKENS: dict[str, Any] = {"parser": count, "metavar": "TOKENS"}
# Of several options: the help, and the names.
_PARSE_SPECIAL = "Special tokens that the text spells are tokens, not their letters.", "--parse-special"
_BF16 = "Autocast.  [default: where the processor has bfloat16]", "--bf16/--no-bf16"
_SEPARATE_DOCUMENTS = "Documents of a sequence apart, or joined.", "--separate-documents/--join-documents"
_KEEP_OPTIMIZER = "Whether --resume with more steps can go on after the end.", "--keep-optimizer/--drop-optimizer"
_BACKBONE = "The decoder of another family, qwen3_moe for one.  [default: ours]"


@dataclass(frozen=True, kw_only=True)
class DataOptions(_Checked):
    """Text, as `load_documents` takes it."""

    data: list[str] = option(
        [], "File, folder, Hub id[:configuration], standard-library; repeatable, with weights as in a:0.7."
    )
    split: str = option("train", "Split of a folder or of a Hub dataset.")
    text_column: str | None = option(None, "The column to read, whatever others are.  [default: text]")
    sample_by: str = option("document", "What of a text file is one: document (all), paragraph, line.")

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


@dataclass(frozen=True, kw_only=True)
class RunOptions(DataOptions):
    """What `finetune` and `pretrain` have in common."""

    parse_special: bool = option(False, *_PARSE_SPECIAL)
    streaming: bool = option(False, None, "--streaming", hidden=True)
    held_out: float = option(0.02, "Share of the documents to evaluate on; 0: none.")
    held_out_data: list[str] = option([], "Evaluate on all of these instead, and on no share of --data; repeatable.")
    held_out_blocks: int = option(256, "Evaluate on at most this many blocks.")
    seed: int = option(0, "Of the random numbers: weights, order of the data, dropout.")
    bf16: bool | None = option(None, *_BF16)
    gradient_checkpointing: bool = option(False, "Less memory, more time.", "--gradient-checkpointing")
    compile: bool = option(False, "Compile each layer with torch.compile.", "--compile")
    attn_implementation: str | None = option(None, "sdpa, eager, flash_attention_2.  [default: sdpa]")
    report_to: list[str] = option([], "tensorboard, trackio, wandb; repeatable.")
    optim: str | None = option(None, "muon, or one of Transformers.  [default: adamw_torch_fused]")
    muon_learning_rate: float | None = option(None, "Of the matrices.  [default: --learning-rate]")
    spike: float = option(2.0, "Stop if the loss stays so far above its lowest; 0: never.")
    keep_optimizer: bool = option(False, *_KEEP_OPTIMIZER)
    resume: bool = option(False, "Go on with a run that was stopped.", "--resume")
    force: bool = option(False, "Replace an earlier result, and discard an unfinished run.", "--force")

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

    micro_batch: int | None = option(None, "Sequences per device and pass.  [default: all, or 16,384 tokens]")
    tokens: int | None = option(None, "Of a run: 300k, 1.6B.  [default: 20 a parameter]", **_TOKENS)
    learning_rate: float | None = option(
        None, "The highest.  [default: the size's; of compare --from: 5e-5]", "--learning-rate", "--lr"
    )
    connection_learning_rate: float | None = option(
        None, "Of coefficients.  [default: 50 x --learning-rate, at most 0.2; of compare --from: 3e-4]"
    )
    gate_learning_rate: float | None = option(None, "Of gates and queries.  [default: --learning-rate]")
    table_learning_rate: float | None = option(
        None, "Of value embeddings.  [default: --learning-rate; nanochat: 19 times it]"
    )
    embedding_learning_rate: float | None = option(
        None, "Of the token embedding, then not decayed.  [default: --learning-rate]"
    )
    warmup: float = option(0.05, "Share of the steps, or how many.")
    schedule: str = option("cosine", "cosine, constant, or wsd: down in the last --decay of the steps.")
    decay: float = option(0.2, "Share of the steps, with --schedule wsd.")
    weight_decay: float = option(0.1, "Of matrices; never of connections.")
    evaluations: int = option(10, "Evaluations in a run, at even intervals; each saves a checkpoint.")

    def __post_init__(self) -> None:
        super().__post_init__()
        # Those of a method are what its text says, perhaps no number.
        self._expect("more than 0", lambda rate: isinstance(rate, (int, float)) and 0 < rate < math.inf, *RATES)
        self._expect("0 or more", lambda decay: 0 <= decay < math.inf, "weight_decay")
        if self.schedule == "wsd" and 1 > self.warmup > 1 - self.decay:
            raise ValueError(f"warmup is {self.warmup} and decay {self.decay}; expected at most all steps together.")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions):
    """Options of `resformer finetune`."""

    model: str = argument("A checkpoint folder or a Hub id.")
    output: str = argument("The folder to write; new or empty.")
    steps: int | None = option(None, "Optimizer steps.")
    epochs: float | None = option(None, "Passes over the data.  [default: 1]")
    block: int | None = option(None, "Tokens per sequence.  [default: 1024, or all positions]")
    separate_documents: bool = option(True, *_SEPARATE_DOCUMENTS)
    batch: int = option(8, "Sequences per device and pass.")
    accumulate: int = option(1, "Passes per step.")
    learning_rate: float = option(5e-5, "Of the backbone.", "--learning-rate", "--lr")
    connection_learning_rate: float = option(3e-4, "Of the cross-layer connections.")
    truncate: bool = option(False, "Cut chats that are longer than --block.", "--truncate")
    train: str = option("all", "all parameters, or connections: those that connections add.")
    save_dtype: str | None = option(None, "Of the weights as saved.  [default: float32]")
    tokenizer: str | None = option(None, "Checkpoint with the tokenizer.  [default: MODEL]")
    trainer: dict[str, Any] = option({}, "Any field of TrainingArguments; repeatable.", "--set", metavar="NAME=VALUE")
    dry_run: bool = option(False, "Pack the data, measure one step; write nothing.", "--dry-run")
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


@dataclass(frozen=True, kw_only=True)
class NewOptions(DataOptions):
    """What `resformer new` takes."""

    output: str = argument("The folder to write; new or empty.")
    size: str = option("tiny", "tiny, 10m, 82m, 180m, 320m or 468m, with :FIELD=VALUE... or without.")
    method: str = option("resformer", "A named method: see `resformer methods`. Or FILE.py:NAME.")
    backbone: str | None = option(None, _BACKBONE, metavar="FAMILY|CONFIG.JSON")
    tokenizer: str | None = option(
        None, "bytes; bpe:N, trained on --data; folder; Hub id.  [default: of --data, or bpe:4096, bpe:32768]"
    )
    block: int | None = option(None, "Tokens a sequence.  [default: 512 up to 10m, else 2048]")
    fields: dict[str, Any] = option(
        {}, "A field of ResFormerConfig, or the backbone's; repeatable.", "--set", metavar="FIELD=VALUE"
    )
    seed: int = option(0, "Of the random numbers.")
    force: bool = option(False, "Replace an earlier result.", "--force")

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "method", method_named(self.method))


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(NewOptions, RunOptions, ScheduleOptions):
    """What `resformer pretrain` takes."""

    batch_tokens: int | None = option(None, "A step's.  [default: follows from the size]", **_TOKENS)
    separate_documents: bool = option(True, *_SEPARATE_DOCUMENTS)
    start: str | None = option(None, "Go on from the last step of this OUTPUT, which had a constant rate.", "--from")
    held_out: float = option(0.01, "Share of the documents to evaluate on; 0: none.")
    keep_optimizer: bool = option(True, *_KEEP_OPTIMIZER)
    trainer: dict[str, Any] = option(
        {}, "Any field of TrainingArguments; repeatable.", "--trainer", metavar="NAME=VALUE"
    )


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(DataOptions):
    """What `resformer tokenize` takes."""

    data: list[str] = argument("Files, folders, Hub ids, standard-library.")
    output: str = argument("The folder to write, or to go on with.")
    tokenizer: str = option(..., "bytes; bpe:N, trained on DATA; folder or Hub id.")
    parse_special: bool = option(False, *_PARSE_SPECIAL)
    workers: int = option(1, "Processes.")
    tokens_per_file: int = option(64_000_000, "Of a file.  [default: 64M]", **_TOKENS, show_default=False)
    held_out: float = option(0.01, "Share of the documents to evaluate on.")


@dataclass(frozen=True, kw_only=True)
class StudyOptions(ScheduleOptions, DataOptions):
    """What `resformer compare` takes; what is not said follows from the size, as in `pretrain`."""

    output: str = argument("The folder of the study; new, empty, or one to go on with.")
    data: list[str] = option([], "As of finetune; repeatable.  [default: standard-library]")
    methods: list[str] = option(
        ["resformer,denseformer,svformer"],
        "NAME or FILE.py:NAME, [:FIELD=VALUE...], separated by commas; transformer is always one.",
    )
    baseline: str | None = option(None, "What is compared with.  [default: the first transformer]")
    start: str | None = option(None, "Continue this checkpoint, converted to each method.", "--from")
    backbone: str | None = option(None, _BACKBONE, metavar="FAMILY|CONFIG.JSON")
    sizes: list[str] = option([], "As --size of pretrain; commas between.  [default: tiny]", "--sizes", "--size")
    seeds: int = option(3, "Paired runs of each method.")
    first_seed: int = option(0, "The first run's; the others count on from it.", min=0)
    steps: int | None = option(None, "Of each run.  [default: those of --tokens]")
    batch: int | None = option(None, "Sequences per step.  [default: the size's; --from: 8]")
    tokenizer: str | None = option(None, "As of pretrain.  [default: bpe:4096, or the checkpoint's]")
    block: int = option(512, "Tokens per sequence.")
    parse_special: bool = option(False, *_PARSE_SPECIAL)
    separate_documents: bool = option(True, *_SEPARATE_DOCUMENTS)
    bf16: bool | None = option(None, *_BF16)
    held_out: float = option(0.02, "Share of the documents of --data to evaluate on.")
    held_out_blocks: int = option(128, "The most that is evaluated on before a run's end.")
    save_models: bool = option(False, "Keep the models of the first seed.", "--save-models")

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
