"""What smaller caches of a trained Llama cost on held-out text: shared ones against their rivals, at equal bytes.

    python benchmarks/shrink.py --source SmolLM2 --calibrate valid.txt --text wikitext=test.txt
    python benchmarks/shrink.py --source SmolLM2 --text wikitext=test.txt --shrunken "shared, refitted=folder"
    python benchmarks/shrink.py --source SmolLM2 --calibrate valid.txt --parts passages --plans shrink/83.3.json
    python benchmarks/shrink.py --plot

Rivals, all without training:

drop, by cosine     whole attention layers are left out, those first whose output is most like their input: LLM-Drop
                    (arXiv 2406.15786), whose order this is
drop, by loss       the same, those first whose removal alone costs the least loss on the calibration text
merge heads, mean   two key/value heads become their mean (GQA, arXiv 2305.13245), in the layers where that costs least;
                    the last point merges all heads of all layers (MQA)
merge heads, fitted two heads become the principal part of both, which folds into q_proj and o_proj; then o_proj is
                    refitted by ridge regression on attention outputs
fp8, int8, int4     Transformers' quantised caches; int8 and int4 are its group-wise layers with optimum-quanto's
                    rounding, a scale and an offset of 16 bits for each 64 numbers, so that no package is needed

The part `passages` asks for words that a passage has to be read for: the last word of a sentence in Python's
documentation (`pydoc_data`, in every Python) that stands in the 700 characters before, but not in the last 120. It
refits the source for each plan in `--plans`, the JSON files in benchmarks/results/shrink. A word is right if each of
its tokens is the most probable one. Rates have Wilson's intervals of 95 %.

`--shrunken NAME=FOLDER` measures each checkpoint in a folder as a curve NAME, and its quantised caches.

Quantised caches are measured as in decoding: after each chunk of 128 tokens, Transformers quantises all of them; the
first 128 tokens of a block see nothing quantised. The share of the cache is of bytes per token in bfloat16, without the
last 128 tokens, which are not quantised yet. Results are written after each measurement; what the output holds is not
measured again.
"""

import argparse
import hashlib
import itertools
import json
import math
import platform
import re
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from pydoc_data import topics
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, PreTrainedModel, QuantizedCache
from transformers.cache_utils import QuantizedLayer

import resformer
from resformer.configuration import cache_bytes_per_token
from resformer.convert.families import backbone_config
from resformer.convert.source import open_source
from resformer.modeling.versions import CACHE
from resformer.shrinking.accounting import compare_predictions, interval
from resformer.shrinking.calibration import calibrating
from resformer.shrinking.readers import Plan, Readers
from resformer.shrinking.shrink import plain_model
from resformer.training.data import load_documents
from resformer.training.packing import pack_all

#: Bits that a cached number takes, its part of scales and offsets included.
BITS = {"fp8": 8.0, "int8": 8 + 32 / 64, "int4": 4 + 32 / 64}
DROPPED = (2, 3, 5, 7, 10)  # of 30 layers
MERGED = (8, 15, 23, 30)  # layers with two heads merged, of 30
ALONE = "source, from the last 24 tokens alone"
FINAL_STEPS = 300  # as `resformer shrink` trains query projections for
RIDGE = 1e-3  # of the mean diagonal


class RoundingLayer(QuantizedLayer):
    """Transformers' group-wise layer; each group of numbers in a row has its own minimum and step."""

    def _quantize(self, tensor: torch.Tensor, axis: int) -> Any:
        groups = tensor.reshape(-1, self.q_group_size)
        low, high = groups.aminmax(dim=-1, keepdim=True)
        step = ((high - low) / (2**self.nbits - 1)).clamp(min=torch.finfo(tensor.dtype).tiny)
        return ((groups - low) / step).round().to(torch.uint8), step, low, tensor.shape

    def _dequantize(self, stored: Any) -> torch.Tensor:
        numbers, step, low, shape = stored
        return (numbers * step + low).reshape(shape)


def quantised(kind: str, layers: int) -> QuantizedCache:
    cache = QuantizedCache("fp8", config=LlamaConfig(num_hidden_layers=layers))
    if kind != "fp8":
        cache.layers = [RoundingLayer(nbits=int(kind.removeprefix("int"))) for _ in cache.layers]
    return cache


