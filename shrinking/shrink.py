"""`resformer.shrink`: a Llama-style checkpoint in, one with a smaller key/value cache out."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedTokenizerBase
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from resformer.configuration import ResFormerConfig
from resformer.configuration.methods import method_fields, method_of, without_connections
from resformer.convert.families import backbone_config
from resformer.convert.retrofitting import RetrofitReport, write_retrofit
from resformer.convert.source import OpenedSource, Source, open_source
from resformer.convert.to_folder import Options, folder_name
from resformer.environment import require
from resformer.errors import CheckpointError, one_line
from resformer.files import check_target
from resformer.modeling import ResFormerForCausalLM
from resformer.progress import progress_bar
from resformer.shrinking.accounting import Cost, measure_cost
from resformer.shrinking.calibration import HELD_OUT, Calibration, calibrating, student_of
from resformer.shrinking.options import ShrinkOptions
from resformer.shrinking.readers import Plan, Readers
from resformer.shrinking.search import best_plan, single_costs, smallest
from resformer.training.data import load_documents
from resformer.training.packing import PackedBlocks, pack_all, pack_documents
from resformer.training.tokenizers import load_tokenizer
from resformer.untrusted import read_json

#: Steps of training a query projection: while plans are compared, and for the result.
_SEARCH_STEPS, _FINAL_STEPS = 50, 300
#: `share` -> what one layer may read of another.
_SHARED = {"any": ("key", "value"), "values": ("value",), "both": ("both",)}
_WORDS = dict(zip(_SHARED.values(), ("keys and values", "values", "keys and values of the same layer"), strict=True))
#: Held-out blocks that shares by themselves are measured on, and those that plans are compared on.
_SINGLES_ON, _PLANS_ON = 2, 4
#: The part of the documents that the cost is measured on, where there is no other text.
_HELD_OUT_SHARE = 0.2
#: The fewest calibration tokens for each input of an output projection.
_TOKENS_PER_INPUT = 4


@dataclass(frozen=True, kw_only=True)
class ShrinkReport(RetrofitReport):
    """What `shrink` did, or would do."""

    cache: float  # share of the source's cache
    calibration: dict[str, Any]  # texts and tokens
    shares: list[dict[str, Any]]  # of each reader: its sources, and how well it was fitted
    cost: dict[str, Any]  # `accounting.Cost`, on text that was not calibrated on
    refitted: int  # tensors that are not the source's

    @cached_property
    def summary(self) -> Cost:
        """The cost, as it was measured."""
        return Cost(**{field.name: self.cost[field.name] for field in fields(Cost)})


def shrink(source: str | Path, output: str | Path, cache: float | None = None, **options: Any) -> ShrinkReport:
    """Writes `source` with a smaller key/value cache to the folder `output`, without training the model.

    Layers read the keys or values of earlier ones. Which ones is searched for on the calibration text. Each reader's
    output projection is refitted by least squares on the outputs of its attention, and its query projection, where it
    reads another's keys, on its attention weights. Heads of a reader may change their order. All other weights stay as
    they are.

    Args:
        source: a folder with safetensors, a `.gguf` file (dequantised), or a Hub id.
        output: a new or empty folder.
        cache: the largest share of the source's cache that the result may take.
        options: further fields of `ShrinkOptions`, which are the options of the command.

    Raises:
        CheckpointError: the source cannot be converted, no plan reaches `cache`, the plan does not fit the model, or
            it gives no finite numbers on the text.
        DataError: the text cannot be read or is too short.
        OutputError: the disk is full or read-only. Nothing is left behind.
        ValueError: not exactly one of `cache`, `plan` and `method` is given, or an argument makes no sense.
    """
    given = ShrinkOptions(cache=cache, **options)
    writing = Options(
        **{name: getattr(given, name) for name in ("force", "dry_run", "durable", "max_shard_size", "progress")},
        verify="hashes",
    )
    require("scipy", "shrink")
    target = Path(output).expanduser()
    inputs: list[str | Path] = [*given.calibrate, *given.evaluate, *([] if given.plan is None else [given.plan])]
    check_target(target, source, *inputs, made_by="convert", force=given.force)
    opened = open_source(source, given.revision)
    config: Any = backbone_config(opened.config)
    kinds = _kinds(opened.name, config, given.share)
    planned = None
    if cache is None:
        planned = _given_plan(config, given.plan, given.method, kinds)
    else:
        _check_budget(opened.name, config, kinds, cache)
    tokenizer = _tokenizer(opened)
    block = min(given.block, config.max_position_embeddings)
    calibration_blocks, evaluation_blocks, notes = _texts(given, tokenizer, block)
    inputs_of_output = config.num_attention_heads * config.head_dim
    if calibration_blocks.numel() < _TOKENS_PER_INPUT * inputs_of_output or len(calibration_blocks) < 2 * HELD_OUT:
        needed = max(_TOKENS_PER_INPUT * inputs_of_output, 2 * HELD_OUT * calibration_blocks.shape[1])
        raise CheckpointError(
            f"The calibration text has {calibration_blocks.numel():,} tokens, and an output projection of "
            f"{opened.name} has {inputs_of_output:,} inputs: at least {needed:,} tokens in {2 * HELD_OUT} sequences "
            "are needed. Give more text, or --tokens."
        )
    fetched = opened.fetch()
    config.tie_word_embeddings = fetched.tied
    model = plain_model(fetched, config)
    with (
        progress_bar(unit="step", desc="calibrating", show=given.progress) as bar,
        calibrating(model, calibration_blocks, progress=bar.update) as calibration,
    ):
        if not calibration.hidden[-1].isfinite().all():
            raise CheckpointError(f"{opened.name} gives no finite numbers on the calibration text; use another dtype.")

        def stage(name: str) -> None:
            bar.set_description_str(name)
            bar.update()

        with torch.inference_mode():
            chosen = planned or _searched(calibration, kinds, cache or 0.0, stage)
            readers = Readers(calibration, _FINAL_STEPS, chosen, lambda done: stage("refitting"))
            fits = readers.fit(chosen)
            result_config, changed = readers.result(chosen)
            plain = student_of(model, config, {})
            student = student_of(model, result_config, changed)
            cost = measure_cost(
                plain, student, evaluation_blocks, tokenizer=tokenizer, progress=lambda: stage("measuring")
            )
    shares = [
        {
            "layer": n,
            "keys_of": chosen.key_sources[n],
            "values_of": chosen.value_sources[n],
            "output_error": fit.error,
            "ridge": fit.strength,
            "attention_divergence": None if fit.keys is None else fit.keys.error,
        }
        for n, (_, fit) in fits.items()
    ]
    return write_retrofit(
        fetched,
        result_config,
        target,
        writing,
        ShrinkReport,
        changed={name: tensor.cpu() for name, tensor in changed.items()},
        method=method_of(result_config) or "calibrated-sharing",
        fields=chosen.fields(),
        cache=chosen.kept / (2 * config.num_hidden_layers),
        calibration={
            "texts": list(map(_text_name, given.calibrate)),
            "tokens": calibration_blocks.numel(),
            "evaluated_on": list(map(_text_name, given.evaluate)),
            "notes": notes,
        },
        shares=shares,
        cost=cost.as_dict(),
        refitted=len(changed),
    )


def _text_name(text: str) -> str:
    """The name of a file or folder without its path: a card is public."""
    return folder_name(text) if Path(text).expanduser().exists() else text


def plain_model(source: OpenedSource, config: ResFormerConfig) -> ResFormerForCausalLM:
    """The source as a ResFormer model without connections, on an accelerator if there is one."""
    with torch.device("meta"):
        model = ResFormerForCausalLM._from_config(config, dtype=source.dtype)
    model.load_state_dict(source.load().state_dict(), assign=True)
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    return model.to("cuda" if torch.cuda.is_available() else "cpu").eval()


def _kinds(name: str, config: Any, share: str) -> tuple[str, ...]:
    if config.qk_norm and share == "both":
        raise CheckpointError(
            f"{name}: norms its keys (qk_norm), and queries cannot be refitted to another layer's: share values only."
        )
    return ("value",) if config.qk_norm else _SHARED[share]


def _check_budget(name: str, config: Any, kinds: tuple[str, ...], cache: float) -> None:
    least = smallest(config, kinds)
    if _kept(config, cache) < least:
        raise CheckpointError(
            f"{name}: no plan takes {cache:.1%} of the cache: with {_WORDS[kinds]} shared, at least "
            f"{least / (2 * config.num_hidden_layers):.1%} is left."
        )


def _kept(config: Any, cache: float) -> int:
    """How many layers' keys and values a share of the cache holds, of 2N."""
    return int(cache * 2 * config.num_hidden_layers + 1e-6)


