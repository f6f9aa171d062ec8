"""Loads bundles in a process that cannot import resformer: `python remote_worker.py BUNDLES RESULTS`.

Each folder in BUNDLES is a bundle. RESULTS gets the numbers of each as METHOD.safetensors, what one of them saves, and
facts.json.
"""

import json
import pickle
import sys
from importlib.abc import MetaPathFinder
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForImageTextToText

#: The bundles that more is done with than loading them: Llama's and another family's.
CHOSEN = ("resformer-denseformer", "gemma3_text")
LANGUAGE_MODELS = (AutoModelForCausalLM, AutoModelForImageTextToText)
NEW_TOKENS = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}


class NoResformer(MetaPathFinder):
    """As if the package were not installed."""

    def find_spec(self, name: str, *rest: object) -> None:
        if name.partition(".")[0] == "resformer":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def numbers(model: Any, ids: torch.Tensor) -> dict[str, torch.Tensor]:
    """Logits, and tokens generated with the default cache and with a static one."""
    with torch.no_grad():
        logits = model(ids).logits
    mask = torch.ones_like(ids)
    return {
        "logits": logits,
        "tokens": model.generate(ids, attention_mask=mask, **NEW_TOKENS),
        "static": model.generate(ids, attention_mask=mask, cache_implementation="static", **NEW_TOKENS),
    }


def is_remote(found: Any) -> bool:
    return type(found).__module__.startswith("transformers_modules.")


def save_and_load(auto_class: Any, source: Path, target: Path, ids: torch.Tensor) -> dict[str, Any]:
    """What an Auto class makes of a bundle, and of what that saves."""
    model = auto_class.from_pretrained(source, trust_remote_code=True).eval()
    model.save_pretrained(target)
    again = auto_class.from_pretrained(target, trust_remote_code=True).eval()
    with torch.no_grad():
        one, other = model(ids)[0], again(ids)[0]
    return {
        "class": type(again).__name__,
        "remote": is_remote(again),
        "same": torch.equal(one, other),
        "files": sorted(path.name for path in target.glob("*.py")),
        "auto_map": json.loads((target / "config.json").read_text())["auto_map"],
    }


def main(bundles: Path, results: Path) -> None:
    facts: dict[str, Any] = {}
    ids = load_file(bundles / "ids.safetensors")["ids"]
    for folder in sorted(path for path in bundles.iterdir() if path.is_dir()):
        named = json.loads((folder / "config.json").read_text())["auto_map"]
        auto_class = next(each for each in LANGUAGE_MODELS if each.__name__ in named)
        model = auto_class.from_pretrained(folder, trust_remote_code=True).eval()
        assert is_remote(model), type(model).__module__
        pickle.dumps(model)
        save_file(numbers(model, ids), results / f"{folder.name}.safetensors")

    for chosen in CHOSEN:
        source = bundles / chosen
        found = facts[chosen] = {"heads": {}}
        for name in json.loads((source / "config.json").read_text())["auto_map"]:
            if name != "AutoConfig":
                target = results / chosen / name
                found["heads"][name] = save_and_load(getattr(transformers, name), source, target, ids)
        model = AutoModelForCausalLM.from_pretrained(source, trust_remote_code=True)
        model.model.save_pretrained(results / chosen / "base")
        base = AutoModel.from_pretrained(results / chosen / "base", trust_remote_code=True)
        found["base of another"] = is_remote(base)
        model.train().gradient_checkpointing_enable()
        model(ids, labels=ids, use_cache=False).loss.backward()
        found["gradients"] = all(each.grad is not None for each in model.parameters())
        config = AutoConfig.from_pretrained(source, trust_remote_code=True)
        found["config is remote"] = is_remote(config)
        found["from_config"] = is_remote(AutoModelForCausalLM.from_config(config, trust_remote_code=True))
        found["is registered"] = config.model_type in AutoConfig.for_model.__globals__["CONFIG_MAPPING"]
    facts["resformer"] = [name for name in sys.modules if name.partition(".")[0] == "resformer"]
    (results / "facts.json").write_text(json.dumps(facts))


if __name__ == "__main__":
    sys.meta_path.insert(0, NoResformer())
    main(*map(Path, sys.argv[1:]))
