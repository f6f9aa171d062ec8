"""Chats, prompts and completions: TRL renders and masks them, and packs them whole. Needs TRL (the `train` extra)."""

import copy
import json
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from functools import partial
from itertools import count
from operator import eq
from typing import Any
from unittest.mock import patch

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch
from datasets import Dataset, Features, Json, Value, concatenate_datasets
from datasets.table import InMemoryTable
from jinja2 import TemplateError
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Trainer
from trl import SFTTrainer, pack_dataset
from trl.chat_template_utils import get_training_chat_template, is_chat_template_stop_token_trained
from trl.data_utils import common_prefix_length, maybe_convert_to_chatml
from trl.trainer import sft_trainer

from resformer.errors import first_names, one_line
from resformer.training.data import DataError
from resformer.training.packing import Blocks, has_labels, padding
from resformer.training.trainer import RecipeTrainer

#: How TRL prepares a row: whole chats by the template's marks, or what comes after a prompt.
_CHAT, _ANSWER, _TEXT, _NOTHING = "chat", "answer", "text", "nothing"
_COLUMNS = {_CHAT: ["messages"], _ANSWER: ["prompt", "completion"], _TEXT: ["text_prompt", "text_completion"]}
#: Texts are no `Json`, which takes one that is JSON, such as "42", for what it says.
_FEATURES = Features(
    {name: Value("string") for name in ("kind", "unused", "roles", *_COLUMNS[_TEXT])}
    | {name: Json() for name in ("messages", "prompt", "completion", "tools", "chat_template_kwargs")}
)
_THOUGHTS = ("reasoning_content", "reasoning", "thinking")
_WAY_OUT = "use another --tokenizer, or leave it out of the data"
#: Of each text of a chat, printable: a template may show the whole message as Python does.
_SIGNS = "⟦[0-9]+[.][0-9]+⟧"
_READ = {"role", "content", "tool_calls", "weight", *_THOUGHTS}


class SupervisedTrainer(RecipeTrainer, SFTTrainer):
    """TRL's `SFTTrainer` with our groups of parameters, the model's own forward, and our evaluation.

    TRL's entropy, accuracy and number of tokens, which its own head measures, are not logged.
    """

    def __init__(self, *args: Any, **kwargs: Any):
        # TRL's own head does without logits. It raises for some families, and is no part of the loss here.
        with patch.object(sft_trainer, "add_fused_lm_head", lambda *given, **options: None):
            super().__init__(*args, **kwargs)
        best = str(self.args.metric_for_best_model).removeprefix("eval_")
        if best in ("mean_token_accuracy", "entropy", "num_tokens", "aux_loss"):
            raise ValueError(f"metric_for_best_model is {best!r}, which is not measured here; use eval_loss.")
        if self.args.loss_type == "dft":
            self.compute_loss_func = dynamic_fine_tuning
        if self.args.router_aux_loss_coef is not None:  # TRL sets it in the configuration, which was read before
            for module in self.model.modules():
                if "router_aux_loss_coef" in vars(module):
                    module.router_aux_loss_coef = self.args.router_aux_loss_coef


def dynamic_fine_tuning(outputs: Any, labels: torch.Tensor, num_items_in_batch: Any = None) -> torch.Tensor:
    """Cross-entropy in which each token counts by its probability (arXiv 2508.05629), a mean over labels."""
    targets = labels[:, 1:].to(outputs.logits.device)
    nats = cross_entropy(outputs.logits[:, :-1].float().transpose(1, 2), targets, reduction="none")
    count = (targets != -100).sum() if num_items_in_batch is None else torch.as_tensor(num_items_in_batch)
    return (nats * (-nats).exp().detach()).sum() / count.clamp(min=1)


