"""`import resformer` is all a user needs, costs nothing and works in every order."""

import json
import os
import pickle
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SIZES, byte_tokenizer
from command_server import run
from conftest import others_slow

import resformer
from resformer import (
    ResFormerConfig,
    ResFormerForCausalLM,
    ResFormerForQuestionAnswering,
    ResFormerForSequenceClassification,
    ResFormerForTokenClassification,
    ResFormerModel,
)

#: Auto class -> the model class that it must find.
HEADS = {
    "AutoModel": ResFormerModel,
    "AutoModelForCausalLM": ResFormerForCausalLM,
    "AutoModelForSequenceClassification": ResFormerForSequenceClassification,
    "AutoModelForTokenClassification": ResFormerForTokenClassification,
    "AutoModelForQuestionAnswering": ResFormerForQuestionAnswering,
}


def python(code: str, *arguments: str | Path, cwd: Path) -> Any:
    """Runs `code` in a new interpreter, outside the checkout, and returns the JSON of the last line it prints."""
    environment = {**os.environ, "PYTHONPATH": str(Path(resformer.__file__).parents[1]), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-W", "error::UserWarning", "-c", f"import json, sys\n{code}", *map(str, arguments)]
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def config() -> ResFormerConfig:
    return ResFormerConfig.for_method("resformer", **{**SIZES, "num_hidden_layers": 3})


@pytest.fixture(scope="session")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with one saved model for each Auto class, under its name."""
    folder = tmp_path_factory.mktemp("checkpoints")
    for name, model_class in HEADS.items():
        torch.manual_seed(0)
        model_class(config()).save_pretrained(folder / name)
    return folder


@pytest.fixture
def checkpoint(checkpoints: Path) -> Path:
    return checkpoints / "AutoModelForCausalLM"


# The import is cheap

_HEAVY = "print(json.dumps(sorted({'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules))))"


@pytest.mark.parametrize("code", ["import resformer", "import resformer; resformer.__version__; dir(resformer)"])
def test_import_brings_neither_torch_nor_transformers(code: str, tmp_path: Path) -> None:
    assert python(f"{code}\n{_HEAVY}", cwd=tmp_path) == []


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["demo", "--help"], ["convert", "--help"]])
def test_command_line_answers_without_torch_or_transformers(arguments: list[str], tmp_path: Path) -> None:
    code = f"""
from resformer.cli import main
sys.argv = ["resformer", *{arguments!r}]
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
{_HEAVY}"""
    assert {"torch", "transformers"} & set(python(code, cwd=tmp_path)) == set()


def test_every_public_name_is_there_and_unknown_ones_are_not() -> None:
    assert [name for name in resformer.__all__ if getattr(resformer, name, None) is None] == []
    assert set(resformer.__all__) <= set(dir(resformer))
    with pytest.raises(AttributeError, match="module 'resformer' has no attribute 'ResFormer'"):
        resformer.ResFormer  # noqa: B018


# Every order of imports works

ORDERS = {
    "resformer first": "import resformer",
    "Auto classes first": "from transformers import AutoConfig, AutoModel, AutoModelForCausalLM; import resformer",
    "tokenizer first": "from transformers import AutoTokenizer; import resformer",
    "a Llama first": "from transformers import LlamaConfig, LlamaForCausalLM; LlamaConfig(); import resformer",
    "only a configuration": "from resformer import ResFormerConfig",
    "only a model": "from resformer import ResFormerForCausalLM",
    "only the models' package": "from resformer.modeling import ResFormerForCausalLM",
    "only the converter": "from resformer import retrofit",
}

_LOAD = """
import torch
from transformers import AutoConfig, AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained(sys.argv[1])
again = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(sys.argv[1]))
made = AutoModelForCausalLM.from_config(AutoConfig.for_model("resformer", num_hidden_layers=1, hidden_size=32,
    intermediate_size=48, num_attention_heads=4, vocab_size=64))
print(json.dumps([type(m).__module__ + "." + type(m).__name__ for m in (model, again, made)]))"""


@pytest.mark.parametrize("name", others_slow(ORDERS, ["resformer first"]))
def test_import_order_does_not_matter(name: str, checkpoint: Path, tmp_path: Path) -> None:
    loaded = python(f"{ORDERS[name]}\n{_LOAD}", checkpoint, cwd=tmp_path)
    assert loaded == ["resformer.modeling.modeling_resformer.ResFormerForCausalLM"] * 3


_AGAIN = {
    "imported twice": "import resformer; del sys.modules['resformer']; import resformer",
    "reloaded after use": f"import resformer{_LOAD}\nimport importlib; importlib.reload(resformer)",
    "registration called again": (
        "import resformer; from resformer.registration import register_on_demand\n"
        f"register_on_demand(){_LOAD}\nregister_on_demand()"
    ),
    "forgotten and imported anew": (
        f"import resformer{_LOAD}\n"
        "for name in [n for n in sys.modules if n.partition('.')[0] == 'resformer']: del sys.modules[name]\n"
        "import resformer"
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("imports", _AGAIN.values(), ids=_AGAIN)
def test_importing_again_does_no_harm(imports: str, checkpoint: Path, tmp_path: Path) -> None:
    check = """
