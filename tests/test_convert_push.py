"""Retrofits made on the Hub: the server copies the weights, one commit holds the rest."""

import hashlib
import json
import os
import shlex
import signal
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_checkpoint, sparse_checkpoint
from conftest import assert_answers, tiny_model
from hub_server import Commands, HubServer, Repository, Sparse
from huggingface_hub import get_session

from resformer.convert import inspect, retrofit
from resformer.names import LISTING

CARD = "---\nlicense: {}\nlanguage: en\n---\n# A Llama\n"
#: 4.2 GB of bfloat16.
LARGE = {
    "vocab_size": 32000,
    "hidden_size": 2560,
    "intermediate_size": 6912,
    "num_hidden_layers": 28,
    "num_attention_heads": 20,
    "num_key_value_heads": 4,
}


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "llama"
    save_checkpoint(folder, shards=True)
    (folder / "README.md").write_text(CARD.format("apache-2.0"))
    (folder / "License.md").write_text("Do as you like.")
    return folder


@pytest.fixture
def hub(commands: Commands, llama: Path) -> HubServer:
    """With a source, them/llama."""
    commands.hub.add("them/llama", llama)
    return commands.hub


def large_source(hub: HubServer) -> Repository:
    repository = hub.repositories["them/large"] = Repository()
    repository.update({**sparse_checkpoint(4, **LARGE), "README.md": CARD.format("mit").encode()})
    return repository


def test_the_result_is_that_of_a_conversion_in_one_commit(
    hub: HubServer, commands: Commands, llama: Path, tmp_path: Path
) -> None:
    local = retrofit(llama, tmp_path / "out", verify="headers", progress=False)
    done = commands("convert", "them/llama", "--push", "you/new", "--json")
    assert done.exit_code == 0, done.stderr
    new, source_commit = hub.repositories["you/new"], hub.commit_id("them/llama")
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != LISTING}
    assert set(new) == {*files, ".gitattributes"}
    described = {"README.md", "resformer_conversion.json", "config.json"}
    origin = {"name": "them/llama", "revision": source_commit, "license": "apache-2.0", "family": "llama"}
    own = {"base_model": origin}
    assert json.loads(new["config.json"][:]) == {**json.loads(files["config.json"]), **own}
    assert new.items() >= {name: content for name, content in files.items() if name not in described}.items()
    assert new.messages == ["initial commit", f"Retrofit of them/llama at {source_commit[:7]}"]
    report = json.loads(done.stdout)
    assert (report["commit"], report["output"]) == (hub.commit_id("you/new"), "you/new")
    assert (report["verified"], report["exact"]) == ("copies", True)
    assert report["carried_files"] == local.carried_files
    carried = [f"model-{number:05}-of-00013.safetensors" for number in range(1, 13)]
    assert report["transfer"]["copied_by_hub"] == sum(len(new[name]) for name in carried)
    card = bytes(new["README.md"][:]).decode()
    for stated in ("license: apache-2.0", "base_model: them/llama", 'from_pretrained("you/new")', "copied by the Hub"):
        assert stated in card
    recorded = json.loads(new["resformer_conversion.json"][:])["files"]
    assert recorded == {
        name: {"sha256": hashlib.sha256(new[name][:]).hexdigest()} for name in new if name.endswith(".safetensors")
    }
    fetched = json.loads(commands("convert", "them/llama", "fetched", "--json").stdout)
    assert fetched["left_behind"] == report["left_behind"] == [".gitattributes", "README.md"]
    assert (fetched["revision"], fetched["logits"]["identical"]) == (source_commit, True)
    assert (tmp_path / "fetched" / "License.md").exists()
    again = commands("convert", "them/llama", "--push", "you/new", "--json")
    assert again.exit_code == 1
    assert "Replace its files with --force" in again.stderr
    new["tokenizer.model"] = b"of another model"
    replaced = commands("convert", "them/llama", "--push", "you/new", "--json", "--force")
    assert replaced.exit_code == 0, replaced.stderr
    assert set(new) == {*files, ".gitattributes"}


