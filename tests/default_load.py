"""What Transformers makes of a folder by default: the judge of conversions, which knows nothing of this package."""

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from checkpoints import change_json
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, AutoTokenizer, PreTrainedModel

TEXTS = ["Two  spaces, 1234567 digits;\n\tdon't naïve 中文 Привет<end> after<end>before \U0001f600 ", "a b"]
TURNS = [{"role": "user", "content": TEXTS[0]}, {"role": "assistant", "content": "Yes."}]
SETTINGS = "special_tokens_map all_special_ids padding_side model_max_length chat_template".split()


def look(folder: Path) -> dict[str, Any]:
    """What can be compared; raises if the model does not run."""
    seen = look_at_what_works(folder)
    assert not isinstance(seen["logits"], str), seen["logits"]
    return seen


def auto_class(folder: Path) -> Any:
    """Which Auto class makes the model that config.json names."""
    config = AutoConfig.from_pretrained(folder, local_files_only=True)
    made = AutoModelForImageTextToText._model_mapping.get(type(config), None)
    named = made is not None and made.__name__ in (config.architectures or ())
    return AutoModelForImageTextToText if named else AutoModelForCausalLM


@torch.no_grad()
def look_at_what_works(folder: Path, **more: Callable[[PreTrainedModel], Any]) -> dict[str, Any]:
    """Of a call that fails, the name of the error: both may fail alike.

    Neither a dtype nor an implementation of attention is asked for. `more` are calls with the model.
    """
    model = auto_class(folder).from_pretrained(folder, local_files_only=True).eval()
    vocab_size = model.config.get_text_config().vocab_size
    ids = torch.randint(3, vocab_size, (2, 40), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[0, :5] = 0

    def logits() -> list[Any]:
        return (model(input_ids=ids, return_dict=True).logits.double() + 0.0).tolist()

    def generated() -> list[Any]:
        torch.manual_seed(0)  # a folder may ask for samples
        options: Any = {"max_new_tokens": 4, "max_time": 60, "return_dict_in_generate": False}
        return model.generate(ids, attention_mask=mask, **options).tolist()

    def tokens() -> list[Any]:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
        read = tokenizer(TEXTS, padding=tokenizer.pad_token is not None)
        told = [getattr(tokenizer, name) for name in SETTINGS]
        chat = isinstance(told[-1], str) and tokenizer.apply_chat_template(TURNS, tokenize=False)
        return [dict(read), tokenizer.batch_decode(read["input_ids"]), told, chat]

    settings = model.generation_config.to_dict()
    seen: dict[str, Any] = {"dtype": str(model.dtype)}
    seen["generation"] = {k: v for k, v in settings.items() if k != "transformers_version" and k[0] != "_"}
    calls = {"logits": logits, "tokens": tokens, "generated": generated}
    calls |= {name: partial(call, model) for name, call in more.items()}
    for name, call in calls.items():
        try:
            seen[name] = call()
        except Exception as error:
            seen[name] = type(error).__name__
    return seen


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
