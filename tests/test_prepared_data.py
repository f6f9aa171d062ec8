"""What a run learns from is what its data say: rows, columns, splits, masks, templates, bytes."""

import json
import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch.nn.functional import cross_entropy
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedTokenizerFast

from resformer.convert.nanochat import CHAT_TEMPLATE
from resformer.errors import CheckpointError
from resformer.training.data import DataError, content, load_documents
from resformer.training.options import FinetuneOptions, NewOptions, TokenizeOptions
from resformer.training.packing import bytes_per_token
from resformer.training.recipe import build_trainer, finetune_checkpoint
from resformer.training.tokenizers import make_tokenizer
from resformer.training.tokenizing import tokenize
from resformer.training.trainer import RecipeTrainer
from resformer.training.untrained import new_checkpoint

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m['role'] + '\n' + (m['content'] or '') + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
MARKS = "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end"


def byte_tokenizer(template: str | None = None, more: tuple[str, ...] = ()) -> PreTrainedTokenizerFast:
    names = ["<|end|>", "<|start|>", "<|im_start|>", "<|im_end|>", *more, *sorted(pre_tokenizers.ByteLevel.alphabet())]
    backend = Tokenizer(models.BPE(vocab={name: number for number, name in enumerate(names)}, merges=[]))
    backend.pre_tokenizer, backend.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    special = {"additional_special_tokens": ["<|im_start|>", "<|im_end|>", *more]}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, eos_token="<|end|>", bos_token="<|start|>", chat_template=template, **special
    )
    assert len(tokenizer) == len(names)
    return tokenizer


def rows(path: Path, items: list[dict[str, Any]]) -> str:
    path.write_text("".join(json.dumps(item, ensure_ascii=False) + "\n" for item in items), encoding="utf-8")
    return str(path)


def save(folder: Path, tokenizer: PreTrainedTokenizerFast, family: str = "llama", **more: Any) -> str:
    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    shape |= {"num_key_value_heads": 2, "max_position_embeddings": 2048, "vocab_size": len(tokenizer)}
    config = CONFIG_MAPPING[family](**shape, bos_token_id=1, eos_token_id=0, **more)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def options(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, data: str, **more: Any) -> FinetuneOptions:
    model = save(tmp_path / "model", tokenizer)
    given = {"bf16": False, "block": 64, "held_out": 0.0, **more}
    return FinetuneOptions(model=model, output=str(tmp_path / "out"), data=[data], **given)


def trainer_of(tmp_path: Path, tokenizer: PreTrainedTokenizerFast, data: str, **more: Any) -> RecipeTrainer:
    """The trainer that `finetune` builds."""
    return build_trainer(options(tmp_path, tokenizer, data, **more))[0]


def read(trainer: RecipeTrainer) -> list[dict[str, torch.Tensor]]:
    """The rows of its batches."""
    batches = [*trainer.get_train_dataloader()]
    return [{name: each[n] for name, each in batch.items()} for batch in batches for n in range(len(batch["labels"]))]


def first_document(trainer: RecipeTrainer) -> tuple[str, str]:
    """All, and learned text of a document."""
    row = read(trainer)[0]
    starts = (row["position_ids"] == 0).nonzero().flatten().tolist()
    until = starts[1] if len(starts) > 1 else len(row["labels"])
    ids, labels = row["input_ids"][:until], row["labels"][:until]
    decode = trainer.processing_class.decode
    return decode(ids), decode(labels[labels >= 0])


def test_a_chat_of_nanochat_has_the_marks_of_its_template_and_tools_outputs_are_not_learned(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHAT_TEMPLATE, tuple(f"<|{name}|>" for name in MARKS.split()))
    texts = ("text", "It is "), ("python", "12/60"), ("python_output", "0.2"), ("text", ", so 0.2")
    chat = [
        {"role": "user", "content": "12/60?"},
        {"role": "assistant", "content": [{"type": kind, "text": text} for kind, text in texts]},
    ]
    trainer = trainer_of(tmp_path, tokenizer, rows(tmp_path / "c.jsonl", [{"messages": chat}] * 20))
    whole, answer = first_document(trainer)
    assert whole == tokenizer.apply_chat_template(chat, tokenize=False)
    assert answer == "It is <|python_start|>12/60<|python_end|>, so 0.2<|assistant_end|>"


