"""Two checkpoints side by side: what their configurations build, tensors byte for byte, logits on the same tokens."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers.modeling_rope_utils import RopeParameters

from resformer.configuration import ResFormerConfig, key_sources, mixing_layers, value_sources
from resformer.configuration.methods import CONNECTION_FIELDS, backbone_fields
from resformer.convert.connected_families import facts, in_one_family, is_connected, view
from resformer.convert.connections import added_shapes, expected_shapes, head_of, read_connections
from resformer.convert.logits import LogitsComparison, compare_logits, memory_for_logits, window_of
from resformer.convert.reading import EMBEDDING, HEAD
from resformer.convert.sameness import differences
from resformer.convert.source import OpenedSource, open_source
from resformer.convert.tensors import numbers
from resformer.convert.to_folder import Verify, check_verify
from resformer.convert.tokens import TokensComparison, compare_tokens, fetch_side_files, source_tokenizer
from resformer.environment import free_memory
from resformer.errors import CheckpointError, one_line
from resformer.files import AsDict
from resformer.modeling.any_decoder import text_config
from resformer.modeling.connection import Connection
from resformer.modeling.connections import KINDS
from resformer.safetensors_format import Tensor, same_bytes
from resformer.untrusted import MIB, check_folder, read_bounded

#: Fields of `ResFormerConfig` that change no number of a forward pass or its gradient. Both ends of a tie are compared
#: as tensors.
_WITHOUT_EFFECT = set("initializer_range use_cache pad_token_id bos_token_id eos_token_id tie_word_embeddings".split())


@dataclass(frozen=True)
class Comparison(AsDict):
    """The result of comparing two checkpoints."""

    one: str
    other: str
    configuration: dict[str, tuple[Any, Any]]  # field that changes what is computed -> its values, where they differ
    without_effect: list[str]  # those fields whose connections change nothing: their coefficients are the identity
    bytes_compared: bool  # False: only names, dtypes and shapes of tensors
    identical: int  # tensors that are alike
    different: dict[str, float | None]  # tensor -> largest absolute difference; None if shapes or dtypes differ
    only_in_one: list[str]
    only_in_other: list[str]
    added: list[str]  # those of the two lists above that are parameters of connections
    logits: LogitsComparison | None
    tokens: TokensComparison | None
    not_compared: list[str]  # sentences: what was not compared, and why

    @property
    def same_tensors(self) -> bool:
        """Whether every tensor that both models should have is alike, as far as it was compared."""
        return not self.different and not ({*self.only_in_one, *self.only_in_other} - set(self.added))

    @property
    def same_configuration(self) -> bool:
        """Whether both configurations build models that compute the same with the same tensors."""
        return self.configuration.keys() <= set(self.without_effect)

    @property
    def same(self) -> bool | None:
        """Whether both are the same model, as an exact retrofit and its source are; `None` if not known."""
        compared = [each for each in (self.logits, self.tokens) if each is not None]
        if not (self.same_tensors and all(each.identical for each in compared)):
            return False
        differing = self.configuration.keys() - set(self.without_effect)
        if self.bytes_compared or differing - set(CONNECTION_FIELDS):
            return not differing
        return None


def verify(
    one: str | Path,
    other: str | Path,
    *,
    verify: Verify = "auto",
    tokens: int = 128,
    text: str | Path | None = None,
    device: str | None = None,
    revision: str | None = None,
    other_revision: str | None = None,
) -> Comparison:
    """Compares two checkpoints, a source and its retrofit for example.

    Args:
        one, other: folders, `.gguf` files or Hub ids, of any family that can be converted, or ResFormer's.
        verify: configurations and tokenizers are always compared. `"headers"` compares names, dtypes and shapes of
            tensors; `"hashes"` the bytes too; `"logits"` the logits too, each model in its own dtype, one in memory at
            a time. `"auto"` is logits where the larger fits into free memory. Only logits of language models are
            compared.
        tokens: at which logits are compared, at the end of two rows that are longer than any sliding window.
        text: a file whose text, as the tokenizer of `one` reads it, makes the rows; default: random tokens.
        device: where the models run; default: the CPU.
        revision, other_revision: of `one` and `other`, if they are Hub ids.

    Raises:
        CheckpointError: one of them cannot be read, or the text is too short.
        ValueError: `verify`, `tokens` or `device` make no sense.
    """
    check_verify(verify)
    _check_options(verify, tokens, text, device)
    sources = [open_source(each, commit, heads=True) for each, commit in ((one, revision), (other, other_revision))]
    opened = [source.fetch(headers_only=verify == "headers") for source in sources]
    configs = in_one_family(*(source.config for source in opened))
    tables: list[dict[str, Tensor]] = []
    for source, config in zip(opened, configs, strict=True):
        table = dict(source.checkpoint.tensors)
        # The model has both ends, a checkpoint one or both.
        if source.tied and not is_connected(config) and HEAD in expected_shapes(config):
            for stored, missing in ((EMBEDDING, HEAD), (HEAD, EMBEDDING)):
                if missing not in table:
                    table[missing] = table[stored]
        tables.append(table)
    configuration, without_effect = _configurations(opened, configs, tables)
    configuration |= _built(opened, configuration)
    a, b = tables
    common = [name for name in a if name in b]
    different: dict[str, float | None] = {}
    for name in common:
        comparable = (a[name].dtype, a[name].shape) == (b[name].dtype, b[name].shape)
        if not (comparable and (verify == "headers" or same_bytes(a[name], b[name]))):
            different[name] = None if verify == "headers" else _distance(a[name], b[name])
    only_a, only_b = sorted(a.keys() - b.keys()), sorted(b.keys() - a.keys())
    logits, reasons = None, ["bytes of tensors (--verify headers)"] if verify == "headers" else []
    if reason := _why_no_logits(opened, configs, verify):
        reasons.append(f"logits ({reason})")
    else:
        logits = _logits(opened, configs, tokens, text, device)
    same_ids, reason = _tokens(opened)
    reasons += [reason] if reason else []
    return Comparison(
        one=opened[0].name,
        other=opened[1].name,
        configuration=configuration,
        without_effect=without_effect,
        bytes_compared=verify != "headers",
        identical=len(common) - len(different),
        different=different,
        only_in_one=only_a,
        only_in_other=only_b,
        added=sorted({name for config in configs for name in added_shapes(config)} & {*only_a, *only_b}),
        logits=logits,
        tokens=same_ids,
        not_compared=reasons,
    )


def _check_options(verify: Verify, tokens: int, text: object, device: str | None) -> None:
    if tokens < 16:
        raise ValueError(f"tokens={tokens}: expected 16 or more.")
    if verify in ("headers", "hashes") and (text is not None or device is not None):
        raise ValueError(f"verify={verify!r} runs no model: leave out --text and --device.")
    try:
        torch.device(device or "cpu")
    except RuntimeError as error:
        raise ValueError(f"device={device!r}: {one_line(error, 100)}") from error


def _configurations(
    sources: Sequence[OpenedSource], configs: Sequence[Any], tables: Sequence[dict[str, Tensor]]
) -> tuple[dict[str, tuple[Any, Any]], list[str]]:
    """(the fields that build different models, with both values; those whose connections have no effect)."""
    first, second = (_computed(source, config) for source, config in zip(sources, configs, strict=True))
    differing = {name: (first.get(name), second.get(name)) for name in {**first, **second}}
    differing = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    for name in differing.keys() & set(CONNECTION_FIELDS):  # as they are stated, if they are: others follow from those
        differing[name] = getattr(configs[0], name, None), getattr(configs[1], name, None)
    differing = {name: pair for name, pair in differing.items() if pair[0] != pair[1]}
    neutral = [
        name
        for kind in KINDS
        if not any(_has_effect(kind, config, table) for config, table in zip(configs, tables, strict=True))
        for name in kind.fields
        if name in differing
    ]
    return differing, neutral


def _built(sources: Sequence[OpenedSource], configuration: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """What Transformers builds differently, as far as no field of the backbone says so already."""
    first, second = (source.facts() for source in sources)
    explained = bool(configuration.keys() - set(CONNECTION_FIELDS))
    return {
        each.name: (each.source, each.result)
        for each in differences(first, second)
        if each.name.startswith(("generation: ", "special tokens: "))
        or not (
            explained or each.name.startswith(("tensors: ", "configuration: ")) or each.name == "tie_word_embeddings"
        )
    }


def _computed(source: OpenedSource, config: Any) -> dict[str, Any]:
    """The fields that change what a model computes; defaults are filled in, what nothing reads is `None`."""
    if is_connected(config):
        values = {name: value for name, value in facts(config).items() if name not in _WITHOUT_EFFECT}
    else:
        values = _backbone(config)
    for kind in KINDS:
        values |= {name: getattr(config, name, None) if kind.is_in(config) else None for name in kind.fields}
    learned = {name for name in CONNECTION_FIELDS if name.endswith("_init")}  # the start of what a checkpoint holds
    values |= dict.fromkeys(learned - ({"value_residual_init"} if config.value_residual == "constant" else set()))
    shape = view(config)
    values["value_sources"], values["key_sources"] = value_sources(shape), key_sources(shape)
    if values["value_residual"] is not None:
        values["value_residual_layers"] = mixing_layers(shape)
    values["dtype"] = str(source.stated_dtype).removeprefix("torch.")
    return values


def _backbone(config: ResFormerConfig) -> dict[str, Any]:
    """The fields of the decoder of this package that change what it computes."""
    values = {name: value for name, value in backbone_fields(config).items() if name not in _WITHOUT_EFFECT}
    rope = {"rope_type": "default", "partial_rotary_factor": 1.0, **(values.pop("rope_parameters") or {})}
    values |= {name: rope.get(name) for name in RopeParameters.__annotations__}
    if "sliding_attention" not in (config.layer_types or ()):
        values["sliding_window"] = None
    if rope["rope_type"] == "default":
        values["max_position_embeddings"] = None  # how long the model was trained: no limit
    values["no_rope_layers"] = config.no_rope_layers or [1] * config.num_hidden_layers
    if config.attention_out_bias is None:
        values["attention_out_bias"] = config.attention_bias
    return values


def _has_effect(kind: type[Connection], config: Any, tensors: dict[str, Tensor]) -> bool:
    """Whether connections of this kind change what a model computes; True where their coefficients are not here."""
    if not kind.is_in(config):
        return False
    if not all(tensors[name].on_this_disk for name in added_shapes(config)):
        return True
    read = read_connections(config, tensors)
    modules = [module for name, module in read.items() if kind.name in name.split(".")]
    if not modules:
        return bool(kind.inexact_because(view(config)))
    fixed = kind.chosen(config).fixed_effects(view(config))
    return bool(fixed) or any(distance != 0 for module in modules for distance, _ in module.deviations())


def _why_no_logits(sources: Sequence[OpenedSource], configs: Sequence[Any], verify: Verify) -> str:
    """Why logits are not compared; empty if they are."""
    if any(map(head_of, configs)):
        return "only language models have them"
    sizes = [text_config(config).vocab_size for config in configs]
    if verify not in ("auto", "logits"):
        return f"--verify {verify}"
    if sizes[0] != sizes[1]:
        return f"the vocabularies have {sizes[0]:,} and {sizes[1]:,} tokens"
    needed, free = max(memory_for_logits(source.checkpoint, source.dtype) for source in sources), free_memory()
    if verify == "auto" and needed > free:
        return f"that takes {needed / 1e9:.1f} GB of memory, {free / 1e9:.1f} GB are free"
    return ""


def _logits(
    sources: Sequence[OpenedSource],
    configs: Sequence[Any],
    tokens: int,
    text: str | Path | None,
    device: str | None,
) -> LogitsComparison:
    window = max(map(window_of, configs))
    row = max(tokens // 2, window + tokens // 4)
    ids = (
        None
        if text is None
        else _token_ids(sources[0], Path(text).expanduser(), text_config(configs[0]).vocab_size, 2 * row)
    )
    return compare_logits(sources[0].load, sources[1].load, tokens, row=row, text=ids, window=window, device=device)


def _token_ids(source: OpenedSource, path: Path, vocab_size: int, needed: int) -> list[int]:
    """The first `needed` tokens of a text file."""
    if source.gguf is None:
        check_folder(source.folder)  # a file that does not go along may change the tokens
    content = read_bounded(path, 64 * MIB).decode("utf-8", "replace")
    try:
        with source_tokenizer(source) as tokenizer:
            ids: list[int] = tokenizer(content)["input_ids"]
    except CheckpointError as error:
        raise CheckpointError(f"{source.name}: its tokenizer cannot be read: {error}") from error
    if len(ids) < needed:
        raise CheckpointError(
            f"{path}: has {len(ids):,} tokens, two rows take {needed:,}: give more text, or --tokens."
        )
    if max(ids) >= vocab_size:
        raise CheckpointError(f"{source.name}: its tokenizer gives the id {max(ids):,}, of {vocab_size:,} tokens.")
    return ids[:needed]


def _tokens(sources: Sequence[OpenedSource]) -> tuple[TokensComparison | None, str]:
    """(the tokenizers, compared; why they are not)."""
    with ExitStack() as stack:
        loaded = []
        for source in sources:
            fetch_side_files(source)
            try:
                loaded.append(stack.enter_context(source_tokenizer(source)))
            except CheckpointError as error:
                reason = str(error) if source.gguf or source.checkpoint.tokenizer_files else "it has none"
                return None, f"tokens (of {source.name}: {reason})"
        return compare_tokens(*loaded), ""


def _distance(one: Tensor, other: Tensor) -> float | None:
    """The largest absolute difference; NaN if there is one."""
    if one.shape != other.shape:
        return None
    pairs = zip(numbers(one), numbers(other), strict=True)
    distances = [(a.double() - b.double()).abs().max() for a, b in pairs]
    return torch.stack(distances).max().item() if distances else 0.0
