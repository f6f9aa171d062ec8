"""Of weights on the Hub, `inspect`, `verify --verify headers` and dry runs read the headers alone."""

import json
import shutil
from pathlib import Path

import pytest
from checkpoints import save_checkpoint, sparse_checkpoint
from conftest import tiny_model
from hub_server import Commands, HubServer, Repository, Sparse
from huggingface_hub import get_session

from resformer.convert import inspect

#: 4.2 GB of bfloat16.
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
}


def large_source(hub: HubServer) -> Repository:
    repository = hub.repositories["them/large"] = Repository()
    repository.update(sparse_checkpoint(4, **LARGE))
    return repository


def test_no_weight_moves_through_this_machine(commands: Commands) -> None:
    hub = commands.hub
    source = large_source(hub)
    assert sum(map(len, source.values())) > 4e9
    for words in (
        ["inspect", "them/large"],
        ["convert", "them/large", "out", "--dry-run"],
        ["verify", "them/large", "them/large", "--verify", "headers"],
    ):
        before = hub.sent, hub.received
        done = commands(*words)
        assert done.exit_code == (4 if words[0] == "verify" else 0), done.stderr  # the bytes were not compared
        assert hub.sent - before[0] < 1e6, words
        assert hub.received - before[1] < 1e6, words
        assert "out" not in words or "4.2 GB downloaded" in done.stdout
    assert not [path for path in commands.home.rglob("*.safetensors") if "large" in str(path)]


def test_headers_on_the_hub_say_what_a_folder_says(commands: Commands, tmp_path: Path) -> None:
    """Coefficients that were trained are read too, and answers that are cut off are read again."""
    tiny_model("resformer-denseformer").save_pretrained(tmp_path / "trained", max_shard_size="20KB")
    hub = commands.hub
    hub.add("you/trained", tmp_path / "trained")
    hub.fail("GET /objects/", "answer", 3)
    done = commands("inspect", "you/trained", "--json")
    assert done.exit_code == 0, done.stderr
    assert commands("inspect", "you/trained", "--json", offline=True).stdout == done.stdout
    expected = {**inspect(tmp_path / "trained").as_dict(), "source": "you/trained"}
    assert json.loads(done.stdout) == {**expected, "revision": hub.commit_id("you/trained")}
    assert expected["value_mixing_matrix"] is not None
    assert expected["depth_mixing_matrix"] is not None


#: Fault -> (part of the message, requests that it meets). Exit code 1 says that it may pass.
FAULTS: dict[str, tuple[str, str]] = {
    "header": (
        "model-00002-of-00004.safetensors: its header claims 200,000,000 bytes; at most 33,554,432 are read",
        "",
    ),
    "index": ("names 10,000 files; at most 1,000 are read", ""),
    "absent": ("the index names files that are missing: 'model-00002-of-00004.safetensors'", ""),
    "short": ("asked for 16,384 bytes of model-0", "GET /objects/"),
    "whole": ("(no range). Run the command again", "GET /objects/"),
    "away": ("model-00002-of-00004.safetensors cannot be read from 127.0.0.1", "GET .*model-00002-of-00004"),
    "answer": ("safetensors cannot be read from localhost: peer closed connection", "GET /objects/"),
    "503": ("the Hub answered 503 (a bad day). Run the command again later", "GET .*model-00002-of-00004"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_headers_and_servers_end_in_one_error(fault: str, commands: Commands) -> None:
    hub, (message, requests) = commands.hub, FAULTS[fault]
    source = large_source(hub)
    if fault == "header":
        head = Sparse((200_000_000).to_bytes(8, "little") + b"{", 10**9, "0" * 64)
        source["model-00002-of-00004.safetensors"] = head
    elif fault == "index":
        names = {f"model.layers.{n}.x": f"part-{n}.safetensors" for n in range(10_000)}
        source["model.safetensors.index.json"] = json.dumps({"metadata": {}, "weight_map": names}).encode()
    elif fault == "absent":
        del source["model-00002-of-00004.safetensors"]
    else:
        hub.fail(requests, fault, 100)
    sent, session = hub.sent, get_session()
    said = commands.refused("inspect", "them/large")
    assert (said[:3], message in said) == ("1: " if fault in ("away", "answer", "503") else "3: ", True), said
    assert hub.sent - sent < 1e8  # "whole": what the sockets held when the connections were closed
    assert get_session() is session  # to close it would cut off what other threads read


def test_revisions_private_repositories_and_the_cache(commands: Commands, tmp_path: Path) -> None:
    hub = commands.hub
    save_checkpoint(tmp_path / "llama", shards=True)
    source = hub.add("you/source", tmp_path / "llama")
    source.private = True
    source.tags["v1"] = hub.commit_id("you/source")
    source["config.json"] = b"{}"
    assert commands("inspect", "you/source").exit_code == 3
    command = ["inspect", "you/source", "--revision", "v1", "--json"]
    first = commands(*command)
    assert first.exit_code == 0, first.stderr
    assert json.loads(first.stdout)["revision"] == source.tags["v1"]
    assert commands(*command, token=None).exit_code == 3
    requests = len(hub.requests)
    assert commands(*command, offline=True).stdout == first.stdout
    assert len(hub.requests) == requests
    assets = commands.home / "assets"
    shutil.rmtree(assets)
    assets.write_bytes(b"")  # so that nothing can be kept there
    assert commands(*command).stdout == first.stdout
    assets.unlink()
    missing = commands(*command, offline=True)
    assert (missing.exit_code, "HF_HUB_OFFLINE" in missing.stderr) == (3, True)
    assert commands("convert", "you/source", "out", "--revision", "v1").exit_code == 0
    requests = len(hub.requests)
    assert commands(*command, offline=True).stdout == first.stdout
    dry = commands("convert", "you/source", "out", "--revision", "v1", "--force", "--dry-run", offline=True)
    assert dry.exit_code == 0, dry.stderr
    assert len(hub.requests) == requests