@contextmanager
def without_attention(model: PreTrainedModel, layers: list[int]) -> Iterator[None]:
    """Leaves the attention of these layers out: it adds zero to the stream."""

    class Nothing(nn.Module):
        def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
            return torch.zeros_like(hidden_states), None

    before = {layer: model.model.layers[layer].self_attn for layer in layers}
    for layer in layers:
        model.model.layers[layer].self_attn = Nothing()
    try:
        yield
    finally:
        for layer, attention in before.items():
            model.model.layers[layer].self_attn = attention


@contextmanager
def edited(model: PreTrainedModel, weights: dict[int, dict[str, torch.Tensor]]) -> Iterator[None]:
    """Gives projections of some layers' attention other weights: layer -> name -> weight."""
    before = []
    for layer, projections in weights.items():
        for name, weight in projections.items():
            projection = getattr(model.model.layers[layer].self_attn, name)
            before.append((projection, projection.weight.data))
            projection.weight.data = weight
    try:
        yield
    finally:
        for projection, weight in before:
            projection.weight.data = weight


@torch.no_grad()
def mean_loss(model: PreTrainedModel, blocks: torch.Tensor) -> float:
    losses = [
        F.cross_entropy(model(ids, use_cache=False).logits[0, :-1].float(), ids[0, 1:]).item()
        for ids in blocks.split(1)
    ]
    return sum(losses) / len(losses)


@torch.no_grad()
def cosine_order(model: PreTrainedModel, blocks: torch.Tensor) -> list[int]:
    """Layers, those first whose stream after attention is most like the one before it."""
    before: dict[int, torch.Tensor] = {}
    cosines = torch.zeros(len(model.model.layers), dtype=torch.float64)

    def enter(number: int, args: Any) -> None:
        before[number] = args[0]

    def leave(number: int, output: Any) -> None:
        stream = before.pop(number)
        cosines[number] += F.cosine_similarity(stream, stream + output[0], dim=-1).mean().double()

    hooks = []
    for number, layer in enumerate(model.model.layers):
        hooks.append(layer.register_forward_pre_hook(lambda _, args, n=number: enter(n, args)))
        hooks.append(layer.self_attn.register_forward_hook(lambda _, args, output, n=number: leave(n, output)))
    for ids in blocks.split(1):
        model.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return cosines.argsort(descending=True).tolist()


def loss_order(model: PreTrainedModel, blocks: torch.Tensor, change: Callable[[int], Any]) -> tuple[list[int], Any]:
    """Layers, those first whose change alone raises the loss least, and the rises."""
    base = mean_loss(model, blocks)
    rises = []
    for layer in range(len(model.model.layers)):
        with change(layer):
            rises.append(mean_loss(model, blocks) - base)
    return sorted(range(len(rises)), key=rises.__getitem__), [round(rise, 4) for rise in rises]


# Merged heads: all heads of a group hold the same, or multiples of the same, so that one of them need be stored.


def heads_of(model: PreTrainedModel) -> tuple[int, int]:
    return model.config.num_key_value_heads, model.config.head_dim


def mean_of_heads(weight: torch.Tensor, group: list[int], heads: int) -> torch.Tensor:
    rows = weight.unflatten(0, (heads, -1)).clone()
    rows[group] = rows[group].mean(0)
    return rows.flatten(0, 1)


def principal_values(weight: torch.Tensor, gram: torch.Tensor, group: list[int], heads: int) -> tuple[Any, float]:
    """v_proj with the group's heads on their first head_dim principal components, and the share of variance lost."""
    rows = weight.double().unflatten(0, (heads, -1)).clone()
    stacked = rows[group].flatten(0, 1)  # (heads of the group * head_dim, hidden)
    variances, vectors = torch.linalg.eigh(stacked @ gram @ stacked.T)
    basis = vectors[:, -rows.shape[1] :]
    rows[group] = (basis @ (basis.T @ stacked)).unflatten(0, (len(group), -1))
    lost = variances[: -rows.shape[1]].sum() / variances.sum()
    return rows.flatten(0, 1).to(weight.dtype), lost.item()


