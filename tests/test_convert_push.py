"""Retrofits made on the Hub: the server copies the weights, one commit holds the rest."""

import hashlib
import json
import os
import signal
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import command_server
import pytest
import torch
from checkpoints import save_checkpoint, sparse_checkpoint
from conftest import TinyModel, others_slow
from hub_server import HubServer, Repository, Sparse
from safetensors.torch import load_file, save_file
from test_convert_fp8 import save_fp8
from test_hub import COMMANDS
from transformers import AutoModelForCausalLM

from resformer.convert import inspect, retrofit
from resformer.convert.logits import compare_logits
from resformer.files import LISTING

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
#: As HF_HUB_OFFLINE=1, which is read when huggingface_hub is imported.
OFFLINE = "import huggingface_hub.constants; huggingface_hub.constants.HF_HUB_OFFLINE = True"


class Commands:
    """Runs commands against a loopback Hub, which other tests of this file have used before."""

    def __init__(self, folder: Path, hub: HubServer):
        self.folder, self.hub = folder, hub
        (folder / "work").mkdir()
        self.home = folder / "home"
        self.env = {**os.environ, **hub.environment(self.home, token=None)}

    def __call__(self, *words: object, token: str | None = "hf_test", code: str = COMMANDS) -> tuple[int, str, str]:
        """Exit code, stdout and stderr."""
        text = json.dumps([[token, *map(str, words)]])
        done = command_server.run("-c", code, text, cwd=self.folder / "work", env=self.env)
        assert done.returncode == 0, done.stderr
        return tuple(json.loads(done.stdout)[0])

    def start(self, *words: object) -> command_server.Run:
        text = json.dumps([["hf_test", *map(str, words)]])
        return command_server.Run(
            "-c", COMMANDS, text, cwd=self.folder / "work", env=self.env, log=self.folder / "work" / "log"
        )


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    folder = tmp_path_factory.mktemp("push")
    save_checkpoint(folder / "llama", shards=True)
    (folder / "llama" / "README.md").write_text(CARD.format("apache-2.0"))
    (folder / "llama" / "License.md").write_text("Do as you like.")
    with HubServer(copies="made") as hub:
        yield Commands(folder, hub)


@pytest.fixture
def commands(shared: Commands) -> Iterator[Commands]:
    """With a source, them/llama."""
    shared.hub.repositories.clear()
    shared.hub.add("them/llama", shared.folder / "llama")
    yield shared
    shared.hub.copies, shared.hub.watch = "made", lambda request: None
    shared.hub._faults.clear()


def large_source(hub: HubServer, **changes: bytes) -> Repository:
    repository = hub.repositories["them/large"] = Repository()
    files = sparse_checkpoint(4, **LARGE)
    hub.store(repository, {**files, "README.md": CARD.format("mit").encode(), **changes})
    return repository


def test_the_result_is_that_of_a_conversion_in_one_commit(commands: Commands, tmp_path: Path) -> None:
    hub = commands.hub
    local = retrofit(commands.folder / "llama", tmp_path / "out", verify="headers", progress=False)
    code, out, err = commands("convert", "them/llama", "--push", "you/new", "--json")
    assert code == 0, err
    new = hub.repositories["you/new"]
    files = {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir() if path.name != LISTING}
    assert set(new) == {*files, ".gitattributes"}
    described = {"README.md", "resformer_conversion.json", "config.json"}
    own = {"base_model": {"name": "them/llama", "revision": hub.commit_id("them/llama"), "license": "apache-2.0"}}
    assert json.loads(new["config.json"][:]) == {**json.loads(files["config.json"]), **own}
    assert {name: new[name] for name in files.keys() - described} == {
        name: content for name, content in files.items() if name not in described
    }
    assert new.messages == ["initial commit", f"Retrofit of them/llama at {hub.commit_id('them/llama')[:7]}"]
    report = json.loads(out)
    assert (report["commit"], report["output"]) == (hub.commit_id("you/new"), "you/new")
    assert (report["verified"], report["exact"]) == ("copies", True)
    assert report["carried_files"] == local.carried_files
    carried = [f"model-{number:05}-of-00013.safetensors" for number in range(1, 13)]
    assert report["transfer"]["copied_by_hub"] == sum(len(new[name]) for name in carried)
    card = bytes(new["README.md"][:]).decode()
    for stated in ("license: apache-2.0", "base_model: them/llama", 'from_pretrained("you/new")', "copied by the Hub"):
        assert stated in card
    record = json.loads(new["resformer_conversion.json"][:])
    assert record["files"] == {
        name: {
            **file,
            "tensors": record["files"][name]["tensors"],
            "sha256": hashlib.sha256(new[name][:]).hexdigest(),
        }
        for name, file in json.loads(files["resformer_conversion.json"])["files"].items()
    }
    fetched = json.loads(commands("convert", "them/llama", "fetched", "--json")[1])
    assert fetched["left_behind"] == report["left_behind"] == [".gitattributes", "README.md"]
    assert (fetched["revision"], fetched["logits"]["identical"]) == (hub.commit_id("them/llama"), True)
    assert (commands.folder / "work" / "fetched" / "License.md").exists()
    again = commands("convert", "them/llama", "--push", "you/new", "--json")
    assert again[0] == 1
    assert "Replace its files with --force" in again[2]
    new["tokenizer.model"] = b"of another model"
    replaced = commands("convert", "them/llama", "--push", "you/new", "--json", "--force")
    assert replaced[0] == 0, replaced[2]
    assert set(new) == {*files, ".gitattributes"}


def test_no_weight_moves_through_this_machine(commands: Commands) -> None:
    hub = commands.hub
    source = large_source(hub)
    assert sum(map(len, source.values())) > 4e9
    for words in (
        ["inspect", "them/large"],
        ["convert", "them/large", "out", "--dry-run"],
        ["convert", "them/large", "--push", "you/large"],
        ["verify", "them/large", "you/large", "--verify", "headers"],
    ):
        before = hub.sent, hub.received
        code, out, err = commands(*words)
        assert code == (4 if words[0] == "verify" else 0), err  # the bytes were not compared
        assert hub.sent - before[0] < 1e6, words
        assert hub.received - before[1] < 1e6, words
        assert "out" not in words or "4.2 GB downloaded" in out
    assert not [path for path in commands.folder.rglob("*.safetensors") if "large" in str(path)]
    new = hub.repositories["you/large"]
    assert [new[f"model-{n:05}-of-00005.safetensors"] for n in range(1, 5)] == [
        source[f"model-{n:05}-of-00004.safetensors"] for n in range(1, 5)
    ]


@pytest.mark.parametrize(
    ("reason", "words", "message"),
    [
        ("region", [], "different storage regions"),
        ("server", [], "it answered 404"),
        ("no xet", [], "stores with Xet"),
        ("made", ["--method", "svformer", "--lossy"], "has to be written anew"),
        ("made", ["--verify", "logits"], "comparing logits takes the weights"),
    ],
)
def test_where_the_hub_cannot_copy_nothing_moves(
    reason: Any, words: list[str], message: str, commands: Commands
) -> None:
    hub = commands.hub
    hub.copies = reason
    code, _, err = commands("convert", "them/llama", "--push", "you/new", "--verify", "headers", *words)
    assert code == 1
    assert message in err
    assert "Nothing was committed. Convert to a folder" in err
    assert "then: resformer push FOLDER you/new." in err
    assert "you/new" not in hub.repositories or hub.repositories["you/new"].messages == ["initial commit"]


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
    gated: Any, private: bool, license: str, reason: str, commands: Commands
) -> None:
    hub = commands.hub
    source = hub.repositories["you/source"] = hub.repositories.pop("them/llama")
    source["README.md"] = CARD.format(license).encode()
    source.gated, source.private = gated, private
    refused = commands("convert", "you/source", "--push", "you/copy")
    assert refused[0] == 3
    assert reason in refused[2]
    assert "--accept-license" in refused[2]
    assert "you/copy" not in hub.repositories
    if gated:
        done = commands("convert", "you/source", "--push", "you/copy", "--accept-license")
        assert done[0] == 0, done[2]
        copy = hub.repositories["you/copy"]
        assert copy.gated == "manual"
        assert "The source is gated (manual), and so is this repository" in bytes(copy["README.md"][:]).decode()
    if private:
        done = commands("convert", "you/source", "--push", "you/copy", "--private")
        assert done[0] == 0, done[2]
        assert hub.repositories["you/copy"].private


def test_what_cannot_be_pushed_is_refused_in_one_line(commands: Commands, tmp_path: Path) -> None:
    hub = commands.hub
    save_fp8(tmp_path / "fp8", torch.float32)
    hub.add("them/fp8", tmp_path / "fp8")
    forecast = json.loads(commands("convert", "them/fp8", "out", "--dry-run", "--json")[1])["transfer"]
    assert forecast["downloaded"] == (tmp_path / "fp8" / "model.safetensors").stat().st_size
    before = hub.commit_id("them/llama")
    for words, token, code, message in (
        (["them/llama", "--push", "other/x"], "hf_test", 1, "other/x: this token may not write there"),
        (["them/llama", "--push", "you/x"], None, 1, "you/x: no token. Run `hf auth login`"),
        (["them/llama", "--push", "x"], "hf_test", 2, "expected OWNER/NAME"),
        (["them/llama", "--push", "you/a b", "--dry-run"], "hf_test", 2, "'you/a b'"),
        (["them/fp8", "--push", "you/x"], "hf_test", 3, "that are not dequantised"),
        (["them/llama", "--push", "them/llama"], "hf_test", 3, "is the source"),
        (["them/llama", "out", "--push", "you/x"], "hf_test", 2, "Give either"),
        (["them/llama"], "hf_test", 2, "Give either"),
        ([commands.folder / "llama", "--push", "you/x"], "hf_test", 3, "only safetensors on the Hub"),
    ):
        done = commands("convert", *words, token=token)
        assert done[0] == code, done
        assert message in done[2]
        assert len([line for line in done[2].splitlines() if line.startswith("Error: ")]) == 1
    assert hub.repositories.keys() == {"them/llama", "them/fp8"}
    assert hub.commit_id("them/llama") == before


def test_headers_on_the_hub_say_what_a_folder_says(commands: Commands, tiny_model: TinyModel, tmp_path: Path) -> None:
    """Coefficients that were trained are read too."""
    tiny_model("resformer-denseformer").save_pretrained(tmp_path / "trained", max_shard_size="20KB")
    commands.hub.add("you/trained", tmp_path / "trained")
    code, out, err = commands("inspect", "you/trained", "--json")
    assert code == 0, err
    expected = {**inspect(tmp_path / "trained").as_dict(), "source": "you/trained"}
    assert json.loads(out) == {**expected, "revision": commands.hub.commit_id("you/trained")}
    assert expected["value_mixing_matrix"] is not None
    assert expected["depth_mixing_matrix"] is not None