def _searched(calibration: Calibration, kinds: Sequence[str], cache: float, stage: Any) -> Plan:
    readers = Readers(calibration, _SEARCH_STEPS)

    def measured_on(blocks: int) -> Callable[[Plan], float]:
        rows = calibration.held_out[:blocks]
        return lambda plan: calibration.divergence(readers.student(plan), rows)

    costs = single_costs(readers, kinds, measured_on(_SINGLES_ON), stage)
    kept = _kept(calibration.config, cache)
    return best_plan(calibration.config.num_hidden_layers, kept, costs, measured_on(_PLANS_ON), stage)


def _given_plan(config: ResFormerConfig, path: str | Path | None, method: str | None, kinds: Sequence[str]) -> Plan:
    layers = config.num_hidden_layers
    own = list(range(layers))
    if path is not None:
        content = read_json(Path(path).expanduser())
        fields, where = content.get("fields", content), f"{path}"
        if not isinstance(fields, dict):
            raise CheckpointError(f"{where}: `fields` is a {type(fields).__name__}; expected an object.")
    else:
        fields, where = method_fields(str(method), layers), f"Method {method}"
    sources = {name: fields.get(name) or own for name in ("key_sources", "value_sources")}
    if all(each == own for each in sources.values()):
        raise CheckpointError(
            f"{where}: shares neither keys nor values; `key_sources` and `value_sources` say what does."
        )
    try:
        without_connections(config, **sources)
    except Exception as error:  # its validators' any
        raise CheckpointError(
            f"{where}: does not fit the source, which has {layers} layers: {one_line(error)}"
        ) from error
    if kinds == ("both",) and sources["key_sources"] != sources["value_sources"]:
        n = next(n for n in own if sources["key_sources"][n] != sources["value_sources"][n])
        raise CheckpointError(
            f"{where}: layer {n} reads the keys of layer {sources['key_sources'][n]} and the values of layer "
            f"{sources['value_sources'][n]}, but both are to be of the same layer."
        )
    if sources["key_sources"] != own and kinds == ("value",):
        reason = (
            "the source norms its keys (qk_norm), and queries cannot be refitted" if config.qk_norm else "values only"
        )
        raise CheckpointError(f"{where}: `key_sources` shares keys, but {reason}.")
    return Plan(tuple(sources["key_sources"]), tuple(sources["value_sources"]))


