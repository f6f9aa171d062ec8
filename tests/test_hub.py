"""Pushing to a Hub and loading from it, over HTTP, with the real huggingface_hub in processes of their own."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from checkpoints import save_checkpoint
from hub_server import HubServer

from resformer.convert import retrofit
from resformer.files import LISTING

TESTS = Path(__file__).parent

PRELUDE = """
import json, sys
import torch
import transformers
from huggingface_hub import HfApi
from transformers import AutoModelForCausalLM, AutoTokenizer
from checkpoints import SIZES, byte_tokenizer
from resformer import METHODS, ResFormerConfig, ResFormerForCausalLM

TOKENS = torch.arange(1, 17).reshape(2, 8)

def tiny(method="resformer", seed=0, **fields):
    torch.manual_seed(seed)
    model = ResFormerForCausalLM(ResFormerConfig.for_method(method, **{**SIZES, **fields})).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.2)
    return model

def logits(model):
    with torch.no_grad():
        return model(TOKENS).logits

def load(*arguments, **options):
    return AutoModelForCausalLM.from_pretrained(*arguments, **options)
"""

#: Runs commands in one process, each with its own token; answers with exit codes, outputs and words.
COMMANDS = """
import json, sys
from typer.testing import CliRunner
from resformer.cli import app

done = []
for token, *arguments in json.loads(sys.argv[1]):
    sys.argv = ["resformer", *arguments]
    result = CliRunner().invoke(app, arguments, env={"HF_TOKEN": token})
    done.append([result.exit_code, result.stdout, result.stderr])
print(json.dumps(done))
"""


def run(hub: HubServer, home: Path, code: str, *arguments: str, **variables: str) -> str:
    """What a script prints that takes `hub` for the Hub; `HF_HOME` is `home`."""
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join([str(TESTS), os.environ.get("PYTHONPATH", "")]),
        **hub.environment(home, **variables),
    }
    command = [sys.executable, "-c", code, *arguments]
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def resformer_commands(hub: HubServer, home: Path, *commands: list[object]) -> list[tuple[int, str, str]]:
    """Exit code, stdout and stderr of `[token, argument, ...]`, each."""
    texts = [[None if word is None else str(word) for word in command] for command in commands]
    return [tuple(done) for done in json.loads(run(hub, home, COMMANDS, json.dumps(texts), token=None))]


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A retrofit, with the card that it writes."""
    save_checkpoint(tmp_path / "llama")
    retrofit(tmp_path / "llama", tmp_path / "out", "resformer", verify="headers")
    return tmp_path / "out"


def test_every_method_and_revision_loads_with_the_same_logits(tmp_path: Path) -> None:
    with HubServer() as hub:
        code = """
for method in METHODS:
    model = tiny(method)
    model.push_to_hub(f"you/{method}", max_shard_size="20KB")
    assert torch.equal(logits(load(f"you/{method}")), logits(model)), method

api, first, second, third = HfApi(), *(tiny(seed=seed) for seed in (1, 2, 3))
sha = first.push_to_hub("you/revised").oid
byte_tokenizer().push_to_hub("you/revised")
api.create_tag("you/revised", tag="v1.0")
second.push_to_hub("you/revised")
third.push_to_hub("you/revised", revision="experiment")
for revision, model in {None: second, "main": second, "v1.0": first, sha: first, "experiment": third}.items():
    loaded = load("you/revised", **({} if revision is None else {"revision": revision}))
    assert torch.equal(logits(loaded), logits(model)), revision
assert AutoTokenizer.from_pretrained("you/revised", revision="v1.0")("ab").input_ids == byte_tokenizer()("ab").input_ids
"""
        run(hub, tmp_path, PRELUDE + code)
        assert set(hub.repositories["you/revised"].branches) == {"main", "experiment"}
        assert hub.asked("PUT /objects/")


