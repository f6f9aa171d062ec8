"""What a smaller cache costs: two models of one vocabulary compared on held-out text."""

import random
import re
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from resformer.configuration import cache_bytes_per_token
from resformer.errors import CheckpointError
from resformer.files import AsDict
from resformer.modeling.versions import CACHE

#: How many blocks' starts are continued, and how long these are.
_GREEDY_PROMPTS, _GREEDY_PROMPT_TOKENS = 8, 32
#: Prompts in tokens, as far as both models can read them.
_PASSKEY_LENGTHS = (256, 512, 1024, 2048)
_LAST_WORD = re.compile(r"[ \n]([^\W\d_]+)(?= ?[.!?\n])")
_TASK = "There is important information hidden in a lot of irrelevant text. Find it and memorize it.\n"
_FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
_NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key.\n"
_QUESTION = "What is the pass key? The pass key is"


@dataclass(frozen=True)
class Predictions:
    """What two models predict for each token of held-out blocks but the first: tensors of (blocks, tokens - 1)."""

    targets: torch.Tensor
    source_losses: torch.Tensor  # nats
    losses: torch.Tensor
    divergences: torch.Tensor  # KL(source || result), nats
    source_top: torch.Tensor  # the most probable token
    top: torch.Tensor


@dataclass(frozen=True)
class Cost(AsDict):
    """What a model with a smaller cache costs against its source, on held-out text.

    `None` where nothing was measured: no tokenizer, or no length that both models can read.
    """

    tokens: int  # predicted tokens, over which the next five are taken
    source_loss: float  # nats per token
    loss: float
    kl_mean: float  # KL(source || result), nats per token
    kl_p95: float
    top1_agreement: float  # share of tokens for which both find the same token most probable
    greedy_prompts: int
    greedy_limit: int  # tokens after which the texts are not compared further
    greedy_median: float  # equal tokens before the first difference of greedy texts
    last_words: int | None  # words that end a sentence or a line
    source_last_word_accuracy: float | None  # share of them whose every token is the most probable one
    last_word_accuracy: float | None
    passkey: list[dict[str, float]] | None  # length, questions, accuracies of source and result
    source_bytes_per_token: int  # of the cache in bfloat16
    bytes_per_token: int

    @property
    def cache(self) -> float:
        """The share of the source's cache."""
        return self.bytes_per_token / self.source_bytes_per_token

    @property
    def intervals(self) -> dict[str, Any]:
        """95 % intervals of the rates of few items: last words, and the numbers found in each length."""
        asked = {
            name: interval(share * (self.last_words or 0), self.last_words)
            for name in ("source_last_word_accuracy", "last_word_accuracy")
            if self.last_words and (share := getattr(self, name)) is not None
        }
        found = [
            {name: interval(each[name] * each["questions"], int(each["questions"])) for name in ("source", "result")}
            for each in self.passkey or ()
        ]
        return {**asked, "passkey": found}