def principal_keys(weight: torch.Tensor, gram: torch.Tensor, group: list[int], heads: int) -> tuple[Any, float]:
    """k_proj with the group's heads as complex multiples of one, for each frequency, and the share of variance lost.

    Channels j and j + head_dim / 2 are the parts of a complex number that the rotary embedding turns, so that a complex
    factor commutes with it and folds into q_proj.
    """
    rows = weight.double().unflatten(0, (heads, -1)).clone()
    half = rows.shape[1] // 2
    numbers = torch.complex(rows[group, :half], rows[group, half:]).transpose(
        0, 1
    )  # (half, heads of the group, hidden)
    variances, vectors = torch.linalg.eigh(numbers @ gram.to(numbers.dtype) @ numbers.mH)
    top = vectors[..., -1:]
    numbers = (top @ (top.mH @ numbers)).transpose(0, 1)
    rows[group] = torch.cat((numbers.real, numbers.imag), dim=1)
    return rows.flatten(0, 1).to(weight.dtype), (variances[:, :-1].sum() / variances.sum()).item()


@torch.no_grad()
def input_grams(model: PreTrainedModel, blocks: torch.Tensor) -> list[torch.Tensor]:
    """For each layer, the sum of x x^T over the inputs x of its attention, in float64."""
    grams = [torch.zeros((model.config.hidden_size,) * 2, dtype=torch.float64) for _ in model.model.layers]

    def add(number: int, states: torch.Tensor) -> None:
        flat = states.flatten(0, 1)
        grams[number] += (flat.T @ flat).double()

    hooks = [
        layer.self_attn.v_proj.register_forward_pre_hook(lambda _, args, n=number: add(n, args[0]))
        for number, layer in enumerate(model.model.layers)
    ]
    for ids in blocks.split(1):
        model.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    return grams


