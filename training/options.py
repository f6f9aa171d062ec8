"""The options of commands that train: a field's annotation is its option on the command line. Imports no torch."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any

from huggingface_hub.utils import validate_repo_id  # type: ignore[attr-defined]
from typer import Argument, Option

from resformer.errors import CheckpointError, first_names, one_line

#: What a document of a plain text file may be.
SAMPLE_BY = ("document", "paragraph", "line")
#: Of the learning rate; "wsd" is warm-up, stable, decay.
SCHEDULES = ("cosine", "constant", "wsd")
#: What `finetune --train` takes.
TRAIN = ("all", "sharing", "connections")

_UNITS = {"k": 10**3, "M": 10**6, "B": 10**9, "T": 10**12}
_LAUNCH_OPTIONS = ("resume", "force", "dry_run")  # options that do not change the result


def count(text: str | int) -> int:
    """The number that a text such as 300k, 1.6B or 2,048 stands for; raises ValueError if it stands for none."""
    text = str(text)  # Typer passes defaults, too
    number, unit = (text[:-1], _UNITS[text[-1]]) if text[-1:] in _UNITS else (text, 1)
    value = float(number.replace(",", "").replace("_", "")) * unit
    if not (value > 0 and value == round(value)):
        raise ValueError(f"{text!r}: expected a whole number of more than 0, such as 300k or 1.6B.")
    return round(value)


def names(text: str) -> list[str]:
    """The names of a list such as `svformer,transformer:num_key_value_heads=4`; lists among the values keep commas."""
    return [name.strip() for name in re.split(r",(?![^\[]*\])", text) if name.strip()]


def weighted_sources(sources: Sequence[str]) -> tuple[list[str], list[float] | None]:
    """Names of sources, and their shares of the documents where `name:weight` gives them, adding up to 1."""
    names, weights = [], []
    for source in sources:
        name, _, weight = source.rpartition(":")
        if len(sources) > 1 and re.fullmatch(r"\d*\.?\d+", weight) and name and not Path(source).exists():
            names.append(name)
            weights.append(float(weight))
        else:
            names.append(source)
    if weights and (len(weights) < len(names) or not all(weights)):
        raise ValueError(f"data is {first_names(sources)}; give a weight above 0 to every source, or to none.")
    return names, [weight / sum(weights) for weight in weights] or None


def check_same(record: Path, now: dict[str, Any], what: str, way_out: str = "Give another folder.") -> None:
    """Raises CheckpointError if a folder was begun with something else than `now`, as the JSON in `record` says."""
    try:
        before = json.loads(record.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{record}: cannot be read ({one_line(error)}); remove its folder.") from error
    now = json.loads(json.dumps(now))
    if different := sorted(name for name in now if now[name] != before.get(name)):
        changes = ", ".join(f"{name} was {before.get(name)!r}, is {now[name]!r}" for name in different)
        raise CheckpointError(f"{record.parent}: holds another {what}: {changes}. {way_out}")


class _Checked:
    """Checks of fields by their names, for dataclasses of options."""

    def _expect(self, what: str, check: Any, *names: str) -> None:
        for name in names:
            if (value := getattr(self, name)) is not None and not check(value):
                raise ValueError(f"{name} is {value!r}; expected {what}.")

    def _positive(self, *names: str) -> None:
        self._expect("more than 0", lambda value: value > 0, *names)

    def _whole(self, *names: str) -> None:
        self._expect("an integer of more than 0", lambda value: isinstance(value, int) and value > 0, *names)

    def _one_of(self, choices: Sequence[str], name: str) -> None:
        self._expect(f"one of {', '.join(choices)}", choices.__contains__, name)


@dataclass(frozen=True, kw_only=True)
class DataOptions(_Checked):
    """Text, as `load_documents` takes it."""

    data: Annotated[
        list[str],
        Option(
            help="Text, JSON, CSV, parquet file; folder; Hub id[:configuration]; standard-library; repeatable, with "
            "weights as in a:0.7. Columns: input_ids, text; finetune: messages, prompt and completion."
        ),
    ] = field(default_factory=list)
    split: Annotated[str, Option(help="Split of a Hub dataset.")] = "train"
    text_column: Annotated[str, Option(help="Column that holds the text.")] = "text"
    sample_by: Annotated[str, Option(help="What of a text file is one: document (all), paragraph, line.")] = "document"

    def __post_init__(self) -> None:
        self._one_of(SAMPLE_BY, "sample_by")
        weighted_sources(self.data)

    @property
    def sources(self) -> list[str]:
        """`data` without weights."""
        return weighted_sources(self.data)[0]

    @property
    def reading(self) -> dict[str, Any]:
        """Arguments of `load_documents`."""
        return {"split": self.split, "text_column": self.text_column, "sample_by": self.sample_by}


Bf16 = Annotated[bool | None, Option("--bf16/--no-bf16", help="Autocast.  [default: where the processor has bfloat16]")]


@dataclass(frozen=True, kw_only=True)
class RunOptions(DataOptions):
    """What `finetune` and `pretrain` have in common."""

    streaming: Annotated[bool, Option("--streaming", help="Read as it trains, never all.")] = False
    held_out: Annotated[float, Option(help="Share of the documents to evaluate on; 0: none.")] = 0.02
    held_out_blocks: Annotated[int, Option(help="Evaluate on at most this many blocks.")] = 256
    seed: Annotated[int, Option(help="Of the random numbers: weights, order of the data, dropout.")] = 0
    bf16: Bf16 = None
    gradient_checkpointing: Annotated[bool, Option("--gradient-checkpointing", help="Less memory, more time.")] = False
    compile: Annotated[bool, Option("--compile", help="Compile each layer with torch.compile.")] = False
    attn_implementation: Annotated[str | None, Option(help="sdpa, eager, flash_attention_2.  [default: sdpa]")] = None
    report_to: Annotated[list[str], Option(help="tensorboard, trackio, wandb; repeatable.  [default: none]")] = field(
        default_factory=list
    )
    tasks: Annotated[
        list[str],
        Option("--eval", help="Tasks of lm-evaluation-harness, at each evaluation and at the end; repeatable."),
    ] = field(default_factory=list)
    shard: Annotated[int, Option(help="FSDP2: so many devices share weights, gradients and moments.")] = 1
    tensor_parallel: Annotated[int, Option(help="So many devices share each layer's matrices and sequences.")] = 1
    push: Annotated[str | None, Option(metavar="REPO", help="Push the finished OUTPUT to this Hub id.")] = None
    resume: Annotated[bool, Option("--resume", help="Go on with a run that was stopped.")] = False
    force: Annotated[bool, Option("--force", help="Replace an earlier result, and discard an unfinished run.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.data:
            raise ValueError("data is empty; name some with --data.")
        self._positive("held_out_blocks", "shard", "tensor_parallel")
        for name in ("shard", "tensor_parallel"):
            for other in ("compile", "distill"):
                if getattr(self, name) > 1 and getattr(self, other, None):
                    raise ValueError(f"{name} is {getattr(self, name)}, with {other}; leave one of them out.")
        if self.tensor_parallel > 1 and self.streaming:
            raise ValueError(
                f"tensor_parallel is {self.tensor_parallel}, with streaming; write tokens with `resformer tokenize`, "
                "and read these."
            )
        self._expect("a share of the documents, from 0 to below 1", lambda share: 0 <= share < 1, "held_out")
        if self.push is not None:
            validate_repo_id(self.push)


@dataclass(frozen=True, kw_only=True)
class ScheduleOptions(_Checked):
    """What `pretrain` and `compare` have in common.

    AdamW (0.9, 0.95), gradients clipped at 1. Norms, biases and cross-layer connections are not decayed.
    """

    micro_batch: Annotated[
        int | None, Option(help="Sequences per device and pass.  [default: all; pretrain: 16,384 tokens or fewer]")
    ] = None
    learning_rate: float | None = None
    connection_learning_rate: Annotated[
        float | None, Option(help="Of the connections.  [default: --learning-rate; of compare --from: 3e-4]")
    ] = None
    warmup: Annotated[float, Option(help="Share of the steps.")] = 0.05
    schedule: Annotated[str, Option(help="cosine, constant, or wsd: down in the last --decay of the steps.")] = "cosine"
    decay: Annotated[float, Option(help="Share of the steps, with --schedule wsd.")] = 0.2
    weight_decay: Annotated[float, Option(help="Of matrices; never of connections.")] = 0.1
    evaluations: Annotated[int, Option(help="Evaluations in a run, at even intervals; each saves a checkpoint.")] = 10

    def __post_init__(self) -> None:
        self._whole("micro_batch", "evaluations")
        self._expect(
            "a number of more than 0",
            lambda value: isinstance(value, (int, float)) and value > 0,
            *("learning_rate", "connection_learning_rate"),
        )
        self._expect("a share of the steps from 0 to less than 1", lambda share: 0 <= share < 1, "warmup", "decay")
        self._one_of(SCHEDULES, "schedule")
        if self.schedule == "wsd" and self.warmup + self.decay > 1:
            raise ValueError(f"warmup is {self.warmup} and decay {self.decay}; expected at most all steps together.")


@dataclass(frozen=True, kw_only=True)
class FinetuneOptions(RunOptions):
    """What `resformer finetune` takes."""

    model: Annotated[str, Argument(help="A checkpoint folder or a Hub id.")]
    output: Annotated[str, Argument(help="The folder to write; new or empty.")]
    steps: Annotated[int | None, Option(help="Optimizer steps; --streaming needs them.")] = None
    epochs: Annotated[float | None, Option(help="Passes over the data.  [default: 1]")] = None
    block: Annotated[int | None, Option(help="Tokens per sequence.  [default: 1024, or all positions]")] = None
    separate_documents: Annotated[
        bool,
        Option(
            "--separate-documents/--join-documents",
            help="Whether documents that are packed into a sequence are hidden from each other.",
        ),
    ] = True
    batch: Annotated[int, Option(help="Sequences per device and pass.")] = 8
    accumulate: Annotated[int, Option(help="Passes per step.")] = 1
    learning_rate: Annotated[float, Option(help="Of the backbone.")] = 5e-5
    connection_learning_rate: Annotated[float, Option(help="Of the cross-layer connections.")] = 3e-4
    distill: Annotated[str | None, Option(help="Learn from this checkpoint's logits, too: MODEL's source.")] = None
    distill_weight: Annotated[float, Option(help="Weight of the teacher's loss, 0 to 1.")] = 0.5
    temperature: Annotated[float, Option(help="Of the teacher's and the model's softmax.")] = 1.0
    distill_hidden: Annotated[float, Option(help="Weight of the teacher's hidden states.")] = 0.0
    distill_hidden_layers: Annotated[
        list[int], Option(help="Which of Transformers' hidden_states; repeatable; -2 is the last layer's input.")
    ] = field(default_factory=lambda: [-2])
    train: Annotated[
        str,
        Option(
            help="all parameters; sharing: projections and norms that sharing touched, and connections; connections "
            "alone."
        ),
    ] = "all"
    dtype: Annotated[str, Option(help="Of the weights in training, float32 or bfloat16.")] = "float32"
    save_dtype: Annotated[str | None, Option(help="Of the weights as saved.  [default: --dtype]")] = None
    optim: Annotated[str | None, Option(help="Of Transformers, such as adamw_8bit.  [default: adamw_torch_fused]")] = (
        None
    )
    tokenizer: Annotated[str | None, Option(help="Checkpoint with the tokenizer.  [default: MODEL]")] = None
    trainer: Annotated[
        dict[str, Any],
        Option("--set", metavar="NAME=VALUE", help="Any field of Transformers' TrainingArguments; repeatable."),
    ] = field(default_factory=dict)
    dry_run: Annotated[
        bool, Option("--dry-run", help="Pack the data, take one step and say what memory it took; write nothing.")
    ] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("steps", "epochs", "batch", "accumulate", "temperature")
        self._expect("2 tokens at least, one to predict the other", lambda block: block > 1, "block")
        self._expect("0 to 1", lambda weight: 0 <= weight <= 1, "distill_weight")
        self._expect("a finite number from 0 up", lambda w: math.isfinite(w) and w >= 0, "distill_hidden")
        self._expect("a layer at least", len, "distill_hidden_layers")
        self._one_of(TRAIN, "train")
        if self.distill_hidden and self.distill is None:
            raise ValueError(f"distill_hidden is {self.distill_hidden}, without a teacher; name it with --distill.")
        if self.steps is not None and self.epochs is not None:
            raise ValueError(f"steps is {self.steps} and epochs {self.epochs}; give one of them.")
        if self.streaming and self.steps is None:
            raise ValueError("streaming needs steps: the length of a stream is not known.")
        if self.streaming and (workers := self.trainer.get("dataloader_num_workers")):
            raise ValueError(
                f"dataloader_num_workers is {workers}; a stream is read by the training process: leave it out."
            )
        if self.separate_documents and self.batch > 1 and "flash" in (self.attn_implementation or ""):
            raise ValueError(
                f"batch is {self.batch}; with FlashAttention, documents of a block are kept apart in batches of one "
                "alone. Use --batch 1 and --accumulate, --attn-implementation sdpa, or --join-documents."
            )
        if self.dtype == "float16":
            raise ValueError(
                "dtype is float16; its gradients underflow. Train in float32, and save in it with --save-dtype float16."
            )
        self._one_of(("float32", "bfloat16"), "dtype")
        self._one_of(("float32", "bfloat16", "float16"), "save_dtype")

    @property
    def unfinished(self) -> Path:
        """The folder beside the output that holds the checkpoints until the run ends."""
        output = Path(self.output)
        return output.with_name(f"{output.name}.training")

    @property
    def run(self) -> dict[str, Any]:
        """What decides the result: all but how this process was started."""
        return {name: value for name, value in asdict(self).items() if name not in _LAUNCH_OPTIONS}


@dataclass(frozen=True, kw_only=True)
class NewOptions(DataOptions):
    """What `resformer new` takes."""

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
    block: Annotated[int | None, Option(help="Tokens a sequence.  [default: 512 up to 10m, else 2048]")] = None
    fields: Annotated[
        dict[str, Any], Option("--set", metavar="FIELD=VALUE", help="A field of ResFormerConfig; repeatable.")
    ] = field(default_factory=dict)
    seed: Annotated[int, Option(help="Of the random numbers.")] = 0
    force: Annotated[bool, Option("--force", help="Replace an earlier result.")] = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._expect("2 tokens at least, one to predict the other", lambda block: block > 1, "block")


@dataclass(frozen=True, kw_only=True)
class PretrainOptions(NewOptions, RunOptions, ScheduleOptions):
    """What `resformer pretrain` takes."""

    tokens: Annotated[
        int | None, Option(parser=count, metavar="TOKENS", help="300k, 1.6B.  [default: 20 for each parameter]")
    ] = None
    batch_tokens: Annotated[
        int | None,
        Option(parser=count, metavar="TOKENS", help="A step's, on all devices.  [default: follows from the size]"),
    ] = None
    learning_rate: Annotated[float | None, Option(help="The highest.  [default: follows from the size]")] = None
    held_out: Annotated[float, Option(help="Share of the documents to evaluate on; 0: none.")] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        ScheduleOptions.__post_init__(self)


@dataclass(frozen=True, kw_only=True)
class TokenizeOptions(DataOptions):
    """What `resformer tokenize` takes."""

    data: Annotated[list[str], Argument(help="Files, folders, Hub ids, standard-library.")]
    output: Annotated[str, Argument(help="The folder to write, or to go on with.")]
    tokenizer: Annotated[str, Option(help="bytes; bpe:N, trained on DATA; folder or Hub id.")]
    workers: Annotated[int, Option(help="Processes.")] = 1
    shard: Annotated[str, Option(metavar="I/N", help="Only the I-th of N parts; one machine each.")] = "1/1"
    tokens_per_file: Annotated[
        int,
        Option(parser=count, metavar="TOKENS", help="A file ends after so many.  [default: 64M]", show_default=False),
    ] = 64_000_000
    held_out: Annotated[float, Option(help="Share of the documents to evaluate on.")] = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        self._positive("workers")
        part, slash, parts = self.shard.partition("/")
        if not (part.isdecimal() and slash and parts.isdecimal() and 1 <= int(part) <= int(parts)):
            raise ValueError(f"shard is {self.shard!r}; expected I/N, with I from 1 to N.")
        self._expect("a share of the documents, from 0 to below 1", lambda share: 0 <= share < 1, "held_out")

    @property
    def part(self) -> tuple[int, int]:
        """(I, N) of `shard`."""
        part, _, parts = self.shard.partition("/")
        return int(part), int(parts)


@dataclass(frozen=True, kw_only=True)
class RunSettings(ScheduleOptions):
    """How a study trains a model; the defaults are those of pre-training."""

    steps: int
    batch: Annotated[int, Option(help="Sequences per step, on all devices together.")] = 8
    learning_rate: float = 6e-4
    bf16: Bf16 = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._whole("steps", "batch")


@dataclass(frozen=True, kw_only=True)
class StudyOptions(RunSettings, DataOptions):
    """What `resformer compare` takes."""

    output: Annotated[str, Argument(help="The folder of the study; new, empty, or one to go on with.")]
    data: Annotated[
        list[str],
        Option(
            help="Text, JSON, CSV or parquet file, folder, Hub id[:configuration]; repeatable.  [default: Python's "
            "standard library]"
        ),
    ] = field(default_factory=list)
    methods: Annotated[
        list[str], Option(help="NAME[:FIELD=VALUE...], separated by commas; transformer is always one of them.")
    ] = field(default_factory=lambda: ["resformer,denseformer,svformer"])
    baseline: Annotated[str | None, Option(help="What is compared with.  [default: the first transformer]")] = None
    start: Annotated[
        str | None,
        Option(
            "--from", help="Continue this Llama-style checkpoint, converted to each method, instead of from scratch."
        ),
    ] = None
    sizes: Annotated[
        list[str],
        Option(help="tiny, 10m, 82m, 180m, 320m, 468m, or NAME:FIELD=VALUE...; commas between.  [default: tiny]"),
    ] = field(default_factory=list)
    seeds: Annotated[int, Option(help="Paired runs of each method.")] = 3
    first_seed: Annotated[int, Option(min=0, help="The first run's; the others count on from it.")] = 0
    steps: Annotated[int | None, Option(help="Steps of each run; or give --tokens.")] = None  # type: ignore[assignment]
    tokens: Annotated[
        int | None,
        Option(parser=count, metavar="TOKENS", help="Of each run, rounded up to steps: 300k, 1.6B."),
    ] = None
    tokenizer: Annotated[
        str | None,
        Option(
            help="bytes, bpe:N trained on the data, a folder or a Hub id.  [default: bpe:4096, or the checkpoint's]"
        ),
    ] = None
    block: Annotated[int, Option(help="Tokens per sequence.")] = 512
    learning_rate: Annotated[float | None, Option(help="The highest.  [default: 6e-4, or 5e-5 with --from]")] = None  # type: ignore[assignment]
    held_out: Annotated[float, Option(help="Share of the documents of --data to evaluate on.")] = 0.02
    held_out_blocks: Annotated[int, Option(help="The most that is evaluated on before a run's end.")] = 128
    save_models: Annotated[bool, Option("--save-models", help="Keep the models of the first seed.")] = False

    def __post_init__(self) -> None:
        self._expect("2 tokens at least, one to predict the other", lambda block: block > 1, "block")
        if (self.steps is None) == (self.tokens is None):
            raise ValueError(f"--steps is {self.steps} and --tokens {self.tokens}: give one of them.")
        defaults: dict[str, Any] = {
            name: [each for text in getattr(self, name) for each in names(text)] for name in ("methods", "sizes")
        }
        if self.tokens is not None:
            defaults["steps"] = math.ceil(self.tokens / max(self.batch * self.block, 1))
        if self.learning_rate is None:
            defaults["learning_rate"] = 6e-4 if self.start is None else 5e-5
        if self.connection_learning_rate is None and self.start is not None:
            defaults["connection_learning_rate"] = 3e-4
        for name, value in defaults.items():
            object.__setattr__(self, name, value)
        RunSettings.__post_init__(self)
        DataOptions.__post_init__(self)
        self._positive("seeds", "held_out_blocks")
        self._expect("a share of the documents between 0 and 1", lambda share: 0 < share < 1, "held_out")
        self._one_of(self.all_methods, "baseline")
        if self.start is not None and self.sizes:
            raise ValueError(
                f"sizes are {', '.join(self.sizes)}, but the size is that of {self.start}; give one of them."
            )

    @property
    def settings(self) -> RunSettings:
        return RunSettings(**{each.name: getattr(self, each.name) for each in fields(RunSettings)})

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
OF_A_METHOD = ("learning_rate", "connection_learning_rate", "steps")


def architecture(method: str) -> str:
    """A method of a study without the settings of its training."""
    return ":".join(part for part in method.split(":") if part.partition("=")[0] not in OF_A_METHOD)