def test_no_weight_moves_through_this_machine(hub: HubServer, commands: Commands) -> None:
    source = large_source(hub)
    assert sum(map(len, source.values())) > 4e9
    for words in (
        ["inspect", "them/large"],
        ["convert", "them/large", "out", "--dry-run"],
        ["convert", "them/large", "--push", "you/large"],
        ["verify", "them/large", "you/large", "--verify", "headers"],
    ):
        before = hub.sent, hub.received
        done = commands(*words)
        assert done.exit_code == (4 if words[0] == "verify" else 0), done.stderr  # the bytes were not compared
        assert hub.sent - before[0] < 1e6, words
        assert hub.received - before[1] < 1e6, words
        assert "out" not in words or "4.2 GB downloaded" in done.stdout
    assert not [path for path in commands.home.rglob("*.safetensors") if "large" in str(path)]
    new = hub.repositories["you/large"]
    assert [new[f"model-{n:05}-of-00005.safetensors"] for n in range(1, 5)] == [
        source[f"model-{n:05}-of-00004.safetensors"] for n in range(1, 5)
    ]


@pytest.mark.parametrize(
    ("gated", "private", "license", "reason"),
    [
        ("manual", False, "llama3", "it is gated (manual)"),
        (False, True, "mit", "it is private"),
        (False, False, "other", "its license is other"),
        (False, False, "cc-by-nc-nd-4.0", "its license is cc-by-nc-nd-4.0"),
        (False, False, "{", "its card states no license"),
    ],
)
def test_what_may_not_be_published_again_needs_consent(
    gated: Any, private: bool, license: str, reason: str, hub: HubServer, commands: Commands
) -> None:
    source = hub.repositories["you/source"] = hub.repositories.pop("them/llama")
    source["README.md"] = CARD.format(license).encode()
    source.gated, source.private = gated, private
    command = ["convert", "you/source", "--push", "you/copy"]
    said = commands.refused(*command)
    assert (said[:3], reason in said, "--accept-license" in said) == ("3: ", True, True), said
    assert "you/copy" not in hub.repositories
    if gated or private:
        done = commands(*command, "--private" if private else "--accept-license")
        assert done.exit_code == 0, done.stderr
        copy = hub.repositories["you/copy"]
        assert (copy.gated, copy.private) == (gated, private)
        noted = f"The source is gated ({gated}), and so is this repository" in bytes(copy["README.md"][:]).decode()
        assert noted == bool(gated)


def test_what_cannot_be_pushed_is_refused_in_one_line_and_nothing_moves(
    hub: HubServer, commands: Commands, llama: Path, tmp_path: Path
) -> None:
    before = hub.commit_id("them/llama")
    (tmp_path / "local").symlink_to(llama)

    def answer(asked: str) -> str:
        """What storage does, or that there is no token, is said before a colon."""
        how, _, words = asked.rpartition(": ")
        hub.copies = how or "made"  # type: ignore[assignment]
        return commands.refused(*shlex.split(words), token=None if how == "no token" else "hf_test")

    assert_answers("convert-push", answer, sha=before)
    assert hub.commit_id("them/llama") == before
    assert hub.repositories["you/x"].messages == ["initial commit"]


def test_headers_on_the_hub_say_what_a_folder_says(hub: HubServer, commands: Commands, tmp_path: Path) -> None:
    """Coefficients that were trained are read too, and answers that are cut off are read again."""
    tiny_model("resformer-denseformer").save_pretrained(tmp_path / "trained", max_shard_size="20KB")
    hub.add("you/trained", tmp_path / "trained")
    hub.fail("GET /objects/", "answer", 3)
    done = commands("inspect", "you/trained", "--json")
    assert done.exit_code == 0, done.stderr
    expected = {**inspect(tmp_path / "trained").as_dict(), "source": "you/trained"}
    assert json.loads(done.stdout) == {**expected, "revision": hub.commit_id("you/trained")}
    assert expected["value_mixing_matrix"] is not None
    assert expected["depth_mixing_matrix"] is not None


def test_a_commit_in_between_is_not_overwritten(hub: HubServer, commands: Commands) -> None:
    target = hub.repositories["you/new"] = Repository()

    def commit(request: str) -> None:
        if "duplicate" in request:
            target["notes.txt"] = b"by somebody else"

    hub.watch = commit
    said = commands.refused("convert", "them/llama", "--push", "you/new")
    assert "somebody else committed to main meanwhile" in said
    assert "Nothing was committed." in said
    assert set(target) == {".gitattributes", "notes.txt"}


