"""A conversion that is killed, runs out of disk, or loses its source: nothing, or all of it, and a second run works."""

import errno
import hashlib
import json
import os
import shutil
import signal
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
from checkpoints import contents, save_checkpoint
from command_server import Run

import resformer.convert.retrofitting as retrofitting
import resformer.convert.reverting as reverting
import resformer.convert.to_folder as to_folder
import resformer.files as files
from resformer import retrofit
from resformer.convert import CheckpointError, OutputError, revert

if sys.platform == "win32":
    pytest.skip("needs fork and POSIX signals", allow_module_level=True)

pytestmark = pytest.mark.timeout(120)


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden things too; nothing if there is no folder."""
    return sorted(path.name for path in folder.glob("*"))


def beside(output: Path, part: str) -> Path:
    """The `partial` or `old` folder of an output, or its `lock` file."""
    return output.with_name(f".{output.name}.resformer-{part}")


def tidy_up(output: Path) -> None:
    """What the next run does: brings the old output back if it has no place, and removes what a killed run has left."""
    with suppress(KeyboardInterrupt), files.replacing(output, made_by="test"):
        raise KeyboardInterrupt


def old_result(command: str) -> dict[str, bytes]:
    """An earlier result, as far as --force looks at it."""
    listing = {"made_by": command, "files": {"mine": f"4 {hashlib.sha256(b'mine').hexdigest()}"}}
    return {files.LISTING: json.dumps(listing).encode(), "mine": b"mine"}


OLD = old_result("convert")


def write_old(folder: Path, content: dict[str, bytes] = OLD) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, data in content.items():
        (folder / name).write_bytes(data)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama in shards, with a tokenizer and a folder of chat templates."""
    folder = tmp_path_factory.mktemp("small") / "llama"
    save_checkpoint(folder, num_hidden_layers=2, shards=True)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ messages }}")
    return folder


@pytest.fixture(scope="module")
def small_result(small: Path) -> dict[str, bytes]:
    """What `retrofit(small, ..., verify="headers")` has to write."""
    retrofit(small, small.parent / "expected" / "out", verify="headers")
    return contents(small.parent / "expected" / "out")


@pytest.fixture
def source(small: Path, tmp_path: Path) -> Path:
    """A copy of `small` to take things away from."""
    return Path(shutil.copytree(small, tmp_path / "llama"))


Before = Callable[..., None]


@pytest.fixture
def before(monkeypatch: pytest.MonkeyPatch) -> Before:
    """`before(module, "function", act)`: `act()` runs before each call of the function."""

    def patch(module: Any, name: str, act: Callable[[], object]) -> None:
        real = getattr(module, name)

        def call(*arguments: Any, **options: Any) -> Any:
            act()
            return real(*arguments, **options)

        monkeypatch.setattr(module, name, call)

    return patch


# Processes that are killed.

#: `python -c STOPPED SIGNAL STEP FOLDER COMMAND...` runs `resformer COMMAND` and sends itself the signal at the step of
#: this number and at all further ones; a step opens, makes, links, renames or removes something in the folder. The last
#: line of its output is the number of steps.
STOPPED = """
import os, sys
from resformer.cli import main

number, first, folder, *sys.argv[1:] = sys.argv[1:]
events = {"open", "os.mkdir", "os.link", "os.rename", "os.remove", "os.rmdir"}
steps = 0

def on_event(event, arguments):
    global steps
    if event in events and folder in str(arguments):
        steps += 1
        if steps >= int(first):
            os.kill(os.getpid(), int(number))

sys.addaudithook(on_event)
try:
    main()
finally:
    print(steps)
"""


