"""Small checkpoints of every family, made on the spot."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from hub_server import Sparse
from safetensors.torch import load_file
from small_decoders import in_short_chunks, small_config
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoConfig,
    AutoModelForCausalLM,
    LlamaConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

from resformer.names import standard_names
from resformer.safetensors_format import Tensor, header_bytes

#: The methods that can start as the identity.
EXACT = (
    "transformer resformer resformer-plus resformer-dense resformer-gated depth-attention value-embeddings "
    "denseformer denseformer-4x5 resformer-denseformer delta-attention-residuals attnres mudd "
    "hyper-connections mhc nanochat"
).split()

SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
}

#: Family -> what it sets beside SIZES; its model_type comes before the hyphen.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "llama-biases": {"attention_bias": True, "mlp_bias": True},
    "llama-3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "mistral": {"sliding_window": 8, "head_dim": 12},
    "qwen2": {},
    "qwen2-windows": {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 2},
    "qwen3": {"head_dim": 12},
    "smollm3": {},
    "ministral": {"layer_types": ["sliding_attention", "full_attention"] * 3, "sliding_window": 8, "head_dim": 12},
    "cwm": {"sliding_window": 8, "head_dim": 12},
    "internlm3": {"head_dim": 12, "attention_bias": True, "mlp_bias": True},
    "seed_oss": {"head_dim": 12},
    "seed_oss-biases": {"attention_out_bias": True, "mlp_bias": True},
    "iquestcoder": {"head_dim": 12, "attention_bias": True},
    "exaone": {"head_dim": 12},  # Llama's class, tensors of other names
}

#: The shape of SmolLM2-135M.
SMOLLM2_135M = {
    "vocab_size": 49152,
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}


def family_model(family: str, **fields: Any) -> PreTrainedModel:
    """A model of the family with random parameters, biases and norms among them; of any other, as that starts it."""
    if family not in FAMILIES:
        decoder = small_config(family)
        for name, value in {**dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id"), 0), **fields}.items():
            setattr(decoder.get_text_config(), name, value)
        torch.manual_seed(0)
        seeing = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING.get(type(decoder), None)
        model_class = seeing or MODEL_FOR_CAUSAL_LM_MAPPING[type(decoder)]
        in_short_chunks(model_class)
        return model_class(decoder)
    config = AutoConfig.for_model(family.partition("-")[0], **{**SIZES, **FAMILIES[family], **fields})
    return randomise(AutoModelForCausalLM.from_config(config))


def randomise(model: Any) -> Any:
    """Draws every parameter, the same each time."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2 + ("norm" in name))
    return model.eval()


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token per byte, from 1 on, and `<end>` = 0: reads any text with `SIZES["vocab_size"]` ids."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<end>": 0, **{character: index for index, character in enumerate(alphabet, start=1)}}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token="<end>", pad_token="<end>", chat_template="{{ messages[0].content }}"
    )


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def stored(folder: Path) -> dict[str, tuple[torch.dtype, torch.Size, bytes]]:
    """Every tensor of a checkpoint: its dtype, shape and bytes."""
    tensors = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    return {name: (t.dtype, t.shape, t.reshape(-1).view(torch.uint8).numpy().tobytes()) for name, t in tensors.items()}


def change_json(path: Path, **fields: Any) -> None:
    """Sets fields of a JSON object in a file."""
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def save_notes(folder: Path, name: str = "notes.txt", between: str = "\n\n") -> None:
    """Writes 300 short documents, a paragraph each."""
    lines = [f"Value {index} of the first layer reaches layer {index % 7}." for index in range(300)]
    (folder / name).write_text(between.join(lines))


def save_checkpoint(
    folder: Path, family: str = "llama", *, dtype: torch.dtype = torch.float32, shards: bool = False, **fields: Any
) -> PreTrainedModel:
    """Saves a checkpoint with its tokenizer and returns the model."""
    model = family_model(family, **fields).to(dtype)
    model.generation_config.temperature = 0.7
    model.generation_config.do_sample = True
    model.save_pretrained(folder, max_shard_size="20KB" if shards else "1GB")
    byte_tokenizer().save_pretrained(folder)
    return model


def sparse_checkpoint(shards: int, **fields: Any) -> dict[str, bytes | Sparse]:
    """The files of a bfloat16 Llama of any size, all zero, for a loopback Hub: they take no memory."""
    config = LlamaConfig(**fields, dtype="bfloat16", architectures=["LlamaForCausalLM"])
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    tensors = [
        Tensor(name, "BF16", tuple(each.shape), 0, 2 * each.numel()) for name, each in model.state_dict().items()
    ]
    if config.tie_word_embeddings:
        tensors = [tensor for tensor in tensors if tensor.name != "lm_head.weight"]
    total, size = sum(tensor.nbytes for tensor in tensors), 0
    names = standard_names(shards)
    parts: dict[str, list[Tensor]] = {name: [] for name in names}
    for tensor in tensors:
        parts[names[size * shards // total]].append(tensor)
        size += tensor.nbytes
    files: dict[str, bytes | Sparse] = {"config.json": config.to_json_string().encode()}
    for name, part in parts.items():
        head = header_bytes(part)
        files[name] = Sparse(head, len(head) + sum(t.nbytes for t in part), hashlib.sha256(head).hexdigest())
    if shards > 1:
        weight_map = {tensor.name: name for name, part in parts.items() for tensor in part}
        index = {"metadata": {"total_size": total}, "weight_map": weight_map}
        files["model.safetensors.index.json"] = json.dumps(index, indent=2).encode()
    return files
