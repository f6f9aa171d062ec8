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
from checkpoints import change_json, save_checkpoint, save_notes
from conftest import others_slow
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from jinja2 import UndefinedError
from transformers import Gemma3Config, PreTrainedConfig
from transformers.integrations import hub_kernels

from resformer import ResFormerConfig, ResFormerError, push, retrofit
from resformer.analysis import analyze
from resformer.checkpoint_cards import checkpoint_card
from resformer.convert import bundle, inspect, revert, verify
from resformer.errors import CheckpointError
from resformer.loading import load_config
from resformer.model_cards import model_card
from resformer.names import INDEX, OFTEN_LINKED, RECORD, SINGLE
from resformer.pushing import Push
from resformer.training.options import FinetuneOptions
from resformer.training.recipe import finetune_checkpoint
from resformer.untrusted import MOST_BYTES, check_folder

pytestmark = pytest.mark.timeout(120)
if sys.platform == "win32":
    pytest.skip("needs links, FIFOs and sockets in the file system", allow_module_level=True)

CANARY = "canary-7f3a"
WEIGHTS = "model-00001-of-00002.safetensors"
#: Weights, config.json and the index may be links to a store; all else that is read stays in the folder.
LINKED = ("config.json", INDEX, WEIGHTS)
#: What Transformers reads when it loads a model or a tokenizer.
LOADED = ("tokenizer.json", "tokenizer_config.json", "generation_config.json", "additional_chat_templates/tools.jinja")
DESCRIBING = ("README.md", RECORD, "metrics.json")
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
    "additional_chat_templates-linked": ("additional_chat_templates", linked_folder("additional_chat_templates")),
    "deep-folder-linked": ("a/b", lambda f, o: ((f / "a").mkdir(), (f / "a" / "b").symlink_to(o))),
    **{f"{name}-fifo": (name, in_place_of(name, "fifo")) for name in UNREAD},
    "adapter": ("adapter_config.json", in_place_of("adapter_config.json", "link-out")),
    "temporary-README.md": ("README.md", lambda f, o: (f / ".README.md.partial").symlink_to(o / "secret")),
}
TRAINING = json.loads((Path(__file__).parent / "data" / "metrics.json").read_text(encoding="utf-8"))
#: One of each kind and of each file: the others are marked slow.
QUICK = [
    *(f"{name}-link-out" for name in (*LOADED, *DESCRIBING, *OTHER)),
    *(f"README.md-{kind}" for kind in KINDS if kind != "folder"),
    *(f"metrics.json-{kind}" for kind in ("of-8-GB", "fifo")),
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

    def run(each: Push) -> dict[str, Any]:
        for name, content in each.contents.items():
            small = isinstance(content, Path) and content.stat().st_size < MOST_BYTES
            sent[name] = content.read_text(encoding="latin-1") if small else str(content)
        return {"repo_id": each.report.repo_id, "commit": "0" * 40, "url": "", "deleted": []}

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
        "finetune": lambda: finetune_checkpoint(
            FinetuneOptions(
                model=str(folder), output=str(out / "tuned"), data=[data], sample_by="line", dry_run=True, block=16
            )
        ),
        "verify --text": lambda: verify(folder, folder, verify="logits", text=data),
    }


@pytest.mark.parametrize("plant", others_slow(PLANTS, QUICK))
def test_nothing_outside_a_planted_folder_is_read_or_changed(
    plant: str, good: Path, outside: Path, pushed: dict[str, str], tmp_path: Path
) -> None:
    named, make = PLANTS[plant]
    for name in ("ours", "llama"):
        shutil.copytree(good / name, tmp_path / name)
        make(tmp_path / name, outside)
    (tmp_path / "notes.txt").write_text("text of a line\n" * 400)
    before, out = snapshot(outside), tmp_path / "out"
    acts = commands(tmp_path / "ours", tmp_path / "llama", out)
    if named in LOADED and not plant.endswith("folder"):  # each is refused; what is not would take seconds
        acts |= loading(tmp_path / "llama", out)
    for name, act in acts.items():
        try:
            report: Any = act()
            said = [repr(report)]
        except ResFormerError as error:
            said = [str(error)]
            named_or_left_out = Path(named).name in said[0] or named.split("/")[0] in said[0]
            assert named_or_left_out or "cannot be bundled" in said[0], name
        else:
            unread = plant.endswith("of-8-GB") and named in (*DESCRIBING, WEIGHTS)
            assert unread or plant.endswith("folder"), f"{name} loaded it"
        made = [*said, *written(out), *pushed, *pushed.values()]
        assert not [text for text in made if CANARY in text], name
        assert snapshot(outside) == before, name
    card = tmp_path / "ours" / "README.md"
    if card.is_file() and not card.is_symlink():
        assert CANARY not in card.read_text()