@pytest.mark.parametrize(
    ("number", "force", "command"),
    [
        (signal.SIGKILL, True, ["convert", "--method", "denseformer"]),
        (signal.SIGINT, False, ["revert"]),
        pytest.param(signal.SIGTERM, True, ["convert", "--link"], marks=pytest.mark.slow),
        pytest.param(signal.SIGKILL, False, ["revert"], marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_killed_at_any_step_the_output_is_the_old_or_the_new(
    number: signal.Signals, force: bool, command: list[str], small: Path, tmp_path: Path
) -> None:
    """Signals that can be handled come again and again; what SIGKILL leaves beside the output, the next run removes."""
    source, out, log, errors = small, tmp_path / "place" / "out", tmp_path / "log", tmp_path / "errors"
    before = old_result(command[0]) if force else {}
    if command[0] == "revert":
        source = tmp_path / "retrofit"
        retrofit(small, source, verify="headers")

    def run(step: int) -> int:
        shutil.rmtree(out.parent, ignore_errors=True)
        out.parent.mkdir()
        if force:
            write_old(out, before)
        arguments = [*command, source, out, "--verify", "headers", *["--force"] * force]
        return Run("-c", STOPPED, int(number), step, out.parent, *arguments, log=log, errors=errors).wait()

    assert run(10**9) == 0, errors.read_text()
    after, last = contents(out), int(log.read_text().split()[-1])
    assert names(out.parent) == ["out"]
    outcomes = set()
    for step in (1, 2, 3, last // 3, 2 * last // 3, *range(last - 7, last + 1)):
        code = run(step)
        if number == signal.SIGKILL:
            assert code == -number
            tidy_up(out)
        else:
            assert (code, errors.read_text().count("\n")) == (130, 1)
            assert "Interrupted" in errors.read_text()
            if contents(out) == after:  # the very last steps can leave the lock file, which bars nobody
                beside(out, "lock").unlink(missing_ok=True)
        assert contents(out) in (before, after), f"step {step} of {last}"
        assert names(out.parent) == (["out"] if contents(out) else [])
        outcomes.add(contents(out) == after)
    assert False in outcomes
    assert True in outcomes or number != signal.SIGKILL


# Failing system calls.


def failing(real: Callable[..., Any], code: int, at: int, calls: Iterator[int] | None = None) -> Callable[..., Any]:
    """`real`, but for the call number `at` and those after it, which raise an OSError; `calls` counts from 1."""
    numbers = calls or count(1)

    def call(*arguments: Any, **named: Any) -> Any:
        if next(numbers) >= at:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    return call


def test_a_rename_that_fails_leaves_what_was_there(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them fails, the last one too."""
    out = tmp_path / "place" / "out"

    def convert(at: int) -> int:
        """Returns the number of calls."""
        shutil.rmtree(out, ignore_errors=True)
        write_old(out, OLD)
        calls = count(1)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", failing(Path.rename, errno.EIO, at, calls))
            retrofit(small, out, verify="headers", force=True)
        return next(calls) - 1

    for at in range(1, convert(10**6) + 1):
        with pytest.raises(OutputError, match=os.strerror(errno.EIO)):
            convert(at)
        if not out.exists():  # the old output lies beside it, and the next run brings it back, and replaces nothing
            with pytest.raises(CheckpointError, match="is not empty"):
                retrofit(small, out, verify="headers")
        assert contents(out) == OLD, f"call {at}"
        assert names(out.parent) == ["out"]


@pytest.mark.parametrize("at", [0, 1, 5])
def test_a_copy_that_the_kernel_does_not_make_is_a_plain_copy(
    at: int, small: Path, small_result: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At 0, the kernel says that it copied nothing, as on some file systems."""
    broken = failing(os.copy_file_range, errno.EXDEV, at) if at else lambda *arguments: 0
    monkeypatch.setattr(os, "copy_file_range", broken)
    retrofit(small, tmp_path / "out", verify="headers")
    assert contents(tmp_path / "out") == small_result


def test_a_link_to_another_disk_is_refused(small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "link", failing(os.link, errno.EXDEV, 2))
    with pytest.raises(OutputError, match=r"same disk, or copy it, without --link"):
        retrofit(small, tmp_path / "out", link=True)
    assert names(tmp_path) == []


def test_a_disk_with_no_room_is_refused_before_anything_is_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage, moved = shutil.disk_usage(tmp_path), retrofit(small, tmp_path / "out", dry_run=True).transfer.moved
    needed = moved + 64 * 2**20
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=needed - 1))
    with pytest.raises(OutputError, match=rf"{needed - 1:,} bytes free, the result takes {moved:,}.*--link"):
        retrofit(small, tmp_path / "new" / "out", verify="headers")
    dry = retrofit(small, tmp_path / "new" / "out", verify="headers", dry_run=True)
    assert "would fail" in dry.warnings[-1]
    assert names(tmp_path) == []


@pytest.mark.parametrize("output", ["\udcff", "\udcff/out"])
def test_an_output_that_is_not_utf_8_is_refused(output: str, small: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is not UTF-8"):
        retrofit(small, tmp_path / output, verify="headers")
    assert names(tmp_path) == []


# A source that changes under the reader's hands.


def replaced(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def change(path: Path) -> None:
        path.rename(path.with_name("moved"))
        make(path)

    return change


CHANGES: dict[str, Callable[[Path], object]] = {
    "deleted": Path.unlink,
    "truncated": lambda path: os.truncate(path, path.stat().st_size - 1000),
    "grown": lambda path: os.truncate(path, path.stat().st_size + 100),
    "a-folder": replaced(Path.mkdir),
    "a-fifo": replaced(os.mkfifo),
    "a-link": replaced(lambda path: path.symlink_to("absent")),
}
#: How the bytes of the weights get to the output.
WAYS: dict[str, dict[str, Any]] = {"copied": {}, "linked": {"link": True}}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", [*WAYS, "reverted"])
def test_a_shard_that_changes_after_it_was_read_is_refused(change: str, way: str, source: Path, before: Before) -> None:
    convert: Any = partial(retrofit, **WAYS.get(way, {}))
    if way == "reverted":
        retrofit(source, source.with_name("retrofit"), verify="headers")
        source, convert = source.with_name("retrofit"), partial(revert, link=True)
    shard, there = sorted(source.glob("*.safetensors"))[1], names(source.parent)
    for module in (retrofitting, reverting):
        before(module, "carry_out", lambda: CHANGES[change](shard))
    with pytest.raises(CheckpointError, match=shard.name) as caught:
        convert(source, source.parent / "new" / "out", verify="headers")
    assert "cannot be written" not in str(caught.value)
    assert names(source.parent) == there


# Two at once.


@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_a_second_conversion_to_the_same_output_is_refused_and_does_no_harm(
    force: bool, small: Path, small_result: dict[str, bytes], tmp_path: Path, before: Before
) -> None:
    out, messages = tmp_path / "new" / "out", []

    def second() -> None:
        if not messages:
            messages.append("")
            with pytest.raises(OutputError) as caught:
                retrofit(small, out, "denseformer", verify="headers", force=force)
            messages[0] = str(caught.value)

    before(to_folder, "write_settings", second)
    retrofit(small, out, verify="headers", force=force)
    assert f"{out}: another process is writing there" in messages[0]
    assert contents(out) == small_result
    assert names(out.parent) == ["out"]


def test_what_somebody_puts_into_the_output_meanwhile_is_kept(small: Path, tmp_path: Path, before: Before) -> None:
    write_old(tmp_path / "out")
    before(to_folder, "write_settings", (tmp_path / "out" / "notes.txt").touch)
    with pytest.raises(CheckpointError, match=r"holds 'notes\.txt'"):
        retrofit(small, tmp_path / "out", verify="headers", force=True)
    assert contents(tmp_path / "out") == {**OLD, "notes.txt": b""}


# What lies where the writer wants to write.


@pytest.mark.parametrize("part", ["partial", "old", "lock"])
@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_a_link_in_the_place_of_what_lies_beside_the_output_is_not_followed(
    part: str, force: bool, small: Path, tmp_path: Path
) -> None:
    """In a folder that others can write to, it could lead anywhere."""
    write_old(tmp_path / "precious")
    out = tmp_path / "place" / "out"
    out.parent.mkdir()
    if force:
        write_old(out)
    target = "../precious/mine" if part == "lock" else "../precious"
    beside(out, part).symlink_to(target)
    with suppress(CheckpointError):
        retrofit(small, out, verify="headers", force=force)
    assert contents(tmp_path / "precious") == OLD
    assert not out.is_symlink()


# Bytes and modes.


def test_modes_follow_the_umask(source: Path) -> None:
    umask = 0o027
    for path in source.rglob("*"):
        path.chmod(0o700)  # nothing of the source's modes goes along
    before = os.umask(umask)
    try:
        retrofit(source, source.parent / "out", verify="headers")
        revert(source.parent / "out", source.parent / "back", verify="headers")
    finally:
        os.umask(before)
    for folder in (source.parent / "out", source.parent / "back"):
        for path in (folder, *folder.rglob("*")):
            expected = (0o777 if path.is_dir() else 0o666) & ~umask
            assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(expected), path.name


@pytest.mark.parametrize("way", [*WAYS, "random"])
def test_two_runs_write_the_same_bytes_and_no_path_of_this_machine(way: str, source: Path) -> None:
    first, second = (source.parent / part / ("x" * 245) for part in ("one", "two"))
    options = WAYS.get(way, {"lossy": True, "value_embeddings": [1], "value_embeddings_init": 0.02})
    retrofit(source, first, "resformer-denseformer", verify="headers", **options)
    for path in source.iterdir():
        os.utime(path, (0, 0))
    retrofit(source, second, "resformer-denseformer", verify="headers", **options)
    assert contents(first) == contents(second)
    assert not [name for name, content in contents(first).items() if str(source.parent).encode() in content]
