"""A conversion that is killed, runs out of disk, or loses its source: nothing, or all of it, and a second run works."""

import errno
import inspect
import io
import json
import os
import random
import shutil
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import pytest
import torch
from checkpoints import save_checkpoint
from command_server import Run as PythonRun
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM

import resformer.convert.conversion as conversion
import resformer.convert.retrofitting as retrofitting
import resformer.convert.reverting as reverting
import resformer.convert.writing as writing
import resformer.files as files
from resformer import retrofit
from resformer.convert import CheckpointError, OutputError, revert

if sys.platform == "win32":
    pytest.skip("needs fork and POSIX signals", allow_module_level=True)

pytestmark = pytest.mark.timeout(120)

SIGNALS = [signal.SIGKILL, signal.SIGTERM, signal.SIGINT]
BIG: dict[str, Any] = {
    "vocab_size": 4000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 4,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below, with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()
    }


def names(folder: Path) -> list[str]:
    """What lies in a folder, hidden things too."""
    return sorted(path.name for path in folder.iterdir())


def partial_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.resformer-partial")


def lock_of(output: Path) -> Path:
    return output.with_name(f".{output.name}.resformer-lock")


def tidy_up(output: Path) -> None:
    """What the next run does: brings the old output back if it has no place, and removes what a killed run has left."""
    with suppress(KeyboardInterrupt), files.replacing(output):
        raise KeyboardInterrupt


#: An earlier result, as far as --force looks at it.
OLD = {"resformer_conversion.json": b"{}", "mine": b"mine"}


