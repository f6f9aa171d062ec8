"""Training data: every kind of source, the split by content, the packing."""

import bz2
import errno
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoints import byte_tokenizer, family_model
from datasets import Dataset, DatasetDict, Features, List, Value
from datasets.exceptions import DatasetGenerationError
from tokenizers.processors import TemplateProcessing

from resformer.analysis import analyze
from resformer.errors import OutputError
from resformer.training.data import (
    DataError,
    content,
    is_held_out,
    load_documents,
    reading_source,
    source_digest,
    standard_library,
    training_texts,
)
from resformer.training.options import weighted_sources
from resformer.training.packing import Blocks, PackedBlocks, pack_documents, spelt_specials

TEXTS = [f"Document {index} says {index * index}." for index in range(200)]


def _jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def _folder(path: Path) -> None:
    (path / "below").mkdir(parents=True)
    _jsonl(path / "a.jsonl", TEXTS[:30])
    _jsonl(path / "below" / "b.jsonl", TEXTS[30:])
    (path / "readme.rst").write_text("not data")


ROWS = Dataset.from_dict({"text": TEXTS})
ROWS_OF_JSON = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
PACKERS: dict[str, Callable[[bytes], bytes]] = {"gz": gzip.compress, "bz2": bz2.compress, "xz": lzma.compress}
#: Kind of a source -> writes it.
SOURCES: dict[str, Callable[[Path], object]] = {
    "txt": lambda path: path.write_text("\n\n".join(TEXTS)),
    "jsonl": lambda path: _jsonl(path, TEXTS),
    **{f"jsonl.{kind}": lambda path, pack=pack: path.write_bytes(pack(ROWS_OF_JSON)) for kind, pack in PACKERS.items()},
    "json": lambda path: path.write_text("\n" + json.dumps([{"text": text} for text in TEXTS])),
    "texts.json": lambda path: path.write_text(json.dumps(TEXTS)),
    "csv": ROWS.to_csv,
    "tsv": lambda path: ROWS.to_csv(path, sep="\t"),
    "parquet": ROWS.to_parquet,
    "folder": _folder,
    "saved": lambda path: DatasetDict({"train": ROWS, "test": ROWS.select([0])}).save_to_disk(path),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", SOURCES)
def test_every_kind_of_source_gives_the_same_documents(
    kind: str, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the path is a pattern that others match; `datasets` takes those of folders and archives for one."""
    run, data = ("run", "data") if kind.endswith(("folder", *PACKERS)) else ("run[1]", "data[1]")
    for each in (run, "run1"):
        (tmp_path / each).mkdir()
    monkeypatch.chdir(tmp_path / run)
    source = Path(f"{data}.{kind}")
    SOURCES[kind](source)
    for folder in (Path(), tmp_path / "run1"):
        (folder / f"data1.{kind}").touch()
    (documents,) = load_documents([str(source)], sample_by="paragraph", streaming=streaming).values()
    assert [text for batch in documents.iter(batch_size=64) for text in batch["text"]] == TEXTS


def test_sources_are_kept_apart_and_columns_are_renamed(tmp_path: Path) -> None:
    texts = {str(tmp_path / "one.jsonl"): TEXTS[:3], str(tmp_path / "other.jsonl"): TEXTS[3:5]}
    for path, each in texts.items():
        _jsonl(Path(path), each, column="body")
    documents = load_documents([*texts], text_column="body")
    assert {source: part["text"][:] for source, part in documents.items()} == texts


def test_lines_and_whole_files_can_be_documents(tmp_path: Path) -> None:
    path = str(tmp_path / "a.txt")
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    for options, expected in (
        ({"sample_by": "line"}, ["one", "two", "", "three"]),
        ({"sample_by": "paragraph"}, ["one\ntwo", "three\n"]),
        ({}, ["one\ntwo\n\nthree\n"]),
    ):
        assert load_documents([path], **options)[path]["text"][:] == expected


def packed(texts: list[str], **options: Any) -> Blocks:
    return pack_documents({"texts": Dataset.from_dict({"text": texts})}, byte_tokenizer(), **options)


def tokens_of(blocks: Any) -> list[int]:
    return [int(token) for index in range(len(blocks)) for token in blocks[index]["input_ids"]]


def expected_tokens(texts: list[str], share: float, held_out: bool) -> list[int]:
    """The documents of one side end to end."""
    chosen = [text for text in texts if is_held_out(text, share) == held_out]
    return [token for text in chosen for token in [*byte_tokenizer()(text)["input_ids"], 0]]


@pytest.mark.parametrize("block", [8, 61])
def test_no_token_is_lost_but_the_tail(block: int) -> None:
    blocks = packed(TEXTS, block=block, held_out=0.2, held_out_blocks=1000)
    for side, held_out in ((blocks.train, False), (blocks.held_out, True)):
        expected = expected_tokens(TEXTS, 0.2, held_out)
        got = tokens_of(side)
        assert got == expected[: len(got)]
        assert len(expected) - block < len(got) <= len(expected)
        assert all(side[i]["labels"].tolist() == side[i]["input_ids"].tolist() for i in range(len(side)))


def test_blocks_are_found_in_any_chunks() -> None:
    numbers = np.random.default_rng(0)
    chunks = np.split(np.arange(1000), np.sort(numbers.choice(1000, 60)))  # some are empty
    blocks = PackedBlocks(pa.chunked_array([pa.array(each, pa.int32()) for each in chunks]), np.arange(0, 1000, 50), 48)
    assert tokens_of(blocks) == [*range(1000 // 48 * 48)]


def test_held_out_blocks_come_from_all_held_out_documents_of_all_sources(tmp_path: Path) -> None:
    texts = {letter: [f"{letter}{n:03} " * 8 for n in range(60)] for letter in "xyz"}
    paths = {letter: str(_jsonl(tmp_path / f"{letter}.jsonl", texts[letter])) for letter in texts}
    documents = load_documents([*paths.values()])
    for most, per_document in ((10_000, 1), (30, 0)):
        blocks = pack_documents(documents, byte_tokenizer(), block=10, held_out=0.3, held_out_blocks=most)
        text = byte_tokenizer().decode(tokens_of(blocks.held_out)).replace(" ", "")
        held_out = {letter: [text for text in texts[letter] if is_held_out(text, 0.3)] for letter in texts}
        assert len(blocks.held_out) == min(
            most, sum(len(text) + 1 for each in held_out.values() for text in each) // 10
        )
        evaluated = {letter: sum(each[:4] in text for each in held_out[letter]) for letter in texts}
        counted = {letter: blocks.held_out_documents[path] for letter, path in paths.items()}
        for letter, each in held_out.items():
            if per_document:
                assert counted[letter] == evaluated[letter] == len(each)
            else:  # every second document or so, of every source, to its end
                assert 0.3 * len(each) < counted[letter] <= len(each)
                assert any(text[:4] in byte_tokenizer().decode(tokens_of(blocks.held_out)) for text in each[-3:])


def test_packed_documents_are_computed_as_if_alone() -> None:
    texts = [text * (1 + index % 3) for index, text in enumerate(TEXTS[:40])]
    train = packed(texts, block=64, held_out=0.5, held_out_blocks=1, separate=True).train
    model = family_model("llama")
    batch = torch.utils.data.default_collate([train[index] for index in range(4)])
    documents = 0
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits  # as the Trainer has it
        for row, positions in enumerate(batch["position_ids"]):
            starts = [*(positions == 0).nonzero().flatten().tolist(), 64]
            for start, end in pairwise(starts):
                ids = batch["input_ids"][row, start:end]
                torch.testing.assert_close(logits[row, start:end], model(ids[None]).logits[0], atol=1e-5, rtol=1e-4)
                # A first token has no token before it that could predict it; one that a block cuts off neither.
                assert batch["labels"][row, start + 1 : end].tolist() == ids[1:].tolist()
                assert batch["labels"][row, start] == (-100 if start or row == 0 else ids[0])
                assert (ids[:-1] != 0).all()
                documents += 1
    assert documents > 6


def test_documents_begin_as_the_tokenizer_begins_them(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<begin>"})  # which it adds itself, as Llama's does
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 257)])
    documents = load_documents([str(_jsonl(tmp_path / "rows.jsonl", TEXTS))])
    held_out = pack_documents(documents, tokenizer, block=8, held_out=0.2, held_out_blocks=9999).held_out
    expected = [token for text in TEXTS if is_held_out(text, 0.2) for token in [*tokenizer(text)["input_ids"], 0]]
    assert expected[0] == 257
    assert tokens_of(held_out) == expected[: len(held_out) * 8]
    # `resformer analyze` reads the same.
    assert analyze(family_model("llama"), ["abc"], tokenizer=tokenizer).tokens == 4


def test_more_data_moves_no_document_to_the_other_side() -> None:
    options = {"block": 2, "held_out": 0.2, "held_out_blocks": 9999}
    few, many = (tokens_of(packed(texts, **options).held_out) for texts in (TEXTS[:100], TEXTS))
    assert many[: len(few)] == few
    assert len(many) > len(few)
    for share in (0.02, 0.1, 0.5):
        numbers = [is_held_out(str(number), share) for number in range(20_000)]
        assert sum(numbers) / 20_000 == pytest.approx(share, rel=0.1)


def test_modules_of_the_standard_library_are_held_out_whole() -> None:
    files = list(standard_library())
    assert files == list(standard_library())
    held_out = {file["group"] for file in files if is_held_out(file["group"], 0.1)}
    part = Dataset.from_list(files)
    trained = list(training_texts("x", part, 0.1))
    assert trained == [file["text"] for file in files if file["text"] and file["group"] not in held_out]
    assert 0.02 * len(files) < len(files) - len(trained) < 0.3 * len(files)


def test_tokens_are_cached(tmp_path: Path) -> None:
    documents = load_documents([str(_jsonl(tmp_path / "rows.jsonl", TEXTS))])
    (part,) = documents.values()
    cache = Path(part.cache_files[0]["filename"]).parent
    options = {"block": 16, "held_out": 0.2, "held_out_blocks": 5}
    before = set(cache.iterdir())
    expected = tokens_of(pack_documents(documents, byte_tokenizer(), **options).train)
    written = set(cache.iterdir())
    assert len(written - before) == 2
    assert tokens_of(pack_documents(documents, byte_tokenizer(), **options).train) == expected
    assert set(cache.iterdir()) == written


def test_a_block_without_a_label_is_left_out() -> None:
    ids = [number if number == 7 else -1 - number for number in range(16)]  # the first token of a document
    tokens, starts = pa.chunked_array([pa.array(ids, pa.int32())]), np.array([0, 7])
    assert len(PackedBlocks(tokens, starts, 8, masked=True)) == 1
    assert len(PackedBlocks(tokens, starts, 8, masked=True, separate=True)) == 0
    rows = {"input_ids": [[1, 2, 3, 4]] * 9, "labels": [[-100] * 4] * 9}
    with pytest.raises(DataError, match="documents have 36 tokens, and no answer or completion to learn"):
        pack_documents({"rows": Dataset.from_dict(rows)}, byte_tokenizer(), block=8, held_out=0, held_out_blocks=1)
    rows["labels"][3] = [-100] * 5
    with pytest.raises(DataError, match="A row has 4 `input_ids` and 5 `labels`"):
        pack_documents({"rows": Dataset.from_dict(rows)}, byte_tokenizer(), block=8, held_out=0, held_out_blocks=1)


def test_an_empty_cell_is_left_out() -> None:
    given = {"notes": Dataset.from_dict({"text": [*TEXTS, None]})}
    blocks = pack_documents(given, byte_tokenizer(), block=8, held_out=0.1, held_out_blocks=4)
    assert len(blocks.train) == len(packed(TEXTS, block=8, held_out=0.1, held_out_blocks=4).train)


@pytest.mark.parametrize("dtype", ["int64", "uint16"])
@pytest.mark.parametrize("held_out", [{}, {"held_out": [True] * 4 + [False] * 36}], ids=["", "held_out"])
def test_any_column_of_token_ids_is_read(dtype: str, held_out: dict[str, list[bool]], tmp_path: Path) -> None:
    ids = [[*range(n, n + 16)] for n in range(40)]
    features = {"input_ids": List(Value(dtype)), **{name: Value("bool") for name in held_out}}
    Dataset.from_dict({"input_ids": ids, **held_out}, features=Features(features)).save_to_disk(tmp_path / "ids")
    documents = load_documents([str(tmp_path / "ids")])
    options = {"block": 16, "held_out": 0.1, "held_out_blocks": 99}
    blocks = pack_documents(documents, byte_tokenizer(), **options)
    both = [block["input_ids"].tolist() for side in (blocks.held_out, blocks.train) for block in side]
    assert both == ids if held_out else sorted(both) == ids
    assert len(pack_documents(documents, byte_tokenizer(), **options, held_out_data=documents).held_out) == len(ids)
    for wrong in {-1, 257} if dtype == "int64" else {257}:
        given = Dataset.from_dict({"input_ids": [*ids[:-1], [wrong] * 16], **held_out})
        with pytest.raises(DataError, match=f"have the token {wrong}, and the tokenizer 257 tokens; name"):
            pack_documents({"ids": given}, byte_tokenizer(), **options)
    if held_out:  # by their tokens where the column says nothing
        given = Dataset.from_dict({"input_ids": ids, "held_out": [None] * 40})
        assert len(pack_documents({"ids": given}, byte_tokenizer(), **options).held_out)


def test_a_saved_dataset_stays_as_it_is_and_a_full_disk_is_not_its_fault(tmp_path: Path) -> None:
    ROWS.save_to_disk(tmp_path)
    before = source_digest(str(tmp_path))
    pack_documents(load_documents([str(tmp_path)]), byte_tokenizer(), block=8, held_out=0.0, held_out_blocks=1)
    assert source_digest(str(tmp_path)) == before  # no cache beside the data, which may be read-only
    with pytest.raises(OutputError, match=r"notes.txt: the cache of .* cannot be written"), reading_source("notes.txt"):
        raise DatasetGenerationError from OSError(errno.ENOSPC, "full")


def test_sources_are_mixed_by_tokens_and_none_is_cut(tmp_path: Path) -> None:
    _jsonl(tmp_path / "a.jsonl", [f"a{n:05}" for n in range(100)])  # small
    _jsonl(tmp_path / "b.jsonl", [f"b{n:04}" + "b" * 50 for n in range(100)])
    names, weights = weighted_sources([f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"])
    assert weights == [0.75, 0.25]
    options = {"block": 7, "held_out": 0.05, "held_out_blocks": 10_000}
    given = {"weights": weights, "length": lambda one_pass: 2_400, **options}
    blocks = pack_documents(load_documents(names), byte_tokenizer(), **given)
    texts = [byte_tokenizer().decode(blocks.train[n]["input_ids"]) for n in range(2_400)]
    of_a = [bool(re.search(r"a\d", text)) for text in texts]
    for some in (of_a[:40], of_a[1000:1040], of_a):
        assert sum(some) / len(some) == pytest.approx(0.75, abs=0.03)
    read = blocks.train.read(2_400)
    assert [read[name][0] for name in names] == [1800 * 7, 600 * 7]
    small = len({text for text, chosen in zip(texts, of_a, strict=True) if chosen})
    assert small == pytest.approx(95, abs=5)  # all but what is held out
    assert len({*re.findall(r"b\d{4}", "".join(texts))}) > 50  # of some 750 blocks, 600 of them
    assert read[names[0]][1] == pytest.approx(1800 / small, abs=1)
    assert read[names[1]][1] == pytest.approx(600 / 750, abs=0.08)


def test_one_pass_with_weights_reads_all_of_every_source() -> None:
    given = {"few": Dataset.from_dict({"text": TEXTS[:20]}), "many": Dataset.from_dict({"text": TEXTS[20:]})}
    options = {"block": 8, "held_out": 0, "held_out_blocks": 1}
    plain = {str(block) for block in pack_documents(given, byte_tokenizer(), **options).train}
    mixed = pack_documents(given, byte_tokenizer(), **options, weights=[0.5, 0.5]).train
    assert {str(mixed[n]) for n in range(len(mixed))} == plain
    read = mixed.read(len(mixed))
    assert read["many"][1] == pytest.approx(1, abs=0.01)
    tokens = [sum(len(text) + 1 for text in texts) for texts in (TEXTS[:20], TEXTS[20:])]
    assert read["few"][1] == pytest.approx(tokens[1] / tokens[0], rel=0.02)
    given["many"] = Dataset.from_dict({"text": ["too few."]})
    with pytest.raises(DataError, match="many: its training documents have 9 tokens and do not fill a block of 10"):
        pack_documents(given, byte_tokenizer(), **{**options, "block": 10}, weights=[0.5, 0.5])


@pytest.mark.parametrize("weights", [None, [0.3, 0.7]])
def test_a_longer_run_begins_alike_and_each_pass_is_whole(weights: list[float] | None) -> None:
    given = {"few": Dataset.from_dict({"text": TEXTS[:50]}), "many": Dataset.from_dict({"text": TEXTS[50:]})}
    options = {"block": 8, "held_out": 0, "held_out_blocks": 1, "weights": weights}
    short, long, other = (
        pack_documents(given, byte_tokenizer(), **options, length=lambda _, n=n: n, seed=seed).train.order.tolist()
        for n, seed in ((1000, 0), (3000, 0), (3000, 1))
    )
    assert long[:1000] == short
    assert other != long
    every = len({*long})
    few = int(np.searchsorted(np.cumsum([len(text) + 1 for text in TEXTS[:50]])[-1:], np.arange(every) * 8).argmax())
    for source in [range(every)] if weights is None else [range(few), range(few, every)]:
        order = [block for block in long if block in source]
        passes = [order[n : n + len(source)] for n in range(0, len(order) - len(source), len(source))]
        assert len(passes) > 1
        assert all(sorted(each) == list(source) for each in passes)
        assert passes[0] != passes[1]


def test_weights_are_told_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes:2").touch()
    assert weighted_sources(["notes:2", "you/set:en"]) == (["notes:2", "you/set:en"], None)
    assert weighted_sources(["a/b:en:.5", "c:1.5"]) == (["a/b:en", "c"], [0.25, 0.75])
    assert weighted_sources(["you/set:2019"]) == (["you/set:2019"], None)  # one source needs no weight
    for twice in (["a", "b", "a"], ["a:1", "a:2"]):
        with pytest.raises(ValueError, match="data has 'a' more than once; name it once, with a weight"):
            weighted_sources(twice)


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    Dataset.from_list(rows).to_parquet(written := io.BytesIO())
    return written.getvalue()


#: Name of a file that cannot be read -> its content, and what is said of it.
BAD_FILES: dict[str, tuple[bytes, str]] = {
    **{f"b.txt.{kind}": (pack(ROWS_OF_JSON)[:-60], "") for kind, pack in PACKERS.items()},
    **{f"b.jsonl.{kind}": (pack(ROWS_OF_JSON)[:-60], "") for kind, pack in PACKERS.items()},
    "b.txt": (b"caf\xe9", "codec can't decode byte 0xe9"),
    "b.jsonl": (ROWS_OF_JSON + b'{"text": "cut of', ""),
    "b.json": (b'[{"text": "a"}, {"bo', ""),
    "b.csv": (b"text,id\none, two,3\n", ""),
    "b.parquet": (_parquet([{"text": "a"}])[:-20], ""),
}


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("name", BAD_FILES)
def test_a_bad_file_is_named(name: str, streaming: bool, tmp_path: Path) -> None:
    data, words = BAD_FILES[name]
    suffix = name.partition(".")[2]
    good = {"parquet": _parquet([{"text": "good"}]), "csv": b"text\ngood\n", "json": b'[{"text": "good"}]'}
    (tmp_path / f"a.{suffix.partition('.')[0]}").write_bytes(good.get(suffix, ROWS_OF_JSON))
    (tmp_path / name).write_bytes(data)
    said = pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: ") + ".*" + re.escape(words))
    with said, reading_source(str(tmp_path)):  # as who reads a stream does
        list(load_documents([str(tmp_path)], streaming=streaming)[str(tmp_path)])


def test_files_whose_columns_differ_are_refused_in_a_line(tmp_path: Path) -> None:
    for number, other in enumerate(({"meta": {"id": 1}}, {"id": "x"})):
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({**other, "text": "a"}) + "\n")
    told = "`datasets` cannot read it: .*; the columns of 0.jsonl and 1.jsonl differ: name each with --data"
    with pytest.raises(DataError, match=f"{tmp_path}: {told}"):
        load_documents([str(tmp_path)])
    (tmp_path / "a::b.txt").touch()
    with pytest.raises(DataError, match="takes the :: in its path for an archive; rename it"):
        load_documents([str(tmp_path / "a::b.txt")])
    (tmp_path / "a[1]").mkdir()
    (packed := tmp_path / "a[1]" / "b.txt.gz").write_bytes(gzip.compress(b"text"))
    for source in (packed.parent, packed):
        with pytest.raises(DataError, match="for a pattern; rename it, or name a folder's files"):
            load_documents([str(source)])


def test_what_is_no_data_in_a_folder_is_not_read_and_told(tmp_path: Path) -> None:
    _jsonl(tmp_path / "data.jsonl", TEXTS)
    (tmp_path / "README.md").write_text("# How the data came about")
    (tmp_path / "table.xlsx").touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "copy.txt").write_text("hidden")
    documents = load_documents([str(tmp_path)])
    assert documents[str(tmp_path)]["text"][:] == TEXTS
    assert documents.notes == [f"{tmp_path.name}: not read: 'table.xlsx'"]
    readme = str(tmp_path / "README.md")
    assert load_documents([readme])[readme]["text"][:] == ["# How the data came about"]  # asked for


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "rows.jsonl", TEXTS[:10])
    before = source_digest(str(tmp_path))
    assert load_documents([str(path)])[str(path)]["text"][:] == TEXTS[:10]
    _jsonl(path, TEXTS[10:20])  # of the same size
    assert load_documents([str(path)])[str(path)]["text"][:] == TEXTS[10:20]
    assert source_digest(str(tmp_path)) != before


@pytest.mark.parametrize("parse_special", [False, True])
def test_special_tokens_that_a_text_spells_stay_text(parse_special: bool) -> None:
    tokenizer = byte_tokenizer()
    end = tokenizer.eos_token
    given = {"rows": Dataset.from_dict({"text": [f"a{end}b"]})}
    options = {"block": 2, "held_out": 0, "held_out_blocks": 1, "parse_special": parse_special}
    ids = pack_documents(given, tokenizer, **options).train.tokens.to_pylist()
    assert ids.count(0) == 1 + parse_special
    assert tokenizer.decode(ids) == f"a{end}b{end}"
    note = f"rows: {end} in its text is read as text; --parse-special makes it a token"
    assert spelt_specials({**given, "others": ROWS}, tokenizer) == [note]


def test_a_table_leaves_no_empty_keys_in_a_chat(tmp_path: Path) -> None:
    said, answered = {"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "c"}
    rows = [{"messages": [{**said, "tool_calls": None}, answered]}]
    (tmp_path / "rows.parquet").write_bytes(_parquet(rows))
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for source in ("rows.parquet", "saved"):
        (part,) = load_documents([str(tmp_path / source)], chats=True).values()
        assert [content(row) for row in part] == [{"messages": [said, answered]}]
