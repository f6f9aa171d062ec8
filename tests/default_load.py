"""What Transformers makes of a folder by default: the judge of conversions, which knows nothing of this package."""

import json
from pathlib import Path
from typing import Any

import torch
from checkpoints import change_json
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

TEXTS = ["Two  spaces, 1234567 digits;\n\tdon't naïve 中文 Привет<end> after<end>before \U0001f600 ", "a b"]


@torch.no_grad()
def look(folder: Path) -> dict[str, Any]:
    """Neither a dtype nor an implementation of attention is asked for."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0
    seen: dict[str, Any] = {"dtype": str(model.dtype), "logits": model(input_ids=ids).logits.tolist()}
    settings = model.generation_config.to_dict()
    seen["generation"] = {k: v for k, v in settings.items() if k != "transformers_version" and k[0] != "_"}
    for name, chosen in {"greedy": {"do_sample": False}, "sampled": {"do_sample": True}}.items():
        torch.manual_seed(0)
        try:
            seen[name] = model.generate(ids, attention_mask=mask, max_new_tokens=4, **chosen).tolist()
        except Exception as error:  # both may fail alike
            seen[name] = type(error).__name__
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        return seen | {"tokens": type(error).__name__}
    seen["tokens"] = [tokenizer(text).input_ids for text in TEXTS]
    seen["back"] = tokenizer.batch_decode(seen["tokens"])
    names = "special_tokens_map all_special_ids padding_side model_max_length chat_template".split()
    return seen | {name: getattr(tokenizer, name) for name in names}


def publish(folder: Path) -> None:
    """Makes a saved checkpoint look as others are published: names of code, no dtype, old keys, buffers of old."""
    content = json.loads((folder / "config.json").read_text())
    content.pop("dtype", None)
    content |= {
        "auto_map": {"AutoConfig": "configuration_x.XConfig", "AutoModelForCausalLM": "modeling_x.XForCausalLM"},
        "transformers_version": "4.31.0",
        "_name_or_path": "/home/somebody/model",
        "unsloth_fixed": True,
        "num_labels": 3,
    }
    (folder / "config.json").write_text(json.dumps(content))
    change_json(folder / "tokenizer_config.json", some_key="of another library")
    (folder / "additional_chat_templates").mkdir(exist_ok=True)
    (folder / "additional_chat_templates" / "tool use.jinja").write_text("{{ tools }}")
    (folder / "modeling_x.py").write_text("raise SystemExit('code ran')")
    file = sorted(folder.glob("*.safetensors"))[0]
    tensors = load_file(file)
    buffer = "model.layers.0.self_attn.rotary_emb.inv_freq"
    save_file({**tensors, buffer: torch.ones(4)}, file, {"format": "pt"})
    index = folder / "model.safetensors.index.json"
    if index.exists():
        content = json.loads(index.read_text())
        content["weight_map"][buffer] = file.name
        index.write_text(json.dumps(content))