@pytest.mark.slow
def test_trainer_pushes_every_save(tmp_path: Path) -> None:
    with HubServer() as hub:
        code = """
from transformers import Trainer, TrainerCallback, TrainingArguments

class StepsTakeLongerThanPushes(TrainerCallback):
    def on_save(self, *arguments, **options):
        trainer.push_in_progress.wait_until_done()

model = tiny()
rows = [{"input_ids": list(range(n, n + 8)), "labels": list(range(n, n + 8))} for n in range(1, 5)]
trainer = Trainer(
    model=model,
    args=TrainingArguments(
        "trained", max_steps=2, save_steps=1, report_to="none", use_cpu=True, per_device_train_batch_size=2,
        push_to_hub=True, hub_model_id="you/trained", hub_strategy="every_save",
    ),
    train_dataset=rows,
    processing_class=byte_tokenizer(),
    callbacks=[StepsTakeLongerThanPushes()],
)
trainer.train()
trainer.push_to_hub()
assert torch.equal(logits(load("you/trained")), logits(model.eval()))
"""
        run(hub, tmp_path, PRELUDE + code)
        messages = hub.repositories["you/trained"].messages
        assert {"Training in progress, step 1", "Training in progress, step 2", "End of training"} <= set(messages)
        assert {"README.md", "config.json", "model.safetensors"} <= set(hub.repositories["you/trained"])


def test_push_is_one_commit_that_loads(checkpoint: Path, tmp_path: Path) -> None:
    for name in ("checkpoint-5/model.safetensors", "optimizer.pt", "x.tmp", ".git/config", "__pycache__/x.pyc", ".env"):
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_bytes(b"debris")
    with HubServer() as hub:
        dry, pushed, again, converted = resformer_commands(
            hub,
            tmp_path,
            ["hf_test", "push", checkpoint, "you/model", "--dry-run", "--tag", "v1.0"],
            ["hf_test", "push", checkpoint, "you/model", "--private", "--tag", "v1.0", "--message", "First"],
            ["hf_test", "push", checkpoint, "you/model", "--json"],
            ["hf_test", "revert", "you/model", tmp_path / "plain", "--revision", "v1.0", "--json"],
        )
        names = {path.name for path in checkpoint.iterdir() if path.is_file()} - {"optimizer.pt", "x.tmp", ".env"}
        names.discard(LISTING)
        assert dry[0] == pushed[0] == again[0] == 0, dry[2] + pushed[2] + again[2]
        left_behind = "left behind   .env, .git/, __pycache__/, checkpoint-5/, optimizer.pt, x.tmp\n"
        assert left_behind in dry[1]
        assert all(f"  {name}  " in dry[1] for name in names)
        assert f"do it         resformer push {checkpoint} you/model --tag v1.0\n" in dry[1]

        repository = hub.repositories["you/model"]
        assert repository.private
        assert set(repository) == names | {".gitattributes"}
        assert repository["README.md"] == (checkpoint / "README.md").read_bytes()
        assert repository.messages == ["initial commit", "First"], "the second push changes nothing"
        sha = repository.tags["v1.0"]
        assert pushed[1].endswith(f"commit        {sha}\n{hub.url}/you/model/commit/{sha}\n")
        assert "README.md does not name you/model" in pushed[2]
        assert f"resformer card {checkpoint} --repository you/model" in pushed[2]
        report = json.loads(again[1])
        assert report["commit"] == sha
        assert report["bytes"] == sum((checkpoint / name).stat().st_size for name in names)

        assert converted[0] == 0, converted[2]
        assert json.loads(converted[1])["source"] == "you/model"
        assert (tmp_path / "plain" / "model.safetensors").read_bytes() == (
            tmp_path / "llama" / "model.safetensors"
        ).read_bytes()


