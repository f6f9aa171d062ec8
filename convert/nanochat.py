"""nanochat's checkpoints in, checkpoints of `Nanochat2026Config` with connections out.

A run's folder has `model_STEP.pt`, `meta_STEP.json` and `tokenizer.pkl`, which may be in a folder `tokenizer`.
meta.json holds sizes; what else a model computes with has changed four times and stands in nanochat's code of the day
alone. The tensors tell the era.

The decoder computes the same: a norm after the embeddings is taken of the table; nanochat rotates by -theta, which is
theta with the halves of each head exchanged; a norm without weights commutes with a rotation, so that the factor of q
and k stands in `q_norm` and `k_norm`.
"""

import os
import pickletools
import re
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from tokenizers.processors import TemplateProcessing
from transformers import GenerationConfig, PreTrainedTokenizerFast

from resformer.configuration.methods import connections_of, method_of
from resformer.convert.carrying import check_space
from resformer.convert.connections import meta_model
from resformer.convert.judging import build
from resformer.convert.tiktoken_pickle import Encoding, fast_tokenizer, read_encoding
from resformer.convert.to_folder import folder_name
from resformer.errors import CheckpointError, OutputError, did_you_mean, first_names, one_line, quoted
from resformer.files import AsDict, check_target, replacing, write_text
from resformer.hub import Snapshot
from resformer.modeling.families import config_class
from resformer.modeling.nanochat import Nanochat2026Config
from resformer.names import CONFIG, INDEX, SINGLE
from resformer.untrusted import MIB, read_json, regular_file

