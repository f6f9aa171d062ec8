"""Checkouts that a stranger has planted: no command reads or writes outside them, waits for them, or believes them.

Each plant goes into a copy of a good checkpoint, beside a folder with canaries, through every command that reads it.
"""

import json
import os
import re
import shutil
import socket
import sys
from collections.abc import Callable, Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import yaml
from checkpoints import save_checkpoint
from conftest import others_slow
from jinja2 import UndefinedError

from resformer import ResFormerConfig, ResFormerError, push, retrofit
from resformer.analysis import analyze
from resformer.checkpoint_cards import checkpoint_card
from resformer.convert import bundle, inspect, revert, verify
from resformer.errors import OutputError
from resformer.evaluation import _load
from resformer.files import replace_text
from resformer.hub import Push, Pushed
from resformer.model_cards import model_card
from resformer.record import RECORD
from resformer.shrinking.shrink import shrink
from resformer.training.options import FinetuneOptions
from resformer.training.recipe import finetune_checkpoint
from resformer.untrusted import MOST_BYTES

pytestmark = pytest.mark.timeout(120)
if sys.platform == "win32":
    pytest.skip("needs links, FIFOs and sockets in the file system", allow_module_level=True)

CANARY = "canary-7f3a"
WEIGHTS = "model-00001-of-00002.safetensors"
#: Weights, config.json and the index may be links to a store; all else that is read stays in the folder.
LINKED = ("config.json", "model.safetensors.index.json", WEIGHTS)
#: What Transformers reads when it loads a model or a tokenizer.
LOADED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "additional_chat_templates/tools.jinja")
DESCRIBING = ("README.md", RECORD, "metrics.json", ".eval_results/arc.yaml")
OTHER = ("LICENSE",)
#: What is never opened beside weights in safetensors.
UNREAD = ("stray.safetensors", "pytorch_model.bin", "weights.gguf")

Plant = Callable[[Path, Path], object]


def bind_socket(path: Path) -> None:
    with chdir(path.parent), socket.socket(socket.AF_UNIX) as bound:
        bound.bind(path.name)  # a socket's path has 108 bytes at most


#: Kind -> puts it at a path; `outside` has a file of the same name with canaries.
KINDS: dict[str, Callable[[Path, Path], object]] = {
    "link-out": lambda path, outside: path.symlink_to(outside / "secret"),
    "link-to-nothing": lambda path, outside: path.symlink_to("nothing"),
    "link-to-zero": lambda path, outside: path.symlink_to("/dev/zero"),
    "fifo": lambda path, outside: os.mkfifo(path),
    "socket": lambda path, outside: bind_socket(path),
    "folder": lambda path, outside: path.mkdir(),
    "of-8-GB": lambda path, outside: (path.touch(), os.truncate(path, 8 * 2**30)),
}


def in_place_of(name: str, kind: str) -> Plant:
    def plant(folder: Path, outside: Path) -> None:
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).unlink(missing_ok=True)
        KINDS[kind](folder / name, outside)

    return plant


def linked_folder(name: str) -> Plant:
    """A folder of the checkpoint is a link to one outside, which has a file of every name."""

    def plant(folder: Path, outside: Path) -> None:
        shutil.rmtree(folder / name, ignore_errors=True)
        (folder / name).symlink_to(outside)

    return plant