NAMES = st.text(st.characters(exclude_characters="/\0", exclude_categories=["Cs"]), min_size=1, max_size=20).filter(
    lambda name: name.strip(".") and not OFTEN_LINKED.fullmatch(name)
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(folders=st.lists(NAMES, max_size=2), name=NAMES, kind=st.sampled_from(["link-out", "link-to-zero", "fifo"]))
def test_a_folder_with_a_link_out_is_not_loaded_whatever_its_name(
    folders: list[str], name: str, kind: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("planted")
    (folder / "outside").mkdir()
    (folder / "outside" / "secret").touch()
    place = folder.joinpath("model", *folders)
    place.mkdir(parents=True)
    KINDS[kind](place / name, folder / "outside")
    with pytest.raises(CheckpointError):
        check_folder(folder / "model")
    (place / name).unlink()
    (place / name).symlink_to(f"{name}2")  # inside: it is followed
    (place / f"{name}2").touch()
    check_folder(folder / "model")


#: A file of the checkpoint, and text in it that Transformers takes for the path of another.
POINTERS: dict[str, dict[str, Any]] = {
    "tokenizer_config.json": {"vocab": "PATH"},
    "tokenizer_config.json, a list": {"init_inputs": [{"x": ["PATH"]}]},
    "tokenizer_config.json, any key": {"whatever": "PATH"},
    "tokenizer_config.json, of its versions": {"fast_tokenizer_files": ["../outside/secret"]},
    "config.json": {"transformers_weights": "../outside/secret"},
    INDEX: {"weight_map": {"a": "../outside/secret"}},
}


@pytest.mark.parametrize("pointer", POINTERS)
def test_no_text_in_a_folder_leads_out_of_it(pointer: str, good: Path, outside: Path, tmp_path: Path) -> None:
    shutil.copytree(good / "llama", tmp_path / "llama")
    path = tmp_path / "llama" / pointer.partition(",")[0]
    if path.name == INDEX:
        (tmp_path / "llama" / SINGLE).unlink()  # beside which an index is ignored
    text = json.dumps(POINTERS[pointer]).replace("PATH", str(outside / "secret"))
    path.write_text(json.dumps({**json.loads(path.read_text() if path.exists() else "{}"), **json.loads(text)}))
    (tmp_path / "notes.txt").write_text("text of a line\n" * 400)
    acts = loading(tmp_path / "llama", tmp_path / "out")
    del acts["verify --text"]  # reads the tokenizer elsewhere, and the weights by their own checks
    for act in acts.values():
        with pytest.raises(ResFormerError, match="secret"):
            act()


#: Keys under which Transformers, or an older one, takes the name of code on the Hub.
IMPLEMENTATIONS = [name for name in vars(PreTrainedConfig()) if name.endswith("_implementation_internal")]
KERNELS = [key for name in IMPLEMENTATIONS for key in (name, name.removesuffix("_internal"), name[1:-9])]


def test_no_key_of_a_configuration_loads_a_kernel(good: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each command loads the model, as if the key were not there."""
    assert {"attn_implementation", "_attn_implementation", "experts_implementation"} <= {*KERNELS}
    for function in ("get_kernel", "load_and_register_attn_kernel"):
        monkeypatch.setattr(hub_kernels, function, lambda *_, **named: pytest.fail("a kernel was asked for"))
    shutil.copytree(good / "llama", tmp_path / "llama")
    save_notes(tmp_path)
    change_json(tmp_path / "llama" / "config.json", **dict.fromkeys(KERNELS, "evil/kernel@main:run"))
    for act in loading(tmp_path / "llama", tmp_path / "out").values():
        act()
    planted = dict.fromkeys(KERNELS, "evil/kernel")
    nested = Gemma3Config(text_config=planted).to_dict() | planted
    nested["text_config"] |= planted
    (tmp_path / "config.json").write_text(json.dumps(nested | {"sub_configs_defaults": {}}))
    config = load_config(tmp_path)
    for part in (config, config.text_config, config.vision_config):
        assert [getattr(part, name) for name in IMPLEMENTATIONS] == [None] * len(IMPLEMENTATIONS)


#: Begins lines, a block of metadata, a link, a tag, a table cell, a fence and a span, if it is taken for Markdown.
HOSTILE = f"x`\n\n# {CANARY}\n---\n{CANARY}: 1\n---\n```\n<{CANARY}> [{CANARY}](https://e.vil) | `[{CANARY}]({CANARY})`"
#: Renderers of the Hub and of GitHub make these links, and mentions.
HOSTILE += f" (HTTPS://{CANARY}.vil/`x` see www.{CANARY}.vil|x {CANARY}@e.vil @{CANARY}"


def places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(holder, key) of everything in a JSON value, but of a record's files, whose text no card states."""
    for key, child in list(value.items() if isinstance(value, dict) else enumerate(value)):
        if key != "files":
            yield value, key
            if isinstance(child, (dict, list)):
                yield from places(child)


@pytest.mark.parametrize("kind", ["retrofit", "exact", "finetuned"])
def test_text_of_a_record_is_data_in_a_card(kind: str, good: Path) -> None:
    record = json.loads((good / "ours" / RECORD).read_text()) | {"source_card": {"license": "mit"}}
    record |= {"inexact_because": ["a"], "terms": {"gated": "auto"}, "exact": kind == "exact"}
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
            assert not re.search(rf"(//|www\.|@){CANARY}|{CANARY}@", line, re.IGNORECASE), (key, line)
    assert cards > 5
