"""Smaller caches: the fits by definition, models that can be shared exactly, plans, `resformer shrink` as a whole."""

import itertools
import json
import random
import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from checkpoints import byte_tokenizer, contents, save_checkpoint
from conftest import TINY
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

import resformer
import resformer.shrinking.shrink as shrinking
from resformer import ResFormerConfig, ResFormerForCausalLM, retrofit
from resformer.configuration import cache_bytes_per_token, key_sources, value_sources
from resformer.convert import CheckpointError
from resformer.convert.source import Source
from resformer.record import RECORD
from resformer.shrinking.accounting import measure_cost
from resformer.shrinking.calibration import Calibration, calibrating
from resformer.shrinking.keys import KeyFit, complex_scalars, divergence, fit_keys, fold_into_queries
from resformer.shrinking.readers import Plan, Readers
from resformer.shrinking.refit import STRENGTHS, Moments, assign_heads, fit, fold_heads, ridge
from resformer.shrinking.search import best_plan, single_costs, smallest

OWN = (0, 1, 2, 3)
SMALL: dict[str, Any] = {
    **TINY,
    "hidden_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 8,
}
WINDOWS = {"layer_types": ["full_attention", "sliding_attention"] * 2, "sliding_window": 8}
BLOCKS = torch.randint(1, 97, (15, 48), generator=torch.Generator().manual_seed(0))


def plain_model(**fields: Any) -> ResFormerForCausalLM:
    model = ResFormerForCausalLM(ResFormerConfig(**{**SMALL, **fields})).eval()
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        parameter.data = torch.randn(parameter.shape, generator=generator) * 0.15 + ("norm" in name)
    return model.double()


Shares = Mapping[int, tuple[int, tuple[int, ...]]]  # reader -> (source, order)


def shareable_model(keys: Shares, values: Shares, **fields: Any) -> ResFormerForCausalLM:
    """Group g of a reader has the keys z k and the values v M + c of the source's head order[g].

    c is zero without output biases. Norms do nothing, and keys and values read dimensions that no layer writes to.
    """
    model = plain_model(rms_norm_eps=1e12, attention_bias=True, **fields)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data.fill_(1e6)
        elif "embed" in name or "q_proj.weight" in name:
            parameter.data *= 4
        elif "k_proj.weight" in name or "v_proj.weight" in name:
            parameter.data[:, 24:] = 0
        elif "o_proj" in name or "down_proj" in name:
            parameter.data[:24] = 0

    def heads_of(n: int, name: str, order: Sequence[int]) -> torch.Tensor:  # heads, head_dim, hidden_size + 1
        projection = model.get_submodule(f"model.layers.{n}.self_attn.{name}_proj")
        return torch.cat((projection.weight, projection.bias[:, None]), 1).unflatten(0, (3, 8))[list(order)].detach()

    def write(n: int, name: str, heads: torch.Tensor) -> None:
        projection = model.get_submodule(f"model.layers.{n}.self_attn.{name}_proj")
        projection.weight.data, projection.bias.data = heads[..., :40].flatten(0, 1), heads[..., 40].flatten()

    for n, (source, order) in values.items():
        heads = torch.randn(3, 8, 8).mul(0.4).double() @ heads_of(source, "v", order)
        heads[..., 40] += torch.randn(3, 8) * bool(model.config.attention_out_bias)
        write(n, "v", heads)
    for n, (source, order) in keys.items():
        k = torch.complex(*heads_of(source, "k", order).unflatten(1, (2, 4)).unbind(1))
        k = torch.randn(3, 4, 1, dtype=torch.complex128) * k
        write(n, "k", torch.cat((k.real, k.imag), 1))
    return model