def measure_cost(
    source: PreTrainedModel,
    result: PreTrainedModel,
    blocks: torch.Tensor,
    *,
    tokenizer: PreTrainedTokenizerBase | None = None,
    greedy_limit: int = 128,
    progress: Callable[[], object] = lambda: None,
) -> Cost:
    """Measures all that `Cost` holds. Both models are in evaluation mode.

    Args:
        source, result: the models, of the same vocabulary.
        blocks: (blocks, tokens), the ids of held-out text.
        tokenizer: of both; without it, last words and passkeys are left out.
        greedy_limit: for how many tokens the blocks' starts are continued.
        progress: called after each block and each passkey question.

    Raises:
        CheckpointError: a model gives NaN or infinity.
    """
    predictions = compare_predictions(block_logits(source, blocks), block_logits(result, blocks), blocks, progress)
    for name, losses in (("source", predictions.source_losses), ("result", predictions.losses)):
        if not losses.isfinite().all():
            raise CheckpointError(
                f"The {name} gives a loss of NaN or infinity on held-out text; is it a trained model?"
            )
    equal = equal_greedy_tokens(source, result, blocks[:_GREEDY_PROMPTS, :_GREEDY_PROMPT_TOKENS], greedy_limit)
    progress()
    words, passkey = None, None
    if tokenizer is not None:
        words = word_accuracy(predictions, tokenizer)
        longest = min(model.config.max_position_embeddings for model in (source, result))
        passkey = [
            passkey_accuracy(source, result, tokenizer, length, progress=progress)
            for length in _PASSKEY_LENGTHS
            if length <= longest
        ]
    return Cost(
        tokens=predictions.losses.numel(),
        source_loss=predictions.source_losses.mean().item(),
        loss=predictions.losses.mean().item(),
        kl_mean=predictions.divergences.mean().item(),
        kl_p95=predictions.divergences.quantile(0.95).item(),
        top1_agreement=(predictions.source_top == predictions.top).float().mean().item(),
        greedy_prompts=len(equal),
        greedy_limit=greedy_limit,
        greedy_median=statistics.median(equal),
        last_words=words and words[0],
        source_last_word_accuracy=words and words[1],
        last_word_accuracy=words and words[2],
        passkey=passkey or None,
        source_bytes_per_token=cache_bytes_per_token(source.config),
        bytes_per_token=cache_bytes_per_token(result.config),
    )


def block_logits(model: PreTrainedModel, blocks: torch.Tensor) -> Iterator[torch.Tensor]:
    """Yields the logits of each block, (tokens, vocabulary)."""
    for block in blocks.to(model.device).split(1):
        with torch.inference_mode():
            yield model(input_ids=block, use_cache=False).logits[0]


@torch.inference_mode()
def compare_predictions(
    source_logits: Iterable[torch.Tensor],
    logits: Iterable[torch.Tensor],
    blocks: torch.Tensor,
    progress: Callable[[], object] = lambda: None,
) -> Predictions:
    """Compares what two models predict for each token, from their logits as `block_logits` yields them."""
    rows = []
    for one, other, targets in zip(source_logits, logits, blocks[:, 1:], strict=True):
        dtype = torch.promote_types(one.dtype, torch.float32)
        source_log, log = (each[:-1].to(other.device, dtype).log_softmax(-1) for each in (one, other))
        wanted = targets.to(log.device)[:, None]
        losses = [-each.gather(-1, wanted)[:, 0] for each in (source_log, log)]
        top = [each.argmax(-1) for each in (source_log, log)]
        divergences = source_log.exp().mul_(source_log.sub_(log)).sum(-1)
        rows.append([each.cpu() for each in (targets, *losses, divergences, *top)])
        progress()
    return Predictions(*(torch.stack(column) for column in zip(*rows, strict=True)))


@torch.inference_mode()
def equal_greedy_tokens(
    source: PreTrainedModel, result: PreTrainedModel, prompts: torch.Tensor, limit: int
) -> list[int]:
    """How many tokens, at most `limit`, the greedy texts after each prompt (a row of ids) have in common.

    Only the source generates: up to the first difference, the result's text is what it finds most probable after each
    token of the source's. Texts go on past end-of-sequence tokens.
    """
    new = prompts.to(source.device)
    tokens, cache = [], None
    for _ in range(limit):
        output = source(input_ids=new, use_cache=True, logits_to_keep=1, **{CACHE: cache})
        cache, new = output[CACHE], output.logits.argmax(-1)
        tokens.append(new)
    expected = torch.cat(tokens, dim=1).to(result.device)
    ids = torch.cat((prompts.to(result.device), expected[:, :-1]), dim=1)
    equal = []
    for row, wanted in zip(ids.split(1), expected.split(1), strict=True):
        top = result(input_ids=row, use_cache=False, logits_to_keep=limit).logits.argmax(-1)
        equal.append(int((top == wanted).cumprod(1).sum()))
    return equal


