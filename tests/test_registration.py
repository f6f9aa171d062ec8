"""`import resformer` is all a user needs, costs nothing and works in every order."""

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SIZES
from command_server import python
from conftest import others_slow

import resformer
from resformer import ResFormerConfig, ResFormerForCausalLM


def result_of(code: str, *arguments: Path, cwd: Path) -> Any:
    """Runs `code` in a new interpreter, outside the checkout, and returns the JSON of the last line it prints."""
    words = ["-W", "error::UserWarning", "-c", f"import json, sys\n{code}", *arguments]
    return json.loads(python(*words, cwd=cwd, PYTHONPATH=str(Path(resformer.__file__).parents[1])).splitlines()[-1])


CONFIG = ResFormerConfig.for_method("resformer", **{**SIZES, "num_hidden_layers": 3})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    ResFormerForCausalLM(CONFIG).save_pretrained(folder)
    return folder


ASKING_LITTLE = """
import contextlib, runpy
import resformer
resformer.__version__, dir(resformer)
for words in (["--help"], ["--version"], ["convert", "--help"], ["methods"]):
    sys.argv = ["resformer", *words]
    with contextlib.suppress(SystemExit):
        runpy.run_module("resformer", run_name="__main__")
print(json.dumps(sorted({"torch", "transformers"} & set(sys.modules))))
"""


def test_neither_an_import_nor_help_brings_torch_or_transformers(tmp_path: Path) -> None:
    assert result_of(ASKING_LITTLE, cwd=tmp_path) == []


def test_every_public_name_is_there_and_unknown_ones_are_not() -> None:
    assert [name for name in resformer.__all__ if getattr(resformer, name, None) is None] == []
    packages = {"analysis", "configuration", "convert", "model_cards", "modeling", "training"}
    listed = {name for name in dir(resformer) if not name.startswith("_")}
    assert listed == {*resformer.__all__, *packages} - {"__version__"}
    with pytest.raises(AttributeError, match="module 'resformer' has no attribute 'ResFormer'"):
        resformer.ResFormer  # noqa: B018


LOAD = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
made = AutoModelForCausalLM.from_config(AutoConfig.for_model("resformer", num_hidden_layers=1, hidden_size=32,
    intermediate_size=48, num_attention_heads=4, vocab_size=64))
from resformer import ResFormerConfig, ResFormerForCausalLM
assert type(model) is ResFormerForCausalLM and type(model.config) is ResFormerConfig
loaded = [type(m).__module__ + "." + type(m).__name__ for m in (model, again, made)]
"""
IMPORTS = {
    "resformer first": "import resformer; from transformers import AutoModelForCausalLM",
    "Auto classes first": "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM; import resformer",
    "only a configuration of another process": f"import pickle; pickle.loads({pickle.dumps(CONFIG)!r})",
    "only a model": "from resformer import ResFormerForCausalLM",
    "reloaded after use": f"import resformer{LOAD}\nimport importlib; importlib.reload(resformer)",
    "forgotten and imported anew": (
        f"import resformer{LOAD}\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] == 'resformer']: del sys.modules[name]\n"
        "import resformer"
    ),
}


@pytest.mark.parametrize("imports", others_slow(IMPORTS, ["resformer first"]))
def test_a_checkpoint_loads_after_any_import(imports: str, checkpoint: Path, tmp_path: Path) -> None:
    loaded = result_of(f"{IMPORTS[imports]}\n{LOAD}\nprint(json.dumps(loaded))", checkpoint, cwd=tmp_path)
    assert loaded == ["resformer.modeling.modeling_resformer.ResFormerForCausalLM"] * 3