_WEIGHTS = re.compile(r"model_(\d{1,12})\.pt")
#: What torch.save writes of a map of tensors.
_CLASSES = re.compile(r"collections OrderedDict|torch \w+Storage|torch\._utils _rebuild_(tensor_v2|parameter)")
_TOKENIZERS = ("tokenizer.pkl", "tokenizer/tokenizer.pkl")
_SIZES = "sequence_len vocab_size n_layer n_head n_kv_head n_embd".split()
#: The result's tensors -> nanochat's; {} is the layer's number.
_NAMES = {
    "model.embed_tokens.weight": "transformer.wte.weight",
    "lm_head.weight": "lm_head.weight",
    "model.layers.{}.self_attn.q_proj.weight": "transformer.h.{}.attn.c_q.weight",
    "model.layers.{}.self_attn.k_proj.weight": "transformer.h.{}.attn.c_k.weight",
    "model.layers.{}.self_attn.v_proj.weight": "transformer.h.{}.attn.c_v.weight",
    "model.layers.{}.self_attn.o_proj.weight": "transformer.h.{}.attn.c_proj.weight",
    "model.layers.{}.mlp.up_proj.weight": "transformer.h.{}.mlp.c_fc.weight",
    "model.layers.{}.mlp.down_proj.weight": "transformer.h.{}.mlp.c_proj.weight",
    "model.layers.{}.value_embedding.table.weight": "value_embeds.{}.weight",
    "model.layers.{}.value_embedding.gate.weight": "transformer.h.{}.attn.ve_gate.weight",
    "model.smear.gate.weight": "smear_gate.weight",
    "model.smear.weight": "smear_lambda",
    "model.layers.{}.backout.weight": "backout_lambda",
}
#: Tensors with a row for each token; since December 2025 rows are added up to a multiple of 64.
_TABLES = ("transformer.wte.", "lm_head.", "value_embeds.")
#: What nanochat's code computes with, and meta.json does not hold. Short windows: tokens before a token's own.
_CONSTANTS = "rope_theta gate_limit qk_scale softcap short_window".split()
#: Era -> these, the last of a context.
ERAS: list[tuple[float, float, float, float, Callable[[int], int]]] = [
    (10_000.0, 2.0, 1.0, 15.0, lambda context: context),  # since 13 Oct 2025
    (10_000.0, 2.0, 1.0, 15.0, lambda context: context // 2),  # 11 Jan 2026: r x + s x_0
    (10_000.0, 2.0, 1.0, 15.0, lambda context: context // 2),  # 16 Jan: value embeddings; autoresearch
    (100_000.0, 3.0, 1.15, 15.0, lambda context: -(-context // 3 // 128) * 128),  # 9 Mar: gates of 12 channels
    (100_000.0, 3.0, 1.2, 15.0, lambda context: -(-context // 4 // 128) * 128),  # 14 Mar: smear, backout
]

#: As nanochat renders conversations; a system message stands before the first user's. Content may be in parts.
CHAT_TEMPLATE = """\
{%- macro text(content) -%}
{%- if content is string %}{{ content }}{% else %}{% for part in content %}{{ part["text"] }}{% endfor %}{% endif -%}
{%- endmacro -%}
{{- "<|bos|>" -}}
{%- set system = namespace(text="") -%}
{%- for message in messages -%}
{%- if message["role"] == "system" and loop.first -%}
{%- set system.text = text(message["content"]) + "\\n\\n" -%}
{%- elif message["role"] == "user" -%}
{{- "<|user_start|>" + system.text + text(message["content"]) + "<|user_end|>" -}}
{%- set system.text = "" -%}
{%- elif message["role"] == "assistant" -%}
{{- "<|assistant_start|>" -}}
{%- set content = message["content"] -%}
{%- for part in ([{"type": "text", "text": content}] if content is string else content) -%}
{%- if part["type"] == "python" -%}
{%- generation -%}{{- "<|python_start|>" + part["text"] + "<|python_end|>" -}}{%- endgeneration -%}
{%- elif part["type"] == "python_output" -%}
{{- "<|output_start|>" + part["text"] + "<|output_end|>" -}}
{%- elif part["type"] == "text" -%}
{%- generation -%}{{- part["text"] -}}{%- endgeneration -%}
{%- else -%}
{{- raise_exception("Unknown part type: " + part["type"]) -}}
{%- endif -%}
{%- endfor -%}
{%- generation -%}{{- "<|assistant_end|>" -}}{%- endgeneration -%}
{%- else -%}
{{- raise_exception("Unknown role: " + message["role"]) -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- "<|assistant_start|>" -}}{%- endif -%}
"""


@dataclass(frozen=True, kw_only=True)
class NanochatReport(AsDict):
    """The result of a conversion, or the forecast of a dry run."""

    source: str
    output: str
    weights: str  # the file
    era: int
    constants: dict[str, Any]
    method: str | None
    fields: dict[str, Any]  # the connection fields
    parameters: int
    dtype: str
    tokens: int  # of the tokenizer
    bos: str
    chat: bool  # whether it has a chat template
    warnings: list[str]


def is_run(source: str | Path, revision: str | None = None) -> bool:
    """Whether `source` is the folder or Hub id of a nanochat run.

    A config.json beside, as some publish, is for other code: a run has no safetensors.
    """
    path = Path(source).expanduser()
    if path.is_dir():
        names = {file.name for file in path.iterdir()}
    elif os.path.lexists(path) or not re.fullmatch(r"\w[\w.-]*/[\w.-]+", str(source)):
        return False
    else:
        names = {*Snapshot.of(str(source), revision).files}
    return any(map(_WEIGHTS.fullmatch, names)) and not names & {SINGLE, INDEX}


def convert_nanochat(
    run: str | Path,
    output: str | Path,
    *,
    force: bool = False,
    dry_run: bool = False,
    revision: str | None = None,
    step: int | None = None,
    **constants: Any,
) -> NanochatReport:
    """Writes a nanochat run as a Transformers checkpoint, with its tokenizer, to the folder `output`.

    Args:
        run: the folder or Hub id, of whose steps the last is taken.
        output: a new or empty folder.
        force, dry_run, revision: as for `resformer.retrofit`.
        step: take this one, not the last.
        constants: `rope_theta`, `gate_limit`, `qk_scale`, `softcap` or `short_window`, in place of the era's.

    Raises:
        CheckpointError: a file, a tensor or a key is not as nanochat writes it; `output` is in the way.
        OutputError: the disk is full or read-only. Nothing is left behind.
        ValueError: a constant is unknown.
    """
    target = Path(output).expanduser()
    check_target(target, run, made_by="convert", force=force)
    path, meta_path, commit, warnings = _opened(run, revision, step)
    tokenizer_path = next((each for name in _TOKENIZERS if (each := path.parent / name).exists()), None)
    if tokenizer_path is None:
        raise CheckpointError(
            f"{path.parent}: has neither {' nor '.join(_TOKENIZERS)}: copy it there from nanochat's folder `tokenizer`."
        )
    for each in (path, meta_path, tokenizer_path):
        regular_file(each, path.parent, within=True)
    sizes = _sizes(meta_path)
    weights = _weights(path)
    era = _era(path, weights)
    if (layers := sizes["n_layer"]) > len(weights):  # a file of a few bytes may claim any number
        raise CheckpointError(f"{path}: looks like era {era} of nanochat, but lacks '{layers} layers'.")
    chosen = _constants(era, sizes["sequence_len"], constants)
    config = _config(sizes, era, chosen)
    model = meta_model(config)
    _check_tensors(path, weights, era, config, model.state_dict())
    encoding = read_encoding(tokenizer_path)
    if encoding.size != sizes["vocab_size"]:
        raise CheckpointError(
            f"{tokenizer_path}: has {encoding.size:,} tokens, {meta_path.name} says {sizes['vocab_size']:,}: it is "
            "another run's."
        )
    tokenizer = run_tokenizer(encoding, sizes["sequence_len"], tokenizer_path)
    config.bos_token_id, config.eos_token_id = tokenizer.bos_token_id, tokenizer.eos_token_id
    name = str(run) if commit is not None else folder_name(str(path.parent))
    config.base_model = {"name": name, "revision": commit}
    if era == 2 and "softcap" not in constants:
        warnings.append(
            "From 2 to 9 March 2026 nanochat bounded logits by 20, not by 15, which neither tensors nor meta.json "
            "show: if the run is of these days, give --set softcap=20."
        )
    config.dtype = torch.float32
    report = NanochatReport(
        source=str(run),
        output=str(output),
        weights=path.name,
        era=era,
        constants=chosen,
        method=method_of(config),
        fields=connections_of(config),
        parameters=model.num_parameters(),
        dtype="float32",
        tokens=encoding.size,
        bos=str(tokenizer.bos_token),
        chat=tokenizer.chat_template is not None,
        warnings=warnings,
    )
    if dry_run:
        return report
    with replacing(target, made_by="convert", force=force) as partial:
        check_space(4 * report.parameters, partial)
        made = _converted(weights, config, model.state_dict(), chosen["qk_scale"])
        if wrong := [name for name, tensor in made.items() if not bool(tensor.isfinite().all())]:
            raise CheckpointError(f"{path}: {first_names(wrong)} would not be finite.")
        try:
            save_file(made, partial / SINGLE, {"format": "pt"})
        except SafetensorError as error:
            raise OutputError(f"{target}: cannot be written: {one_line(error)}.") from error
        tokenizer.save_pretrained(partial)
        # nanochat stops at the end of the assistant's turn, or where another document would begin.
        bos, ends = config.bos_token_id, list(dict.fromkeys([config.eos_token_id, config.bos_token_id]))
        GenerationConfig(bos_token_id=bos, eos_token_id=ends, pad_token_id=bos).save_pretrained(partial)
        config.architectures = ["ResFormerNanochat2026ForCausalLM"]
        write_text(partial / CONFIG, config.to_json_string())
        build(partial, target)
    return report


def _opened(run: str | Path, revision: str | None, step: int | None) -> tuple[Path, Path, str | None, list[str]]:
    """(weights and meta.json of this step, or of the last one; the commit, if it is on the Hub; warnings).

    Of a run on the Hub the weights of this step alone are downloaded.
    """
    folder, hub = Path(run).expanduser(), None
    if not folder.is_dir():
        hub = Snapshot.of(str(run), revision)
    elif revision is not None:
        raise CheckpointError(f"{folder}: --revision {revision} is for Hub ids, this is local.")
    names = [path.name for path in folder.iterdir()] if hub is None else [*hub.files]
    steps = {int(match[1]): name for name in names if (match := _WEIGHTS.fullmatch(name))}
    if not steps:
        raise CheckpointError(f"{run}: has no model_STEP.pt.")
    if step not in (None, *steps):
        raise CheckpointError(f"{run}: has steps {', '.join(map(str, sorted(steps)[:20]))}, and no step {step}.")
    name, warnings = steps[max(steps) if step is None else step], []
    if len(steps) > 1 and step is None:
        warnings.append(f"Has {len(steps)} steps, the last was taken, {name}; to take another, give --set step=NUMBER.")
    meta = name.replace("model_", "meta_").replace(".pt", ".json")
    if hub is not None:
        hub.fetch([meta, *_TOKENIZERS], 64 * MIB)
        folder = hub.fetch([name])
    return folder / name, folder / meta, None if hub is None else hub.commit, warnings


def _sizes(path: Path) -> dict[str, Any]:
    """The sizes in a meta.json, and `window_pattern`."""
    sizes = read_json(path).get("model_config")
    if not isinstance(sizes, dict):
        raise CheckpointError(f"{path}: has no `model_config`, in which nanochat writes the sizes of the model.")
    sizes = {"window_pattern": "L", **sizes}
    if unknown := sizes.keys() - {*_SIZES, "window_pattern"}:
        raise CheckpointError(
            f"{path}: `model_config` has {first_names(unknown)}, which is in none of the five eras: if it changes "
            "nothing that the model computes, take it out."
        )
    for name in _SIZES:
        if type(sizes.get(name)) is not int or not 0 < sizes[name] < 2**31:
            raise CheckpointError(f"{path}: `model_config` has {name} {quoted(sizes.get(name))}; expected a size.")
    if not re.fullmatch("[SLsl]{1,1000}", str(sizes["window_pattern"])):
        raise CheckpointError(f"{path}: window_pattern is {quoted(sizes['window_pattern'])}; expected S and L alone.")
    return sizes


def _weights(path: Path) -> dict[str, torch.Tensor]:
    try:
        _check_archive(path)
        state = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    except CheckpointError:
        raise
    except Exception as error:  # zipfile's, torch's and pickle's, of any type, for a bad file
        raise CheckpointError(f"{path}: cannot be read as weights alone: {one_line(error)}") from error
    if not isinstance(state, dict) or not all(isinstance(each, torch.Tensor) for each in state.values()):
        raise CheckpointError(f"{path}: expected a map from names to tensors, as nanochat saves it.")
    # A few bytes may claim any number of elements, with strides of 0 or one storage for many.
    claimed = sum(tensor.numel() * tensor.itemsize for tensor in state.values())
    if claimed > path.stat().st_size:
        raise CheckpointError(f"{path}: its tensors claim {claimed:,} bytes, the file has {path.stat().st_size:,}.")
    return {str(name).removeprefix("_orig_mod."): tensor for name, tensor in state.items()}  # of torch.compile


def _check_archive(path: Path) -> None:
    """Refuses what torch would unpack to more than the file has, and classes that weights have no use for."""
    with zipfile.ZipFile(path) as archive:
        entries, size = archive.infolist(), path.stat().st_size
        if any(entry.compress_type for entry in entries) or sum(entry.file_size for entry in entries) > size:
            raise CheckpointError(f"{path}: is compressed; save it with torch.save, which does not compress.")
        for entry in entries:
            if not entry.filename.endswith("data.pkl"):
                continue
            if entry.file_size > MIB:
                raise CheckpointError(f"{path}: names and shapes take {entry.file_size:,} bytes; at most {MIB:,}.")
            for code, given, _ in pickletools.genops(archive.read(entry)):
                if code.name in ("GLOBAL", "STACK_GLOBAL", "INST") and not _CLASSES.fullmatch(str(given)):
                    raise CheckpointError(f"{path}: holds {quoted(given)}; expected tensors by name and nothing else.")


def _era(path: Path, weights: Mapping[str, torch.Tensor]) -> int:
    gates = {tensor.shape[-1] for name, tensor in weights.items() if name.endswith(".ve_gate.weight")}
    if gates - {12, 32} or len(gates) > 1:
        raise CheckpointError(f"{path}: gates of value embeddings read {sorted(gates)} channels; known are 12 and 32.")
    if {"smear_gate.weight", "smear_lambda", "backout_lambda"} & weights.keys():
        return 4
    if any(name.startswith("value_embeds.") for name in weights) or gates:
        return 2 if gates != {12} else 3
    return 1 if {"resid_lambdas", "x0_lambdas"} & weights.keys() else 0


def _constants(era: int, context: int, given: Mapping[str, Any]) -> dict[str, Any]:
    *numbers, window = ERAS[era]
    constants = dict(zip(_CONSTANTS, [*numbers, window(context)], strict=True))
    for name, value in given.items():
        if name not in constants:
            known, hint = ", ".join(constants), did_you_mean(name, constants)
            raise ValueError(f"`{name}` is no constant of a nanochat run: expected {known}.{hint}")
        whole = name == "short_window"
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)) or not 0 < value < 2**31:
            raise ValueError(f"`{name}` is {value!r}: expected a {'whole ' if whole else ''}number above 0.")
    return {**constants, **given}


def _config(sizes: Mapping[str, Any], era: int, constants: Mapping[str, Any]) -> Any:
    layers, pattern = sizes["n_layer"], sizes["window_pattern"].upper()
    short = [pattern[layer % len(pattern)] == "S" for layer in range(layers - 1)]  # the last layer sees all
    value_embeddings: dict[str, Any] = {
        "value_embeddings": [n for n in range(layers) if n % 2 != layers % 2],
        "value_embeddings_gate_channels": 32 if era == 2 else 12,
        "value_embeddings_gate_limit": constants["gate_limit"],
    }
    try:
        return config_class(Nanochat2026Config)(
            vocab_size=sizes["vocab_size"],
            hidden_size=sizes["n_embd"],
            intermediate_size=4 * sizes["n_embd"],
            num_hidden_layers=layers,
            num_attention_heads=sizes["n_head"],
            num_key_value_heads=sizes["n_kv_head"],
            head_dim=sizes["n_embd"] // sizes["n_head"],
            max_position_embeddings=sizes["sequence_len"],
            rope_parameters={"rope_type": "default", "rope_theta": float(constants["rope_theta"])},
            final_logit_softcapping=float(constants["softcap"]),
            sliding_window=constants["short_window"] + 1 if any(short) else None,  # with its own token
            layer_types=["sliding_attention" if each else "full_attention" for each in (*short, False)],
            smear=era >= 4,
            embedding_residual=era >= 1,
            backout=era >= 4,
            **(value_embeddings if era >= 2 else {}),
        )
    except Exception as error:  # of the validators
        raise CheckpointError(f"The sizes in meta.json make no model: {one_line(error)}") from error


def _theirs(name: str) -> str:
    """nanochat's name of a tensor of the result; "" of norms, which have no weights there, and embedding residuals."""
    return _NAMES.get(re.sub(r"\.\d+\.", ".{}.", name), "").format(*re.findall(r"\.(\d+)\.", name))


def _check_tensors(
    path: Path, weights: Mapping[str, torch.Tensor], era: int, config: Any, result: Mapping[str, torch.Tensor]
) -> None:
    """Refuses other names and shapes than nanochat's of this era."""
    expected = {_theirs(name): [*tensor.shape] for name, tensor in result.items() if _theirs(name)}
    if era >= 1:
        expected |= {name: [config.num_hidden_layers] for name in ("resid_lambdas", "x0_lambdas")}
    if missing := expected.keys() - weights.keys():
        raise CheckpointError(f"{path}: looks like era {era} of nanochat, but lacks {first_names(missing)}.")
    if unknown := weights.keys() - expected.keys():
        raise CheckpointError(
            f"{path}: holds {first_names(unknown)}, which is in none of the five eras: a form that nanochat had "
            "for a few days, or a fork's, computes something else."
        )
    rows = config.vocab_size
    if weights["transformer.wte.weight"].shape[:1] != (rows,):
        rows = -(-rows // 64) * 64
    for name, shape in expected.items():
        tensor = weights[name]
        if name.startswith(_TABLES):
            shape[0] = rows
        if [*tensor.shape] != shape or not tensor.is_floating_point():
            raise CheckpointError(f"{path}: {name} is {tensor.dtype} {[*tensor.shape]}; expected {shape} of floats.")


def _converted(
    weights: Mapping[str, torch.Tensor], config: Any, result: Mapping[str, torch.Tensor], qk_scale: float
) -> dict[str, torch.Tensor]:
    made = {}
    for_queries, for_keys = split_scale(qk_scale**2)
    for name, expected in result.items():
        theirs, kind = _theirs(name), name.split(".")[-2]
        if theirs:
            tensor = weights[theirs].float()[: config.vocab_size if theirs.startswith(_TABLES) else None]
            if kind == "embed_tokens":
                tensor = torch.nn.functional.rms_norm(tensor, tensor.shape[1:])
            if kind in ("q_proj", "k_proj"):  # the halves of each head exchanged
                tensor = tensor.unflatten(0, (-1, 2, config.head_dim // 2)).flip(1).flatten(0, 2)
        elif kind == "embedding_residual":
            n = int(name.split(".")[2])
            tensor = torch.stack([weights["resid_lambdas"][n], weights["x0_lambdas"][n]]).float()
        else:  # a norm
            tensor = torch.full(expected.shape, {"q_norm": for_queries, "k_norm": for_keys}.get(kind, 1.0))
        made[name] = tensor.contiguous()
    return made


def split_scale(product: float) -> tuple[float, float]:
    """Weights of `q_norm` and `k_norm` with this product, which bfloat16 keeps nearly: it rounds 1.2 to 1.203.

    The first is a number of bfloat16, and of these the one with which the second is nearest to one.
    """
    first = torch.arange(128, 256, dtype=torch.float64) / 128
    second = product / first
    error = (second.to(torch.bfloat16).double() / second - 1).abs()
    best = int(error.argmin())
    return float(first[best]), float(second[best])


def run_tokenizer(encoding: Encoding, context: int, path: Path) -> PreTrainedTokenizerFast:
    """The tokenizer, with nanochat's bos before each text, and its chat template where it has the tokens for it."""
    bos = next((name for name in ("<|bos|>", "<|reserved_0|>") if name in encoding.special), None)
    if bos is None:
        raise CheckpointError(
            f"{path}: has no token <|bos|>, or <|reserved_0|>, which begins every document; its special tokens are "
            f"{first_names(encoding.special)}."
        )
    fast = fast_tokenizer(encoding)
    fast.post_processor = TemplateProcessing(
        single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, encoding.special[bos])]
    )
    chat = {"<|user_start|>", "<|user_end|>", "<|assistant_start|>", "<|assistant_end|>"} <= encoding.special.keys()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=bos,
        eos_token="<|assistant_end|>" if chat else bos,
        model_max_length=context,
        clean_up_tokenization_spaces=False,
    )
    if chat:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer
