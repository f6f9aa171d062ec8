"""Pushing a folder to a Hub, over HTTP, in one commit, or not at all."""

import json
import os
import re
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from checkpoints import save_checkpoint
from conftest import assert_answers, tiny_model
from hub_server import Commands, Repository
from transformers import AutoConfig

from resformer import push
from resformer.convert import CheckpointError, retrofit
from resformer.convert.bundling import auto_map, remote_code
from resformer.names import LISTING


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A retrofit, with the card that it writes."""
    save_checkpoint(tmp_path / "llama", num_hidden_layers=2)
    retrofit(tmp_path / "llama", tmp_path / "out", "resformer", verify="headers")
    return tmp_path / "out"


def test_push_is_one_commit_that_loads(checkpoint: Path, tmp_path: Path, commands: Commands) -> None:
    checkpoint = checkpoint.rename(tmp_path / "the output")
    for name in ("checkpoint-5/model.safetensors", "optimizer.pt", "x.tmp", ".git/config", "__pycache__/x.pyc", ".env"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(b"debris")
    curves = checkpoint / "runs" / "events.out.tfevents.1764200000.0"
    curves.parent.mkdir()
    curves.write_bytes(b"of TensorBoard")
    names = {path.name for path in checkpoint.iterdir() if path.is_file()} - {"optimizer.pt", "x.tmp", ".env", LISTING}
    names.add(f"runs/{curves.name}")
    dry = commands("push", checkpoint, "you/model", "--dry-run", "--tag", "v1.0")
    assert not commands.hub.requests
    assert "left behind   .env, .git/, __pycache__/, checkpoint-5/, optimizer.pt, x.tmp\n" in dry.stdout
    assert all(f"  {name}  " in dry.stdout for name in names)
    assert f"do it         resformer push '{checkpoint}' you/model --tag v1.0\n" in dry.stdout

    pushed = commands("push", checkpoint, "you/model", "--private", "--tag", "v1.0", "--message", "First")
    again = commands("push", checkpoint, "you/model", "--json")
    repository = commands.hub.repositories["you/model"]
    assert repository.private
    assert set(repository) == names | {".gitattributes"}
    assert repository["README.md"] == (checkpoint / "README.md").read_bytes()
    assert repository.messages == ["initial commit", "First"], "the second push changes nothing"
    sha = repository.tags["v1.0"]
    assert pushed.stdout.endswith(f"commit        {sha}\n{commands.hub.url}/you/model/commit/{sha}\n")
    assert "README.md does not name you/model" in pushed.stderr
    assert f"resformer card '{checkpoint}' --repository you/model" in pushed.stderr
    report = json.loads(again.stdout)
    assert report["commit"] == sha
    assert report["bytes"] == sum((checkpoint / name).stat().st_size for name in names)

    reverted = commands("revert", "you/model", tmp_path / "plain", "--revision", "v1.0", "--json")
    assert json.loads(reverted.stdout)["source"] == "you/model"
    plain, source = (tmp_path / name / "model.safetensors" for name in ("plain", "llama"))
    assert plain.read_bytes() == source.read_bytes()


def test_push_replaces_weights_that_would_be_loaded_instead(
    checkpoint: Path, tmp_path: Path, commands: Commands
) -> None:
    hub = commands.hub
    # An adapter's base model wins over both, and one model.safetensors over an index.
    (tmp_path / "llama" / "adapter_config.json").write_text("{}")
    old = hub.add("you/model", tmp_path / "llama")
    hub.add("you/same", checkpoint)
    same = commands("push", checkpoint, "you/same", "--json")
    branch = commands("push", checkpoint, "you/model", "--revision", "next", "--json")
    deleted = ["adapter_config.json", "model.safetensors"]
    assert sorted(json.loads(branch.stdout)["deleted"]) == deleted, branch.stderr
    assert json.loads(same.stdout)["deleted"] == [], same.stderr
    new = old.commits[old.branches["next"]]
    assert "model.safetensors" not in new
    assert {"model.safetensors.index.json", "model-00002-of-00002.safetensors"} <= set(new)
    assert "model.safetensors" in old, "main is as it was"


def test_push_proposes_a_commit_to_a_repository_of_others(checkpoint: Path, commands: Commands) -> None:
    target = commands.hub.repositories["them/model"] = Repository()
    target["config.json"] = b"{}"
    main = target.branches["main"]
    done = commands("push", checkpoint, "them/model", "--create-pr", "--json")
    assert done.exit_code == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["url"].endswith("/them/model/discussions/1")
    assert target.branches["main"] == main
    assert target.commits[target.branches["refs/pr/1"]]["config.json"] == (checkpoint / "config.json").read_bytes()
    commands.hub.fail("/commit/main", "answer")  # it was made, and its answer is lost
    assert commands("push", checkpoint, "them/model", "--create-pr").exit_code == 1
    assert sum(name.startswith("refs/pr/") for name in target.branches) == 2
    assert commands("push", checkpoint, "them/none", "--create-pr").exit_code == 1
    assert "leave --private, --tag" in commands("push", checkpoint, "them/model", "--create-pr", "--tag", "v1").stderr


def test_push_tries_again_and_never_commits_twice(checkpoint: Path, commands: Commands) -> None:
    hub = commands.hub
    hub.fail("POST /api/repos/create", "503")
    hub.fail("PUT /objects/", "request")
    hub.fail("POST .*/commit/main", "request")
    hub.fail("POST .*/commit/main", "answer")  # made, but nobody hears of it
    hub.fail("POST .*/tag/", "answer")
    done = commands("push", checkpoint, "you/model", "--tag", "v1", "--json")
    assert done.exit_code == 0, done.stderr
    repository = hub.repositories["you/model"]
    assert repository.messages == ["initial commit", "Upload resformer checkpoint"]
    assert json.loads(done.stdout)["commit"] == repository.branches["main"] == repository.tags["v1"]
    hub.fail("POST /api/repos/create", "answer", times=100)
    assert f"you/model: {hub.url} cannot be reached" in commands.refused("push", checkpoint, "you/model")


def test_push_says_in_one_line_what_to_do(checkpoint: Path, tmp_path: Path, commands: Commands) -> None:
    cards = {
        "broken": "---\na: [\n---\n",
        "licensed": "---\nlicense: nobody's\n---\nyou/x\n",
        "cardless": None,
        "torn": None,
    }
    for name, text in cards.items():
        shutil.copytree(checkpoint, name, ignore=shutil.ignore_patterns("*.safetensors*" if name == "torn" else ""))
        Path(name, "README.md").unlink() if text is None else Path(name, "README.md").write_text(text)
    public = commands.hub.add("you/public", tmp_path / "llama")
    public.tags["v1"] = public.branches["main"]
    before = dict(public)

    def answer(asked: str) -> str:
        how, _, words = asked.rpartition(": ")
        return commands.refused(*words.split(), token={"no token": None, "wrong token": "hf_wrong"}.get(how, "hf_test"))

    assert_answers("push", answer, hub=commands.hub.url)
    plain = commands.refused("push", tmp_path / "llama", "you/llama")  # `resformer card` is for connected models
    assert "there is no model card. Write one that begins with `---`, `library_name: transformers`, `---`." in plain
    assert dict(public) == before
    assert not commands.hub.asked("commit")


def test_what_is_pushed_is_what_was_checked(checkpoint: Path, commands: Commands) -> None:
    """Files that change after the check go as they were checked, or not at all."""
    hub, config = commands.hub, (checkpoint / "config.json").read_bytes()
    weights = checkpoint / "model-00001-of-00002.safetensors"
    changes: dict[str, Callable[[], object]] = {
        "config": lambda: (checkpoint / "config.json").write_bytes(config.replace(b"silu", b"relu")),
        "weights": lambda: weights.write_bytes(weights.read_bytes()[:-4] + b"\1\1\1\1"),
    }
    for name, change in changes.items():
        hub.watch = lambda request, change=change: "/repos/create" in request and change()
        done = commands("push", checkpoint, f"you/{name}")
        if done.exit_code == 0:
            assert hub.repositories[f"you/{name}"]["config.json"] == config
        else:
            assert (done.exit_code, "changed meanwhile" in done.stderr) == (3, True)
            assert set(hub.repositories[f"you/{name}"]) == {".gitattributes"}
        (checkpoint / "config.json").write_bytes(config)


def test_a_commit_that_holds_something_else_is_found(checkpoint: Path, commands: Commands) -> None:
    def change(request: str) -> None:
        if "/tree/" in request and len((files := commands.hub.repositories["you/new"]).messages) == 2:
            files.data["README.md"] = b"---\nlicense: mit\n---\n"

    commands.hub.watch = change
    said = commands.refused("push", checkpoint, "you/new")
    assert said.startswith("4: ")
    assert "these files are not what was sent: 'README.md'" in said


def test_a_commit_in_between_is_not_overwritten(checkpoint: Path, commands: Commands) -> None:
    hub = commands.hub
    target = hub.repositories["you/new"] = Repository()

    def commit(request: str) -> None:
        if "preupload" in request:
            target["notes.txt"] = b"by somebody else"

    hub.watch = commit
    said = commands.refused("push", checkpoint, "you/new")
    assert "somebody else committed to main meanwhile" in said
    assert "Nothing was committed." in said
    assert set(target) == {".gitattributes", "notes.txt"}


def test_a_commit_that_cannot_be_read_back_is_named(checkpoint: Path, commands: Commands) -> None:
    hub = commands.hub
    hub.watch = lambda request: "commit/main" in request and hub.fail("GET .*/tree/", "503", times=100)
    said = commands.refused("push", checkpoint, "you/new")
    assert f"1: Error: you/new at {hub.commit_id('you/new')}: was committed, but cannot be read back: " in said


def test_a_killed_push_leaves_the_old_state_or_the_new(checkpoint: Path, commands: Commands, tmp_path: Path) -> None:
    target = commands.hub.repositories["you/new"] = Repository()
    target["config.json"] = b"{}"
    old = dict(target)
    for moment in ("/repos/create", "/preupload/", "PUT /objects/", "/commit/main", "/tree/[0-9a-f]{40}"):

        def kill(request: str, moment: str = moment) -> None:
            if re.search(moment, request):
                os.kill(int((tmp_path / "pid").read_text()), signal.SIGKILL)

        commands.hub.watch = kill
        process = commands.start("push", checkpoint, "you/new", log=tmp_path / "log")
        (tmp_path / "pid").write_text(str(process.pid))
        assert process.wait() == -signal.SIGKILL, moment
        assert dict(target) == old or {"config.json", "model-00002-of-00002.safetensors"} <= set(target)
    assert dict(target) != old


def test_links_out_of_the_folder_are_not_shared(checkpoint: Path, tmp_path: Path) -> None:
    """Not even those of weights, which other commands follow."""
    name = "model-00001-of-00002.safetensors"
    (checkpoint / name).rename(tmp_path / "secret")
    (checkpoint / name).symlink_to(tmp_path / "secret")
    with pytest.raises(CheckpointError, match=f"{name}: is a link out of its folder"):
        push(checkpoint, "you/x", dry_run=True)


def test_bundle_is_pushed_with_the_code_that_loads_it_and_all_that_a_push_takes(
    checkpoint: Path, commands: Commands
) -> None:
    shutil.rmtree(checkpoint)
    tiny_model("resformer").save_pretrained(checkpoint)
    (checkpoint / "README.md").write_text("---\nlicense: mit\n---\nIt loads you/flat.\n")
    more = ["metrics.json", "losses.png", "old_module.py", "modeling_resformer.py", "x.log"]
    for name in more:
        (checkpoint / name).write_text("raise SystemExit" if name.endswith(".py") else "{}")
    folder = sorted(checkpoint.rglob("*"))
    dry = commands("push", checkpoint, "you/flat", "--bundle", "--json", "--dry-run")
    pushed = commands("push", checkpoint, "you/flat", "--bundle", "--json")
    assert "without trust_remote_code=True" in pushed.stderr
    repository, report = commands.hub.repositories["you/flat"], json.loads(pushed.stdout)
    assert report["left_behind"] == ["old_module.py", "x.log"]
    assert {path.name for path in folder} - {"old_module.py", "x.log", LISTING} <= {
        name.rpartition("/")[2] for name in repository
    }
    assert report["files"] == {name: len(repository[name]) for name in sorted(repository) if name[:4] != ".git"}
    assert json.loads(dry.stdout)["files"] == report["files"]
    assert sorted(checkpoint.rglob("*")) == folder
    config = AutoConfig.from_pretrained(checkpoint)
    assert json.loads(repository["config.json"])["auto_map"] == auto_map(config)
    code = remote_code(config)
    assert {name: repository[name].decode() for name in code} == code