class ChatTrainer(SupervisedTrainer):
    """Trains on the blocks that `pack` makes with the function that it is given, which packs a source's chats whole.

    A chat is one row where the tokenizer's template marks its answers, or TRL knows a template that does; else, and
    where the template renders an answer otherwise once others follow, each answer is a row of its own, with what comes
    before it as its prompt. All but answers and completions is not learned.

    Args:
        truncate: whether rows that are longer than a block are cut, and not refused.
    """

    def __init__(
        self, *, pack: Callable[..., Blocks], block: int, truncate: bool, chats: Dataset, model: Any, **kwargs: Any
    ):
        self.pack, self.block, self.truncate = pack, block, truncate
        text = model.config.get_text_config()
        before = {name: getattr(text, name) for name in ("output_router_logits", "pad_token_id") if hasattr(text, name)}
        super().__init__(model=model, train_dataset=chats, eval_dataset=chats, **kwargs)
        for name, value in before.items():
            setattr(text, name, value)
        if self.blocks is not None and not len(self.blocks.held_out):
            self.eval_dataset = None

    def _prepare_dataset(
        self, dataset: Any, tokenizer: Any, args: Any, packing: Any, formatting_func: Any, name: str
    ) -> Any:
        if self.blocks is None:
            self.blocks = self.pack(chats=partial(self._packed, tokenizer=tokenizer, args=args))
        return self.blocks.train if name == "train" else self.blocks.held_out

    def _set_signature_columns_if_needed(self) -> None:
        Trainer._set_signature_columns_if_needed(self)

    def create_model_card(self, *given: Any, **options: Any) -> None:
        """The card is that of the whole run."""

    def _send_telemetry(self) -> None:
        """Nothing is sent."""

    def _packed(self, chats: Dataset, source: str, *, tokenizer: PreTrainedTokenizerBase, args: Any) -> pa.Table:
        """Rows of a source in whole blocks, filled up with documents of padding; tokens not learned are -1 - id."""
        template, marked = _template(tokenizer)
        rows = chats.map(
            _rows_of,
            fn_kwargs={"tokenizer": tokenizer, "template": template, "marked": marked},
            batched=True,
            remove_columns=chats.column_names,
            features=_FEATURES,
            desc="Reading chats",
        )
        if unused := sorted({name for names in rows.unique("unused") for name in (names or "").split()}):
            self.notes.append(f"{source}: the chat template does not render {first_names(unused)}")
        parts = []
        self.chat_template, self.completion_only_loss = template, True
        for kind, columns in _COLUMNS.items():
            if not len(part := rows.filter(partial(eq, kind), input_columns="kind")):
                continue
            part = part.select_columns([*columns, "tools", "chat_template_kwargs"])
            part = part.rename_columns({name: name.removeprefix("text_") for name in columns})
            options = copy.copy(args)
            options.max_length, options.assistant_only_loss = None, kind == _CHAT
            prepared = super()._prepare_dataset(part, tokenizer, options, False, None, source)
            parts.append(prepared.select_columns(["input_ids", "labels"]))
        if roles := rows.filter(partial(eq, _NOTHING), input_columns="kind")["roles"]:
            told = f"{len(roles):,} of {len(chats):,} chats have no message of role assistant to learn"
            told += f", but {first_names(sorted({role for each in roles for role in each.split()}))}"
            if not parts:
                raise DataError(f"{source}: {told}; name the role of answers assistant.")
            self.notes.append(f"{source}: {told}, and are left out")
        table = concatenate_datasets(parts).with_format("arrow")[:].combine_chunks()
        ids, labels = (np.asarray(table[name].combine_chunks().flatten()) for name in ("input_ids", "labels"))
        lengths = np.asarray(pc.list_value_length(table["input_ids"]))
        if long := int((lengths > self.block).sum()):
            told = f"{long:,} of {len(lengths):,} rows are longer than a block of {self.block:,} tokens"
            if not self.truncate:
                way_out = f"use --block {lengths.max()}, or cut them with --truncate"
                raise DataError(f"{source}: {told}, the longest has {lengths.max():,}; {way_out}.")
            self.notes.append(f"{source}: {told}, and are cut there")
        offsets = np.concatenate([[0], lengths.cumsum()]).astype(np.int32)
        values = np.where(labels == -100, -1 - ids, ids).astype(np.int32)
        rows = pc.list_slice(pa.ListArray.from_arrays(offsets, values), 0, self.block)
        table = pa.table({"input_ids": rows})
        kept = table.filter(has_labels(table))
        if dropped := len(table) - len(kept):
            self.notes.append(f"{source}: {dropped:,} rows have nothing left to learn, and are left out")
        if not len(kept):
            raise DataError(f"{source}: nothing of its chats is learned within a block; use a larger --block.")
        bins = pack_dataset(Dataset(InMemoryTable(kept)), self.block, "bfd").with_format("arrow")[:]
        return _filled(bins, self.block, tokenizer)


def _filled(bins: pa.Table, block: int, tokenizer: PreTrainedTokenizerBase) -> pa.Table:
    """The rows of TRL's packing, each bin with one of padding that fills its block."""
    ids = np.asarray(bins["input_ids"].combine_chunks().flatten())
    rows = [np.array(each) for each in bins["seq_lengths"].to_pylist()]
    sums = np.array([row.sum() for row in rows])
    values = np.insert(ids, np.repeat(sums.cumsum(), block - sums), padding(tokenizer)).astype(np.int32)
    lengths = np.concatenate([[*row, block - total] for row, total in zip(rows, sums, strict=True)])
    offsets = np.concatenate([[0], lengths[lengths > 0].cumsum()]).astype(np.int32)
    return pa.table({"input_ids": pa.ListArray.from_arrays(offsets, values)})


