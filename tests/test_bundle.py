"""Bundles load, compute, train and save where resformer is not installed; where it is, its own classes are used."""

import json
import re
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SIZES, byte_tokenizer, change_json, contents, randomise
from command_server import python
from hub_server import Commands
from remote_worker import CHOSEN, numbers
from safetensors.torch import load_file, save_file
from small_decoders import small_config, small_decoder
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.dynamic_module_utils import get_imports, get_relative_imports

from resformer import METHODS, ResFormerConfig, ResFormerForCausalLM, connect, connected_config, inspect, push, retrofit
from resformer.checkpoint_cards import checkpoint_card
from resformer.convert import bundle, revert
from resformer.convert.bundling import auto_map, remote_code
from resformer.errors import CheckpointError
from resformer.modeling.connection import KINDS
from resformer.names import LISTING
from resformer.version import __version__

AUTO_MAP = auto_map(ResFormerConfig())
CODE = [*remote_code(ResFormerConfig())]
#: Bundle -> the family, what connects it, and what differs in its small model.
FAMILIES: dict[str, Any] = {
    "gemma3_text": ("gemma3_text", "resformer-denseformer"),
    "gemma3_text svformer": ("gemma3_text", "svformer"),
    "qwen3_moe": ("qwen3_moe", "resformer-denseformer"),
    "qwen3 damped": ("qwen3", "damped"),
    "phi3": ("phi3", "resformer"),  # its class prepares inputs for generation by itself
    "llava svformer": ("llava", "svformer"),
}
#: A file of a user's, with a class.
DAMPED = (Path(__file__).parents[1] / "examples" / "own_connection.py").read_text()
TRUE = ("base of another", "gradients", "config is remote", "from_config")
CARD = "---\nlicense: mit\n---\nA card.\n"


def save_model(folder: Path, method: str, **fields: Any) -> ResFormerForCausalLM:
    """Saves a model with random coefficients, with its tokenizer and a card."""
    model = randomise(ResFormerForCausalLM(ResFormerConfig.for_method(method, **{**SIZES, **fields})))
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    (folder / "README.md").write_text(CARD)
    return model


@pytest.fixture(scope="module")
def ids() -> torch.Tensor:
    return torch.randint(1, 97, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture(scope="module")
def damped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The file with a user's class, which is imported."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_connection.py").write_text(DAMPED)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        yield Path(import_module("own_connection").__file__ or "")
    KINDS[:] = [kind for kind in KINDS if kind.name != "damped"]
    del METHODS["damped"], sys.modules["own_connection"]


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, ids: torch.Tensor, damped: Path) -> Path:
    """A bundle for each method, under its name, and `expected/METHOD.safetensors`, the package's own numbers."""
    folder = tmp_path_factory.mktemp("bundles")
    (folder / "expected").mkdir()
    (folder / "bundles").mkdir()
    save_file({"ids": ids}, folder / "bundles" / "ids.safetensors")
    for method in set(METHODS) - {"damped"}:
        model = save_model(folder / "saved" / method, method)
        save_file(numbers(model, ids), folder / "expected" / f"{method}.safetensors")
        bundle(folder / "saved" / method, folder / "bundles" / method, verify="headers")
    for name, (family, method) in FAMILIES.items():
        model = randomise(connect(small_decoder(family), method, lossy=True))
        model.save_pretrained(folder / "saved" / name)
        save_file(numbers(model, ids), folder / "expected" / f"{name}.safetensors")
        bundle(folder / "saved" / name, folder / "bundles" / name, verify="headers")
    return folder


@pytest.fixture(scope="module")
def remote(bundles: Path) -> Path:
    """What `remote_worker.py` has written, from a process that cannot import resformer."""
    results = bundles / "results"
    results.mkdir()
    home = {"HF_HOME": str(bundles / "home"), "HF_MODULES_CACHE": str(bundles / "home" / "modules")}
    threads = str(torch.get_num_threads())  # another number may change the last bits
    worker = Path(__file__).with_name("remote_worker.py")
    python(worker, bundles / "bundles", results, cwd=results, OMP_NUM_THREADS=threads, **home)
    return results