@pytest.mark.parametrize("column", ["labels", "assistant_masks", "completion_mask"])
def test_labels_and_masks_of_tokenised_data_are_used(column: str, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    question, answer = tokenizer("question? ")["input_ids"], tokenizer("answer")["input_ids"]
    ids = question + answer + [0] * 20
    learned = [-100] * len(question) + answer + [-100] * 20
    if column != "labels":
        learned = [int(label >= 0) for label in learned]
    mask = [int(token > 0) for token in ids]
    table = pa.table({"input_ids": [ids] * 40, column: [learned] * 40, "attention_mask": [mask] * 40})
    pq.write_table(table, tmp_path / "prepared.parquet")
    trainer = trainer_of(tmp_path, tokenizer, str(tmp_path / "prepared.parquet"))
    labels = torch.cat([row["labels"][row["labels"] >= 0] for row in read(trainer)]).tolist()
    assert set(labels) == set(answer)
    assert not any((row["input_ids"] == 0).any() for row in read(trainer))
    assert not trainer.notes
    given: dict[str, Any] = {"data": [str(tmp_path / "prepared.parquet")], "tokenizer": str(tmp_path / "model")}
    with pytest.raises(DataError, match=f"has '{column}', and only tokens that are all learned are written"):
        tokenize(TokenizeOptions(output=str(tmp_path / "tokens"), **given))


def test_the_column_that_is_named_wins(tmp_path: Path) -> None:
    table = pa.table({"body": ["some words to learn " * 5] * 40, "input_ids": [[7, 8, 9, 10] * 20] * 40})
    pq.write_table(table, tmp_path / "both.parquet")
    trainer = trainer_of(tmp_path, byte_tokenizer(), str(tmp_path / "both.parquet"), text_column="body")
    assert "words" in first_document(trainer)[0]
    assert any("input_ids" in note for note in trainer.notes)


@pytest.mark.parametrize("column", ["prompt", "completion", "messages"])
def test_texts_of_the_column_that_is_named_are_texts_whatever_its_name(column: str, tmp_path: Path) -> None:
    data = rows(tmp_path / "texts.jsonl", [{column: "some words", "text": "others"}] * 40)
    for streaming in (False, True):
        documents = load_documents([data], text_column=column, streaming=streaming, chats=not streaming)
        assert [content(row) for row in documents[data]] == ["some words"] * 40


def test_chats_that_fit_are_whole(tmp_path: Path) -> None:
    random.seed(0)
    chats = [
        [
            {"role": "user", "content": "q" * random.randint(20, 300)},
            {"role": "assistant", "content": "a" * random.randint(100, 600)},
        ]
        for _ in range(300)
    ]
    tokenizer = byte_tokenizer(CHATML)
    trainer = trainer_of(
        tmp_path, tokenizer, rows(tmp_path / "c.jsonl", [{"messages": chat} for chat in chats]), block=1024
    )
    blocks = trainer.blocks.train.blocks
    answers = []
    for number in range(len(blocks)):
        row = blocks[number]
        assert row["position_ids"][0] == 0
        starts = [*(row["position_ids"] == 0).nonzero().flatten().tolist(), 1024]
        for begin, end in pairwise(starts):
            ids, labels = row["input_ids"][begin:end], row["labels"][begin:end]
            if (labels >= 0).any():
                answers.append(tokenizer.decode(labels[labels >= 0]))
                assert tokenizer.decode(ids[labels < 0]).startswith("<|im_start|>user\nq")
    assert sorted(answers) == sorted(f"{answer['content']}<|im_end|>\n" for _, answer in chats)


def test_rows_longer_than_a_block_are_refused_or_cut_and_told(tmp_path: Path) -> None:
    chats = [{"prompt": "q" * 10, "completion": "a" * n} for n in [20] * 20 + [200]]
    chats.append({"prompt": "q" * 100, "completion": "a"})
    data = rows(tmp_path / "c.jsonl", chats)
    with pytest.raises(DataError, match=r"2 of 22 rows are longer than a block of 64 .* the longest has 211; use"):
        trainer_of(tmp_path, byte_tokenizer(), data)
    trainer = trainer_of(tmp_path, byte_tokenizer(), data, truncate=True)
    assert any("2 of 22 rows are longer" in note for note in trainer.notes)
    assert any("1 rows have nothing left to learn" in note for note in trainer.notes)


def test_a_template_whose_generation_prompt_begins_a_thought_is_used(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer(CHATML.replace("assistant\n' }}{% endif %}", "assistant\n<think>\n' }}{% endif %}"))
    question, answer = [{"role": "user", "content": "Hi?"}], [{"role": "assistant", "content": "Yo."}]
    for row in ({"messages": question + answer}, {"prompt": question, "completion": answer}):
        _, learned = first_document(trainer_of(tmp_path, tokenizer, rows(tmp_path / "c.jsonl", [row] * 20)))
        assert learned == "Yo.<|im_end|>\n"


def test_tool_calls_that_a_template_does_not_render_are_refused(tmp_path: Path) -> None:
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    chat = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": None, "tool_calls": [call]}]
    with pytest.raises(CheckpointError, match="does not render `tool_calls`"):
        trainer_of(tmp_path, byte_tokenizer(CHATML), rows(tmp_path / "c.jsonl", [{"messages": chat}] * 20))


def test_a_chat_that_begins_with_an_answer_is_refused_or_learns_the_others(tmp_path: Path) -> None:
    first: dict[str, Any] = {"role": "assistant", "content": "Hello."}
    others = [{"role": "user", "content": "Hi?"}, {"role": "assistant", "content": "Yo."}]
    with pytest.raises(DataError, match=r'begins with an answer, .*write a message before it, or "weight": 0 in it'):
        trainer_of(tmp_path, byte_tokenizer(CHATML), rows(tmp_path / "a.jsonl", [{"messages": [first, *others]}] * 20))
    data = rows(tmp_path / "b.jsonl", [{"messages": [{**first, "weight": 0}, *others]}] * 20)
    assert first_document(trainer_of(tmp_path, byte_tokenizer(CHATML), data))[1] == "Yo.<|im_end|>\n"


def test_chats_without_an_answer_are_told_or_refused_with_their_roles(tmp_path: Path) -> None:
    chats = [
        {"messages": [{"role": "user", "content": "Hi?"}, {"role": role, "content": "Yo."}]}
        for role in ("assistant", "model")
    ]
    trainer = trainer_of(tmp_path, byte_tokenizer(CHATML), rows(tmp_path / "a.jsonl", chats * 20))
    told = "20 of 40 chats have no message of role assistant to learn, but 'model', 'user', and are left out"
    assert [told in note for note in trainer.notes] == [True]
    data = rows(
        tmp_path / "b.jsonl", [{"conversations": [{"from": "human", "value": "Hi?"}, {"from": "gpt", "value": "Yo."}]}]
    )
    with pytest.raises(
        DataError, match=r"1 of 1 chats have .*, but 'gpt', 'human'; name the role of answers assistant"
    ):
        trainer_of(tmp_path, byte_tokenizer(CHATML), data)


def test_a_completion_is_tokenised_as_it_follows_its_prompt(tmp_path: Path) -> None:
    backend = Tokenizer(models.BPE(unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    backend.decoder = decoders.Metaspace(prepend_scheme="first")
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=120, special_tokens=special)
    backend.train_from_iterator(["Question: what is it Answer: yes no (yes) (no)"] * 50, trainer)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="<unk>")
    data = rows(tmp_path / "p.jsonl", [{"prompt": "Question: what is it Answer: (", "completion": "yes)"}] * 40)
    whole, learned = first_document(trainer_of(tmp_path, tokenizer, data))
    assert "(yes)" in whole
    assert learned.endswith("yes)</s>")


@pytest.mark.parametrize("answer", ["42", " 1.", "true", "null", '"yes"', '{"a": [1, "b"]}'])
def test_texts_that_are_json_stay_the_texts_they_are(tmp_path: Path, answer: str) -> None:
    said = [{"role": "user", "content": answer}, {"role": "assistant", "content": answer}]
    parts = [{"role": "user", "content": [{"type": "text", "text": answer}]}, said[1]]
    texts = {"prompt": answer, "completion": answer}
    for number, kinds in enumerate(([texts], [{"messages": said}], [{"messages": parts}, {"messages": said}])):
        data = rows(tmp_path / f"{number}.jsonl", [*kinds] * 20)
        whole, learned = first_document(trainer_of(tmp_path, byte_tokenizer(CHATML), data))
        assert (whole.count(answer), learned.count(answer)) == (2, 1)
    mixed = [{"prompt": "a", "completion": answer}, {"prompt": said[:1], "completion": said[1:]}]
    with pytest.raises(
        DataError, match=r"m.jsonl: some rows have a text as `prompt`, others messages; use a file for each"
    ):
        load_documents([rows(tmp_path / "m.jsonl", mixed)], chats=True)


def test_a_folder_has_the_splits_that_its_files_are_named_for(tmp_path: Path) -> None:
    (tmp_path / "set").mkdir()
    for split in ("train", "validation", "test"):
        rows(tmp_path / "set" / f"{split}-00000-of-00001.jsonl", [{"text": f"a text of the {split} split"}])
    source = str(tmp_path / "set")
    for split in ("train", "test"):
        documents = load_documents([source], split=split)
        assert [content(row) for row in documents[source]] == [f"a text of the {split} split"]
        assert "validation-00000-of-00001.jsonl" in documents.notes[0]
    with pytest.raises(DataError, match="has no split 'dev' but 'test', 'train', 'validation'"):
        load_documents([source], split="dev")


def test_bits_per_byte_are_of_bytes_in_any_script(tmp_path: Path) -> None:
    tokenizer, text = make_tokenizer("bytes", {}, 0), "sentence {} Слово 日本語の文章 😀😁"
    data = rows(tmp_path / "t.jsonl", [{"text": text.format(number)} for number in range(400)])
    held_out = trainer_of(tmp_path, tokenizer, data, held_out=0.5).blocks.held_out
    labels = torch.cat([held_out[number]["labels"] for number in range(len(held_out))])
    labels = labels[labels >= 0]
    expected = (labels != tokenizer.eos_token_id).float().mean().item()  # each token is a byte
    assert bytes_per_token(held_out, tokenizer) == pytest.approx(expected, abs=1e-6)


def test_the_held_out_loss_of_a_mixture_is_its_cross_entropy(tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    balanced = {"output_router_logits": True, "router_aux_loss_coef": 1.0}
    save(tmp_path / "moe", tokenizer, "mixtral", num_local_experts=4, **balanced)
    data = rows(tmp_path / "t.jsonl", [{"text": f"this is document {n}"} for n in range(400)])
    common = {"model": str(tmp_path / "moe"), "output": str(tmp_path / "out"), "data": [data]}
    given = FinetuneOptions(**common, block=64, held_out=0.1, steps=2, bf16=False)
    held_out = build_trainer(given)[0].blocks.held_out
    report = finetune_checkpoint(given)
    network, total, count = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval(), 0.0, 0
    assert network.config.output_router_logits
    for number in range(len(held_out)):
        item = {name: tensor[None] for name, tensor in held_out[number].items()}
        labels = item.pop("labels")[0, 1:]
        with torch.no_grad():
            total += cross_entropy(network(**item, use_cache=False).logits[0, :-1], labels, reduction="sum").item()
        count += int((labels != -100).sum())
    assert report.loss_after == pytest.approx(total / count, abs=1e-5)


def test_a_run_of_one_step_learns(tmp_path: Path) -> None:
    data = rows(tmp_path / "t.jsonl", [{"text": f"this is document {n}"} for n in range(20)])
    ends = rows(tmp_path / "ends.jsonl", [{"input_ids": [1, 0] * 32}])  # which are no text
    report = finetune_checkpoint(options(tmp_path, byte_tokenizer(), data, held_out_data=[ends]))
    assert (report.steps, report.bits_per_byte) == (1, None)
    before, after = (load_file(tmp_path / name / "model.safetensors") for name in ("model", "out"))
    assert all((before[name] != after[name]).any() for name in before)
    with pytest.raises(ValueError, match="the run has one step, which would learn nothing"):
        finetune_checkpoint(options(tmp_path, byte_tokenizer(), data, force=True, trainer={"warmup_steps": 1}))


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "olmoe", "jetmoe"])
def test_experts_are_balanced_from_scratch(family: str, tmp_path: Path) -> None:
    given = {"size": "tiny", "backbone": family, "method": "transformer", "tokenizer": "bytes"}
    new = NewOptions(output=str(tmp_path / family), **given)
    model = AutoModelForCausalLM.from_config(new_checkpoint(new, weights=False, dry_run=True)).eval()
    ids = torch.arange(12)[None]
    outputs = model(ids, labels=ids, use_cache=False)
    assert outputs.aux_loss > 0
    assert outputs.loss > cross_entropy(outputs.logits[0, :-1], ids[0, 1:])