@pytest.mark.slow
def test_push_replaces_weights_that_would_be_loaded_instead(checkpoint: Path, tmp_path: Path) -> None:
    with HubServer(tokens={"hf_test": "you", "hf_other": "other"}) as hub:
        # An adapter's base model wins over both, and one model.safetensors over an index.
        (tmp_path / "llama" / "adapter_config.json").write_text("{}")
        old = hub.add("you/model", tmp_path / "llama")
        old[".eval_results/old.yaml"] = b"- value: 1"  # of the old weights
        hub.add("you/same", checkpoint)[".eval_results/kept.yaml"] = b"- value: 1"  # of these weights
        same, branch, request, foreign = resformer_commands(
            hub,
            tmp_path,
            ["hf_test", "push", checkpoint, "you/same", "--json"],
            ["hf_test", "push", checkpoint, "you/model", "--revision", "next", "--json"],
            ["hf_test", "push", checkpoint, "you/model", "--create-pr", "--json"],
            ["hf_other", "push", checkpoint, "you/model", "--create-pr", "--json"],
        )
        assert sorted(json.loads(branch[1])["deleted"]) == [
            ".eval_results/old.yaml",
            "adapter_config.json",
            "model.safetensors",
        ], branch[2]
        assert json.loads(same[1])["deleted"] == [], same[2]
        new = old.commits[old.branches["next"]]
        assert "model.safetensors" not in new
        assert {"model.safetensors.index.json", "model-00002-of-00002.safetensors"} <= set(new)
        assert "model.safetensors" in old, "main is as it was"
        for number, done in enumerate((request, foreign), start=1):
            report = json.loads(done[1])
            assert report["revision"] == f"refs/pr/{number}"
            assert report["url"] == f"{hub.url}/you/model/discussions/{number}"
            assert old.commits[old.pull_requests[f"refs/pr/{number}"]] == new


@pytest.mark.slow
def test_push_tries_again_and_never_commits_twice(checkpoint: Path, tmp_path: Path) -> None:
    with HubServer() as hub:
        hub.fail("POST /api/repos/create", "status")
        hub.fail("PUT /objects/", "request")
        hub.fail("POST .*/commit/main", "request")
        hub.fail("POST .*/commit/main", "answer")  # made, but nobody hears of it
        hub.fail("POST .*/tag/", "answer")
        ((code, out, err),) = resformer_commands(
            hub, tmp_path, ["hf_test", "push", checkpoint, "you/model", "--tag", "v1", "--json"]
        )
        assert code == 0, err
        repository = hub.repositories["you/model"]
        assert repository.messages == ["initial commit", "Upload resformer checkpoint"]
        assert json.loads(out)["commit"] == repository.branches["main"] == repository.tags["v1"]
        (checkpoint / "LICENSE").touch()
        hub.fail("POST .*/commit/main", "answer")
        ((code, _, err),) = resformer_commands(
            hub, tmp_path, ["hf_test", "push", checkpoint, "you/model", "--create-pr"]
        )
        assert code == 1
        assert "The pull request may have been opened: look before" in err
        assert len(repository.pull_requests) == 1


@pytest.mark.slow
def test_push_says_in_one_line_what_to_do(checkpoint: Path, tmp_path: Path) -> None:
    bare, broken, strange = (tmp_path / name for name in ("bare", "broken", "strange"))
    for folder, card in ((bare, None), (broken, "---\na: [\n---\n"), (strange, "---\nlicense: nobody's\n---\nyou/x\n")):
        folder.mkdir()
        for path in checkpoint.iterdir():
            if path.name != "README.md":
                (folder / path.name).hardlink_to(path)
        if card is not None:
            (folder / "README.md").write_text(card)
    torn = tmp_path / "torn"
    torn.mkdir()
    (torn / "config.json").write_bytes((checkpoint / "config.json").read_bytes())
    with HubServer() as hub:
        hub.add("you/public", tmp_path / "llama")
        hub.repositories["you/public"].tags["v1"] = hub.commit_id("you/public")
        before = dict(hub.repositories["you/public"])
        cases: list[tuple[list[Any], int, str]] = [
            ([None, "push", checkpoint, "you/x"], 1, "you/x: no token. Run `hf auth login`"),
            (["hf_wrong", "push", checkpoint, "you/x"], 1, "you/x: the Hub does not accept this token"),
            (["hf_test", "push", checkpoint, "other/x"], 1, "other/x: this token may not write there"),
            (["hf_test", "push", checkpoint, "you/public", "--private"], 1, "you/public: exists and is public."),
            (["hf_test", "push", checkpoint, "you/public", "--tag", "v1"], 1, "has a tag v1 already"),
            (["hf_test", "push", checkpoint, "a/b/c"], 2, "'repo_name' or 'namespace/repo_name': 'a/b/c'"),
            (["hf_test", "push", checkpoint, "you/x", "--create-pr", "--tag", "v1"], 2, "neither a revision nor a tag"),
            (["hf_test", "push", tmp_path / "nothing", "you/x"], 3, "expected a checkpoint folder"),
            (["hf_test", "push", torn, "you/x"], 3, f"{torn}"),
            (["hf_test", "push", bare, "you/x"], 3, "there is no model card"),
            (["hf_test", "push", broken, "you/x"], 3, "its metadata cannot be read"),
            (["hf_test", "push", strange, "you/x"], 3, '"license" must be one of'),
        ]
        for (words, code, message), done in zip(
            cases, resformer_commands(hub, tmp_path, *(case[0] for case in cases)), strict=True
        ):
            assert done[0] == code, (words, done)
            assert done[1] == ""
            assert message in done[2]
            assert len([line for line in done[2].splitlines() if line.startswith("Error: ")]) == 1
            assert "Traceback" not in done[2]
        assert dict(hub.repositories["you/public"]) == before
        assert not hub.asked("commit")
    ((code, _, err),) = resformer_commands(hub, tmp_path, ["hf_test", "push", checkpoint, "you/x"])  # it is closed
    assert code == 1
    assert f"you/x: {hub.url} cannot be reached" in err