#: Name -> (the file or folder that a refusal names, what plants it).
PLANTS: dict[str, tuple[str, Plant]] = {
    **{
        f"{name}-{kind}": (name, in_place_of(name, kind))
        for name in (*LOADED, *DESCRIBING, *OTHER)
        for kind in KINDS
        if (name, kind) != ("README.md", "folder")
    },
    **{f"{name}-{kind}": (name, in_place_of(name, kind)) for name in LINKED for kind in KINDS if kind != "link-out"},
    **{
        f"{name}-deep": (name, lambda folder, outside, name=name: (folder / name).write_bytes(b'{"a":' * 10**5))
        for name in (RECORD, "metrics.json", "config.json", "tokenizer_config.json")
    },
    **{f"{name}-linked": (name, linked_folder(name)) for name in (".eval_results", "additional_chat_templates")},
    "deep-folder-linked": ("a/b", lambda f, o: ((f / "a").mkdir(), (f / "a" / "b").symlink_to(o))),
    **{f"{name}-fifo": (name, in_place_of(name, "fifo")) for name in UNREAD},
    "adapter": ("adapter_config.json", in_place_of("adapter_config.json", "link-out")),
    **{
        f"temporary-{name}": (name, lambda f, o, name=name: (f / f".{name}.partial").symlink_to(o / "secret"))
        for name in ("README.md", "arc.yaml")
    },
}
SHRUNK = {
    "cache": 0.5,
    "calibration": {"tokens": 10, "texts": ["a"], "evaluated_on": ["b"]},
    "cost": {"tokens": 1, "source_loss": 1.0, "loss": 1.0, "kl_mean": 0.1, "kl_p95": 0.1, "top1_agreement": 0.5}
    | {"greedy_prompts": 1, "greedy_limit": 2, "greedy_median": 1.0, "last_words": 0, "passkey": []},
    "shares": [{"layer": 1, "keys_of": 0, "values_of": 0, "output_error": 0.1}],
}
TRAINING = json.loads((Path(__file__).parent / "data" / "metrics.json").read_text(encoding="utf-8"))
#: One of each kind and of each file: the others are marked slow.
QUICK = [
    *(f"{name}-link-out" for name in (*LOADED, *DESCRIBING, *OTHER)),
    *(f"README.md-{kind}" for kind in KINDS if kind != "folder"),
    *(f"metrics.json-{kind}" for kind in ("of-8-GB", "fifo", "deep")),
    *(f"tokenizer.json-{kind}" for kind in ("of-8-GB", "fifo")),
    *(name for name in PLANTS if name.endswith("linked") or name.startswith(("temporary", "adapter", *UNREAD))),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a retrofit with card, metrics and results; a plain model beside it."""
    folder = tmp_path_factory.mktemp("good")
    save_checkpoint(folder / "llama", num_hidden_layers=2)
    retrofit(folder / "llama", folder / "ours", verify="headers")
    (folder / "ours" / "LICENSE").write_text("free")
    (folder / "ours" / "additional_chat_templates").mkdir()
    (folder / "ours" / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "ours" / ".eval_results").mkdir()
    (folder / "ours" / ".eval_results" / "arc.yaml").write_text("- value: 1")
    return folder


@pytest.fixture
def outside(tmp_path: Path) -> Path:
    """Files that no command may read or change, under every name that a link may lead to."""
    folder = tmp_path / "outside"
    folder.mkdir()
    text = f"---\nlicense: {CANARY}\n---\n{CANARY}\n"
    for name in ("secret", "arc.yaml", "tools.jinja", f"{CANARY}.yaml", f"{CANARY}.jinja"):
        (folder / name).write_text(text)
    return folder


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def written(folder: Path) -> Iterator[str]:
    """The files that commands have made."""
    for path in folder.rglob("*"):
        assert not path.is_symlink(), path
        if path.is_file() and path.stat().st_size < MOST_BYTES:
            yield path.read_text(encoding="latin-1")


@pytest.fixture
def pushed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What a push would send: name -> content."""
    sent: dict[str, str] = {}

    def run(each: Push) -> Pushed:
        for name, content in each.contents.items():
            small = isinstance(content, Path) and content.stat().st_size < MOST_BYTES
            sent[name] = content.read_text(encoding="latin-1") if small else str(content)
        return Pushed(each.repo_id, "main", "0" * 40, "", [])

    monkeypatch.setattr(Push, "run", run)
    return sent


def commands(folder: Path, plain: Path, out: Path) -> dict[str, Callable[[], object]]:
    """Every command on `folder`; `plain` has the same plant in a model without record."""
    return {
        "inspect": lambda: inspect(folder),
        "verify": lambda: verify(folder, folder, verify="hashes"),
        "bundle": lambda: bundle(folder, out / "bundle", verify="headers", progress=False),
        "revert": lambda: revert(folder, out / "revert", verify="headers", progress=False),
        "convert": lambda: retrofit(plain, out / "convert", verify="logits", progress=False),
        "push": lambda: push(folder, "you/model"),
        "card": lambda: checkpoint_card(folder).write(folder / "README.md"),
        "card --force": lambda: checkpoint_card(folder).write(folder / "README.md", force=True),
    }


def loading(folder: Path, out: Path) -> dict[str, Callable[[], object]]:
    """Commands that have Transformers load the folder."""
    data = str(folder.parent / "notes.txt")
    return {
        "analyze": lambda: analyze(folder, ["text"]),
        "eval": lambda: _load({"pretrained": str(folder)}, "hf"),
        "finetune": lambda: finetune_checkpoint(
            FinetuneOptions(model=str(folder), output=str(out / "tuned"), data=[data], dry_run=True, block=16)
        ),
        "verify --text": lambda: verify(folder, folder, verify="logits", text=data),
        "shrink": lambda: shrink(folder, out / "shrunk", 0.6, calibrate=[data], progress=False),
    }


@pytest.mark.parametrize("plant", others_slow(PLANTS, QUICK))
def test_nothing_outside_a_planted_folder_is_read_or_changed(
    plant: str, good: Path, outside: Path, pushed: dict[str, str], tmp_path: Path
) -> None:
    named, make = PLANTS[plant]
    for name in ("ours", "llama"):
        shutil.copytree(good / name, tmp_path / name)
        make(tmp_path / name, outside)
    (tmp_path / "notes.txt").write_text("text")
    before, out = snapshot(outside), tmp_path / "out"
    acts = commands(tmp_path / "ours", tmp_path / "llama", out)
    if named in LOADED and not plant.endswith(("folder", "deep")):  # each is refused; what is not would take seconds
        acts |= loading(tmp_path / "llama", out)
    for name, act in acts.items():
        try:
            report: Any = act()
            said = [repr(report)]
        except ResFormerError as error:
            said = [str(error)]
            assert Path(named).name in said[0] or named.split("/")[0] in said[0], name
        else:
            assert name not in ("analyze", "eval", "finetune", "verify --text", "shrink"), "it was loaded"
            if name == "convert" and named in (*LOADED, *OTHER, *UNREAD) and not plant.endswith("deep"):
                assert not os.path.lexists(out / "convert" / named)
                assert named in UNREAD or any(Path(named).name in warning for warning in report.warnings)
        made = [*said, *written(out), *pushed, *pushed.values()]
        assert not [text for text in made if CANARY in text], name
        assert snapshot(outside) == before, name
    card = tmp_path / "ours" / "README.md"
    if card.is_file() and not card.is_symlink():
        assert CANARY not in card.read_text()


def test_nothing_is_written_through_a_linked_folder(outside: Path, tmp_path: Path) -> None:
    before = snapshot(outside)
    (tmp_path / ".eval_results").symlink_to(outside)
    with pytest.raises(OutputError, match="eval_results: is a link, which is not followed"):
        replace_text(tmp_path / ".eval_results" / "deep" / "arc.yaml", "- value: 1", tmp_path)
    assert snapshot(outside) == before


#: Begins lines, a block of metadata, a link, a tag, a table cell, a fence and a span, if it is taken for Markdown.
HOSTILE = f"x`\n\n# {CANARY}\n---\n{CANARY}: 1\n---\n```\n<{CANARY}> [{CANARY}](https://e.vil) | `[{CANARY}]({CANARY})`"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of everything in a JSON value, but of a record's files, whose text no card states."""
    for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if key != "files":
            yield value, key
            if isinstance(child, (dict, list)):
                yield from places(child)


@pytest.mark.parametrize("kind", ["retrofit", "exact", "shrunk", "finetuned"])
def test_text_of_a_record_is_data_in_a_card(kind: str, good: Path) -> None:
    record = json.loads((good / "ours" / RECORD).read_text()) | {"source_card": {"license": "mit"}}
    record |= {"inexact_because": ["a"], "terms": {"gated": "auto"}, "exact": kind == "exact"}
    if kind == "shrunk":
        record |= SHRUNK
    values: dict[str, Any] = TRAINING if kind == "finetuned" else record
    config, cards = ResFormerConfig.from_pretrained(good / "ours"), 0
    for holder, key in places(values):
        if isinstance(holder[key], (dict, list)):
            continue
        was, holder[key] = holder[key], HOSTILE
        try:
            card = model_card(values, "m", config=config)
        except (ValueError, TypeError, UndefinedError, KeyError, AttributeError):  # no number, for one
            continue
        finally:
            holder[key] = was
        cards += 1
        _, metadata, body = str(card).split("---\n", 2)
        assert CANARY not in yaml.safe_load(metadata)
        body = re.sub(
            r"\\[\\`\[\]<|]", "", re.sub(r"(?<!\\)`[^`\n]+`", "", body)
        )  # without spans and escaped characters
        for line in body.splitlines():
            assert not line.startswith((CANARY, "# " + CANARY, "---\n")), (key, line)
            assert f"<{CANARY}" not in line, (key, line)
            assert f"[{CANARY}]" not in line, (key, line)
    assert cards > 5