def test_a_commit_that_cannot_be_read_back_is_named(hub: HubServer, commands: Commands) -> None:
    hub.watch = lambda request: "commit/main" in request and hub.fail("GET /objects/", "short")
    said = commands.refused("convert", "them/llama", "--push", "you/new")
    sha = hub.commit_id("you/new")
    assert f"1: Error: you/new at {sha}: was committed, but cannot be read back: you/new: asked for" in said


def test_a_killed_push_leaves_the_old_state_or_the_new(hub: HubServer, commands: Commands, tmp_path: Path) -> None:
    target = hub.repositories["you/new"] = Repository()
    target["config.json"] = b"{}"
    old, ended = dict(target), set()
    for number in range(1, 60, 2):
        seen: list[str] = []

        def kill(request: str, seen: list[str] = seen, number: int = number) -> None:
            if seen or "/repos/create" in request:
                seen.append(request)
                if len(seen) == number:
                    os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

        hub.watch = kill
        process = commands.start("convert", "them/llama", "--push", "you/new", "--force", log=tmp_path / "log")
        (tmp_path / "pid").write_text(str(process.pid))
        code = process.wait()
        state = "old" if dict(target) == old else "new"
        assert state == "old" or {"config.json", "model-00013-of-00013.safetensors"} <= set(target)
        ended.add((code, state))
        if state == "new":
            break
    assert ended >= {(-signal.SIGKILL, "old"), (-signal.SIGKILL, "new")}


#: Fault -> (part of the message, requests that it meets). Exit code 1 says that it may pass.
FAULTS: dict[str, tuple[str, str]] = {
    "header": ("model-00002-of-00004.safetensors: its header claims 200,000,000 bytes; at most 4,194,304 are read", ""),
    "index": ("names 10,000 files; at most 1,000 are read", ""),
    "absent": ("the index names files that are missing: 'model-00002-of-00004.safetensors'", ""),
    "short": ("asked for 16,384 bytes of model-0", "GET /objects/"),
    "whole": ("(no range). Run the command again", "GET /objects/"),
    "away": ("model-00002-of-00004.safetensors cannot be read from 127.0.0.1", "GET .*model-00002-of-00004"),
    "answer": ("safetensors cannot be read from localhost: peer closed connection", "GET /objects/"),
    "503": ("the Hub answered 503 (a bad day). Run the command again later", "GET .*model-00002-of-00004"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_bad_headers_and_servers_end_in_one_error(fault: str, hub: HubServer, commands: Commands) -> None:
    message, requests = FAULTS[fault]
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
    said = commands.refused("convert", "them/large", "--push", "you/new")
    assert (said[:3], message in said) == ("1: " if fault in ("away", "answer", "503") else "3: ", True), said
    assert hub.sent - sent < 1e8  # "whole": what the sockets held when the connections were closed
    assert "you/new" not in hub.repositories
    assert get_session() is session  # to close it would cut off what other threads read


def test_revisions_private_repositories_and_the_cache(hub: HubServer, commands: Commands) -> None:
    source = hub.repositories["you/source"] = hub.repositories.pop("them/llama")
    source.private = True
    source.tags["v1"] = hub.commit_id("you/source")
    source["config.json"] = b"{}"
    assert commands("inspect", "you/source").exit_code == 3
    command = ["inspect", "you/source", "--revision", "v1", "--json"]
    first = commands(*command)
    assert first.exit_code == 0, first.stderr
    assert json.loads(first.stdout)["revision"] == source.tags["v1"]
    assert commands(*command, token=None).exit_code == 3
    missing = commands(*command, offline=True)
    assert (missing.exit_code, "HF_HUB_OFFLINE" in missing.stderr) == (3, True)
    assert commands("convert", "you/source", "out", "--revision", "v1").exit_code == 0
    requests = len(hub.requests)
    assert commands(*command, offline=True).stdout == first.stdout
    dry = commands("convert", "you/source", "out", "--revision", "v1", "--force", "--dry-run", offline=True)
    assert dry.exit_code == 0, dry.stderr
    assert len(hub.requests) == requests
