"""Training data: every kind of source, the split by content, the packing."""

import json
from pathlib import Path

import pytest
from checkpoints import byte_tokenizer
from datasets import Dataset, DatasetDict

from resformer.training.data import DataError, is_held_out, load_documents, pack_documents


@pytest.fixture(autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


TEXTS = [f"Document {index} says {index * index}." for index in range(200)]


def _jsonl(path: Path, texts: list[str], column: str = "text") -> Path:
    path.write_text("".join(json.dumps({"id": index, column: text}) + "\n" for index, text in enumerate(texts)))
    return path


def _folder(folder: Path) -> Path:
    (folder / "below").mkdir(parents=True)
    _jsonl(folder / "a.jsonl", TEXTS[:50])
    (folder / "below" / "b.txt").write_text("\n\n".join(TEXTS[50:]))
    (folder / "readme.rst").write_text("not data")
    return folder


def _saved(folder: Path) -> Path:
    DatasetDict({"train": Dataset.from_dict({"text": TEXTS}), "test": Dataset.from_dict({"text": ["x"]})}).save_to_disk(
        folder
    )
    return folder


def _made(kind: str, folder: Path) -> Path:
    rows = Dataset.from_dict({"text": TEXTS})
    path = folder / f"data.{kind}"
    if kind == "txt":
        path.write_text("\n\n".join(TEXTS))
    elif kind == "jsonl":
        _jsonl(path, TEXTS)
    elif kind == "json":
        path.write_text(json.dumps([{"text": text} for text in TEXTS]))
    elif kind == "csv":
        rows.to_csv(path)
    elif kind == "tsv":
        rows.to_csv(path, sep="\t")
    elif kind == "parquet":
        rows.to_parquet(path)
    elif kind == "folder":
        _folder(path)
    else:
        _saved(path)
    return path


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json", "csv", "tsv", "parquet", "folder", "saved"])
def test_every_kind_of_source_gives_the_same_documents(kind: str, streaming: bool, tmp_path: Path) -> None:
    documents = load_documents([str(_made(kind, tmp_path))], streaming=streaming)
    assert [row["text"] for row in documents] == TEXTS


def test_sources_follow_one_another_and_columns_are_renamed(tmp_path: Path) -> None:
    one = _jsonl(tmp_path / "one.jsonl", TEXTS[:3], column="body")
    other = _jsonl(tmp_path / "other.jsonl", TEXTS[3:5], column="body")
    documents = load_documents([str(one), str(other)], text_column="body")
    assert documents["text"][:] == TEXTS[:5]


def test_lines_and_whole_files_can_be_documents(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\ntwo\n\nthree\n")
    for sample_by, expected in (
        ("line", ["one", "two", "", "three"]),
        ("paragraph", ["one\ntwo", "three\n"]),
        ("document", ["one\ntwo\n\nthree\n"]),
    ):
        assert load_documents([str(tmp_path / "a.txt")], sample_by=sample_by)["text"][:] == expected


@pytest.mark.parametrize(
    ("source", "words"),
    [
        ("missing.jsonl", "missing.jsonl: there is no such file"),
        ("./missing", "there is no such file or folder"),
        ("rows.jsonl", "no column 'body' but 'id', 'text'; name one with --text-column"),
        ("image.png", "expected files of a kind that can be read: txt"),
        ("broken.jsonl", "broken.jsonl: cannot be read"),
        ("empty.jsonl", "empty.jsonl: is empty"),
        ("saved", "no split 'body' but 'test', 'train'; name one with --split"),
        ("nobody/nothing", "nobody/nothing: cannot be read as a file, a folder or a dataset of the Hub"),
    ],
)
def test_sources_that_cannot_be_read_are_named(
    source: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    _jsonl(tmp_path / "rows.jsonl", TEXTS)
    (tmp_path / "image.png").write_bytes(b"\x89PNG")
    (tmp_path / "broken.jsonl").write_text('{"text": ')
    (tmp_path / "empty.jsonl").write_text("")
    _saved(tmp_path / "saved")
    with pytest.raises(DataError) as error:
        load_documents([source], text_column="body", split="body")
    assert words in str(error.value)


def _tokens(blocks: object) -> list[int]:
    return [int(token) for row in blocks for token in row["input_ids"]]  # type: ignore[attr-defined]


@pytest.mark.parametrize("block", [8, 61])
def test_no_token_is_lost_but_the_tail(block: int) -> None:
    tokenizer = byte_tokenizer()
    documents = Dataset.from_dict({"text": TEXTS})
    blocks = pack_documents(documents, tokenizer, block=block, held_out=0.2, held_out_blocks=1000)
    for packed, side in ((blocks.train, False), (blocks.held_out, True)):
        expected: list[int] = []
        for text in TEXTS:
            if is_held_out(text, 0.2) == side:
                expected += [*tokenizer(text)["input_ids"], 0]
        got = _tokens(packed)
        assert got == expected[: len(got)]
        assert len(expected) - block < len(got) <= len(expected)
        assert all(row["labels"].tolist() == row["input_ids"].tolist() for row in packed)
    assert (
        len(
            pack_documents(
                Dataset.from_dict({"text": TEXTS}), tokenizer, block=8, held_out=0.2, held_out_blocks=3
            ).held_out
        )
        == 3
    )


def test_blocks_are_whole_across_the_chunks_of_the_column(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    files = [str(_jsonl(tmp_path / f"{part}.jsonl", TEXTS[part::4])) for part in range(4)]
    documents = load_documents(files)
    blocks = pack_documents(documents, tokenizer, block=100, held_out=0.1, held_out_blocks=99)
    expected = [
        token
        for text in documents["text"]
        if not is_held_out(text, 0.1)
        for token in [*tokenizer(text)["input_ids"], 0]
    ]
    assert _tokens(blocks.train) == expected[: len(blocks.train) * 100]


def test_more_data_moves_no_document_to_the_other_side() -> None:
    options = {"block": 2, "held_out": 0.2, "held_out_blocks": 9999}
    few, many = (
        _tokens(pack_documents(Dataset.from_dict({"text": texts}), byte_tokenizer(), **options).held_out)
        for texts in (TEXTS[:100], TEXTS)
    )
    assert many[: len(few)] == few
    assert len(many) > len(few)
    for share in (0.02, 0.1, 0.5):
        numbers = [is_held_out(str(number), share) for number in range(20_000)]
        assert sum(numbers) / 20_000 == pytest.approx(share, rel=0.1)


def test_a_stream_trains_on_what_a_dataset_does(tmp_path: Path) -> None:
    path = str(_jsonl(tmp_path / "rows.jsonl", TEXTS))
    options = {"block": 16, "held_out": 0.2, "held_out_blocks": 5}
    whole = pack_documents(load_documents([path]), byte_tokenizer(), **options)
    streams = [
        pack_documents(load_documents([path], streaming=True), byte_tokenizer(), **options, seed=seed)
        for seed in (0, 0, 1)
    ]
    first, again, other = ([tuple(row["input_ids"]) for row in stream.train] for stream in streams)
    assert first == again
    assert first != other
    assert sorted(first) == sorted(tuple(row["input_ids"].tolist()) for row in whole.train)
    assert _tokens(streams[0].held_out) == _tokens(whole.held_out)


def test_a_stream_is_not_read_to_its_end() -> None:
    read = []

    def endless() -> object:
        index = 0
        while True:
            read.append(index)
            yield {"text": f"Document {index}."}
            index += 1

    from datasets import IterableDataset

    blocks = pack_documents(
        IterableDataset.from_generator(endless), byte_tokenizer(), block=8, held_out=0.1, held_out_blocks=4
    )
    next(iter(blocks.train))
    assert len(blocks.held_out) == 4
    assert len(read) < 5000


def test_tokens_are_cached(tmp_path: Path) -> None:
    documents = load_documents([str(_jsonl(tmp_path / "rows.jsonl", TEXTS))])
    cache = Path(documents.cache_files[0]["filename"]).parent
    options = {"block": 16, "held_out": 0.2, "held_out_blocks": 5}
    before = set(cache.iterdir())
    expected = _tokens(pack_documents(documents, byte_tokenizer(), **options).train)
    written = set(cache.iterdir())
    assert len(written - before) == 2
    assert _tokens(pack_documents(documents, byte_tokenizer(), **options).train) == expected
    assert set(cache.iterdir()) == written


@pytest.mark.parametrize("streaming", [False, True])
@pytest.mark.parametrize(
    ("texts", "held_out", "words"),
    [
        (["short"], 1e-9, "fill|training documents have 6 tokens, too few for one block of 64"),
        (TEXTS[:20], 1e-9, "held-out documents have 0 tokens.*larger --held-out"),
        (TEXTS[:20], 1 - 1e-9, "fill|training documents have 0 tokens"),
    ],
)
def test_too_little_text_is_said(
    texts: list[str], held_out: float, words: str, streaming: bool, tmp_path: Path
) -> None:
    documents = load_documents([str(_jsonl(tmp_path / "rows.jsonl", texts))], streaming=streaming)
    with pytest.raises(DataError, match="held-out documents have 0" if streaming and held_out < 0.5 else words):
        pack_documents(documents, byte_tokenizer(), block=64, held_out=held_out, held_out_blocks=4)


def test_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    documents = load_documents([str(_jsonl(tmp_path / "rows.jsonl", TEXTS))], text_column="id")
    with pytest.raises(DataError, match="holds 0; expected text; name"):
        pack_documents(documents, byte_tokenizer(), block=8, held_out=0.1, held_out_blocks=4)