from resformer import ResFormerConfig, ResFormerForCausalLM
assert type(model) is ResFormerForCausalLM and type(model.config) is ResFormerConfig
print(json.dumps(type(model).__name__))"""
    assert python(f"{imports}\n{_LOAD}\n{check}", checkpoint, cwd=tmp_path) == "ResFormerForCausalLM"


@pytest.mark.slow
def test_configuration_sent_to_another_process_finds_its_model(tmp_path: Path) -> None:
    (tmp_path / "config.pickle").write_bytes(pickle.dumps(config()))
    code = """
import pickle
from pathlib import Path
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_config(pickle.loads(Path(sys.argv[1]).read_bytes()))
print(json.dumps(type(model).__name__))"""
    assert python(code, tmp_path / "config.pickle", cwd=tmp_path) == "ResFormerForCausalLM"


# Every Auto class


@pytest.mark.slow
def test_auto_classes_load_checkpoints_after_a_mere_import(checkpoints: Path, tmp_path: Path) -> None:
    code = f"""
import resformer, torch, transformers
found = {{}}
for name in {list(HEADS)!r}:
    model, loading = getattr(transformers, name).from_pretrained(f"{{sys.argv[1]}}/{{name}}", output_loading_info=True)
    strays = {{kind: sorted(map(str, keys)) for kind, keys in loading.items() if keys}}
    checksum = sum(value.double().abs().sum() for value in model.state_dict().values()).item()
    found[name] = [type(model).__module__, type(model).__name__, strays, checksum]
print(json.dumps(found))"""
    found = python(code, checkpoints, cwd=tmp_path)
    for name, model_class in HEADS.items():
        saved = model_class.from_pretrained(checkpoints / name).state_dict()
        checksum = sum(value.double().abs().sum() for value in saved.values()).item()
        assert found[name] == [model_class.__module__, model_class.__name__, {}, pytest.approx(checksum, rel=1e-12)]


# Tokenizers beside a checkpoint


@pytest.mark.parametrize("named", [True, False], ids=["tokenizer_class", "no tokenizer_class"])
def test_tokenizer_beside_a_checkpoint_is_found(named: bool, checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    byte_tokenizer().save_pretrained(folder)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    assert settings.pop("tokenizer_class")
    if not named:
        file.write_text(json.dumps(settings))
    code = """
import sys
from transformers import AutoTokenizer
tokenizer = AutoTokenizer.from_pretrained(sys.argv[1])
print(tokenizer.decode(tokenizer("values cross").input_ids), tokenizer.eos_token, tokenizer.is_fast)"""
    assert run("-c", code, folder).stdout == "values cross <end> True\n"


def test_pipeline_generates_from_a_checkpoint_and_its_tokenizer(checkpoint: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(checkpoint, tmp_path / "checkpoint"))
    byte_tokenizer().save_pretrained(folder)
    code = """
import sys
from transformers import pipeline
generate = pipeline("text-generation", model=sys.argv[1])
text = generate("values cross", max_new_tokens=4, do_sample=False)[0]["generated_text"]
print(type(generate.model).__name__, text.startswith("values cross"))"""
    assert run("-c", code, folder).stdout == "ResFormerForCausalLM True\n"


def test_a_class_that_the_user_registered_stays(tmp_path: Path) -> None:
    code = """
import resformer, transformers
from resformer.modeling.modeling_resformer import ResFormerModel
class Mine(ResFormerModel): pass
transformers.AutoModel.register(resformer.ResFormerConfig, Mine, exist_ok=True)
config = resformer.ResFormerConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4)
resformer.ResFormerForCausalLM(config)
print(json.dumps(type(transformers.AutoModel.from_config(config)).__name__))"""
    assert python(code, cwd=tmp_path) == "Mine"


def test_a_registration_that_failed_is_tried_again(tmp_path: Path) -> None:
    code = """
import resformer, transformers
from resformer.configuration import ResFormerConfig
sys.modules["resformer.modeling"] = None  # importing it fails
try:
    ResFormerConfig()
except ImportError:
    del sys.modules["resformer.modeling"]
config = ResFormerConfig(num_hidden_layers=1, hidden_size=32, intermediate_size=48, num_attention_heads=4)
print(json.dumps(type(transformers.AutoModelForCausalLM.from_config(config)).__name__))"""
    assert python(code, cwd=tmp_path) == "ResFormerForCausalLM"