def _template(tokenizer: PreTrainedTokenizerBase) -> tuple[str | None, bool]:
    """TRL's template in the place of the tokenizer's, if it has one, and whether answers are marked with their ends."""
    if not tokenizer.chat_template:
        return None, False
    try:
        template = get_training_chat_template(tokenizer)
    except (TemplateError, TypeError, ValueError):  # none is known
        return None, False
    return template, is_chat_template_stop_token_trained(tokenizer, template)


def _rows_of(batch: Mapping[str, Any], tokenizer: PreTrainedTokenizerBase, **template: Any) -> dict[str, list[Any]]:
    rows = [row for chat in batch["chat"] for row in _rows_of_one(chat, tokenizer, **template)]
    return {name: [row.get(name) for row in rows] for name in _FEATURES}


def _rows_of_one(
    chat: dict[str, Any], tokenizer: PreTrainedTokenizerBase, template: str | None, marked: bool
) -> Iterator[dict[str, Any]]:
    """A whole chat, or each of its answers with what is before it; raises DataError if the template drops any of it."""
    prompt, completion = chat.get("prompt") or "", chat.get("completion") or ""
    if isinstance(prompt, str) and isinstance(completion, str) and completion:
        yield {"kind": _TEXT, "text_prompt": prompt, "text_completion": completion, "chat_template_kwargs": {}}
        return
    if not tokenizer.chat_template:
        raise DataError("The tokenizer has no chat template; use texts as `prompt` and `completion`, or --tokenizer.")
    chat = maybe_convert_to_chatml({name: _read(value) for name, value in chat.items()})
    more: dict[str, Any] = {"tools": chat.get("tools") or None}
    more["chat_template_kwargs"] = chat.get("chat_template_kwargs") or {}
    given = _messages(chat.get("prompt"), "user")
    messages = [*_messages(chat.get("messages"), ""), *given, *_messages(chat.get("completion"), "assistant")]
    weights = [message.get("weight") for message in messages]
    if wrong := [weight for weight in weights if weight not in (None, 0, 1)]:
        raise DataError(f"A message's weight is {wrong[0]!r}; expected 0, not learned, or 1.")
    messages = [{name: x for name, x in each.items() if name != "weight"} for each in messages]
    answers = [
        number
        for number, message in enumerate(messages)
        if number >= len(given) and message["role"] == "assistant" and weights[number] != 0
    ]

    def render(part: list[dict[str, Any]], tools: Any = more["tools"], **options: Any) -> str:
        options |= {"tools": tools, "chat_template": template, **more["chat_template_kwargs"]}
        try:
            return str(tokenizer.apply_chat_template(part, tokenize=False, **options))
        except (TemplateError, TypeError, KeyError, IndexError, ValueError) as error:
            raise DataError(f"A chat does not fit the tokenizer's chat template: {one_line(error)}") from error

    def is_without(*fewer: Any) -> bool:
        """Whether the template makes the same of less; where it raises, it has read what is not there."""
        try:
            return render(*fewer) == whole
        except DataError:
            return False

    if not answers:
        yield {"kind": _NOTHING, "roles": " ".join(str(message["role"]) for message in messages)}
        return
    if (objects := [_with_objects(message) for message in messages]) != messages:
        with suppress(DataError):  # some templates take the texts
            render(objects)
            messages = objects
    unread = sorted({name for message in messages for name in message} - _READ)
    whole = render(messages) if unread or more["tools"] else ""
    more["unused"] = " ".join(
        name for name in unread if is_without([{key: x for key, x in each.items() if key != name} for each in messages])
    )
    names = [str((tool.get("function") or tool).get("name")) for tool in more["tools"] or ()]
    left = [name for name in names if name not in whole]
    if left or (names and is_without(messages, None)):
        raise DataError(f"The chat template does not render `tools` ({[*left, *names][0]}); {_WAY_OUT}.")
    signed = [_signed(message, number) for number, message in enumerate(messages)]
    signed_whole = render(signed)
    everything = len(answers) == sum(message["role"] == "assistant" for message in messages)
    if marked and everything and not given and not any(_dropped(each, signed_whole) for each in signed):
        yield {"kind": _CHAT, "messages": messages, **more}
        return
    if answers[0] == 0:
        way_out = f'write a message before it, or "weight": 0 in it, or {_WAY_OUT}'
        raise DataError(f"A chat begins with an answer, and the chat template does not mark answers; {way_out}.")
    for number in answers:
        text = render(signed[: number + 1])
        for before, message in enumerate(signed[: number + 1]):
            thoughts = before == number  # those of earlier answers are dropped by templates, as when it generates
            if dropped := _dropped(message, text, thoughts=thoughts):
                raise DataError(f"The chat template does not render {dropped} of role {message['role']}; {_WAY_OUT}.")
        prompt = render(signed[:number], add_generation_prompt=True)
        learned = text[common_prefix_length(prompt, text) :]
        if {*re.findall(r"⟦(\d+)\.", learned)} - {str(number)}:
            told = "The chat template renders what is before an answer otherwise once the answer follows"
            raise DataError(f"{told}; {_WAY_OUT}.")
        yield {"kind": _ANSWER, "prompt": messages[:number], "completion": [messages[number]], **more}