@pytest.mark.parametrize("rows", [40, 6])  # inputs: 9
@pytest.mark.parametrize("strength", [1e-8, 0.1])
def test_ridge_solves_the_augmented_least_squares(rows: int, strength: float) -> None:
    z, y, prior = (torch.randn(2, *shape).double() for shape in ((rows, 9), (rows, 4), (9, 4)))
    moments = Moments.of(z[:, :3], y[:, :3]) + Moments.of(z[:, 3:], y[:, 3:])
    got = ridge(moments, prior, strength)
    for k in range(2):
        penalty = strength * z[k].square().sum() / 9
        inputs = torch.cat((z[k], penalty.sqrt() * torch.eye(9)))
        expected = torch.linalg.lstsq(inputs, torch.cat((y[k], penalty.sqrt() * prior[k])), driver="gelsd")[0]
        torch.testing.assert_close(got[k], expected, atol=1e-6, rtol=1e-6)
        torch.testing.assert_close(moments.error(got)[k], (y[k] - z[k] @ got[k]).square().sum(), atol=1e-9, rtol=1e-6)


def test_ridge_leaves_the_prior_where_nothing_is_observed() -> None:
    z, y, prior = torch.randn(20, 5).double(), torch.randn(20, 3).double(), torch.randn(5, 3).double()
    z[:, 2] = 0
    got = ridge(Moments.of(z, y), prior, 0.0)
    torch.testing.assert_close(got[2], prior[2])
    torch.testing.assert_close(z @ got, z @ torch.linalg.lstsq(z, y, driver="gelsd")[0])
    assert torch.equal(ridge(Moments.of(0 * z, y), prior, 0.1), prior)


def test_the_strength_with_the_least_held_out_error_is_chosen() -> None:
    true, prior = torch.randn(20, 4).double(), torch.zeros(20, 4).double()
    sides = [torch.randn(rows, 20).double() for rows in (30, 200)]
    train, held_out = (Moments.of(z, z @ true + 3 * torch.randn(len(z), 4)) for z in sides)
    weight, strength, error = fit(train, held_out, prior)
    errors = {each: float(held_out.error(ridge(train, prior, each))) for each in STRENGTHS}
    assert strength not in (STRENGTHS[0], STRENGTHS[-1])
    assert errors[strength] == error == min(errors.values())
    assert torch.equal(weight, ridge(train, prior, strength))


def test_heads_are_folded_by_group_weighted_by_their_output_and_assigned() -> None:
    z, target = torch.randn(6, 3, 30, 4).double(), torch.randn(6, 1, 30, 4).double()
    output = torch.randn(6, 4, 10).double()
    maps, costs = fold_heads(Moments.of(z, target), output, 0.01)
    for group, head in itertools.product(range(3), range(3)):
        members = [2 * group, 2 * group + 1]
        inputs, outputs = torch.cat([z[i, head] for i in members]), torch.cat([target[i, 0] for i in members])
        penalty = 0.01 * inputs.square().sum() / 4
        expected = torch.linalg.solve(inputs.T @ inputs + penalty * torch.eye(4), inputs.T @ outputs)
        torch.testing.assert_close(maps[group, head], expected)
        errors = [(target[i, 0] - z[i, head] @ expected).square().sum() * output[i].square().mean() for i in members]
        torch.testing.assert_close(costs[group, head], sum(errors))
    for each in (costs, torch.randn(5, 5)):
        orders = itertools.permutations(range(len(each)))
        assert assign_heads(each) == list(min(orders, key=lambda order: sum(each[range(len(each)), order])))


def test_complex_scalars_are_weighted_least_squares_and_fold_into_rotated_queries() -> None:
    own, source, queries = (torch.randn(3, 20, 8) for _ in range(3))  # heads, tokens, head_dim
    weight = torch.rand(3, 20)
    z = complex_scalars(own, source, weight)
    for head, j in itertools.product(range(3), range(4)):
        k, s = (torch.complex(each[head, :, j], each[head, :, j + 4]) * weight[head].sqrt() for each in (own, source))
        torch.testing.assert_close(z[head, j], torch.linalg.lstsq(s[:, None], k[:, None])[0][0, 0])
    rotary = LlamaRotaryEmbedding(ResFormerConfig(**SMALL))(own, torch.arange(20)[None])
    mapped = torch.complex(*source.unflatten(-1, (2, 4)).unbind(-2)) * z[:, None]
    for rotate in (lambda q, k: apply_rotary_pos_emb(q[None], k[None], *rotary), lambda q, k: (q, k)):
        expected_q, expected_k = rotate(queries, torch.cat((mapped.real, mapped.imag), -1))
        got_q, got_k = rotate(fold_into_queries(queries, z[:, None]), source)
        torch.testing.assert_close(got_q @ got_k.mT, expected_q @ expected_k.mT, atol=1e-5, rtol=1e-5)