def test_a_head_that_is_tied_in_name_only_loads_as_the_sources(commands: Commands, tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama", tie_word_embeddings=True)
    (tmp_path / "llama" / "README.md").write_text(CARD.format("mit"))
    weights = load_file(tmp_path / "llama" / "model.safetensors")
    weights["lm_head.weight"] = torch.randn_like(weights["model.embed_tokens.weight"])
    save_file(weights, tmp_path / "llama" / "model.safetensors", {"format": "pt"})
    commands.hub.add("them/untied", tmp_path / "llama")
    code, _, err = commands("convert", "them/untied", "--push", "you/new")
    assert code == 0, err
    assert "they were not compared" in err
    (tmp_path / "new").mkdir()
    for name, content in commands.hub.repositories["you/new"].items():
        (tmp_path / "new" / name).write_bytes(content[:])
    one, other = (AutoModelForCausalLM.from_pretrained(tmp_path / name) for name in ("llama", "new"))
    assert not torch.equal(one.lm_head.weight, one.model.embed_tokens.weight)
    assert compare_logits(one, other).identical


def test_a_commit_in_between_is_not_overwritten(commands: Commands) -> None:
    hub = commands.hub
    target = hub.repositories["you/new"] = Repository()

    def commit(request: str) -> None:
        if "duplicate" in request:
            target["notes.txt"] = b"by somebody else"

    hub.watch = commit
    code, _, err = commands("convert", "them/llama", "--push", "you/new")
    assert code == 1
    assert "somebody else committed to main meanwhile" in err
    assert set(target) == {".gitattributes", "notes.txt"}


def test_a_commit_that_holds_something_else_is_found(commands: Commands) -> None:
    hub = commands.hub

    def change(request: str) -> None:
        if "/api/models/you/new/tree/" in request and len(hub.repositories["you/new"].messages) == 2:
            files = hub.repositories["you/new"].commits[hub.commit_id("you/new")]
            files["model-00003-of-00013.safetensors"] = files["model-00002-of-00013.safetensors"]

    hub.watch = change
    code, _, err = commands("convert", "them/llama", "--push", "you/new")
    assert code == 4
    assert "these files are not what was sent: 'model-00003-of-00013.safetensors'" in err


def test_a_commit_that_cannot_be_read_back_is_named(commands: Commands) -> None:
    hub = commands.hub
    hub.watch = lambda request: "commit/main" in request and hub.fail("GET /objects/", "short")
    code, _, err = commands("convert", "them/llama", "--push", "you/new")
    assert code == 1
    assert f"you/new at {hub.commit_id('you/new')}: was committed, but cannot be read back: you/new: asked for" in err


def test_the_answer_to_a_commit_may_be_lost(commands: Commands) -> None:
    hub = commands.hub
    hub.fail("POST .*/commit/main", "answer")
    code, out, err = commands("convert", "them/llama", "--push", "you/new", "--json")
    assert code == 0, err
    new = hub.repositories["you/new"]
    assert len(new.messages) == 2, "committed once"
    assert json.loads(out)["commit"] == new.branches["main"]


def test_a_killed_push_leaves_the_old_state_or_the_new(commands: Commands) -> None:
    hub = commands.hub
    target = hub.repositories["you/new"] = Repository()
    target["config.json"] = b"{}"
    old = dict(target)
    command = ["convert", "them/llama", "--push", "you/new", "--force"]
    ended = set()
    for number in range(1, 60, 2):
        seen: list[str] = []

        def kill(request: str, seen: list[str] = seen, number: int = number) -> None:
            if seen or "/repos/create" in request:
                seen.append(request)
                if len(seen) == number:
                    os.kill(int((commands.folder / "work" / "pid").read_text()), signal.SIGKILL)

        hub.watch = kill
        process = commands.start(*command)
        (commands.folder / "work" / "pid").write_text(str(process.pid))
        code = process.wait()
        state = "old" if dict(target) == old else "new"
        assert state == "old" or {"config.json", "model-00013-of-00013.safetensors"} <= set(target)
        ended.add((code, state))
        if state == "new":
            break
    assert ended >= {(-signal.SIGKILL, "old"), (-signal.SIGKILL, "new")}


#: Fault -> (part of the message, requests that it meets).
FAULTS: dict[str, tuple[str, str]] = {
    "header": ("model-00002-of-00004.safetensors: its header claims 200,000,000 bytes; at most 4,194,304 are read", ""),
    "index": ("names 10,000 files; at most 1,000 are read", ""),
    "absent": ("the index names files that are missing: 'model-00002-of-00004.safetensors'", ""),
    "short": ("asked for 16,384 bytes of model-0", "GET /objects/"),
    "whole": ("the server answers 200 with no range", "GET /objects/"),
    "away": ("model-00002-of-00004.safetensors cannot be read from 127.0.0.1", "GET .*model-00002-of-00004"),
    "status": ("503", "GET .*model-00002-of-00004"),
}


@pytest.mark.parametrize("fault", others_slow(FAULTS, ["header", "index", "absent", "short", "whole"]))
def test_bad_headers_and_servers_end_in_one_error(fault: str, commands: Commands) -> None:
    hub, (message, requests) = commands.hub, FAULTS[fault]
    source = large_source(hub)
    if fault == "header":
        head = Sparse((200_000_000).to_bytes(8, "little") + b"{", 10**9, "0" * 64)
        hub.store(source, {"model-00002-of-00004.safetensors": head})
    elif fault == "index":
        names = {f"model.layers.{n}.x": f"part-{n}.safetensors" for n in range(10_000)}
        source["model.safetensors.index.json"] = json.dumps({"weight_map": names}).encode()
    elif fault == "absent":
        del source["model-00002-of-00004.safetensors"]
    else:
        hub.fail(requests, fault, 100)  # type: ignore[arg-type]
    sent = hub.sent
    code, out, err = commands("convert", "them/large", "--push", "you/new")
    assert (code, out) == (3, "")
    assert message in err
    assert len([line for line in err.splitlines() if line.startswith("Error: ")]) == 1
    assert hub.sent - sent < 1e8  # "whole": what the sockets held when the connections were closed
    assert "you/new" not in hub.repositories


def test_revisions_private_repositories_and_the_cache(commands: Commands) -> None:
    hub = commands.hub
    source = hub.repositories["you/source"] = hub.repositories.pop("them/llama")
    source.private = True
    source.tags["v1"] = hub.commit_id("you/source")
    source["config.json"] = b"{}"
    assert commands("inspect", "you/source")[0] == 3
    first = commands("inspect", "you/source", "--revision", "v1", "--json")
    assert first[0] == 0, first[2]
    assert json.loads(first[1])["revision"] == source.tags["v1"]
    refused = commands("inspect", "you/source", "--revision", "v1", token=None)
    assert refused[0] == 3
    offline = partial(commands, code=OFFLINE + COMMANDS)
    missing = offline("inspect", "you/source", "--revision", "v1")
    assert missing[0] == 3
    assert "HF_HUB_OFFLINE" in missing[2]
    assert commands("convert", "you/source", "out", "--revision", "v1")[0] == 0
    requests = len(hub.requests)
    assert offline("inspect", "you/source", "--revision", "v1", "--json")[:2] == first[:2]
    assert offline("convert", "you/source", "out", "--revision", "v1", "--force", "--dry-run")[0] == 0
    assert len(hub.requests) == requests
