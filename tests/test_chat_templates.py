"""All chat templates that TRL ships: what is learned is each answer to its end, or the data are refused by name."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
from test_prepared_data import byte_tokenizer
from transformers import PreTrainedTokenizerFast

trl = pytest.importorskip("trl")

from resformer.training.chats import _rows_of_one, _template  # noqa: E402
from resformer.training.data import DataError  # noqa: E402

FOLDER = Path(trl.__file__).with_name("chat_templates")
TEMPLATES = sorted(path.stem for path in FOLDER.glob("*.jinja") if not path.stem.endswith("_training"))
ONE = [{"role": "user", "content": "How much is it?"}, {"role": "assistant", "content": "It is forty-two."}]
TWO = [*ONE, {"role": "user", "content": "And twice?"}, {"role": "assistant", "content": "Then eighty-four."}]
CALL = {"type": "function", "function": {"name": "multiply", "arguments": {"a": 2, "b": 3}}}
TEXTS = {"name": "multiply", "arguments": '{"a": 2, "b": 3}'}
INTEGERS = {"type": "object", "properties": {"a": {"type": "integer"}, "b": {"type": "integer"}}}
TOOLS = [{"type": "function", "function": {"name": "multiply", "description": "Multiplies.", "parameters": INTEGERS}}]
#: Kind -> a chat and its tools.
CHATS: dict[str, tuple[list[dict[str, Any]], Any]] = {
    "one turn": (ONE, None),
    "two turns": (TWO, None),
    "thoughts": ([{**each, "reasoning_content": "Let me see."} if n % 2 else each for n, each in enumerate(TWO)], None),
    "tools": (
        [ONE[0], {"role": "assistant", "content": "", "tool_calls": [CALL]}, {"role": "tool", "content": "6"}, ONE[1]],
        TOOLS,
    ),
    "ids and texts of OpenAI": (
        [
            ONE[0],
            {"role": "assistant", "content": "", "tool_calls": [{**CALL, "id": "call00001", "function": TEXTS}]},
            {"role": "tool", "content": "6", "tool_call_id": "call00001"},
            ONE[1],
        ],
        TOOLS,
    ),
}


#: Which take parts of images, whose answers have no thoughts apart, and that have no tools or wish for ids of calls.
PARTS = "idefics3 llava_next smolvlm"
REFUSED = {
    "one turn": PARTS,
    "two turns": PARTS,
    "thoughts": f"{PARTS} cohere cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 gemma4 gemma4_v2 gemma4_v3 "
    "gemma4_v4 lfm2 lfm2_v2 llama3 llama3_1 llama3_2 phi3 phi3_5 qwen2_5 qwen2_5_vl qwen3_instruct_2507 qwen3_vl",
    "tools": f"{PARTS} cohere cohere2 deepseek_r1_distill deepseekv3 gemma gemma3 lfm2 llama3 phi3 phi3_5 qwen2_5_vl",
}
REFUSED["ids and texts of OpenAI"] = REFUSED["tools"]


def tokenizer_of(name: str) -> PreTrainedTokenizerFast:
    more = ("<end_of_turn>", "<|eot_id|>", "<|return|>", "<|call|>", "<|END_OF_TURN_TOKEN|>")
    return byte_tokenizer((FOLDER / f"{name}.jinja").read_text(encoding="utf-8"), more)


def learned(name: str, chat: list[dict[str, Any]], tools: Any) -> list[str]:
    """The learned text of each row, as TRL masks it."""
    tokenizer = tokenizer_of(name)
    template, marked = _template(tokenizer)
    found = []
    for row in _rows_of_one({"messages": chat, "tools": tools}, tokenizer, template, marked):
        options = {"chat_template": template, "tools": tools}
        if row["kind"] == "chat":
            encoded = tokenizer.apply_chat_template(
                row["messages"], tokenize=True, return_dict=True, return_assistant_tokens_mask=True, **options
            )
            ids = [i for i, mask in zip(encoded["input_ids"], encoded["assistant_masks"], strict=True) if mask]
        else:
            ends = [
                tokenizer.apply_chat_template(part, tokenize=True, return_dict=True, **more, **options)["input_ids"]
                for part, more in (
                    (row["prompt"], {"add_generation_prompt": True}),
                    (row["prompt"] + row["completion"], {}),
                )
            ]
            ids = ends[1][trl.data_utils.common_prefix_length(*ends) :]
        found.append(tokenizer.decode(ids))
    return found


@pytest.mark.parametrize("kind", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_answers_are_learned_or_the_chat_is_refused(name: str, kind: str) -> None:
    chat, tools = CHATS[kind]
    if name in REFUSED[kind].split():
        said = "The chat template does not render|does not fit the tokenizer's chat template"
        with pytest.raises(DataError, match=said):
            learned(name, chat, tools)
        return
    texts = learned(name, chat, tools)
    whole = "\n".join(texts)
    answers = [message for message in chat if message["role"] == "assistant"]
    for message in answers:
        assert message["content"].strip() in whole
        assert not message.get("tool_calls") or ("multiply" in whole and '\\"' not in whole)
        assert str(message.get("reasoning_content", "")) in whole
    for message in chat:
        if message["role"] in ("user", "tool") and len(message["content"]) > 1:
            assert message["content"] not in whole
    assert len(texts) in (1, len(answers))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3", {"role": "developer", "content": "1"}),
        ("llama3_1", {"role": "assistant", "content": "1", "tool_calls": [CALL]}),
        ("gptoss", {"role": "assistant", "content": "", "tool_calls": [CALL, deepcopy(CALL)]}),
    ],
)
def test_a_short_part_that_is_dropped_is_not_taken_for_another(name: str, message: dict[str, Any]) -> None:
    chat = [{"role": "user", "content": "11?"}, message, {"role": "user", "content": "1?"}, ONE[1]]
    with pytest.raises(DataError, match=r"does not render (the content '1'|`tool_calls`) of role"):
        learned(name, chat, None)


def test_what_is_before_an_answer_is_not_learned_where_the_answer_changes_it() -> None:
    chat, tools = CHATS["tools"]
    with pytest.raises(DataError, match="renders what is before an answer otherwise once the answer follows"):
        learned("gptoss", [chat[0], {**chat[1], "thinking": "Let me see."}, *chat[2:]], tools)