def key_fit(calibration: Calibration, steps: int, turn: complex = 1.0) -> KeyFit:
    """Layer 2 on the keys of layer 1, from the scalars that fit best, times `turn`."""
    with torch.inference_mode():
        costs, z = Readers(calibration, steps).key_costs(2)[1]
        order = assign_heads(costs)
    return fit_keys(calibration, 2, 1, order, z[range(3), order] * turn, steps)


def test_queries_go_down_the_gradient_of_the_divergence() -> None:
    model = plain_model(attention_bias=True, attention_out_bias=False)
    with calibrating(model, BLOCKS[:1].repeat(5, 1)) as calibration:
        start, stepped = key_fit(calibration, 0), key_fit(calibration, 1)
        assert all(parameter.grad is None for parameter in model.parameters())
        weight = start.weight.clone().requires_grad_()
        queries = torch.nn.functional.linear(calibration.inputs(2, [0]), weight, start.bias)
        queries = calibration.rotated(2, queries.unflatten(-1, (6, 8)).transpose(1, 2))
        keys = calibration.keys(1, [0])[:, list(start.order)].repeat_interleave(2, 1)
        divergence(calibration.attend(2, [0])[1], calibration.scores(2, queries, keys)).sum().backward()
    large = weight.grad.abs() > 1e-2
    assert large.float().mean() > 0.8
    step = (stepped.weight - start.weight)[large]  # Adam's first step has the size of its rate
    assert torch.equal(step.sign(), -weight.grad[large].sign())


def test_training_lowers_the_divergence_of_attention_or_is_discarded() -> None:
    with calibrating(shareable_model({2: (1, (1, 2, 0))}, {}), BLOCKS) as calibration:
        start, trained = key_fit(calibration, 0, 1 + 1j), key_fit(calibration, 40, 1 + 1j)
        with torch.no_grad():
            attended = calibration.weights(2, calibration.held_out, trained, 1)
            expected = divergence(calibration.attend(2, calibration.held_out)[1], attended.log()).mean()
        assert 0 < trained.error < 0.5 * start.error
        assert trained.error == pytest.approx(float(expected), rel=1e-4)
        assert torch.equal(key_fit(calibration, 5).weight, key_fit(calibration, 0).weight)  # exact already