@pytest.fixture(scope="module")
def facts(remote: Path) -> dict[str, Any]:
    return json.loads((remote / "facts.json").read_text())


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A small checkpoint of ours."""
    save_model(tmp_path / "saved", "svformer", num_hidden_layers=2)
    return tmp_path / "saved"


@pytest.mark.parametrize("method", [*METHODS, *FAMILIES])
def test_every_method_gives_the_packages_logits_and_tokens(method: str, bundles: Path, remote: Path) -> None:
    expected, found = (load_file(folder / f"{method}.safetensors") for folder in (bundles / "expected", remote))
    for name in ("logits", "tokens", "static"):
        assert torch.equal(found[name], expected[name]), name
    assert torch.equal(found["tokens"], found["static"])


def test_models_that_see_images_are_read_as_what_they_are(bundles: Path) -> None:
    saved = bundles / "saved" / "llava svformer"
    assert inspect(saved).fields == {"value_sources": [0] * 4}
    card = checkpoint_card(saved).card
    assert "AutoModelForImageTextToText.from_pretrained(" in card.text
    assert card.data.pipeline_tag == "image-text-to-text"


@pytest.mark.parametrize("name", CHOSEN)
def test_every_head_loads_saves_and_loads_again(name: str, bundles: Path, facts: dict[str, Any]) -> None:
    expected = json.loads((bundles / "bundles" / name / "config.json").read_text())["auto_map"]
    code, found = sorted(path.name for path in (bundles / "bundles" / name).glob("*.py")), facts[name]
    for auto_class, head in found["heads"].items():
        made = expected[auto_class].partition(".")[2]
        assert head == {"class": made, "remote": True, "same": True, "files": code, "auto_map": expected}
    assert found.keys() - {"heads", "is registered"} == {*TRUE}
    assert [found[each] for each in TRUE] == [True] * len(TRUE)
    # Another bundle of the family, of another version of the package, is loaded with its own code.
    assert (found["is registered"], facts["resformer"]) == (False, [])


@pytest.mark.parametrize(
    "text",
    [
        "import resformer.modeling",
        "import torch, resformer",
        "from .others import weight",
        "import torch, helpers_of_mine",
    ],
)
def test_a_class_that_cannot_go_along_is_refused(text: str, damped: Path) -> None:
    config = connected_config(small_config("qwen3"), "damped")
    source = damped.read_text()
    damped.write_text(f"{text}\n{source}")
    try:
        with pytest.raises(CheckpointError, match=f"own_connection.py: `{re.escape(text)}` cannot go along"):
            remote_code(config)
    finally:
        damped.write_text(source)


def test_a_class_without_a_file_is_refused(damped: Path) -> None:
    before = next(kind for kind in KINDS if kind.name == "damped")
    exec(DAMPED.partition("\nif ")[0], {"__name__": "__main__"})  # a notebook's cell
    try:
        with pytest.raises(CheckpointError, match=r"^Damped: this class of connections has no file of its own"):
            remote_code(connected_config(small_config("qwen3"), "damped"))
    finally:
        KINDS[:] = [before if kind.name == "damped" else kind for kind in KINDS]


@pytest.mark.parametrize("trust", [None, True])
def test_installed_classes_win(bundles: Path, ids: torch.Tensor, trust: bool | None) -> None:
    model = AutoModelForCausalLM.from_pretrained(bundles / "bundles" / CHOSEN[0], trust_remote_code=trust)
    assert type(model) is ResFormerForCausalLM
    assert type(model.config) is ResFormerConfig
    expected = load_file(bundles / "expected" / f"{CHOSEN[0]}.safetensors")
    assert torch.equal(numbers(model, ids)["logits"], expected["logits"])


def test_everything_but_the_configuration_goes_along_byte_for_byte(saved: Path, tmp_path: Path) -> None:
    dry = bundle(saved, tmp_path / "out", dry_run=True)
    assert dry.as_dict()["code"] == {name: len(text.encode()) for name, text in remote_code(ResFormerConfig()).items()}
    assert not (tmp_path / "out").exists()
    report = bundle(saved, tmp_path / "out")
    source, out = contents(saved), contents(tmp_path / "out")
    config, bundled = json.loads(source.pop("config.json")), json.loads(out.pop("config.json"))
    assert bundled == {**config, "auto_map": AUTO_MAP}
    del out[LISTING]
    assert out == {**source, **{name: text.encode() for name, text in remote_code(ResFormerConfig()).items()}}
    assert (report.verified, report.left_behind, report.warnings) == ("logits", [], [])
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("ab").input_ids == byte_tokenizer()("ab").input_ids


def test_the_record_of_a_retrofit_goes_along(tmp_path: Path) -> None:
    save_model(tmp_path / "saved", "resformer")
    retrofit(tmp_path / "saved", tmp_path / "retrofit", "denseformer", verify="headers")
    bundle(tmp_path / "retrofit", tmp_path / "out", link=True)
    retrofitted, out = contents(tmp_path / "retrofit"), contents(tmp_path / "out")
    del retrofitted["config.json"], retrofitted[LISTING]
    assert out.items() >= retrofitted.items()
    shard = "model-00001-of-00002.safetensors"
    assert (tmp_path / "out" / shard).samefile(tmp_path / "retrofit" / shard)
    assert revert(tmp_path / "out", tmp_path / "back").remaining["value_residual"] == "learnable"
    assert not {*CODE} & {*contents(tmp_path / "back")}
    for path in (tmp_path / "out").glob("*.py"):  # as Transformers saves the model where this package is installed
        path.unlink()
    assert "trust_remote_code" not in checkpoint_card(tmp_path / "out").card.text
    assert any(
        "code (auto_map) that is not in" in note for note in push(tmp_path / "out", "you/x", dry_run=True).warnings
    )
    assert "auto_map" not in json.loads((tmp_path / "back" / "config.json").read_text())


def test_a_bundle_of_a_bundle_is_the_same_but_for_the_code_of_an_older_version(saved: Path, tmp_path: Path) -> None:
    bundle(saved, tmp_path / "one", verify="headers")
    expected = contents(tmp_path / "one")
    (tmp_path / "one" / "module_of_an_older_version.py").touch()
    report = bundle(tmp_path / "one", tmp_path / "other", verify="headers")
    assert contents(tmp_path / "other") == expected
    assert report.left_behind == ["module_of_an_older_version.py"]


def test_code_and_settings_of_a_stranger_stay_behind(saved: Path, tmp_path: Path) -> None:
    config = json.loads((saved / "config.json").read_text())
    theirs = {"auto_map": {"AutoConfig": "evil.Config"}, "_attn_implementation": "evil/kernel"}
    change_json(saved / "config.json", **theirs)
    (saved / "modeling_resformer.py").write_text("raise SystemExit('run')")
    (saved / "evil.py").write_text("raise SystemExit('run')")
    report = bundle(saved, tmp_path / "out", verify="logits")
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == {**config, "auto_map": AUTO_MAP}
    assert (
        contents(tmp_path / "out")["modeling_resformer.py"].decode()
        == remote_code(ResFormerConfig())["modeling_resformer.py"]
    )
    assert report.left_behind == ["evil.py", "config.json: _attn_implementation"]


def test_a_checkpoint_of_the_hub_brings_its_card(saved: Path, commands: Commands) -> None:
    commands.hub.add("you/model", saved)
    report = json.loads(commands("bundle", "you/model", "bundled", "--json").stdout)
    assert report["revision"] == commands.hub.commit_id("you/model")
    assert Path("bundled/README.md").read_text() == CARD


def test_code_is_the_packages_and_imports_nothing_but_torch_and_transformers(tmp_path: Path) -> None:
    for name, text in remote_code(ResFormerConfig()).items():
        (tmp_path / name).write_text(text)
        compile(text, name, "exec")
    assert {"configuration_resformer.py", "methods.py", "modeling_resformer.py", "value_residual.py"} <= {*CODE}
    for name, text in remote_code(ResFormerConfig()).items():
        assert f"resformer {__version__}," in text.split("\n")[1]
        assert {f"{module}.py" for module in get_relative_imports(tmp_path / name)} <= {*CODE}
        # huggingface_hub is what Transformers' own configurations are made with; it is not there without it.
        others = {*get_imports(tmp_path / name)} - sys.stdlib_module_names
        assert others <= {"torch", "transformers", "huggingface_hub"}
