"""Training data: every kind of source, the split by content, the packing."""

import bz2
import gzip
import io
import json
import lzma
import re
from collections.abc import Callable
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from checkpoints import byte_tokenizer, family_model
from datasets import Dataset, DatasetDict, Features, IterableDataset, List, Value
from tokenizers.processors import TemplateProcessing

from resformer.analysis import analyze
from resformer.training.data import (
    DataError,
    content,
    is_held_out,
    load_documents,
    source_digest,
    standard_library,
    training_texts,
)
from resformer.training.options import weighted_sources
from resformer.training.packing import Blocks, PackedBlocks, StreamedBlocks, pack_documents, spelt_specials

TEXTS = [f"Document {index} says {index * index}." for index in range(200)]


def _jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({column: text}) + "\n" for text in texts))
    return path


def _folder(path: Path) -> None:
    (path / "below").mkdir(parents=True)
    _jsonl(path / "a.jsonl", TEXTS[:30])
    Dataset.from_dict({"text": TEXTS[30:40]}).to_csv(path / "b.csv")
    Dataset.from_dict({"text": TEXTS[40:50]}).to_csv(path / "b.tsv", sep="\t")
    (path / "below" / "b.txt").write_text("\n\n".join(TEXTS[50:]))
    (path / "readme.rst").write_text("not data")