def write_old(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in OLD.items():
        (folder / name).write_bytes(content)


def shard_written(output: Path, number: int) -> bool:
    """Whether a run has begun this weight file; more than one name fits, as their number is in it."""
    return any(partial_of(output).glob(f"model-{number:05}-of-*"))


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of 120 MB in five shards: of random bits, for nobody computes with it."""
    folder = tmp_path_factory.mktemp("big") / "llama"
    folder.mkdir()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**BIG))
    model.config.architectures = ["LlamaForCausalLM"]
    model.config.save_pretrained(folder)
    generator, shards, weight_map = random.Random(0), {}, {}
    for name, tensor in model.state_dict().items():
        number = int(name.split(".")[2]) + 1 if ".layers." in name else 5
        bits = bytearray(generator.randbytes(2 * tensor.numel()))
        shards.setdefault(number, {})[name] = torch.frombuffer(bits, dtype=torch.bfloat16).view(tensor.shape)
        weight_map[name] = f"model-{number:05}-of-00005.safetensors"
    for number, tensors in shards.items():
        save_file(tensors, folder / f"model-{number:05}-of-00005.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return folder


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


# Processes that are killed.


#: `Run("convert", source, output, log=file)`
Run = partial(PythonRun, "-m", "resformer")

#: Name -> options.
WAYS: dict[str, tuple[str, ...]] = {
    "copied": (),
    "converted": ("--dtype", "float16"),
    "linked": ("--link",),
}


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_a_process_killed_while_it_writes_leaves_nothing_behind(
    number: signal.Signals, big: Path, tmp_path: Path
) -> None:
    """From the shell's side: a real process, its exit code and its words."""
    out = tmp_path / "out"
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "resformer", "convert", str(big), str(out), "--verify", "headers"]
    with subprocess.Popen(
        [*command, "--dtype", "float16"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment
    ) as process:
        end = time.perf_counter() + 60
        while not shard_written(out, 2) and process.poll() is None and time.perf_counter() < end:
            time.sleep(0.001)
        process.send_signal(number)
        stdout, stderr = process.communicate(timeout=60)
    assert stdout == ""
    assert not out.exists()
    if number == signal.SIGKILL:
        assert process.returncode == -signal.SIGKILL
        assert names(tmp_path) == [lock_of(out).name, partial_of(out).name]
        retrofit(big, out, verify="headers", link=True)
        assert names(tmp_path) == ["out"]
    else:
        assert process.returncode == 130, stderr
        assert stderr.count("\n") == 1
        assert "Interrupted" in stderr
        assert names(tmp_path) == []


@pytest.fixture(scope="module")
def big_results(big: Path) -> dict[str, dict[str, bytes]]:
    """Way -> what has to be written."""
    found = {}
    for way, options in WAYS.items():
        arguments: dict[str, Any] = {"dtype": options[1]} if way == "converted" else {}
        retrofit(big, big.parent / "expected" / "out", verify="headers", link=True, force=True, **arguments)
        found[way] = contents(big.parent / "expected" / "out")
    shutil.rmtree(big.parent / "expected")
    return found


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_killed_at_any_moment_the_output_is_absent_or_whole(
    number: signal.Signals, way: str, big: Path, big_results: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    out, log, arguments = tmp_path / "place" / "out", tmp_path / "log", (*WAYS[way], "--verify", "headers")
    out.parent.mkdir()
    start = time.perf_counter()
    run = Run("convert", big, out, *arguments, log=log)
    run.wait_for(partial_of(out).exists)
    first = time.perf_counter()
    assert run.wait() == 0, log.read_text()
    reading, working = first - start, time.perf_counter() - first
    assert contents(out) == big_results[way]
    shutil.rmtree(out)
    generator = random.Random(f"{way} {number}")
    moments = [generator.uniform(0, reading), *(generator.uniform(0, working * 1.1) for _ in range(2))]
    for moment in moments:
        run = Run("convert", big, out, *arguments, log=log)
        if moment < reading and not generator.randrange(3):
            time.sleep(moment)
        else:
            run.wait_for(partial_of(out).exists)
            time.sleep(moment)
        with suppress(ProcessLookupError):
            os.kill(run.pid, number)
        code = run.wait()
        if out.exists():
            assert contents(out) == big_results[way]
            assert code in (0, 130, -number)
            shutil.rmtree(out)
        else:
            assert code == (-number if number == signal.SIGKILL else 130), log.read_text()
        if number != signal.SIGKILL:
            assert names(out.parent) == []
        elif moment != moments[-1]:  # the last one's is for the next run
            tidy_up(out)
    retrofit(big, out, verify="headers", link=True)
    assert names(out.parent) == ["out"]


@pytest.mark.slow
@pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)
def test_killed_while_it_replaces_the_output_is_the_old_or_the_new(
    number: signal.Signals, big: Path, big_results: dict[str, dict[str, bytes]], tmp_path: Path
) -> None:
    place, log = tmp_path / "place", tmp_path / "log"
    out = place / "out"
    retrofit(big, out, "denseformer", verify="headers", link=True)
    (out / "mine").write_text("mine")
    old, new = contents(out), big_results["copied"]
    generator, seen = random.Random(number), set()
    moments: list[Callable[[], bool]] = [
        partial_of(out).exists,
        lambda: shard_written(out, 3),
        (partial_of(out) / "config.json").exists,
        (partial_of(out) / "README.md").exists,
        out.with_name(".out.resformer-old").exists,  # the two are changing places
    ]
    for condition in moments:
        run = Run("convert", big, out, "--force", "--verify", "headers", log=log)
        run.wait_for(condition)
        time.sleep(generator.choice([0, 0.001, 0.01]))
        with suppress(ProcessLookupError):
            os.kill(run.pid, number)
        run.wait()
        if number == signal.SIGKILL:
            tidy_up(out)
        found = contents(out)
        assert found in (old, new)
        seen.add(found == new)
        assert names(place) == ["out"]
        if found == new:
            retrofit(big, out, "denseformer", verify="headers", link=True, force=True)
            (out / "mine").write_text("mine")
            assert names(place) == ["out"]
    assert False in seen
    retrofit(big, out, verify="headers", link=True, force=True)
    assert contents(out) == new
    assert names(place) == ["out"]


@pytest.mark.slow
def test_an_impatient_second_interrupt_leaves_no_debris(big: Path, tmp_path: Path) -> None:
    out, log = tmp_path / "place" / "out", tmp_path / "log"
    out.parent.mkdir()
    for pause in (0.0, 0.001, 0.003):
        run = Run("convert", big, out, "--verify", "headers", "--dtype", "float16", log=log)
        run.wait_for(lambda: shard_written(out, 4))
        for _ in range(3):
            os.kill(run.pid, signal.SIGINT)
            time.sleep(pause)
        assert run.wait() == 130, log.read_text()
        assert names(out.parent) == []


def test_a_revert_that_is_killed_leaves_nothing_behind(big: Path, tmp_path: Path) -> None:
    place, log = tmp_path / "place", tmp_path / "log"
    retrofit(big, tmp_path / "ours", verify="headers", link=True)
    place.mkdir()
    for number in SIGNALS:
        run = Run("revert", tmp_path / "ours", place / "out", "--verify", "headers", log=log)
        run.wait_for(lambda: shard_written(place / "out", 2))
        os.kill(run.pid, number)
        code = run.wait()
        assert not (place / "out").exists() or code == 0
        if number != signal.SIGKILL and code != 0:
            assert code == 130
            assert names(place) == []
        if number == signal.SIGKILL:  # not there to be mistaken for the next run's
            assert names(place) == [lock_of(place / "out").name, partial_of(place / "out").name]
            tidy_up(place / "out")
        shutil.rmtree(place / "out", ignore_errors=True)
    revert(tmp_path / "ours", place / "out", verify="headers", link=True)
    assert names(place) == ["out"]


def _delicate_code() -> set[CodeType]:
    """Where the folder is made, locked, and put in place; elsewhere in the writer files are only filled."""
    code = inspect.unwrap(files.replacing).__code__
    inner = {constant for constant in code.co_consts if isinstance(constant, CodeType)}
    return {code, writing.flush.__code__, *inner}


def _interrupted_at(number: int, act: Callable[[], object]) -> list[str]:
    """Runs `act` and raises KeyboardInterrupt before the line that those functions execute as their number `number`;
    returns the lines that were seen. A signal's handler runs between any two of them."""
    seen: list[str] = []

    def local(frame: FrameType, event: str, argument: object) -> Any:
        if event == "line":
            seen.append(f"{frame.f_code.co_name}:{frame.f_lineno}")
            if len(seen) == number:
                raise KeyboardInterrupt
        return local

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        return local if frame.f_code in delicate else None

    before, delicate = sys.gettrace(), _delicate_code()
    sys.settrace(trace)
    try:
        act()
    finally:
        sys.settrace(before)
    return seen


@pytest.mark.slow
@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_an_interrupt_between_any_two_lines_of_the_writer_leaves_nothing_or_all(
    force: bool, small: Path, small_result: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"

    def prepare() -> None:
        shutil.rmtree(out.parent, ignore_errors=True)
        if force:
            write_old(out)

    def convert() -> None:
        retrofit(small, out, verify="headers", force=force, link=True, durable=True, progress=False)

    prepare()
    lines = _interrupted_at(-1, convert)
    assert contents(out) == small_result
    assert len(lines) > 20
    expected = [small_result, OLD if force else {}]
    wrong = []
    for number, line in enumerate(lines, start=1):
        prepare()
        try:
            _interrupted_at(number, convert)
        except KeyboardInterrupt:
            found = contents(out) if out.exists() else {}
            if found == small_result:  # an interrupt in the very last lines can leave the lock file, which bars nobody
                lock_of(out).unlink(missing_ok=True)
            left = names(out.parent) if out.parent.exists() else []
            if found not in expected or left not in ([], ["out"]) or (not out.exists() and out.parent.exists()):
                wrong.append((line, left))
    assert not wrong, "\n".join(map(str, wrong))


# Failing system calls.


def failing(real: Callable[..., Any], code: int, at: int, calls: list[int] | None = None) -> Callable[..., Any]:
    """`real`, but for the call number `at` and those after it, which raise an OSError."""
    count = 0

    def call(*arguments: Any, **named: Any) -> Any:
        nonlocal count
        count += 1
        if calls is not None:
            calls[0] = count
        if count >= at:
            raise OSError(code, os.strerror(code))
        return real(*arguments, **named)

    return call


class BrokenSource(io.FileIO):
    def read(self, size: int | None = -1) -> bytes:
        raise OSError(errno.EIO, os.strerror(errno.EIO))


@pytest.mark.parametrize("side", ["reading", "writing"])
@pytest.mark.parametrize("at", [1, 7])
def test_a_copy_that_fails_leaves_nothing_and_names_the_file_at_fault(
    side: str, at: int, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel's own copy does not say which of the two files failed."""
    monkeypatch.setattr(os, "copy_file_range", failing(os.copy_file_range, errno.EIO, at))
    if side == "reading":
        monkeypatch.setattr(writing, "open_regular", BrokenSource)
        expected = rf"^{small.parent}.*: cannot be read: {os.strerror(errno.EIO)}"
    else:
        monkeypatch.setattr(writing, "_write_all", failing(writing._write_all, errno.ENOSPC, 1))
        expected = rf"^{tmp_path}.*: cannot be written: {os.strerror(errno.ENOSPC)}"
    with pytest.raises(CheckpointError, match=expected) as caught:
        retrofit(small, tmp_path / "a" / "b" / "out", verify="headers")
    assert isinstance(caught.value, OutputError) == (side == "writing")
    assert names(tmp_path) == []


@pytest.mark.parametrize("code", [errno.EXDEV, errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP], ids=errno.errorcode.get)
@pytest.mark.parametrize("at", [1, 5])
def test_a_copy_that_the_kernel_does_not_do_is_done_without_it(
    code: int,
    at: int,
    small: Path,
    small_result: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "copy_file_range", failing(os.copy_file_range, code, at))
    report = retrofit(small, tmp_path / "out", verify="headers")
    assert contents(tmp_path / "out") == small_result
    assert report.warnings == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO], ids=errno.errorcode.get)
@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_a_flush_that_fails_leaves_what_was_there(
    code: int, force: bool, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever of them fails: whoever is told that it failed finds the old, and no debris."""
    out, calls = tmp_path / "place" / "out", [0]

    def prepare() -> None:
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir(parents=True)
        if force:
            write_old(out)

    real = os.fsync
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(real, code, 10**6, calls))
        prepare()
        retrofit(small, out, verify="headers", force=force, durable=True)
    for at in [1, 2, calls[0] - 1, calls[0]]:
        prepare()
        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", failing(real, code, at))
            with pytest.raises(OutputError, match=os.strerror(code)):
                retrofit(small, out, verify="headers", force=force, durable=True)
        assert contents(out) == (OLD if force else {}), f"call {at} of {calls[0]}"
        assert names(out.parent) == ["out"]


@pytest.mark.parametrize(
    "code", [errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOSPC, errno.EIO], ids=errno.errorcode.get
)
@pytest.mark.parametrize("at", [1, 3])
def test_a_link_that_fails_is_a_copy_and_a_word(
    code: int,
    at: int,
    small: Path,
    small_result: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(os, "link", failing(os.link, code, at))
    report = retrofit(small, tmp_path / "out", verify="headers", link=True)
    assert contents(tmp_path / "out") == small_result
    assert len(report.warnings) == 1
    assert "--link" in report.warnings[0]
    assert report.transfer.linked == sum(path.stat().st_size for path in sorted(small.glob("*.safetensors"))[: at - 1])


@pytest.mark.parametrize("at", [1, 2])
def test_a_rename_that_fails_leaves_what_was_there(
    at: int, small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "place" / "out"
    write_old(out)
    monkeypatch.setattr(Path, "rename", failing(Path.rename, errno.EIO, at))
    with pytest.raises(OutputError):
        retrofit(small, out, verify="headers", force=True)
    monkeypatch.undo()
    if not out.exists():  # the old output lies beside it, and the next run brings it back
        with pytest.raises(CheckpointError):
            retrofit(small, out, verify="headers")
    assert contents(out) == OLD
    assert names(out.parent) == ["out"]


def test_what_a_kill_between_two_renames_has_left_is_put_right(
    small: Path, small_result: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "out"
    write_old(tmp_path / ".out.resformer-old")
    partial_of(out).mkdir()
    lock_of(out).touch()
    with pytest.raises(OutputError):  # what comes back is not replaced unless asked for
        retrofit(small, out, verify="headers")
    assert contents(out) == OLD
    assert names(tmp_path) == ["out"]
    retrofit(small, out, verify="headers", force=True)
    assert contents(out) == small_result
    assert names(tmp_path) == ["out"]


def test_a_disk_with_no_room_is_refused_before_anything_is_written(
    small: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=10**6))
    with pytest.raises(OutputError, match=r"1,000,000 bytes free.*--link"):
        retrofit(small, tmp_path / "new" / "out", verify="headers")
    assert names(tmp_path) == []


@pytest.mark.parametrize("way", ["copied", "converted"])
def test_a_file_that_may_not_grow_leaves_nothing(way: str, big: Path, tmp_path: Path) -> None:
    """The system's own limit on a file's size, in the place of a full disk."""
    place, log = tmp_path / "place", tmp_path / "log"
    place.mkdir()

    run = Run("convert", big, place / "out", "--verify", "headers", *WAYS[way], log=log, largest_file=10**7)
    assert run.wait() == 1
    assert "cannot be written: File too large" in log.read_text()
    assert log.read_text().count("\n") == 1
    assert names(place) == []


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_read_only_folder_is_refused(small: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    place.mkdir(mode=0o555)
    with pytest.raises(OutputError, match="cannot be written"):
        retrofit(small, place / "out", verify="headers")
    assert names(place) == []


def test_an_output_below_a_file_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="file"):
        retrofit(small, tmp_path / "file" / "out", verify="headers")
    assert names(tmp_path) == ["file"]


@pytest.mark.parametrize("length", [200, 233, 245, 255, 256])
def test_an_output_of_a_long_name_is_written_or_refused_without_debris(
    length: int, small: Path, small_result: dict[str, bytes], tmp_path: Path
) -> None:
    out = tmp_path / "new" / ("x" * length)
    if length < 256:
        retrofit(small, out, verify="headers")
        assert {**contents(out), "README.md": b""} == {**small_result, "README.md": b""}  # whose title is the name
        assert names(out.parent) == [out.name]
    else:
        with pytest.raises(CheckpointError):
            retrofit(small, out, verify="headers")
        assert names(tmp_path) == []


# A source that changes under the reader's hands.


def deleted(path: Path) -> None:
    path.unlink()


def truncated(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1000)


def emptied(path: Path) -> None:
    os.truncate(path, 0)


def grown(path: Path) -> None:
    with path.open("ab") as file:
        file.write(bytes(100))


def made_a_folder(path: Path) -> None:
    path.unlink()
    path.mkdir()


def made_a_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def made_a_link(path: Path) -> None:
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("absent"))


CHANGES = [deleted, truncated, emptied, grown, made_a_folder, made_a_fifo, made_a_link]
OPTIONS: dict[str, dict[str, Any]] = {
    "copied": {},
    "linked": {"link": True},
    "rewritten": {"max_shard_size": 5000},
    "converted": {"dtype": "bfloat16"},
}


@pytest.mark.timeout(30)
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("way", OPTIONS)
@pytest.mark.parametrize("verify", ["headers", "logits"])
def test_a_shard_that_changes_after_it_was_read_is_refused(
    change: Callable[[Path], None], way: str, verify: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = sorted(source.glob("*.safetensors"))[1]
    real = retrofitting.carry_out

    def carry_out(*arguments: Any, **options: Any) -> Any:
        change(shard)
        return real(*arguments, **options)

    monkeypatch.setattr(retrofitting, "carry_out", carry_out)
    if change is grown and way in ("rewritten", "converted"):  # nothing that is read has changed
        retrofit(source, source.parent / "new" / "out", verify="hashes", **OPTIONS[way])
        return
    with pytest.raises(CheckpointError) as caught:
        retrofit(source, source.parent / "new" / "out", verify=verify, **OPTIONS[way])
    assert shard.name in str(caught.value)
    assert "cannot be written" not in str(caught.value)
    assert names(source.parent) == ["llama"]


@pytest.mark.parametrize("change", [deleted, emptied])
@pytest.mark.parametrize("verify", ["hashes", "logits"])
def test_a_shard_that_vanishes_once_it_is_copied_is_refused_or_not_needed(
    change: Callable[[Path], None], verify: Any, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = sorted(source.glob("*.safetensors"))[1]
    real = conversion.check_headers

    def check_headers(*arguments: Any) -> Any:
        change(shard)
        return real(*arguments)

    monkeypatch.setattr(conversion, "check_headers", check_headers)
    with pytest.raises(CheckpointError):
        retrofit(source, source.parent / "out", verify=verify)
    assert names(source.parent) == ["llama"]


def test_a_tokenizer_that_vanishes_after_it_was_seen_is_named(source: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = retrofitting.carry_out

    def carry_out(*arguments: Any, **options: Any) -> Any:
        (source / "tokenizer.json").unlink()
        return real(*arguments, **options)

    monkeypatch.setattr(retrofitting, "carry_out", carry_out)
    with pytest.raises(CheckpointError, match=r"tokenizer\.json"):
        retrofit(source, source.parent / "out", verify="headers")
    assert names(source.parent) == ["llama"]


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_a_shard_that_is_rewritten_after_it_was_read_gives_one_state_of_it(
    link: bool, source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = sorted(source.glob("*.safetensors"))[1]
    content = shard.read_bytes()
    real = retrofitting.carry_out

    def carry_out(*arguments: Any, **options: Any) -> Any:
        shard.write_bytes(content[:-200] + bytes(200))
        return real(*arguments, **options)

    monkeypatch.setattr(retrofitting, "carry_out", carry_out)
    out = source.parent / "out"
    with suppress(CheckpointError):
        retrofit(source, out, verify="hashes", link=link)
    if out.exists():
        assert any(path.read_bytes() == shard.read_bytes() for path in out.glob("*.safetensors"))
    else:
        assert names(source.parent) == ["llama"]


@pytest.mark.parametrize("change", CHANGES)
def test_a_retrofit_that_changes_while_it_is_reverted_is_refused(
    change: Callable[[Path], None], source: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours = source.parent / "ours"
    retrofit(source, ours, verify="headers")
    shard = sorted(ours.glob("*.safetensors"))[1]
    real = reverting.carry_out

    def carry_out(*arguments: Any, **options: Any) -> Any:
        change(shard)
        return real(*arguments, **options)

    monkeypatch.setattr(reverting, "carry_out", carry_out)
    with pytest.raises(CheckpointError):
        revert(ours, source.parent / "out", verify="headers", link=True)
    assert names(source.parent) == ["llama", "ours"]


# Two at once.


@pytest.mark.parametrize("force", [False, True], ids=["new", "force"])
def test_a_second_conversion_to_the_same_output_is_refused_and_does_no_harm(
    force: bool, small: Path, small_result: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, messages = tmp_path / "new" / "out", []
    real = conversion.check_headers

    def check_headers(*arguments: Any) -> Any:
        if not messages:
            messages.append("")
            with pytest.raises(OutputError) as caught:
                retrofit(small, out, "denseformer", verify="headers", force=force)
            messages[0] = str(caught.value)
        return real(*arguments)

    monkeypatch.setattr(conversion, "check_headers", check_headers)
    retrofit(small, out, verify="headers", force=force)
    assert f"{out}: another process is writing there" in messages[0]
    assert contents(out) == small_result
    assert names(out.parent) == ["out"]


@pytest.mark.slow
def test_of_many_that_start_at_once_one_wins_and_nothing_is_mixed(big: Path, tmp_path: Path) -> None:
    place = tmp_path / "place"
    for force in ((), ("--force",)):
        arguments = (*force, "--verify", "headers", "--link")
        runs = [
            Run("convert", big, place / "out", "--method", method, *arguments, log=tmp_path / f"log-{number}")
            for number, method in enumerate(["resformer", "denseformer"] * 3)
        ]
        codes = [run.wait() for run in runs]
        logs = [(tmp_path / f"log-{number}").read_text() for number in range(len(runs))]
        assert 0 in codes, logs
        for code, log in zip(codes, logs, strict=True):
            assert code in (0, 1, 3), log
            assert code == 0 or "another process" in log or "not empty" in log
        found = contents(place / "out")
        assert names(place) == ["out"]
        winners = set()
        for method in ("resformer", "denseformer"):
            retrofit(big, tmp_path / method / "out", method, verify="headers", link=True, force=True)
            winners.add(found == contents(tmp_path / method / "out"))
        assert winners == {True, False}
        shutil.rmtree(place)


def test_threads_of_one_process_do_not_write_over_each_other(
    small: Path, small_result: dict[str, bytes], tmp_path: Path
) -> None:
    errors = []

    def convert() -> None:
        try:
            retrofit(small, tmp_path / "place" / "out", verify="headers", progress=False)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=convert) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(errors) == 3
    assert all(isinstance(error, CheckpointError) for error in errors), errors
    assert contents(tmp_path / "place" / "out") == small_result
    assert names(tmp_path / "place") == ["out"]


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
    out.with_name(f".out.resformer-{part}").symlink_to(target)
    with suppress(CheckpointError):
        retrofit(small, out, verify="headers", force=force)
    assert contents(tmp_path / "precious") == OLD
    assert not out.is_symlink()


def test_links_that_a_killed_run_has_left_are_cleared_and_the_source_is_not(
    source: Path, small_result: dict[str, bytes]
) -> None:
    before = contents(source)
    partial = partial_of(source.parent / "out")
    (partial / "sub" / "sub").mkdir(parents=True)
    (partial / "sub" / "link").symlink_to(source)
    (partial / "link").symlink_to(source)
    for path in source.glob("*.safetensors"):
        os.link(path, partial / path.name)
        os.link(path, partial / "sub" / path.name)
    retrofit(source, source.parent / "out", verify="headers")
    assert contents(source) == before
    assert contents(source.parent / "out") == small_result
    assert names(source.parent) == ["llama", "out"]


@pytest.mark.parametrize("kind", ["file", "fifo", "link-to-nothing"])
def test_what_is_no_folder_in_the_place_of_the_partial_folder_is_named(kind: str, small: Path, tmp_path: Path) -> None:
    partial = partial_of(tmp_path / "out")
    {"file": Path.touch, "fifo": os.mkfifo, "link-to-nothing": lambda path: path.symlink_to("x")}[kind](partial)
    with pytest.raises(OutputError, match="partial: cannot be written"):
        retrofit(small, tmp_path / "out", verify="headers")
    assert names(tmp_path) == [partial.name]


def test_an_output_behind_a_link_is_written_where_the_link_leads(
    small: Path, small_result: dict[str, bytes], tmp_path: Path
) -> None:
    (tmp_path / "disk" / "real").mkdir(parents=True)
    (tmp_path / "out").symlink_to("disk/real")
    retrofit(small, tmp_path / "out", verify="headers")
    assert (tmp_path / "out").is_symlink()
    assert contents(tmp_path / "disk" / "real") == small_result
    assert names(tmp_path / "disk") == ["real"]


def test_an_output_that_is_a_loop_of_links_is_refused(small: Path, tmp_path: Path) -> None:
    (tmp_path / "out").symlink_to("out")
    with pytest.raises(CheckpointError):
        retrofit(small, tmp_path / "out", verify="headers")
    assert names(tmp_path) == ["out"]


def test_a_source_that_the_output_links_to_is_not_replaced(source: Path) -> None:
    before = contents(source)
    (source.parent / "out").symlink_to("llama")
    with pytest.raises(CheckpointError, match="source"):
        retrofit(source, source.parent / "out", verify="headers", force=True)
    assert contents(source) == before


# Bytes and modes.


@pytest.fixture
def _umask_as_before() -> Iterator[None]:
    before = os.umask(0o022)
    yield
    os.umask(before)


@pytest.mark.usefixtures("_umask_as_before")
@pytest.mark.parametrize("umask", [0o022, 0o077, 0o002, 0o027], ids=oct)
@pytest.mark.parametrize("way", ["copied", "rewritten", "converted"])
def test_modes_follow_the_umask(umask: int, way: str, source: Path) -> None:
    for path in source.rglob("*"):
        path.chmod(0o700)  # nothing of the source's modes goes along
    os.umask(umask)
    retrofit(source, source.parent / "out", verify="headers", **OPTIONS[way])
    revert(source.parent / "out", source.parent / "back", verify="headers")
    for folder in (source.parent / "out", source.parent / "back"):
        for path in (folder, *folder.rglob("*")):
            expected = (0o777 if path.is_dir() else 0o666) & ~umask
            assert oct(stat.S_IMODE(path.stat().st_mode)) == oct(expected), path.name


@pytest.mark.parametrize("way", OPTIONS)
def test_two_runs_write_the_same_bytes(way: str, source: Path) -> None:
    first, second = source.parent / "one" / "out", source.parent / "two" / "out"
    retrofit(source, first, "resformer-denseformer", verify="headers", **OPTIONS[way])
    for path in source.iterdir():
        os.utime(path, (0, 0))
    time.sleep(0.01)
    retrofit(source, second, "resformer-denseformer", verify="headers", **OPTIONS[way])
    assert contents(first) == contents(second)


def test_links_and_copies_are_the_same_bytes(source: Path, small_result: dict[str, bytes]) -> None:
    report = retrofit(source, source.parent / "out", verify="headers", link=True)
    assert contents(source.parent / "out") == small_result
    assert report.transfer.linked == sum(path.stat().st_size for path in source.glob("*.safetensors"))


@pytest.mark.parametrize("link", [False, True], ids=["copied", "linked"])
def test_link_shares_the_weights_of_the_source_and_nothing_else(link: bool, source: Path) -> None:
    before = {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in source.iterdir()}
    retrofit(source, source.parent / "out", verify="headers", link=link)
    inodes = {path.stat().st_ino for path in source.glob("*.safetensors")}
    shared = {path.name for path in (source.parent / "out").iterdir() if path.stat().st_ino in inodes}
    assert len(shared) == (len(inodes) if link else 0)
    every = {path.stat().st_ino for path in source.rglob("*") if path.is_file()} - inodes
    assert not [path for path in (source.parent / "out").rglob("*") if path.stat().st_ino in every]
    assert {path.name: (path.stat().st_mtime_ns, path.stat().st_ino) for path in source.iterdir()} == before


def test_link_onto_another_disk_copies_and_says_so(
    small: Path, small_result: dict[str, bytes], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = Path("/dev/shm")
    if other.is_dir() and os.access(other, os.W_OK) and other.stat().st_dev != small.stat().st_dev:
        place = other / f"resformer-{os.getpid()}-{tmp_path.name}"
    else:
        place = tmp_path / "place"
        monkeypatch.setattr(os, "link", failing(os.link, errno.EXDEV, 1))
    try:
        report = retrofit(small, place / "out", verify="hashes", link=True)
        assert [warning for warning in report.warnings if "--link" in warning]
        assert report.transfer.linked == 0
        found = contents(place / "out")
        assert {name: found[name] for name in found if name.endswith(".safetensors")} == {
            name: content for name, content in small_result.items() if name.endswith(".safetensors")
        }
        assert names(place) == ["out"]
    finally:
        shutil.rmtree(place, ignore_errors=True)


def test_a_dry_run_writes_nothing_at_all(source: Path) -> None:
    before = {str(path): path.lstat().st_mtime_ns for path in source.parent.rglob("*")}
    folder_before = source.parent.stat().st_mtime_ns
    for options in OPTIONS.values():
        retrofit(source, source.parent / "out", dry_run=True, **options)
    assert {str(path): path.lstat().st_mtime_ns for path in source.parent.rglob("*")} == before
    assert source.parent.stat().st_mtime_ns == folder_before