def _read(value: Any) -> Any:
    """Lists of messages and tools may be their JSON."""
    try:
        return json.loads(value) if isinstance(value, str) and value[:1] in ("[", "{") else value
    except ValueError:
        return value


def _messages(part: Any, role: str) -> list[dict[str, Any]]:
    """A list of messages; a text is one of `role`. Parts of a content that are all texts are joined."""
    messages = [{"role": role, "content": part}] if isinstance(part, str) and part else part or []
    for number, message in enumerate(messages):
        if not isinstance(message, dict) or not message.get("role"):
            raise DataError(f"A message is {one_line(repr(message), 60)}; expected `role` and `content`.")
        message = {name: x for name, x in message.items() if name != "tool_calls" or x}  # an empty list says nothing
        if isinstance(parts := message.get("content"), list):
            if not all(isinstance(each, dict) and isinstance(each.get("text"), str) for each in parts):
                raise DataError(f"A message has {one_line(repr(parts), 60)}; expected text, or parts of `text` alone.")
            if all(each.get("type", "text") == "text" for each in parts):  # templates may show the list as Python does
                message["content"] = "".join(each["text"] for each in parts)
        messages[number] = {"content": None, **message}
    return messages


def _with_objects(message: dict[str, Any]) -> dict[str, Any]:
    """Arguments of calls as the objects that templates take, where they are JSON, as OpenAI writes them."""
    calls = copy.deepcopy(message.get("tool_calls"))
    for call in calls or ():
        function = call.get("function") or call
        function["arguments"] = _read(function.get("arguments"))
    return {**message, "tool_calls": calls} if calls else message


def _signed(message: Mapping[str, Any], number: int) -> dict[str, Any]:
    """The message with a sign after each of its texts and names of calls, so that none is found in another's."""
    signs = (f"⟦{number}.{each}⟧" for each in count())

    def sign(text: Any) -> str:
        pieces = re.split(r"(</?think>)", str(text))
        return "".join(
            each.rstrip() + next(signs) if each.strip() and n % 2 == 0 else each for n, each in enumerate(pieces)
        )

    content, signed = message["content"], {**message}
    if isinstance(content, list):
        signed["content"] = [{**part, "text": sign(part["text"])} for part in content]
    elif content:
        signed["content"] = sign(content)
    signed |= {name: sign(message[name]) for name in _THOUGHTS if message.get(name)}
    if message.get("tool_calls"):
        signed["tool_calls"] = copy.deepcopy(message["tool_calls"])
        for call in signed["tool_calls"]:
            function = call.get("function") or call
            function["name"] = sign(function.get("name"))
    return signed


def _dropped(message: Mapping[str, Any], text: str, *, thoughts: bool = True) -> str:
    """What of a message a rendering does not have; empty if it has all."""
    parts = message["content"] if isinstance(message["content"], list) else [{"text": message["content"] or ""}]
    for part in parts:
        written = part["text"] if thoughts else re.sub(r"<think>.*?</think>", "", part["text"], flags=re.DOTALL)
        for piece in re.split(r"</?think>", written):
            if piece.strip() not in text:
                return f"the content {one_line(repr(re.sub(_SIGNS, '', piece.strip())), 40)}"
    for name in _THOUGHTS if thoughts else ():
        if (thought := message.get(name)) and str(thought).strip() not in text:
            return f"`{name}`"
    for call in message.get("tool_calls") or ():
        if str((call.get("function") or call).get("name")) not in text:
            return "`tool_calls`"
    return ""