ROWS = Dataset.from_dict({"text": TEXTS})
#: Kind of a source -> writes it.
SOURCES: dict[str, Callable[[Path], object]] = {
    "txt": lambda path: path.write_text("\n\n".join(TEXTS)),
    "jsonl": lambda path: _jsonl(path, TEXTS),
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
def test_every_kind_of_source_gives_the_same_documents(kind: str, streaming: bool, tmp_path: Path) -> None:
    source = str(tmp_path / f"data.{kind}")
    SOURCES[kind](Path(source))
    (documents,) = load_documents([source], sample_by="paragraph", streaming=streaming).values()
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


@pytest.mark.parametrize("streaming", [False, True])
def test_held_out_blocks_come_from_all_held_out_documents_of_all_sources(streaming: bool, tmp_path: Path) -> None:
    texts = {letter: [f"{letter}{n:03} " * 8 for n in range(60)] for letter in "xyz"}
    paths = {letter: str(_jsonl(tmp_path / f"{letter}.jsonl", texts[letter])) for letter in texts}
    documents = load_documents([*paths.values()], streaming=streaming)
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


@pytest.mark.parametrize("streaming", [False, True])
def test_documents_begin_as_the_tokenizer_begins_them(streaming: bool, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.add_special_tokens({"bos_token": "<begin>"})  # which it adds itself, as Llama's does
    tokenizer._tokenizer.post_processor = TemplateProcessing(single="<begin> $A", special_tokens=[("<begin>", 257)])
    documents = load_documents([str(_jsonl(tmp_path / "rows.jsonl", TEXTS))], streaming=streaming)
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


@pytest.mark.parametrize("separate", [False, True])
def test_a_stream_trains_on_what_a_dataset_does(
    separate: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(_jsonl(tmp_path / "rows.jsonl", TEXTS))
    options = {"block": 16, "held_out": 0.2, "held_out_blocks": 5, "separate": separate}
    whole = pack_documents(load_documents([path]), byte_tokenizer(), **options)
    monkeypatch.setattr("resformer.training.packing._SHUFFLED", len(whole.train))
    streams = [
        pack_documents(load_documents([path], streaming=True), byte_tokenizer(), **options, seed=seed)
        for seed in (0, 0, 1)
    ]
    first, again, other = (list(map(str, islice(stream.train, len(whole.train)))) for stream in streams)
    assert first == again
    assert first != other
    assert sorted(first) == sorted(str(whole.train[i]) for i in range(len(whole.train)))
    assert tokens_of(streams[0].held_out) == tokens_of(whole.held_out)


def test_a_stream_is_not_read_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resformer.training.packing.READ_AHEAD", 40_000)
    read = []

    def endless() -> object:
        index = 0
        while True:
            read.append(index)
            yield {"text": f"Document {index}."}
            index += 1

    stream = {"endless": IterableDataset.from_generator(endless)}
    blocks = pack_documents(stream, byte_tokenizer(), block=8, held_out=0.1, held_out_blocks=4)
    assert len(blocks.held_out) == 4
    numbers = [int(number) for number in re.findall(r"\d+", byte_tokenizer().decode(tokens_of(blocks.held_out)))]
    assert max(numbers) > 1500  # of some 2,600 in the first 40,000 characters
    assert len(read) < 4000
    next(iter(blocks.train))


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


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(("kind", "share"), [("lines", 0.02), ("lines", 0.5), ("one line", 0.1), ("files", 0.1)])
def test_few_long_documents_are_cut_at_line_ends(
    kind: str, share: float, streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resformer.training.data._STRETCH", 100)
    lines = "".join(f"Line {n} of {n * n}\n" for n in range(2_500))
    whole = [lines, lines.replace("Line", "Row")][: 1 + (kind == "files")]
    if kind == "one line":
        whole = [lines.replace("\n", "; ")]
    path = str(_jsonl(tmp_path / "rows.jsonl", whole))
    documents = load_documents([path], streaming=streaming, held_out=share)
    rows = list(documents[path])
    texts = ["".join(row["text"] for row in rows if row["held_out"] is side) for side in (True, False)]
    assert "".join(row["text"] for row in rows) == "".join(whole)  # nothing is lost
    assert len(texts[0]) / len(lines) / len(whole) == pytest.approx(share, rel=0.1)
    parts = [row for row in rows if row["held_out"]]
    assert len(parts) in (8, 9)  # a document may end within one
    if kind != "one line":
        assert all(row["text"].endswith("\n") for row in rows)
    (note,) = documents.notes
    assert note.startswith("rows.jsonl: ")
    counted = f"{len(whole)} document.* cut at line ends into {len(rows)} parts, {len(parts)} of them held out"
    assert streaming or re.search(counted, note)
    blocks = pack_documents(documents, byte_tokenizer(), block=64, held_out=share, held_out_blocks=10_000)
    assert len(blocks.held_out) == (len(texts[0]) + len(parts)) // 64
    assert list(training_texts(path, documents[path], share)) == [row["text"] for row in rows if not row["held_out"]]


def test_many_documents_and_short_ones_are_not_cut(tmp_path: Path) -> None:
    many = _jsonl(tmp_path / "many.jsonl", [f"{text}\n" * 100 for text in TEXTS])
    short = _jsonl(tmp_path / "short.jsonl", TEXTS[:10])
    documents = load_documents([str(many), str(short)], held_out=0.1)
    assert documents.notes == []
    assert "held_out" not in documents[str(many)].column_names
    assert documents[str(short)]["text"][:] == TEXTS[:10]
    assert documents[str(short)]["held_out"][:] == [True] * 2 + [False] * 8
    (tmp_path / "mixed").mkdir()
    (tmp_path / "mixed" / "a.txt").write_text(TEXTS[0])
    (tmp_path / "mixed" / "b.jsonl").write_text(json.dumps({"messages": TURNS}))
    (mixed,) = load_documents([str(tmp_path / "mixed")], chats=True, held_out=0.1).values()
    assert [content(row) for row in mixed] == [TEXTS[0], {"messages": TURNS}]


def test_a_block_without_a_label_is_left_out() -> None:
    ids = [number if number == 7 else -1 - number for number in range(16)]  # the first token of a document
    tokens, starts = pa.chunked_array([pa.array(ids, pa.int32())]), np.array([0, 7])
    assert len(PackedBlocks(tokens, starts, 8, masked=True)) == 1
    assert len(PackedBlocks(tokens, starts, 8, masked=True, separate=True)) == 0
    given = {"questions": Dataset.from_dict({"messages": [TURNS[:1]] * 9})}
    with pytest.raises(DataError, match="documents have 36 tokens, and no answer or completion to learn"):
        pack_documents(given, byte_tokenizer(), block=8, held_out=0, held_out_blocks=1)


def test_an_empty_cell_is_left_out(tmp_path: Path) -> None:
    given = {"notes": Dataset.from_dict({"text": [*TEXTS, None]})}
    blocks = pack_documents(given, byte_tokenizer(), block=8, held_out=0.1, held_out_blocks=4)
    assert len(blocks.train) == len(packed(TEXTS, block=8, held_out=0.1, held_out_blocks=4).train)
    given = {"notes": Dataset.from_dict({"prompt": [None], "completion": ["no prompt"]})}
    blocks = pack_documents(given, byte_tokenizer(), block=8, held_out=0, held_out_blocks=4)
    assert len(blocks.train.tokens) == len("no prompt") + 1
    lines = [*[""] * 200, "A line of the one text.\n" * 200]  # empty ones are no documents, of which some are held out
    documents = load_documents([str(_jsonl(tmp_path / "one.jsonl", lines))], held_out=0.1)
    assert pack_documents(documents, byte_tokenizer(), block=8, held_out=0.1, held_out_blocks=4).held_out_documents


@pytest.mark.parametrize("dtype", ["int64", "uint16"])
@pytest.mark.parametrize("held_out", [{}, {"held_out": [True] * 4 + [False] * 36}], ids=["", "held_out"])
def test_any_column_of_token_ids_is_read(dtype: str, held_out: dict[str, list[bool]], tmp_path: Path) -> None:
    ids = [[*range(n, n + 16)] for n in range(40)]
    features = {"input_ids": List(Value(dtype)), **{name: Value("bool") for name in held_out}}
    Dataset.from_dict({"input_ids": ids, **held_out}, features=Features(features)).save_to_disk(tmp_path / "ids")
    documents = load_documents([str(tmp_path / "ids")], held_out=0.1)
    options = {"block": 16, "held_out": 0.1, "held_out_blocks": 99}
    blocks = pack_documents(documents, byte_tokenizer(), **options)
    both = [block["input_ids"].tolist() for side in (blocks.held_out, blocks.train) for block in side]
    assert both == ids if held_out else sorted(both) == ids
    for wrong in {-1, 257} if dtype == "int64" else {257}:
        given = Dataset.from_dict({"input_ids": [*ids[:-1], [wrong] * 16], **held_out})
        with pytest.raises(DataError, match=f"have the token {wrong}, and the tokenizer 257 tokens; name"):
            pack_documents({"ids": given}, byte_tokenizer(), **options)
    if held_out:  # by their tokens where the column says nothing
        given = Dataset.from_dict({"input_ids": ids, "held_out": [None] * 40})
        assert len(pack_documents({"ids": given}, byte_tokenizer(), **options).held_out)


CHATML = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
TURNS = [
    {"role": role, "content": text}
    for role, text in (("user", "hi 0"), ("assistant", "yes 0"), ("user", "so?"), ("assistant", "no 0"))
]
#: A row of number 0, and its text with what is learned in brackets.
LEARNED: dict[str, tuple[dict[str, Any], str]] = {
    "chat": ({"messages": TURNS}, "<user>hi 0</s>\n<assistant>[yes 0</s>\n]<user>so?</s>\n<assistant>[no 0</s>\n]"),
    "answer": (
        {"prompt": TURNS[:3], "completion": TURNS[3:]},
        "<user>hi 0</s>\n<assistant>yes 0</s>\n<user>so?</s>\n<assistant>[no 0</s>\n]",
    ),
    "begun": ({"messages": TURNS[1:]}, "<assistant>[yes 0</s>\n]<user>so?</s>\n<assistant>[no 0</s>\n]"),
    "completion": ({"prompt": "0 is a", "completion": " number"}, "0 is a[ number<end>]"),
    "text": ({"text": "0 is a number"}, "[0 is a number<end>]"),
}


@pytest.mark.parametrize("kind", LEARNED)
def test_answers_and_completions_alone_are_learned(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    row, marked = (json.dumps(part) for part in LEARNED[kind])
    path = tmp_path / "rows.jsonl"
    rows = [row.replace("0", f"{n:02}") for n in range(60)]
    path.write_text("\n".join([*rows, json.dumps(dict.fromkeys(LEARNED[kind][0]))]))  # the last has empty cells
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHATML
    options = {"block": 16, "held_out": 0.3, "held_out_blocks": 9999}
    blocks, streamed = (
        pack_documents(load_documents([str(path)], streaming=streaming, chats=True), tokenizer, **options)
        for streaming in (False, True)
    )
    pieces: dict[bool, list[tuple[int, int]]] = {True: [], False: []}
    for n, text in ((n, json.loads(marked).replace("0", f"{n:02}")) for n in range(60)):
        said = json.loads(rows[n])  # whatever the tokenizer's template makes of it
        held_out = is_held_out(said["text"] if kind == "text" else json.dumps(said, sort_keys=True), 0.3)
        for number, piece in enumerate(re.split(r"[\[\]]", text)):
            for token in tokenizer(piece)["input_ids"]:
                pieces[held_out].append((token, token if number % 2 else -100))
    for held_out, side in ((False, blocks.train), (True, blocks.held_out)):
        whole = torch.tensor(pieces[held_out])[: len(pieces[held_out]) // 16 * 16].view(-1, 16, 2)
        expected = [block for block in whole if (block[1:, 1] != -100).any()]
        assert len(side) == len(expected)
        for number, block in enumerate(expected):
            assert torch.equal(torch.stack((side[number]["input_ids"], side[number]["labels"]), dim=1), block)
    assert [streamed.held_out[n]["labels"].tolist() for n in range(len(blocks.held_out))] == [
        blocks.held_out[n]["labels"].tolist() for n in range(len(blocks.held_out))
    ]
    monkeypatch.setattr("resformer.training.packing._SHUFFLED", len(blocks.train))
    assert sorted(row["labels"].tolist() for row in islice(streamed.train, len(blocks.train))) == sorted(
        blocks.train[n]["labels"].tolist() for n in range(len(blocks.train))
    )


@pytest.mark.parametrize("streaming", [False, True])
def test_sources_are_mixed_by_tokens_and_none_is_cut(
    streaming: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resformer.training.packing._SHUFFLED", 40)
    _jsonl(tmp_path / "a.jsonl", [f"a{n:05}" for n in range(100)])  # small
    chats = [{"prompt": f"b{n:04}", "completion": "b" * 50} for n in range(100)]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, chats)))
    names, weights = weighted_sources([f"{tmp_path}/a.jsonl:3", f"{tmp_path}/b.jsonl:1"])
    assert weights == [0.75, 0.25]
    documents = load_documents(names, streaming=streaming, chats=True)
    options = {"block": 7, "held_out": 0.05, "held_out_blocks": 10_000}
    blocks = pack_documents(documents, byte_tokenizer(), **options, weights=weights, length=lambda one_pass: 2_400)
    given = list(islice(blocks.train, 2_400)) if streaming else [blocks.train[n] for n in range(2_400)]
    texts = [byte_tokenizer().decode(block["input_ids"]) for block in given]
    of_a = [bool(re.search(r"a\d", text)) for text in texts]
    for some in (of_a[:40], of_a[1000:1040], of_a):
        assert sum(some) / len(some) == pytest.approx(0.75, abs=0.001 if streaming else 0.03)
    read = blocks.train.read(2_400)
    assert [read[name][0] for name in names] == [1800 * 7, 600 * 7]
    small = len({text for text, chosen in zip(texts, of_a, strict=True) if chosen})
    assert small == pytest.approx(95, abs=5)  # all but what is held out
    assert len({*re.findall(r"b\d{4}", "".join(texts))}) > 50  # of some 750 blocks, 600 of them
    assert read[names[0]][1] == pytest.approx(1800 / small, abs=1)
    assert read[names[1]][1] == (1 if streaming else pytest.approx(600 / 750, abs=0.08))


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


def test_streams_without_weights_are_read_to_their_ends_before_one_begins_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("resformer.training.packing._SHUFFLED", 20)
    paths = [
        str(_jsonl(tmp_path / f"{x}.jsonl", [f"{x}{n:05}" for n in range(count)]))
        for x, count in (("a", 60), ("b", 540))
    ]
    documents = load_documents(paths, streaming=True)
    blocks = pack_documents(documents, byte_tokenizer(), block=7, held_out=0, held_out_blocks=1)
    with pytest.warns(UserWarning, match="a.jsonl: is read 5 times. Beyond 4 passes"):
        texts = [byte_tokenizer().decode(block["input_ids"]) for block in islice(blocks.train, 2_500)]
    counts = [sum("a" in text for text in texts[n : n + 20]) for n in range(0, 720, 20)]
    assert counts[:5] == [10] * 5
    assert set(counts[7:29]) == {0}
    assert counts[31:35] == [10] * 4
    assert len({*texts[:600]}) == 600
    of_a = sum("a" in text for text in texts[:2_493])
    assert blocks.train.read(2_493) == {paths[0]: (7 * of_a, 5), paths[1]: (7 * (2_493 - of_a), 5)}


@pytest.mark.parametrize("weights", [None, [0.7, 0.3]])
def test_a_stream_goes_on_where_it_was(weights: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("resformer.training.packing._SHUFFLED", 16)
    paths = [str(_jsonl(tmp_path / f"{name}.jsonl", [name + text for text in TEXTS])) for name in "xy"]
    (tmp_path / "y.jsonl").write_text(json.dumps({"text": "\n".join(f"y {n}" for n in range(900))}))  # cut, generated

    def stream() -> StreamedBlocks:
        documents = load_documents(paths, streaming=True, held_out=0.1)
        blocks = pack_documents(
            documents, byte_tokenizer(), block=32, held_out=0.1, held_out_blocks=2, weights=weights, separate=True
        ).train
        assert isinstance(blocks, StreamedBlocks)
        return blocks

    whole, expected = stream(), []
    places, tokens = [whole.place(0)], [whole.read(0)]
    for number, block in enumerate(islice(whole, 740), start=1):  # several times through both
        expected.append(str(block))
        if number % 7 == 0:  # the reader may be ahead of the training
            places.append(whole.place(number - 5))
            tokens.append(whole.read(number - 5))
    for number, place in [(7 * n - 5 if n else 0, places[n]) for n in (0, 1, 2, 3, 50, 99)]:
        again = stream()
        again.resume(json.loads(json.dumps(place)))
        assert again.read(number) == tokens[places.index(place)]
        assert list(map(str, islice(again, 40))) == expected[number : number + 40]


def test_weights_are_told_from_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes:2").touch()
    assert weighted_sources(["notes:2", "you/set:en"]) == (["notes:2", "you/set:en"], None)
    assert weighted_sources(["a/b:en:.5", "c:1.5"]) == (["a/b:en", "c"], [0.25, 0.75])
    assert weighted_sources(["you/set:2019"]) == (["you/set:2019"], None)  # one source needs no weight
    for twice in (["a", "b", "a"], ["a:1", "a:2"]):
        with pytest.raises(ValueError, match="data has 'a' more than once; name it once, with a weight"):
            weighted_sources(twice)


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": lzma.compress,
    "zst": lambda content: pa.compress(content, "zstd", asbytes=True),
}


@pytest.mark.parametrize("kind", PACKERS)
def test_a_compressed_file_is_read(kind: str, tmp_path: Path) -> None:
    path = tmp_path / f"rows.jsonl.{kind}"
    path.write_bytes(PACKERS[kind]("\n".join(json.dumps({"text": text}) for text in TEXTS).encode()))
    assert load_documents([str(path)])[str(path)]["text"][:] == TEXTS


def _parquet(rows: list[dict[str, Any]]) -> bytes:
    Dataset.from_list(rows).to_parquet(written := io.BytesIO())
    return written.getvalue()


ROWS_OF_JSON = "".join(json.dumps({"text": text}) + "\n" for text in TEXTS).encode()
#: Name of a file that cannot be read -> its content, and what is said of it.
BAD_FILES: dict[str, tuple[bytes, str]] = {
    **{f"b.txt.{kind}": (pack(ROWS_OF_JSON)[:-60], "") for kind, pack in PACKERS.items()},
    **{f"b.jsonl.{kind}": (pack(ROWS_OF_JSON)[:-60], "") for kind, pack in PACKERS.items()},
    "b.txt": (b"caf\xe9", "codec can't decode byte 0xe9"),
    "b.jsonl": (ROWS_OF_JSON + b'{"text": "cut of', "line 201: "),
    "b.json": (b'[{"text": "a"}, {"body": "b"}]', "has no column 'text' but 'body'; expected text"),
    "c.jsonl": (b'{"text": "\\ud800"}\n', "surrogates"),
    "d.jsonl": (b'{"text": 5}\n', "The text column holds 5, no text"),
    "b.csv": (b"text,id\none, two,3\n", "a row has more cells than there are columns"),
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
    with pytest.raises(DataError, match=re.escape(f"{tmp_path / name}: ") + ".*" + re.escape(words)):
        list(load_documents([str(tmp_path)], streaming=streaming)[str(tmp_path)])


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_columns_that_are_not_read_may_differ_between_files(kind: str, streaming: bool, tmp_path: Path) -> None:
    others: list[dict[str, Any]] = [{"meta": {"id": 1}}, {"meta": "x"}, {"url": "u"}, {"score": None}, {}]
    for number, other in enumerate(others):
        rows = [{**other, "text": text} for text in TEXTS[number * 10 : number * 10 + 10]]
        lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
        (tmp_path / f"{number}.{kind}").write_bytes(_parquet(rows) if kind == "parquet" else lines)
    documents = load_documents([str(tmp_path)], streaming=streaming)
    assert [content(row) for row in documents[str(tmp_path)]] == TEXTS[:50]
    assert documents.notes == [f"{tmp_path.name}: not read: 'meta'"]


def test_what_is_no_data_in_a_folder_is_not_read_and_told(tmp_path: Path) -> None:
    _jsonl(tmp_path / "data.jsonl", TEXTS)
    (tmp_path / "README.md").write_text("# How the data came about")
    (tmp_path / "table.xlsx").touch()
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "copy.txt").write_text("hidden")
    documents = load_documents([str(tmp_path)])
    assert documents[str(tmp_path)]["text"][:] == TEXTS
    assert documents.notes == [f"{tmp_path.name}: not read: 'README.md', 'table.xlsx'"]
    (tmp_path / "links").mkdir()
    for name in ("a", "b"):  # one of them leads back
        (tmp_path / "links" / name).symlink_to(tmp_path)
    linked = str(tmp_path / "links")
    assert load_documents([linked])[linked]["text"][:] == TEXTS
    readme = str(tmp_path / "README.md")
    assert load_documents([readme])[readme]["text"][:] == ["# How the data came about"]  # asked for


def test_a_changed_file_is_read_again(tmp_path: Path) -> None:
    path = _jsonl(tmp_path / "rows.jsonl", TEXTS[:10])
    before = source_digest(str(tmp_path))
    assert load_documents([str(path)])[str(path)]["text"][:] == TEXTS[:10]
    _jsonl(path, TEXTS[10:20])  # of the same size
    assert load_documents([str(path)])[str(path)]["text"][:] == TEXTS[10:20]
    assert source_digest(str(tmp_path)) != before


def learned(row: dict[str, Any], **options: Any) -> str:
    """The text of a row, with what is learned in brackets."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(options.pop("words", []))
    tokenizer.chat_template = CHATML.replace("{% for", "{{ tools | tojson if tools }}{% for", 1)
    if "template" in options:
        tokenizer.chat_template = options.pop("template")
    given = {"rows": Dataset.from_list([{"chat": json.dumps(row)}] if "text" not in row else [row])}
    blocks = pack_documents(given, tokenizer, block=2, held_out=0, held_out_blocks=1, **options).train
    text, open_ = "", False
    for token in blocks.tokens.to_pylist():
        if (token >= 0) != open_:
            text, open_ = text + "]["[token >= 0], token >= 0
        piece = tokenizer.convert_ids_to_tokens(token if token >= 0 else -1 - token)
        text += piece if token in (0, -1) else tokenizer.backend_tokenizer.decoder.decode([piece])
    return text + "]" * open_


END = byte_tokenizer().eos_token


def test_tools_and_weights_reach_the_template_and_the_loss() -> None:
    tools = [{"name": "one", "parameters": {"x": None}}, {"name": "two"}]
    chat = {"messages": [{**TURNS[0]}, {**TURNS[1], "weight": 0}, *TURNS[2:]], "tools": tools}
    said = json.dumps(tools) + "<user>hi 0</s>\n<assistant>yes 0</s>\n<user>so?</s>\n<assistant>[no 0</s>\n]"
    assert learned(chat) == said
    assert learned({**chat, "tools": json.dumps(tools)}) == said
    assert learned({"prompt": TURNS[:3], "completion": TURNS[3:], "tools": tools}) == said
    with pytest.raises(DataError, match="does not render `tools`; use another --tokenizer"):
        learned(chat, template=CHATML)
    with pytest.raises(DataError, match=r"weight is 0.5; expected 0, not learned, or 1"):
        learned({"messages": [TURNS[0], {**TURNS[1], "weight": 0.5}]})
    assert learned({"messages": TURNS[:2], "chat_template_kwargs": {"word": "x"}}, template="{{ word }}" + CHATML) == (
        "x<user>hi 0</s>\n<assistant>[yes 0</s>\n]"
    )
    assert learned({**chat, "messages": json.dumps([{"weight": None, **each} for each in chat["messages"]])}) == said
    with pytest.raises(DataError, match="does not fit the tokenizer's chat template: Expecting value"):
        learned({**chat, "tools": "no JSON"})


def test_a_text_beside_messages_is_a_message() -> None:
    said = "<user>hi 0</s>\n<assistant>[yes 0</s>\n]"
    assert learned({"prompt": TURNS[:1], "completion": "yes 0"}) == said
    assert learned({"prompt": "hi 0", "completion": TURNS[1:2]}) == said
    parts = [{**each, "content": [{"type": "text", "text": text} for text in each["content"]]} for each in TURNS[:2]]
    assert learned({"messages": parts}) == said
    for wrong, told in (
        ({"role": "user", "content": [{"type": "image"}]}, "A message has .*; expected text, or parts of `text` alone"),
        ({"from": "human", "value": "hi"}, "A message is .*; expected `role` and `content`"),
    ):
        with pytest.raises(DataError, match=told):
            learned({"messages": [wrong, TURNS[1]]})


def test_a_token_may_join_a_prompt_to_its_answer() -> None:
    chat = {"messages": [TURNS[0], {"role": "assistant", "content": "\nyes"}]}
    template = CHATML.replace(">{{ m.content", ">\n{{ m.content").replace("<assistant>{%", "<assistant>\n{%")
    assert learned(chat, template=template) == "<user>\nhi 0</s>\n<assistant>\n[\nyes</s>\n]"
    assert learned(chat, template=template, words=["\n\n"]) == "<user>\nhi 0</s>\n<assistant>[\n\nyes</s>\n]"


#: Kind -> a row, the ends of sequences that it has without those that it spells, and its text.
SPELT: dict[str, tuple[dict[str, Any], int, str]] = {
    "text": ({"text": f"a{END}b"}, 1, f"a{END}b{END}"),
    "completion": ({"prompt": f"{END}a", "completion": "b"}, 1, f"{END}ab{END}"),
    "chat": ({"messages": [{**TURNS[0], "content": f"{END}a"}, {**TURNS[1], "content": "b"}]}, 2, f"{END}a{END}b{END}"),
}


@pytest.mark.parametrize("parse_special", [False, True])
@pytest.mark.parametrize("kind", SPELT)
def test_special_tokens_that_a_text_spells_stay_text(kind: str, parse_special: bool) -> None:
    (row, ends, said), tokenizer = SPELT[kind], byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}"
    options = {"block": 2, "held_out": 0, "held_out_blocks": 1, "parse_special": parse_special}
    blocks = pack_documents({"rows": Dataset.from_list([row])}, tokenizer, **options)
    ids = [token if token >= 0 else -1 - token for token in blocks.train.tokens.to_pylist()]
    assert ids.count(0) == ends + parse_special
    assert tokenizer.decode(ids) == said
    note = f"rows: {END} in its text is read as text; --parse-special makes it a token"
    assert spelt_specials({"rows": Dataset.from_list([row]), "others": ROWS}, tokenizer) == [note]


def test_a_table_leaves_no_empty_keys_in_a_chat(tmp_path: Path) -> None:
    said, answered = {"role": "user", "content": "a"}, {"role": "tool", "content": "b", "name": "c"}
    rows = [{"messages": [{**said, "tool_calls": None}, answered]}]
    (tmp_path / "rows.parquet").write_bytes(_parquet(rows))
    Dataset.from_list(rows).save_to_disk(tmp_path / "saved")
    for source in ("rows.parquet", "saved"):
        (part,) = load_documents([str(tmp_path / source)], chats=True).values()
        assert [content(row) for row in part] == [{"messages": [said, answered]}]