@pytest.mark.slow
@pytest.mark.parametrize("name", ["notes.txt", "model-00001-of-00002.safetensors"])
def test_links_out_of_the_folder_are_not_shared(name: str, checkpoint: Path, tmp_path: Path) -> None:
    (checkpoint / name).touch()
    (checkpoint / name).rename(tmp_path / "secret")
    (checkpoint / name).symlink_to(tmp_path / "secret")
    with HubServer() as hub:
        ((code, _, err),) = resformer_commands(hub, tmp_path, ["hf_test", "push", checkpoint, "you/x", "--dry-run"])
        assert code == 3
        assert f"{name}: is a link out of its folder" in err


@pytest.mark.slow
def test_bundle_is_pushed_with_the_code_that_loads_it_and_all_that_a_push_takes(
    checkpoint: Path, tmp_path: Path
) -> None:
    more = ["metrics.json", "losses.png", ".eval_results/gsm8k.yaml", "old_module.py", "modeling_resformer.py", "x.log"]
    for name in more:
        (checkpoint / name).parent.mkdir(exist_ok=True)
        (checkpoint / name).write_text("raise SystemExit" if name.endswith(".py") else "{}")
    folder = sorted(checkpoint.rglob("*"))
    with HubServer() as hub:
        dry, pushed = resformer_commands(
            hub,
            tmp_path,
            ["hf_test", "push", checkpoint, "you/flat", "--bundle", "--json", "--dry-run"],
            ["hf_test", "push", checkpoint, "you/flat", "--bundle", "--json"],
        )
        assert pushed[0] == 0, pushed[2]
        assert "without trust_remote_code=True" in pushed[2]
        repository, report = hub.repositories["you/flat"], json.loads(pushed[1])
        assert report["left_behind"] == ["old_module.py", "x.log"]
        assert {path.name for path in folder} - {"old_module.py", "x.log", ".eval_results", LISTING} <= {
            name.rpartition("/")[2] for name in repository
        }
        assert report["files"] == {name: len(repository[name]) for name in sorted(repository) if name[:4] != ".git"}
        assert json.loads(dry[1])["files"] == report["files"]
        code = """
import sys
from transformers import AutoModelForCausalLM
model = AutoModelForCausalLM.from_pretrained("you/flat", trust_remote_code=True)
assert "resformer" not in sys.modules
assert type(model).__module__.startswith("transformers_modules.")
"""
        run(hub, tmp_path, code)
    assert sorted(checkpoint.rglob("*")) == folder
    assert sorted(path.name for path in tmp_path.iterdir() if path.name.startswith(".")) == []