@pytest.mark.parametrize(
    ("keys", "values", "fields"),
    [
        ({}, {1: (0, (1, 2, 0)), 3: (0, (2, 1, 0))}, {"attention_out_bias": True}),
        ({1: (0, (1, 2, 0)), 3: (0, (2, 1, 0))}, {}, {}),
        ({1: (0, (1, 2, 0))}, {1: (0, (1, 2, 0)), 3: (0, (2, 1, 0))}, {"attention_out_bias": True}),
        # Layer 1 reads values and is read for its keys.
        ({2: (1, (1, 2, 0)), 3: (1, (2, 0, 1))}, {1: (0, (1, 2, 0)), 2: (0, (2, 0, 1))}, {}),
        ({2: (1, (1, 2, 0))}, {3: (0, (1, 2, 0))}, {"no_rope_layers": [1, 0, 0, 1]}),
        ({2: (0, (1, 2, 0))}, {3: (1, (1, 2, 0))}, WINDOWS),
    ],
)
def test_a_model_that_can_be_shared_exactly_gets_its_logits_back(
    keys: Shares, values: Shares, fields: dict[str, Any]
) -> None:
    model = shareable_model(keys, values, **{"attention_out_bias": False, **fields})
    ids = BLOCKS[:3].flip(1)
    with torch.no_grad():
        expected = model(ids).logits
    plan = Plan(*(tuple(shares.get(n, (n,))[0] for n in OWN) for shares in (keys, values)))
    with calibrating(model, BLOCKS) as calibration, torch.inference_mode():
        readers = Readers(calibration, 2)
        torch.testing.assert_close(readers.student(plan)(ids).logits, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(readers.student(Plan(OWN, OWN))(ids).logits, expected)
    assert expected.std() > 0.5


def test_the_fold_with_its_intercept_suffices_for_fewer_tokens_than_inputs() -> None:
    model = shareable_model({}, {3: (0, (1, 2, 0))}, attention_out_bias=True)
    with calibrating(model, BLOCKS[:5, :8]) as calibration, torch.inference_mode():
        ((_, fitted),) = Readers(calibration, 0).fit(Plan(OWN, (0, 1, 2, 0))).values()
    assert fitted.error < 1e-4


@pytest.mark.parametrize(
    ("fields", "keys", "values"),
    [
        ({"no_rope_layers": [1, 0, 0, 1]}, ([], [], [1], [0]), ([], [0], [0, 1], [0, 1, 2])),
        (WINDOWS, ([], [], [0], [1]), ([], [], [0], [1])),
    ],
)
def test_sources_are_earlier_layers_of_the_same_type(fields: dict[str, Any], keys: Any, values: Any) -> None:
    with calibrating(plain_model(**fields), BLOCKS[:5]) as calibration:
        readers = Readers(calibration, 0)
    assert tuple(readers.sources(n, "key") for n in OWN) == keys
    assert tuple(readers.sources(n, "value") for n in OWN) == values
    assert smallest(readers.calibration.config, ("key", "value")) == keys.count([]) + values.count([])
    assert smallest(readers.calibration.config, ("value",)) == 4 + values.count([])
    assert smallest(readers.calibration.config, ("both",)) == 2 * keys.count([])


def cost_of(plan: Plan, costs: Mapping[tuple[str, int], Mapping[int, float]]) -> float:
    pairs = (("key", plan.key_sources), ("value", plan.value_sources))
    if any(kind == "both" for kind, _ in costs):
        assert plan.key_sources == plan.value_sources
        pairs = (("both", plan.key_sources),)
    return sum(costs[kind, n][a] for kind, sources in pairs for n, a in enumerate(sources) if a != n)


def all_plans(kept: int, kinds: Sequence[str]) -> list[Plan]:
    each = [s for s in itertools.product(*(range(n + 1) for n in OWN)) if all(s[a] == a for a in s)]
    pairs = zip(each, each, strict=True) if kinds == ["both"] else itertools.product(each, each)
    return [plan for plan in itertools.starmap(Plan, pairs) if plan.kept == kept]


@pytest.mark.parametrize("kinds", [["key", "value"], ["both"]], ids="+".join)
@pytest.mark.parametrize("kept", [8, 6, 5, 4, 2])
def test_the_plan_is_the_cheapest_one_where_costs_add_up(kept: int, kinds: list[str]) -> None:
    draw = random.Random(kept).random
    plans = all_plans(kept - kept % 2 if kinds == ["both"] else kept, kinds)
    for _ in range(5):
        costs = {(kind, n): {a: draw() for a in range(n)} for kind in kinds for n in (1, 2, 3)}
        measure = partial(cost_of, costs=costs)
        plan = best_plan(4, kept, costs, measure)
        assert plan in plans  # every source keeps its own
        assert measure(plan) == pytest.approx(min(map(measure, plans)))


def test_shares_that_cost_more_together_are_not_chosen_together() -> None:
    costs = {("value", n): dict.fromkeys(range(n), 0.1 * n) for n in (1, 2, 3)}

    def measure(plan: Plan) -> float:
        together = plan.value_sources[1] != 1 and plan.value_sources[2] != 2
        return cost_of(plan, costs) + together

    assert best_plan(4, 6, costs, partial(cost_of, costs=costs)).value_sources == (0, 0, 0, 3)
    assert best_plan(4, 6, costs, measure).value_sources in ((0, 0, 2, 0), (0, 0, 2, 2))
    # A round takes the best that it measures, be it the dearest by itself.
    assert best_plan(4, 7, costs, lambda plan: plan.value_sources[3] == 3).value_sources[3] != 3


def test_the_cost_of_a_plan_is_the_divergence_of_every_second_prediction() -> None:
    model, student = plain_model(), plain_model()
    student.lm_head.weight.data += 0.3 * torch.randn_like(student.lm_head.weight)
    with calibrating(model, BLOCKS[:5]) as calibration:
        got = calibration.divergence(student, [1, 4])
    with torch.no_grad():
        p, q = (each(BLOCKS[[1, 4]]).logits[:, ::2].log_softmax(-1) for each in (model, student))
    assert got == pytest.approx((p.exp() * (p - q)).sum(-1).mean().item(), rel=1e-5)
    assert got > 0.01


@pytest.mark.parametrize("rounding", [-1e-9, 0.0])
def test_rounding_does_not_decide_which_source_an_exact_share_has(rounding: float) -> None:
    share = {3: (1, (1, 2, 0))}
    for kind, keys in (("value", {}), ("both", share)):
        with calibrating(shareable_model(keys, share), BLOCKS) as calibration, torch.inference_mode():
            costs = single_costs(Readers(calibration, 0), (kind,), lambda plan: rounding)[kind, 3]
        assert min(costs, key=costs.__getitem__) == 1


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A checkpoint of 3 layers, and text."""
    folder = tmp_path_factory.mktemp("shrink")
    save_checkpoint(folder / "llama", num_hidden_layers=3)
    words = random.Random(0).choices("the cat sat on a mat and saw seven dogs in fields of green .".split(), k=4000)
    (folder / "text.txt").write_text("\n\n".join(" ".join(words[i : i + 50]) for i in range(0, len(words), 50)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(shrinking, "_SEARCH_STEPS", 10)
        patch.setattr(shrinking, "_FINAL_STEPS", 20)
        yield folder


def shrink(work: Path, output: Path, cache: float | None = None, source: str = "llama", **options: Any) -> Any:
    sizes = {"tokens": 1280, "block": 64, "evaluation_tokens": 256, "progress": False}
    texts = {"calibrate": [str(work / "text.txt")], "sample_by": "paragraph"}
    return resformer.shrink(work / source, output, cache, **{**sizes, **texts, **options})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_result_is_the_source_but_for_its_readers(
    dtype: torch.dtype, work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"llama-{dtype}"
    save_checkpoint(work / name, dtype=dtype, num_hidden_layers=3)
    ids, logits = torch.arange(1, 41)[None], []

    def measure(source: Any, student: Any, *rest: Any, **options: Any) -> Any:
        logits.extend(model(ids).logits for model in (source, student))
        return measure_cost(source, student, *rest, **options)

    monkeypatch.setattr(shrinking, "measure_cost", measure)
    report = shrink(work, tmp_path / "out", 0.75, source=name)
    source, result = (AutoModelForCausalLM.from_pretrained(path) for path in (work / name, tmp_path / "out"))
    for model, expected in zip((source, result), logits, strict=True):
        with torch.no_grad():
            assert torch.equal(model(ids).logits, expected)
    assert result.generate(ids, max_new_tokens=5, min_new_tokens=5, do_sample=False).shape == (1, 45)
    assert result.dtype == dtype
    plan = Plan(tuple(key_sources(result.config)), tuple(value_sources(result.config)))
    assert report.fields == plan.fields()
    assert report.cache == plan.kept / 6 == 4 / 6
    assert cache_bytes_per_token(result.config) == report.cache * cache_bytes_per_token(source.config)
    old, new = (load_file(path / "model.safetensors") for path in (work / name, tmp_path / "out"))
    changed = {key for key in new if key not in old or not torch.equal(old[key], new[key])}
    assert {f"model.layers.{n}.self_attn.o_proj.weight" for n in plan.readers} <= changed
    assert {int(key.split(".")[2]) for key in changed if ".self_attn." in key} == {*plan.readers}
    assert all(".self_attn." in key for key in changed)
    assert sorted(old.keys() - new.keys()) == sorted(report.dropped)
    record = json.loads((tmp_path / "out" / RECORD).read_text())
    for field in ("fields", "shares", "cost", "cache", "calibration"):
        assert record[field] == report.as_dict()[field]
    assert [share["layer"] for share in report.shares] == plan.readers
    assert all(0 < share["output_error"] < 1 for share in report.shares)


def test_a_run_its_repetition_and_its_plan_write_the_same_bytes(work: Path, tmp_path: Path) -> None:
    planned = shrink(work, tmp_path / "out", 0.75, dry_run=True)
    assert list(tmp_path.iterdir()) == []
    (work / "plan.json").write_text(json.dumps(planned.as_dict()))
    for name, wanted in (("a", {"cache": 0.75}), ("b", {"cache": 0.75}), ("c", {"plan": work / "plan.json"})):
        report = shrink(work, tmp_path / name / "out", **wanted)
        assert (report.fields, report.shares, report.cost) == (planned.fields, planned.shares, planned.cost)
    assert contents(tmp_path / "a") == contents(tmp_path / "b") == contents(tmp_path / "c")


def test_chats_calibrate_and_a_layer_that_puts_nothing_out_reads_another(work: Path, tmp_path: Path) -> None:
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    model = AutoModelForCausalLM.from_pretrained(work / "llama")
    model.model.layers[1].self_attn.o_proj.weight.data.zero_()
    for part in (model, tokenizer):
        part.save_pretrained(tmp_path / "silent")
    turns = [{"role": "user", "content": "one and two"}, {"role": "assistant", "content": "make three"}]
    chats = [json.dumps({"messages": [*turns, {"role": "user", "content": str(n)}]}) for n in range(60)]
    (tmp_path / "chats.jsonl").write_text("\n".join(chats))
    plan = {"key_sources": [0, 0, 2], "value_sources": [0, 0, 2], "parameters": 7}  # edited: no longer this number
    (tmp_path / "plan.json").write_text(json.dumps(plan))
    given = {"plan": tmp_path / "plan.json", "calibrate": [str(tmp_path / "chats.jsonl")]}
    report = shrink(tmp_path, tmp_path / "out", source="silent", **given)
    assert report.fields == {name: plan[name] for name in ("key_sources", "value_sources")}
    assert report.shares[0]["output_error"] == 0


def test_a_named_method_is_calibrated(work: Path, tmp_path: Path) -> None:
    text = work / "text.txt"
    report = shrink(work, tmp_path / "out", method="svformer", evaluate=[str(text)])
    assert (report.method, report.fields) == ("svformer", {"value_sources": [0, 0, 0]})
    retrofit(work / "llama", tmp_path / "naive", "svformer", lossy=True)
    folders = (work / "llama", tmp_path / "naive", tmp_path / "out")
    source, *results = map(AutoModelForCausalLM.from_pretrained, folders)
    ids = byte_tokenizer()(text.read_text()[:1000], return_tensors="pt")["input_ids"].view(4, 250)
    uncalibrated, calibrated = (measure_cost(source, result, ids, greedy_limit=1).kl_mean for result in results)
    assert calibrated < 0.7 * uncalibrated
    card = (tmp_path / "out" / "README.md").read_text()
    for share in report.shares:
        assert f"| {share['layer']} | {share['layer']} | 0 | {share['output_error']:.1%}".replace("%", " %") in card
    assert f"| {report.cost['source_loss']:.4f} | {report.cost['loss']:.4f} |" in card


def test_what_is_missing_is_said_before_a_weight_is_read(
    work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Source, "fetch", Mock(side_effect=AssertionError("weights are read")))
    with pytest.raises(CheckpointError, match="at least 640 tokens"):
        shrink(work, tmp_path / "out", cache=0.8, tokens=320)
    monkeypatch.setitem(sys.modules, "scipy", None)
    with pytest.raises(ImportError, match=r"needs scipy: .*\[shrink\]"):
        shrink(work, tmp_path / "out", cache=0.8)


def test_one_text_file_is_calibrated_and_measured_on(work: Path, tmp_path: Path) -> None:
    report = shrink(work, tmp_path / "out", method="svformer", sample_by="document")
    (note,) = report.calibration["notes"]
    assert re.fullmatch(r"text.txt: 1 document was cut at line ends into \d+ parts, \d of them held out", note)
    assert report.cost["tokens"] > 200


def test_an_interrupted_run_leaves_nothing(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shrinking, "measure_cost", Mock(side_effect=KeyboardInterrupt))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    with pytest.raises(KeyboardInterrupt):
        shrink(work, tmp_path / "out", method="svformer")
    assert list(tmp_path.iterdir()) == []
