"""Of a repository on the Hub, a conversion fetches the files that it needs, after everything else has been checked."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest
import torch
from checkpoints import save_checkpoint
from hub_server import HubServer, Sparse
from safetensors.torch import load_file, save_file
from test_hub import run

from resformer import retrofit

CONVERT = """
import json, sys
from resformer import retrofit

for repo_id, options in json.loads(sys.argv[1]).items():
    try:
        outcome = retrofit(repo_id, repo_id.replace("/", "-"), verify="headers", progress=False, **options).output
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps(outcome))
"""
#: Repository -> (options, part of the message).
REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "you/misspelt": ({"method": "resfromer"}, "ValueError: Unknown method 'resfromer'"),
    "you/lossy": ({"method": "svformer"}, "lossy=True"),
    "you/field": ({"value_sources": [0]}, "value_sources"),
    "you/quantised": ({}, "the checkpoint is quantised"),
    "you/moe": ({}, "'mixtral' cannot be converted (it is a mixture of experts)"),
    "you/partial": ({}, "rotary"),
    "you/layers": ({}, "num_hidden_layers is 1,000,000"),
    "you/pickled": ({}, "pytorch_model.bin would have to be unpickled: `resformer convert` does it, restricted to"),
    "you/gguf": ({}, "It holds 'model.gguf': name that file"),
    "you/cut": ({}, "CheckpointError: you/cut: is neither a local folder nor a .gguf file, and the Hub did not give"),
}
CHANGES: dict[str, dict[str, Any]] = {
    "quantised": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "moe": {"model_type": "mixtral"},
    "partial": {"partial_rotary_factor": 0.5},
    "layers": {"num_hidden_layers": 10**6},
}
FETCHED: dict[str, dict[str, Any]] = {"you/indexed": {}, "you/whole": {}, "you/pickles": {"allow_pickle": True}}


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[HubServer, dict[str, str]]]:
    """The Hub, and repository -> output or error of its conversion."""
    folder = tmp_path_factory.mktemp("hub")
    model = save_checkpoint(folder / "indexed", shards=True)
    save_checkpoint(folder / "llama")
    index = json.loads((folder / "indexed" / "model.safetensors.index.json").read_text())
    for file in sorted((folder / "indexed").glob("*.safetensors")):  # names of their own, and a stale series
        stale = file.read_bytes()
        file.rename(file.with_name(file.name.replace("model-", "part[1]-")))
        file.write_bytes(stale)
    index["weight_map"] = {name: file.replace("model-", "part[1]-") for name, file in index["weight_map"].items()}
    (folder / "indexed" / "model.safetensors.index.json").write_text(json.dumps(index))
    with HubServer() as hub:
        for repo_id in (*REFUSED, *FETCHED):
            name = repo_id.removeprefix("you/")
            repository = hub.add(repo_id, folder / ("indexed" if name == "indexed" else "llama"))
            if name in CHANGES:
                config = json.loads(repository["config.json"])
                repository["config.json"] = json.dumps({**config, **CHANGES[name]}).encode()
            if name in ("pickled", "pickles", "gguf"):
                del repository["model.safetensors"]
            if name == "whole":
                repository["model-00001-of-00002.safetensors"] = b"stale"
            if name == "gguf":
                del repository["config.json"]
                repository["model.gguf"] = b"GGUF"
        torch.save(model.state_dict(), folder / "weights")
        for name in ("pickled", "pickles"):
            hub.repositories[f"you/{name}"]["pytorch_model.bin"] = (folder / "weights").read_bytes()
        hub.fail("you/cut", "answer", times=1000)
        options = {**{repo_id: options for repo_id, (options, _) in REFUSED.items()}, **FETCHED}
        home = tmp_path_factory.mktemp("home")
        lines = run(hub, home, CONVERT, json.dumps(options)).splitlines()
        yield hub, dict(zip(options, map(json.loads, lines), strict=True))


def weights_asked(hub: HubServer, repo_id: str) -> set[str]:
    requests = hub.asked(rf"/{repo_id}/resolve/\w+/[^/]+\.(safetensors|bin|gguf)( |$)")
    return {unquote(request.split(" ")[1]).rpartition("/")[2] for request in requests}


@pytest.mark.parametrize("repo_id", REFUSED)
def test_what_is_refused_without_the_weights_fetches_none(
    repo_id: str, outcomes: tuple[HubServer, dict[str, str]]
) -> None:
    hub, messages = outcomes
    assert REFUSED[repo_id][1] in messages[repo_id]
    assert weights_asked(hub, repo_id) == set()


def test_the_files_that_the_index_names_are_fetched_and_no_others(outcomes: tuple[HubServer, dict[str, str]]) -> None:
    hub, messages = outcomes
    assert {repo_id: messages[repo_id] for repo_id in FETCHED} == {name: name.replace("/", "-") for name in FETCHED}
    shards = {name for name in hub.repositories["you/indexed"] if name.startswith("part")}
    assert len(shards) == 12
    assert weights_asked(hub, "you/indexed") == shards
    assert weights_asked(hub, "you/whole") == {"model.safetensors"}
    assert weights_asked(hub, "you/pickles") == {"pytorch_model.bin"}


REVERT = """
import json, sys
from resformer import revert

for repo_id, output, options in json.loads(sys.argv[1]):
    try:
        outcome = revert(repo_id, output, verify="headers", progress=False, **options).removed
    except Exception as error:
        outcome = f"{type(error).__name__}: {error}"
    print(json.dumps(outcome))
"""


@pytest.mark.slow
def test_small_files_are_fetched_up_to_a_number_and_a_size_and_weights_if_the_coefficients_allow_it(
    tmp_path: Path,
) -> None:
    save_checkpoint(tmp_path / "llama")
    for name in ("ours", "learned", "crowd"):
        retrofit(tmp_path / "llama", tmp_path / name, verify="headers")
    coefficients = tmp_path / "learned" / "model-00002-of-00002.safetensors"
    save_file({name: tensor + 1 for name, tensor in load_file(coefficients).items()}, coefficients)

    def outcomes(*calls: tuple[str, str, dict[str, Any]]) -> list[Any]:
        return list(map(json.loads, run(hub, tmp_path, REVERT, json.dumps(calls)).splitlines()))

    with HubServer() as hub:
        for name in ("ours", "learned", "crowd"):
            hub.add(f"you/{name}", tmp_path / name)
        hub.repositories["you/crowd"].update({f"{n}.model": b"" for n in range(1001)})
        large = {"sub/x.json": b"{}", "logs/y.txt": b"", "tokenizer.model": Sparse(b"", 2**40, "0" * 64)}
        hub.repositories["you/ours"].update(large)
        dry, learned = outcomes(("you/ours", "dry", {"dry_run": True}), ("you/learned", "no", {}))
        assert dry == ["model.value_residual.bias"]
        assert "its connections have an effect" in learned
        assert not list(tmp_path.glob("**/blobs/*.safetensors"))
        assert not list(tmp_path.glob("**/snapshots/**/*.safetensors"))
        done, crowd = outcomes(("you/ours", "back", {}), ("you/crowd", "no", {}))
    assert done == dry
    assert "at most 1,000 are read" in crowd
    assert {path.name for path in tmp_path.glob("**/snapshots/**/*")}.isdisjoint({"x.json", "y.txt", "tokenizer.model"})