def _tokenizer(source: Source) -> PreTrainedTokenizerBase:
    """Fetches only the tokenizer of a repository on the Hub."""
    name: str | Path = source.folder
    options: dict[str, Any] = {"local_files_only": True}
    if source.gguf is not None:
        options["gguf_file"] = source.gguf.name
    elif source.repo_id is not None:
        name, options = source.repo_id, {"revision": source.revision}
    return load_tokenizer(name, source.config.vocab_size, "save the model's own beside it", **options)


def _texts(
    given: ShrinkOptions, tokenizer: PreTrainedTokenizerBase, block: int
) -> tuple[torch.Tensor, torch.Tensor, list[str]]:
    """Blocks to calibrate on and to evaluate on, of different documents or parts of them, and notes on these."""
    most, held_out_blocks = max(1, given.tokens // block), max(1, given.evaluation_tokens // block)
    held_out = 0.0 if given.evaluate else _HELD_OUT_SHARE
    reading: dict[str, Any] = {name: getattr(given, name) for name in ("text_column", "sample_by", "split")}
    documents = load_documents(given.calibrate, chats=True, held_out=held_out, **reading)
    if given.evaluate:
        others = load_documents(given.evaluate, chats=True, **reading)
        calibration = pack_all(documents, tokenizer, block=block, most=most, side="calibration")
        evaluation = pack_all(others, tokenizer, block=block, most=held_out_blocks, side="evaluation")
    else:
        sizes: Any = {"block": block, "held_out_blocks": held_out_blocks}
        remedy = "other text as --evaluate"
        split = pack_documents(documents, tokenizer, held_out=held_out, remedy=remedy, **sizes)
        evaluation = split.held_out
        calibration = PackedBlocks(split.train.tokens, split.train.starts, block, most=most)
    return _ids(calibration), _ids(evaluation), documents.notes


def _ids(blocks: Any) -> torch.Tensor:
    return torch.stack([blocks[index]["input_ids"] for index in range(len(blocks))])