def word_accuracy(
    predictions: Predictions, tokenizer: PreTrainedTokenizerBase, context: int = 50
) -> tuple[int, float, float] | None:
    """(how many last words of sentences and lines there are, the share that the source predicts, the result's share).

    A word is predicted if its every token is the most probable one, given all tokens before it in the block, as in
    LAMBADA. Words with fewer than `context` tokens before them are left out; `None` if there is none.
    """
    right = torch.stack([predictions.source_top, predictions.top]) == predictions.targets
    hits = []
    for block, targets in enumerate(predictions.targets.tolist()):
        # Byte-level and sentencepiece tokenizers mark a space and a line's end so.
        pieces = [
            (piece or "\0").replace("Ġ", " ").replace("▁", " ").replace("Ċ", "\n").replace("<0x0A>", "\n")
            for piece in tokenizer.convert_ids_to_tokens(targets)
        ]
        hits += [
            right[:, block, first:end].all(1) for first, end in last_words(pieces) if first + 1 >= context
        ]  # the block's first token is no target
    if not hits:
        return None
    source_share, share = torch.stack(hits).float().mean(0).tolist()
    return len(hits), source_share, share


def interval(right: float, of: int) -> list[float]:
    """(low, high) of Wilson's interval of a rate, at 95 %."""
    from scipy.stats import binomtest

    low, high = binomtest(round(right), of).proportion_ci(method="wilson")
    return [float(low), float(high)]


def last_words(pieces: Sequence[str]) -> list[tuple[int, int]]:
    """The tokens, from first to end, of each whole word that ends a sentence or a line.

    Args:
        pieces: the tokens as text, with the space or line end that a word's first token has before the word.
    """
    token_at = {0: 0, **{end: token for token, end in enumerate(accumulate(map(len, pieces)), start=1)}}
    ranges = []
    for match in _LAST_WORD.finditer("".join(pieces)):
        first = token_at.get(match.start(1), token_at.get(match.start()))
        end = token_at.get(match.end())
        if first is not None and end is not None:
            ranges.append((first, end))
    return ranges


def passkey_prompt(
    tokenizer: PreTrainedTokenizerBase, length: int, depth: float, key: str
) -> tuple[list[int], list[int]]:
    """A prompt of at most `length` tokens, answer included, that hides `key` in filler and asks for it; the answer.

    Args:
        depth: where `key` stands, from 0, at the beginning of the filler, to 1.
    """
    needle = _NEEDLE.format(key=key)
    answer = f" {key}"
    bare = len(tokenizer(_TASK + needle + _QUESTION + answer)["input_ids"])
    repeats = max(0, length - bare) // len(tokenizer(_FILLER, add_special_tokens=False)["input_ids"])
    before = round(depth * repeats)
    prompt = _TASK + _FILLER * before + needle + _FILLER * (repeats - before) + _QUESTION
    ids, prompt_tokens = tokenizer(prompt + answer)["input_ids"], len(tokenizer(prompt)["input_ids"])
    return ids[:prompt_tokens], ids[prompt_tokens:]


@torch.inference_mode()
def passkey_accuracy(
    source: PreTrainedModel,
    result: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    length: int,
    questions: int = 5,
    progress: Callable[[], object] = lambda: None,
) -> dict[str, float]:
    """The shares, `source` and `result`, of numbers of five digits that are found in `length` tokens and repeated.

    The numbers are hidden at 10 to 90 % of the text.
    """
    numbers = random.Random(length)
    right = {"source": 0, "result": 0}
    for question in range(questions):
        depth = 0.1 + 0.8 * question / max(1, questions - 1)
        prompt, answer = passkey_prompt(tokenizer, length, depth, str(numbers.randrange(10_000, 100_000)))
        # The answer is read all at once: a greedy text equals it just if each of its tokens is the most probable one.
        ids = torch.tensor([prompt + answer[:-1]])
        for name, model in (("source", source), ("result", result)):
            logits = model(input_ids=ids.to(model.device), use_cache=False, logits_to_keep=len(answer)).logits
            right[name] += logits[0].argmax(-1).tolist() == answer
        progress()
    return {"length": length, "questions": questions, **{name: count / questions for name, count in right.items()}}