@torch.no_grad()
def refit_outputs(model: PreTrainedModel, weights: dict[int, dict[str, torch.Tensor]], blocks: torch.Tensor) -> None:
    """Adds to `weights` the o_proj of each layer that gives its old attention output best, by ridge regression."""
    width = model.config.num_attention_heads * model.config.head_dim
    grams = {layer: torch.zeros(width, width, dtype=torch.float64) for layer in weights}
    targets = {layer: torch.zeros(model.config.hidden_size, width, dtype=torch.float64) for layer in weights}
    merging = False

    def again(layer: int, attention: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
        nonlocal merging
        if merging:
            return
        merging = True
        inputs: list[torch.Tensor] = []
        hook = attention.o_proj.register_forward_pre_hook(lambda _, args: inputs.append(args[0]))
        with edited(model, {layer: weights[layer]}):
            attention(*args, **kwargs)
        hook.remove()
        merging = False
        mixed, wanted = inputs[0].flatten(0, 1), output[0].flatten(0, 1)
        grams[layer] += (mixed.T @ mixed).double()
        targets[layer] += (wanted.T @ mixed).double()

    hooks = [
        model.model.layers[layer].self_attn.register_forward_hook(
            lambda module, args, kwargs, output, n=layer: again(n, module, args, kwargs, output), with_kwargs=True
        )
        for layer in weights
    ]
    for ids in blocks.split(1):
        model.model(ids, use_cache=False)
    for hook in hooks:
        hook.remove()
    for layer, changed in weights.items():
        old = model.model.layers[layer].self_attn.o_proj.weight
        strength = RIDGE * grams[layer].diagonal().mean()
        gram = grams[layer] + strength * torch.eye(width, dtype=torch.float64)
        changed["o_proj"] = torch.linalg.solve(gram, (targets[layer] + strength * old.double()).T).T.to(old.dtype)


def merged(model: PreTrainedModel, blocks: torch.Tensor, size: int) -> tuple[Any, Any]:
    """Layer -> weights with `size` key/value heads of each layer merged into one: by their mean, and fitted.

    The heads of a layer are those that lose least of their variance when fitted.
    """
    heads, _ = heads_of(model)
    means, fitted = {}, {}
    for number, gram in enumerate(input_grams(model, blocks)):
        attention = model.model.layers[number].self_attn
        keys, values = attention.k_proj.weight.data, attention.v_proj.weight.data
        choices = []
        for chosen in itertools.combinations(range(heads), size):
            group = list(chosen)
            new_keys, lost_keys = principal_keys(keys, gram, group, heads)
            new_values, lost_values = principal_values(values, gram, group, heads)
            choices.append((lost_keys + lost_values, group, {"k_proj": new_keys, "v_proj": new_values}))
        _, group, fitted[number] = min(choices, key=lambda choice: choice[0])
        means[number] = {
            "k_proj": mean_of_heads(keys, group, heads),
            "v_proj": mean_of_heads(values, group, heads),
        }
    refit_outputs(model, fitted, blocks)
    return means, fitted


class Table:
    """The results so far, and the source's logits of one text at a time."""

    def __init__(self, options: argparse.Namespace, results: dict[str, Any]):
        self.options, self.results = options, results
        self.rows: list[dict[str, Any]] = results["rows"]
        self.source = AutoModelForCausalLM.from_pretrained(options.source, dtype=torch.float32).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(options.source)
        self.full = cache_bytes_per_token(self.source.config)
        self.logits: dict[str, torch.Tensor] = {}
        results["source"] = {"parameters": self.source.num_parameters(), "bytes per token": self.full}

    def blocks(self, file: Path, count: int) -> torch.Tensor:
        """The first `count` blocks of a file's tokens."""
        text = file.read_text(encoding="utf-8")
        tokens = count * self.options.tokens
        ids = self.tokenizer(text[: 16 * tokens], verbose=False)["input_ids"][:tokens]
        if len(ids) < tokens:
            raise SystemExit(f"{file}: has {len(ids):,} tokens; {tokens:,} are needed.")
        return torch.tensor(ids).view(count, -1)

    def calibration(self, count: int) -> torch.Tensor:
        if self.options.calibrate is None:
            raise SystemExit("--calibrate: name a file of other documents than those of --text.")
        return self.blocks(self.options.calibrate, count)

    def order(self, name: str, compute: Callable[[], tuple[list[int], Any]]) -> list[int]:
        """Layers in an order that is worked out once."""
        orders = self.results.setdefault("orders", {})
        if name not in orders:
            order, rises = compute()
            orders[name] = {"layers": order, "rises": rises}
            write(self.results, self.options.output)
        return orders[name]["layers"]

    def wants(self, method: str, setting: str) -> list[str]:
        """The texts on which this has not been measured."""
        have = {(row["method"], row["setting"], row["text"]) for row in self.rows}
        return [name for name in self.options.texts if (method, setting, name) not in have]

    def add(
        self,
        method: str,
        setting: str,
        share: float,
        model: PreTrainedModel,
        make_cache: Callable[[], Any] = lambda: None,
        *,
        chunked: bool = False,
        **details: Any,
    ) -> None:
        """Measures one way to have a smaller cache on all texts."""
        for name in self.wants(method, setting):
            began = time.perf_counter()
            blocks = self.blocks(self.options.texts[name], self.options.blocks)
            chunk = 128 if chunked else blocks.shape[1]
            got = compare_predictions(self.logits[name], logits_in_chunks(model, blocks, make_cache, chunk), blocks)
            source, loss = got.source_losses.mean().item(), got.losses.mean().item()
            row = {
                "method": method,
                "setting": setting,
                "cache": round(share, 4),
                "bytes per token": round(share * self.full),
                "text": name,
                "loss": round(loss, 5),
                "rise": round(loss - source, 5),
                "KL": round(got.divergences.mean().item(), 5),
                "KL, 95th percentile": round(got.divergences.quantile(0.95).item(), 5),
                "same top token": round((got.source_top == got.top).float().mean().item(), 5),
                "seconds": round(time.perf_counter() - began, 1),
                **details,
            }
            self.rows.append(row)
            self.results["texts"][name] = {
                "file": self.options.texts[name].name,
                "sha256 of the tokens": hashlib.sha256(blocks.numpy().tobytes()).hexdigest(),
                "blocks": list(blocks.shape),
                "source's loss": round(source, 5),
            }
            write(self.results, self.options.output)
            print(
                f"{name}: {method}, {setting}: cache {share:.1%}, loss {row['rise']:+.4f}, KL {row['KL']:.4f}, "
                f"95 % {row['KL, 95th percentile']:.3f}, top {row['same top token']:.1%}, {row['seconds']} s",
                flush=True,
            )

    def keep_source_logits(self, name: str) -> None:
        """Computes them, before a rival edits the source's weights, and keeps those of this text alone, in a file."""
        blocks = self.blocks(self.options.texts[name], self.options.blocks)
        count, tokens, size = *blocks.shape, self.source.config.vocab_size
        with tempfile.NamedTemporaryFile(dir=self.options.scratch) as file:
            kept = torch.from_file(file.name, shared=True, size=count * tokens * size).view(count, tokens, size)
        with torch.no_grad():
            for block, ids in enumerate(blocks.split(1)):
                kept[block] = self.source(ids, use_cache=False).logits[0]
        self.logits = {name: kept}


@torch.inference_mode()
def logits_in_chunks(
    model: PreTrainedModel, blocks: torch.Tensor, make_cache: Callable[[], Any], chunk: int
) -> Iterator[torch.Tensor]:
    """The logits of each block, whose chunks read the past from the cache, so that the cache itself is measured."""
    for block in blocks.split(1):
        cache, parts = make_cache(), []
        for ids in block.split(chunk, dim=1):
            output = model(input_ids=ids, use_cache=True, **{CACHE: cache})
            cache = output[CACHE]
            parts.append(output.logits[0])
        yield torch.cat(parts)


def of_layers(counts: tuple[int, ...], layers: int) -> list[int]:
    """Counts for 30 layers, for another number of them."""
    return sorted({max(1, round(count * layers / 30)) for count in counts})


def measure_quantised(table: Table) -> None:
    for kind in table.options.quantised:
        add_quantised(table, kind, "stock", 1.0, table.source, kind)


def add_quantised(table: Table, method: str, setting: str, share: float, model: PreTrainedModel, kind: str) -> None:
    layers = model.config.num_hidden_layers
    table.add(method, setting, share * BITS[kind] / 16, model, lambda: quantised(kind, layers), chunked=True)


def measure_dropped(table: Table) -> None:
    layers = table.source.config.num_hidden_layers
    few = table.options.order_blocks
    orders = {
        "drop, by cosine": lambda: (cosine_order(table.source, table.calibration(few)), None),
        "drop, by loss": lambda: loss_order(
            table.source, table.calibration(few), lambda layer: without_attention(table.source, [layer])
        ),
    }
    for method, compute in orders.items():
        for count in of_layers(DROPPED, layers):
            if table.wants(method, f"{count} layers"):
                dropped = table.order(method, compute)[:count]
                with without_attention(table.source, dropped):
                    share = 1 - count / layers
                    table.add(method, f"{count} layers", share, table.source, layers=sorted(dropped))


def measure_merged(table: Table) -> None:
    layers, (heads, _) = table.source.config.num_hidden_layers, heads_of(table.source)
    settings = [(2, count) for count in of_layers(MERGED, layers)] + [(heads, layers)] * (heads > 2)
    weights: dict[int, Any] = {}
    for size, count in settings if heads > 1 else []:
        for which, method in enumerate(("merge heads, mean", "merge heads, fitted")):
            setting = f"{size} heads in {count} layers"
            if not table.wants(method, setting):
                continue
            if size not in weights:
                weights[size] = merged(table.source, table.calibration(table.options.fit_blocks), size)
            change = weights[size][which]
            order = list(range(layers))
            if count < layers:
                few = table.calibration(table.options.order_blocks)
                one_each = [edited(table.source, {layer: change[layer]}) for layer in range(layers)]
                order = table.order(method, partial(loss_order, table.source, few, one_each.__getitem__))
            with edited(table.source, {layer: change[layer] for layer in order[:count]}):
                share = 1 - (size - 1) / heads * count / layers
                table.add(method, setting, share, table.source, layers=sorted(order[:count]))


def measure_shrunken(table: Table) -> None:
    """Each checkpoint below the folders, with a cache in full and quantised."""
    for method, folder in table.options.shrunken.items():
        for config in sorted(folder.glob("*/config.json")):
            name = config.parent.name
            kinds = ["", *table.options.quantised]
            names = {kind: f"{method}, {kind}" if kind else method for kind in kinds}
            if not any(table.wants(names[kind], name) for kind in kinds):
                continue
            model = AutoModelForCausalLM.from_pretrained(config.parent, dtype=torch.float32).eval()
            share = cache_bytes_per_token(model.config) / table.full
            table.add(method, name, share, model)
            for kind in table.options.quantised:
                add_quantised(table, names[kind], name, share, model, kind)


def prose(count: int) -> list[tuple[str, str]]:
    """(passage, the word that ends it), the first `count` of Python's documentation that do not overlap."""
    items = []
    for _, text in sorted(topics.topics.items()):
        text, free = " ".join(text.split()), 0
        for match in re.finditer(r" ([a-z]{4,})(?=\.)", text):
            begin = match.start() - 700
            passage = text[begin : match.start()]
            if begin < free or re.search(rf"\b{match[1]}\b", passage[-120:]):
                continue
            if re.search(rf"\b{match[1]}\b", passage[:-120]):
                items.append((passage, match[0]))
                free = match.end()
    return items[:: max(1, len(items) // count)][:count]


@torch.inference_mode()
def last_words_of(model: PreTrainedModel, items: list[tuple[list[int], list[int]]]) -> list[tuple[bool, float]]:
    """For each passage and its word, whether the word is right, and its loss in nats."""
    answers = []
    for passage, word in items:
        ids = torch.tensor([passage + word[:-1]])
        logits = model(input_ids=ids, use_cache=False, logits_to_keep=len(word)).logits[0].float()
        wanted = torch.tensor(word)
        loss = F.cross_entropy(logits, wanted, reduction="sum").item()
        answers.append((bool((logits.argmax(-1) == wanted).all()), loss))
    return answers


def measure_passages(table: Table) -> None:
    """The source, and the source refitted for each plan, on passages of prose."""
    measured: dict[str, Any] = table.results.setdefault("passages", {})
    words = table.tokenizer.backend_tokenizer
    items = [(words.encode(passage).ids, words.encode(word).ids) for passage, word in prose(table.options.passages)]

    def measure(name: str, model: PreTrainedModel, items: list[tuple[list[int], list[int]]], **facts: Any) -> None:
        began = time.perf_counter()
        answers = last_words_of(model, items)
        measured[name] = {
            **facts,
            "tokens a passage": statistics.fmean(len(passage) for passage, _ in items),
            "right": "".join(str(int(right)) for right, _ in answers),
            "nats": [round(loss, 3) for _, loss in answers],
            "seconds": round(time.perf_counter() - began, 1),
        }
        compare_passages(measured)
        write(table.results, table.options.output)
        print(name, {key: value for key, value in measured[name].items() if key not in ("right", "nats")}, flush=True)

    if table.options.sources and "source" not in measured:
        measure("source", table.source, items, cache=1.0)
        measure(ALONE, table.source, [(passage[-24:], word) for passage, word in items], cache=1.0)
    if not table.options.plans:
        return
    source = open_source(table.options.source).fetch()
    config = backbone_config(source.config)
    config.tie_word_embeddings = source.tied
    model = plain_model(source, config)
    packed = pack_all(
        load_documents([str(table.options.calibrate)]), table.tokenizer, block=512, most=64, side="calibration"
    )
    blocks = torch.stack([packed[number]["input_ids"] for number in range(len(packed))])
    with calibrating(model, blocks) as calibration:
        for file in table.options.plans:
            fields = json.loads(file.read_text(encoding="utf-8"))["fields"]
            own = range(config.num_hidden_layers)
            plan = Plan(*(tuple(fields.get(f"{kind}_sources", own)) for kind in ("key", "value")))
            with torch.inference_mode():
                student = Readers(calibration, FINAL_STEPS, plan).student(plan)
            share = plan.kept / (2 * config.num_hidden_layers)
            measure(file.stem, student, items, cache=share, calibrated=[table.options.calibrate.name, blocks.numel()])


def compare_passages(measured: dict[str, Any]) -> None:
    """Adds to each model's answers its rate with an interval, and what it is against the source's."""
    for row in measured.values():
        right, count = row["right"].count("1"), len(row["right"])
        row |= {
            "share": right / count,
            "interval": interval(right, count),
            "nats a word": statistics.fmean(row["nats"]),
        }
        if source := measured.get("source"):
            rises = [nats - before for nats, before in zip(row["nats"], source["nats"], strict=True)]
            pairs = list(zip(source["right"], row["right"], strict=True))
            row["rise"], row["standard error"] = statistics.fmean(rises), statistics.stdev(rises) / math.sqrt(count)
            row["lost"], row["gained"] = pairs.count(("1", "0")), pairs.count(("0", "1"))


PARTS = {
    "quantised": measure_quantised,
    "shrunken": measure_shrunken,
    "dropped": measure_dropped,
    "merged": measure_merged,
    "passages": measure_passages,
}


def plot(results: dict[str, Any], path: Path) -> None:
    """Draws the rise of the loss against the share of the cache: a panel for each text, a curve for each method."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    texts = list(results["texts"])
    methods = list(dict.fromkeys(row["method"] for row in results["rows"]))
    figure = Figure(figsize=(6.5 * len(texts) + 2.5, 5.5), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(1, len(texts), squeeze=False, sharey=True)[0]
    for axes, text in zip(panels, texts, strict=True):
        for number, method in enumerate(methods):
            points = sorted(
                (100 * row["cache"], row["rise"])
                for row in results["rows"]
                if (row["method"], row["text"]) == (method, text)
            )
            if points:
                colour = colormaps["tab20"](2 * number % 20 + number // 10 % 2)
                own = not method.startswith(("drop", "merge", *BITS))
                axes.plot(*zip(*points, strict=True), marker="o", markersize=4, label=method, color=colour, lw=1 + own)
        axes.axhline(0.0, color="black", linewidth=0.8)
        axes.set_yscale("symlog", linthresh=0.01)
        axes.set(title=text, xlabel="cache, % of the source's bytes per token in bfloat16", xlim=(100, 0))
        axes.grid(alpha=0.3)
    panels[0].set_ylabel("rise of the held-out loss, nats per token")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", fontsize=8)
    figure.savefig(path, dpi=110)


def write(results: dict[str, Any], output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def named(text: str) -> tuple[str, Path]:
    name, separator, path = text.partition("=")
    if not separator:
        raise argparse.ArgumentTypeError(f"{text!r}: expected NAME=PATH")
    return name, Path(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", help="the checkpoint, a folder")
    parser.add_argument("--text", type=named, nargs="+", default=[], metavar="NAME=FILE", help="held-out text")
    parser.add_argument("--calibrate", type=Path, help="text of other documents, for the orders and fits of rivals")
    parser.add_argument("--shrunken", type=named, nargs="+", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=[part for part in PARTS if part != "passages"])
    parser.add_argument(
        "--plans", type=Path, nargs="+", default=[], help="for the part passages: their source is refitted"
    )
    parser.add_argument("--passages", type=int, default=200, help="how many (200)")
    parser.add_argument(
        "--sources", action=argparse.BooleanOptionalAction, default=True, help="passages: the source too"
    )
    parser.add_argument("--quantised", nargs="*", choices=BITS, default=list(BITS), help="kinds of quantised caches")
    parser.add_argument("--blocks", type=int, default=12, help="held-out blocks of each text (12)")
    parser.add_argument("--tokens", type=int, default=512, help="tokens in a block (512)")
    parser.add_argument("--order-blocks", type=int, default=4, help="calibration blocks that order layers (4)")
    parser.add_argument("--fit-blocks", type=int, default=32, help="calibration blocks that fit merged heads (32)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--scratch", type=Path, help="folder for a file of the source's logits (the system's)")
    parser.add_argument("--plot", action="store_true", help="only draw the figure of the output")
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/shrink.json"))
    options = parser.parse_args()
    options.texts, options.shrunken = dict(options.text), dict(options.shrunken)
    torch.set_num_threads(options.threads)
    results = json.loads(options.output.read_text(encoding="utf-8")) if options.output.exists() else {}
    if not options.plot:
        if options.source is None or not (options.texts or options.parts == ["passages"]):
            parser.error("--source and --text are needed")
        command = shlex.join(["python", *sys.argv])
        results = {
            "commands": [*results.get("commands", []), command],
            "versions": {
                "resformer": resformer.__version__,
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "python": platform.python_version(),
            },
            "texts": {},
            "rows": [],
            **{name: results[name] for name in ("texts", "orders", "rows", "passages") if name in results},
            "passages": results.get("passages", {}),
        }
        table = Table(options, results)
        if options.parts == ["passages"]:
            measure_passages(table)
            return
        for name in options.texts:  # one text at a time: its logits of the source take gigabytes
            table.options.texts = {name: dict(options.text)[name]}
            table.keep_source_logits(name)
            for part in options.parts:
                PARTS[part](table)
    plot(results, options.output.with_suffix(".png"))


if __name__ == "__main__":
    main()
