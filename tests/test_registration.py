"""`import resformer` is all a user needs, costs nothing and works in every order."""

import json
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import SIZES
from conftest import others_slow

import resformer
from resformer import ResFormerConfig, ResFormerForCausalLM


def python(code: str, *arguments: str | Path, cwd: Path) -> Any:
    """Runs `code` in a new interpreter, outside the checkout, and returns the JSON of the last line it prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(resformer.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", f"import json, sys\n{code}", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


CONFIG = ResFormerConfig.for_method("resformer", **{**SIZES, "num_hidden_layers": 3})


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint")
    ResFormerForCausalLM(CONFIG).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    "code",
    [
        "import resformer; resformer.__version__; dir(resformer)",
        *(
            f"import runpy; sys.argv = ['resformer', *{words!r}]; runpy.run_module('resformer', run_name='__main__')"
            for words in (["--help"], ["--version"], ["demo", "--help"], ["convert", "--help"])
        ),
    ],
)
def test_neither_an_import_nor_help_brings_torch_or_transformers(code: str, tmp_path: Path) -> None:
    heavy = "print(json.dumps(sorted({'torch', 'transformers'} & set(sys.modules))))"
    assert python(f"import atexit\natexit.register(lambda: {heavy})\n{code}", cwd=tmp_path) == []


def test_every_public_name_is_there_and_unknown_ones_are_not() -> None:
    assert [name for name in resformer.__all__ if getattr(resformer, name, None) is None] == []
    assert set(resformer.__all__) <= set(dir(resformer))
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
    "resformer first": "import resformer",
    "Auto classes first": "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM; import resformer",
    "tokenizer first": "from transformers import AutoTokenizer; import resformer",
    "a Llama first": "from transformers import LlamaConfig, LlamaForCausalLM; LlamaConfig(); import resformer",
    "only a configuration": "from resformer import ResFormerConfig",
    "only a configuration of another process": f"import pickle; pickle.loads({pickle.dumps(CONFIG)!r})",
    "only a model": "from resformer import ResFormerForCausalLM",
    "reloaded after use": f"import resformer{LOAD}\nimport importlib; importlib.reload(resformer)",
    "registered again": (
        "import resformer; from resformer.registration import register_on_demand\n"
        f"register_on_demand(){LOAD}\nregister_on_demand()"
    ),
    "forgotten and imported anew": (
        f"import resformer{LOAD}\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] == 'resformer']: del sys.modules[name]\n"
        "import resformer"
    ),
}


@pytest.mark.parametrize("imports", others_slow(IMPORTS, ["resformer first"]))
def test_a_checkpoint_loads_after_any_import(imports: str, checkpoint: Path, tmp_path: Path) -> None:
    loaded = python(f"{IMPORTS[imports]}\n{LOAD}\nprint(json.dumps(loaded))", checkpoint, cwd=tmp_path)
    assert loaded == ["resformer.modeling.modeling_resformer.ResFormerForCausalLM"] * 3
