"""Of a repository on the Hub, a conversion fetches the files that it needs, after everything else has been checked."""

import json
import re
import secrets
import shutil
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
from checkpoints import save_checkpoint
from click.testing import Result
from conftest import assert_said
from hub_server import Commands, HubServer, Sparse
from safetensors.torch import load_file, save_file

from resformer import retrofit
from resformer.names import INDEX, RECORD

#: Name of a repository -> options, and what its config.json says.
REFUSED: dict[str, tuple[list[str], dict[str, Any]]] = {
    "misspelt": (["--method", "resfromer"], {}),
    "lossy": (["--method", "svformer"], {}),
    "field": (["--set", "value_sources=[0]"], {}),
    "quantised": ([], {"quantization_config": {"quant_method": "gptq", "bits": 4}}),
    "other": ([], {"model_type": "bart"}),
    "layers": ([], {"num_hidden_layers": 10**6}),
    "pickled": ([], {}),
    "gguf": ([], {}),
    "cut": ([], {}),
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("hub") / "llama"
    save_checkpoint(folder)
    return folder


def weights_asked(hub: HubServer) -> set[str]:
    requests = hub.asked(r"/resolve/\w+/[^/]+\.(safetensors|bin|gguf)( |$)")
    return {unquote(request.split(" ")[1]).rpartition("/")[2] for request in requests}


def test_what_is_refused_without_the_weights_fetches_none(llama: Path, commands: Commands) -> None:
    hub, said = commands.hub, {}
    hub.fail("you/cut", "answer", times=1000)
    for name, (options, changes) in REFUSED.items():
        repository = hub.add(f"you/{name}", llama)
        repository["config.json"] = json.dumps({**json.loads(repository["config.json"][:]), **changes}).encode()
        if name in ("pickled", "gguf"):
            del repository["model.safetensors"]
            repository["pytorch_model.bin" if name == "pickled" else "model.gguf"] = b"GGUF"
        if name == "gguf":
            del repository["config.json"]
        said[name] = commands.refused("convert", f"you/{name}", name, *options)
    said["cut"], _, _ = said["cut"].partition("peer closed")
    assert_said("convert-hub", said, home=commands.home, hub=hub.url)
    assert weights_asked(hub) == set()


def test_the_files_that_the_index_names_are_fetched_and_no_others(
    llama: Path, commands: Commands, tmp_path: Path
) -> None:
    hub, indexed = commands.hub, tmp_path / "indexed"
    save_checkpoint(indexed, shards=True)
    (indexed / "additional_chat_templates").mkdir()
    (indexed / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    index = json.loads((indexed / "model.safetensors.index.json").read_text())
    for file in sorted(indexed.glob("*.safetensors")):  # names of their own, and a stale series
        file.with_name(file.name.replace("model-", "part[1]-")).write_bytes(file.read_bytes())
    index["weight_map"] = {name: file.replace("model-", "part[1]-") for name, file in index["weight_map"].items()}
    (indexed / "model.safetensors.index.json").write_text(json.dumps(index))
    hub.add("you/indexed", indexed)
    hub.add("you/whole", llama)["model-00001-of-00002.safetensors"] = b"stale"
    for name, expected in (("indexed", set(index["weight_map"].values())), ("whole", {"model.safetensors"})):
        hub.requests.clear()
        done = commands("convert", f"you/{name}", f"{name}-out", "--verify", "headers")
        assert done.exit_code == 0, done.stderr
        assert weights_asked(hub) == expected
    # Of the cache, whose files are links to its blobs.
    assert Path("indexed-out/additional_chat_templates/tools.jinja").read_text() == "{{ tools }}"
    assert not any(path.is_symlink() for path in Path("indexed-out").rglob("*"))


def test_no_file_is_downloaded_that_the_list_of_files_says_is_too_large(llama: Path, commands: Commands) -> None:
    """Whichever it is of those that a conversion reads."""
    hub = commands.hub
    added = ["README.md", RECORD, INDEX, "LICENSE", "curve.png", "metrics.json"]
    for name in {*added, *(path.name for path in llama.iterdir())} - {"model.safetensors"}:
        hub.add("you/large", llama)[name] = Sparse(b"", 2**30, secrets.token_hex(32))
        sent = hub.sent
        for words in (["inspect"], ["convert", f"dry-{name}", "--dry-run"], ["convert", name, "--verify", "headers"]):
            done = commands(words[0], "you/large", *words[1:])
            assert done.exit_code == 0 or f"you/large: {name} has 1,073,741,824 bytes" in done.stderr
        assert hub.sent - sent < 3 * 10**6, name
        del hub.repositories["you/large"]


def test_small_files_are_fetched_up_to_a_number_and_a_size_and_weights_if_the_coefficients_allow_it(
    llama: Path, commands: Commands, tmp_path: Path
) -> None:
    hub = commands.hub
    retrofit(llama, tmp_path / "ours", verify="headers")
    ours = hub.add("you/ours", tmp_path / "ours")
    hub.add("you/crowd", tmp_path / "ours").update({f"{n}.model": b"" for n in range(1001)})
    ours.update({"sub/x.json": b"{}", "logs/y.txt": b"", "curve.png": Sparse(b"", 2**40, "0" * 64)})
    coefficients = tmp_path / "ours" / "model-00002-of-00002.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(coefficients).items()}, coefficients)
    hub.add("you/learned", tmp_path / "ours")

    def fetched(pattern: str) -> set[str]:
        return {path.name for path in commands.home.glob(f"**/models--you--{pattern}")}

    dry = commands("revert", "you/ours", "back", "--dry-run", "--json")
    learned = commands("revert", "you/learned", "no")
    assert "its connections have an effect" in learned.stderr
    assert fetched("ours/snapshots/**/*.safetensors") == fetched("learned/snapshots/**/*.safetensors") == set()
    done = commands("revert", "you/ours", "back", "--json")
    names = [f"model.layers.{n}.value_residual.weight" for n in range(1, 6)]
    assert json.loads(dry.stdout)["removed"] == json.loads(done.stdout)["removed"] == names
    assert "at most 1,000 are read" in commands("revert", "you/crowd", "no").stderr
    assert fetched("ours/snapshots/**/*").isdisjoint({"x.json", "y.txt", "curve.png"})


@pytest.mark.parametrize(
    ("fault", "command"),
    [("429", "inspect them/llama"), ("408", "convert them/llama out --verify headers")],
)
def test_any_request_that_fails_is_made_again_and_what_fails_for_good_ends_in_exit_code_1(
    fault: str, command: str, llama: Path, commands: Commands
) -> None:
    hub = commands.hub

    def run(pattern: str = "", times: int = 0) -> Result:
        """With nothing in the cache."""
        hub.reset()
        hub.add("them/llama", llama)["README.md"] = b"---\nlicense: mit\n---\n"
        hub.fail(pattern, fault, times)
        for folder in (commands.home / "hub", Path("out")):
            shutil.rmtree(folder, ignore_errors=True)
        return commands(*command.split())

    assert run().exit_code == 0
    requests = hub.asked("llama|objects")  # not whether huggingface_hub runs in an agent
    for pattern in {re.sub(r"\b[0-9a-f]{40}\b", "[0-9a-f]{40}", re.escape(request)) for request in requests}:
        done = run(pattern, 1)
        assert done.exit_code == 0, (pattern, done.stderr)
    for pattern in ("GET .*/revision/main|GET /api/models/them/llama$", "/resolve/"):
        done = run(pattern, 1000)
        assert (done.exit_code, f"them/llama: the Hub answered {fault} (a bad day). Run" in done.stderr) == (1, True)
