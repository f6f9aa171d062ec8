"""What a smaller cache costs: each figure against its definition in float64."""

import pytest
import torch
from checkpoints import byte_tokenizer
from conftest import TINY
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.errors import CheckpointError
from resformer.shrinking.accounting import (
    compare_predictions,
    equal_greedy_tokens,
    interval,
    last_words,
    measure_cost,
    passkey_accuracy,
    passkey_prompt,
    word_accuracy,
)

TOKENIZER = byte_tokenizer()
BLOCKS = torch.randint(1, TINY["vocab_size"], (5, 45), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def source() -> LlamaForCausalLM:
    torch.manual_seed(1)
    model = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    for parameter in model.parameters():  # far from uniform predictions
        parameter.data.mul_(3)
    return model


@pytest.fixture(scope="module")
def result(source: LlamaForCausalLM) -> ResFormerForCausalLM:
    model = ResFormerForCausalLM(ResFormerConfig(**TINY, value_sources=[0, 0, 2, 3, 4, 4])).eval()
    model.load_state_dict(source.state_dict(), strict=False)
    return model


def test_losses_and_divergences_equal_their_definition_in_float64(
    source: LlamaForCausalLM, result: ResFormerForCausalLM
) -> None:
    cost = measure_cost(source, result, BLOCKS, greedy_limit=4)
    with torch.no_grad():
        logits = [model(BLOCKS, use_cache=False).logits.double()[:, :-1].flatten(0, 1) for model in (source, result)]
    p, q = (each.log_softmax(-1) for each in logits)
    losses = [float(nn.functional.nll_loss(each, BLOCKS[:, 1:].flatten())) for each in (p, q)]
    divergences = (p.exp() * (p - q)).sum(-1)
    assert cost.tokens == len(divergences) == 5 * 44
    assert [cost.source_loss, cost.loss] == pytest.approx(losses, abs=1e-5)
    assert cost.kl_mean == pytest.approx(float(divergences.mean()), abs=1e-5)
    assert cost.kl_p95 == pytest.approx(float(divergences.quantile(0.95)), abs=1e-5)
    assert cost.top1_agreement == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).double().mean()))
    assert 0 < cost.top1_agreement < 1
    assert cost.kl_mean > 0.01
    assert (cost.last_words, cost.passkey) == (None, None)
    assert cost.cache == cost.bytes_per_token / cost.source_bytes_per_token == 10 / 12
    assert cost.as_dict()["cache"] == cost.cache


def test_greedy_texts_are_compared_up_to_their_first_difference(
    source: LlamaForCausalLM, result: ResFormerForCausalLM
) -> None:
    prompts = BLOCKS[:, :6]
    got = equal_greedy_tokens(source, result, prompts, 12)
    options = {"do_sample": False, "max_new_tokens": 12, "min_new_tokens": 12, "pad_token_id": 0}
    texts = [model.generate(prompts, attention_mask=torch.ones_like(prompts), **options) for model in (source, result)]
    for count, first, second in zip(got, *(text[:, 6:].tolist() for text in texts), strict=True):
        assert first[:count] == second[:count]
        assert count == 12 or first[count] != second[count]
    assert 0 <= min(got) < 12
    assert equal_greedy_tokens(source, source, prompts, 12) == [12] * 5


def test_last_words_are_whole_words_that_end_a_sentence_or_a_line() -> None:
    pieces = ["The", " cat", " s", "at", ".", " No", " 7", " .", "\n", "ret", "urn", " x", "\n", "\n", "end", " ."]
    found = ["".join(pieces[first:end]) for first, end in last_words(pieces)]
    assert found == [" sat", " x", "end"]
    assert last_words(["a b", "c. d", " e", "f!"]) == []  # a word shares a token with its neighbours


def test_a_last_word_counts_if_its_every_token_is_most_probable() -> None:
    text = "a sentence of some length ends here. so does that."
    ids = torch.tensor([TOKENIZER(text)["input_ids"], TOKENIZER("." * len(text))["input_ids"]])
    logits = torch.nn.functional.one_hot(ids.roll(-1, dims=1), 257).float()
    worse = logits.clone()
    worse[0, text.index("here")] = 0.0  # predicts the letter after the first one
    predictions = compare_predictions(logits, worse, ids)
    assert torch.equal(predictions.targets, ids[:, 1:])
    assert word_accuracy(predictions, TOKENIZER, context=4) == (2, 1.0, 0.5)
    assert word_accuracy(predictions, TOKENIZER, context=1000) is None


def test_rates_of_few_items_have_intervals() -> None:
    # Newcombe 1998, table I, method 3.
    assert interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)
    assert interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert interval(1 / 29 * 29, 29) == pytest.approx((0.0061, 0.1718), abs=5e-5)


@pytest.mark.parametrize("depth", [0.1, 0.9])
def test_a_passkey_is_hidden_at_its_depth_in_a_prompt_of_its_length(depth: float) -> None:
    prompt, answer = passkey_prompt(TOKENIZER, 1500, depth, "73519")
    text = TOKENIZER.decode(prompt)
    assert TOKENIZER.decode(answer) == " 73519"
    assert 1350 < len(prompt) + len(answer) <= 1500
    assert text.count("73519") == 2
    assert abs(text.index("73519") / len(text) - depth) < 0.15


def test_a_passkey_is_found_if_all_of_it_is_repeated() -> None:
    class Copying:
        """Predicts the number after `The pass key is`, or wrong digits in one of two prompts."""

        device = torch.device("cpu")

        def __init__(self, fails: int):
            self.calls, self.fails = 0, fails

        def __call__(self, input_ids: torch.Tensor, logits_to_keep: int, **_: object) -> object:
            text = TOKENIZER.decode(input_ids[0])
            start = text.index("The pass key is") + len("The pass key is")
            answer = TOKENIZER(text[start : start + 6])["input_ids"]
            self.calls += 1
            answer[-1] += self.calls <= self.fails
            logits = torch.nn.functional.one_hot(torch.tensor([answer]), 257).float()
            return type("Output", (), {"logits": logits[:, -logits_to_keep:]})

    got = passkey_accuracy(Copying(0), Copying(1), TOKENIZER, 600, 4)  # type: ignore[arg-type]
    assert got == {"length": 600, "questions": 4, "source": 1.0, "result": 0.75}


def test_a_model_that_gives_no_numbers_is_refused(source: LlamaForCausalLM) -> None:
    broken = LlamaForCausalLM(LlamaConfig(**TINY)).eval()
    broken.lm_head.weight.data[5] = float("nan")
    with pytest.raises(CheckpointError, match=r"result.*NaN"):
        measure_cost(source, broken, BLOCKS)
