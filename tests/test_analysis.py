"""Every number of an analysis against plain loops in float64, the memory it takes, and what the report shows."""

import json
import math
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import any_decoder
import numpy as np
import pytest
import torch
from checkpoints import FAMILIES, byte_tokenizer, family_model, save_checkpoint
from conftest import VARIANTS, cli, others_slow, tiny_config, tiny_model
from matplotlib import image
from small_decoders import small_decoder
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, PreTrainedModel

from resformer import ResFormerForSequenceClassification
from resformer.analysis import Analysis, analyze, figures, read_texts, write_report
from resformer.analysis import report as report_of
from resformer.analysis.measuring import QUANTITIES
from resformer.commands.general import _number
from resformer.configuration import value_sources
from resformer.convert import CheckpointError, retrofit
from resformer.modeling.connection import plain_matrix
from resformer.modeling.versions import CACHE
from resformer.names import LISTING

Written = tuple[list[Analysis], Path]
#: Texts of different lengths, as token ids.
TEXTS = [[5, 17, 3, 60, 9, 9, 41, 22, 80, 4, 33, 71, 8], [64, 2], [12, 90, 31, 7, 55]]


def naive_quantities(model: PreTrainedModel, ids: list[int]) -> dict[str, list[Any]]:
    """Quantity -> a number per layer, one product at a time, from eager attention's weights."""
    base, count = model.base_model, len(ids)
    last: list[torch.Tensor] = []
    hook = base.layers[-1].register_forward_hook(
        lambda module, args, output: last.append(output if torch.is_tensor(output) else output[0])
    )
    raw: dict[int, torch.Tensor] = {}
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, output, n=n: raw.update({n: output[0]}))
        for n, layer in enumerate(base.layers)
        if hasattr(layer.self_attn, "v_proj")
    ]
    with torch.no_grad():
        output = base(torch.tensor([ids]), output_attentions=True, output_hidden_states=True, use_cache=True)
    hook.remove()
    for hook in hooks:
        hook.remove()
    hidden = [*output.hidden_states[1:-1], last[0]]
    quantities: dict[str, list[Any]] = {name: [] for name in QUANTITIES}
    for n in range(len(base.layers)):
        weights = output.attentions[n][0].tolist()
        received = [
            sum(weights[head][i][j] for head in range(len(weights)) for i in range(count)) / len(weights) / count
            for j in range(count)
        ]
        share = [a / sum(received) for a in received]
        quantities["entropy"].append(-sum(a * math.log(a) for a in share if a > 0))
        quantities["first_importance"].append(share[0])
        quantities["importance_ratio"].append(share[0] / (sum(share[1:]) / (count - 1)))
        for name, states in (("value", attended_values(model, raw, output, n)), ("hidden", hidden[n][0].tolist())):
            norms = [math.sqrt(sum(x * x for x in state)) for state in states]
            quantities[f"first_{name}_norm"].append(norms[0])
            quantities[f"other_{name}_norm"].append(sum(norms[1:]) / (count - 1))
            quantities[f"{name}_norm_ratio"].append(norms[0] / (sum(norms[1:]) / (count - 1)))
        cosines = []  # of `states`, which are the hidden ones, and their `norms`
        for i in range(count):
            for j in range(count):
                if i != j:
                    cosines.append(sum(x * y for x, y in zip(states[i], states[j], strict=True)) / norms[i] / norms[j])
        quantities["similarity"].append(sum(cosines) / len(cosines))
    return quantities


def attended_values(model: PreTrainedModel, raw: dict[int, torch.Tensor], output: Any, n: int) -> list[list[float]]:
    """V' of each token: by the mixing matrix, or where tokens decide, what the cache holds of the layer read."""
    if not hasattr(model.base_model, "value_mixing_matrix"):
        return raw[n].tolist()
    row = model.base_model.value_mixing_matrix()[n].double()
    if row.isnan().any() or model.config.value_embeddings:
        cached = output[CACHE].layers[value_sources(model.config)[n]]
        values = cached.values if cached.values.numel() else cached.keys  # values alone are stored as the first tensor
        return values[0].transpose(0, 1).flatten(1).tolist()
    return sum(row[m] * raw[m] for m in raw if row[m] != 0).tolist()


@pytest.fixture(params=[*others_slow(VARIANTS), *FAMILIES])
def any_model(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of every variant, and one of every family of Transformers, in float64."""
    if request.param in FAMILIES:
        return family_model(request.param).double()
    return tiny_model(request.param, dtype=torch.float64)


def test_quantities_are_those_of_plain_loops(any_model: PreTrainedModel) -> None:
    model = any_model
    analysis = analyze(model, TEXTS)
    assert (analysis.texts, analysis.tokens, analysis.skipped) == (3, 20, 0)
    model.set_attn_implementation("eager")
    of_texts = [naive_quantities(model, ids) for ids in TEXTS]
    for quantity in QUANTITIES:
        values = np.array([of_text[quantity] for of_text in of_texts])
        # Eager attention takes its softmax in float32 whatever the model is in.
        np.testing.assert_allclose(analysis.mean(quantity), values.mean(0), rtol=2e-5, atol=1e-6, err_msg=quantity)
        deviation = analysis.quantities[quantity]["deviation"]
        np.testing.assert_allclose(deviation, values.std(0, ddof=1), rtol=2e-5, atol=1e-5, err_msg=quantity)


def test_uniform_reference_is_what_a_model_without_queries_has() -> None:
    model = tiny_model("transformer", dtype=torch.float64)
    for layer in model.model.layers:
        layer.self_attn.q_proj.weight.data.zero_()
    analysis = analyze(model, TEXTS)
    for quantity, value in analysis.uniform.items():
        assert analysis.mean(quantity) == pytest.approx([value] * 6)
    assert analysis.uniform.keys() == {"entropy", "first_importance", "importance_ratio"}


def test_model_is_as_it_was() -> None:
    model = tiny_model("resformer").train()
    analyze(model, TEXTS)
    assert model.config._attn_implementation == "sdpa"
    assert model.training
    assert model.model.layers[0].training
    assert not any(layer._forward_hooks for layer in model.model.layers)
    with pytest.raises(ValueError, match="no text of at least two tokens"):
        analyze(model, [[7]])
    assert model.config._attn_implementation == "sdpa"


def test_texts_are_truncated_and_short_ones_counted() -> None:
    model = tiny_model()
    analysis = analyze(model, [[5], *TEXTS], max_tokens=4)
    assert (analysis.texts, analysis.tokens, analysis.skipped) == (3, 10, 1)
    assert "texts of fewer than two tokens left out: 1" in analysis.warnings[0]
    assert analysis.quantities == analyze(model, [ids[:4] for ids in TEXTS]).quantities
    assert analyze(tiny_model(max_position_embeddings=8), [list(range(1, 30))]).tokens == 8
    with pytest.raises(ValueError, match="max_tokens=1"):
        analyze(model, TEXTS, max_tokens=1)
    with pytest.raises(ValueError, match="needs tokenizer="):
        analyze(model, ["a string"])


def test_broken_weights_are_named() -> None:
    model = tiny_model()
    model.model.layers[3].mlp.down_proj.weight.data.fill_(torch.nan)
    with pytest.raises(CheckpointError, match=r"first_hidden_norm of layer 3 is nan on text 0"):
        analyze(model, TEXTS)


def test_other_attention_is_refused_by_name() -> None:
    with pytest.raises(CheckpointError, match="GPT2Model has no `layers` that each have a `self_attn`"):
        analyze(GPT2LMHeadModel(GPT2Config(n_embd=16, n_layer=1, n_head=2, vocab_size=97)), TEXTS)
    for model_type in ("diffllama", "dory", "longcat_flash"):
        with pytest.raises(CheckpointError, match="its layers attend more than once in a pass"):
            analyze(small_decoder(model_type), TEXTS)
    with pytest.raises(CheckpointError, match="its residual stream has several lanes"):
        analyze(small_decoder("gemma3n_text"), TEXTS)


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Written:
    """A Llama, a ResFormer with depth averages and a gated one, with changed coefficients; one name needs escaping."""
    folder = tmp_path_factory.mktemp("report")
    save_checkpoint(folder / "llama")
    analyses = [
        analyze(folder / "llama", ["Values of the first layer. ", "Reach the last one, " * 9], name='a $b$ <i>&"')
    ]
    for method in ("resformer-denseformer", "resformer-gated"):
        retrofit(folder / "llama", folder / method, method=method)
        model = AutoModelForCausalLM.from_pretrained(folder / method)
        any_decoder.move(model)
        analyses.append(analyze(model, TEXTS, name=method))
    write_report(analyses, folder / "out", "resformer analyze a b")
    return analyses, folder / "out"


PLOTS = (
    "depth_mixing entropy first_importance hidden_norm_ratio importance_ratio similarity value_mixing value_norm_ratio"
).split()


def test_report_has_its_files(report: Written) -> None:
    written, folder = report
    names = {LISTING, "analysis.json", *(f"{plot}.png" for plot in PLOTS)}
    assert {path.name for path in folder.iterdir()} == names
    for plot in PLOTS:
        pixels = image.imread(folder / f"{plot}.png")
        assert min(pixels.shape[:2]) > 500
        assert (pixels[0, 0, :3] == 1).all(), "on white"
        assert pixels[..., :3].std() > 0.02, "something is drawn"
    for plot in figures.plots(written).values():
        if not plot.key.endswith("_mixing"):
            (legend,) = plot.figure.legends
            labels = "\n".join(text.get_text() for text in legend.get_texts())
            assert not [analysis.name for analysis in written if analysis.name not in labels]
            (axes,) = plot.figure.axes
            assert not [each for each in axes.get_yticklabels(which="both") if "$" in each.get_text()]
    values = json.loads((folder / "analysis.json").read_text())
    assert values == json.loads(json.dumps(report_of(written, "resformer analyze a b")))
    assert values["checkpoints"][2]["value_mixing_matrix"][1][:2] == [None, pytest.approx(1.0, abs=1)]
    assert values["command"] == "resformer analyze a b"
    assert {"python", "resformer", "torch", "transformers"} == set(values["versions"])


def test_changes_are_from_llamas_matrices_on_one_scale(report: Written) -> None:
    analyses = report[0]
    for key in ("value_mixing", "depth_mixing"):
        matrices = [np.asarray(getattr(analysis, f"{key}_matrix")) for analysis in analyses]
        moved = [change for matrix in matrices if (change := matrix - plain_matrix(*matrix.shape).numpy()).any()]
        drawn = figures.plots(analyses, changes=True)[key].figure.axes
        meshes = [axes.images[0] for axes in drawn if axes.get_title("left")]  # a colour bar has no title
        for mesh, change in zip(meshes, moved, strict=True):
            shown = mesh.get_array()
            assert np.allclose(shown.compressed(), change[~np.ma.getmaskarray(shown)])
        assert {mesh.get_clim()[1] for mesh in meshes} == {max(np.nanmax(np.abs(change)) for change in moved)}


def test_numbers_are_shown_to_three_digits() -> None:
    assert [_number(value) for value in (0.012345, 0.0, 12.345, 98765.4)] == "0.0123 0 12.3 98,765".split()


def test_report_is_all_or_nothing(report: Written, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(figures.Plot, "png", property(Mock(side_effect=KeyboardInterrupt)))
    with pytest.raises(KeyboardInterrupt):
        write_report(report[0], tmp_path / "out")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ImportError, match=r"pip install '\.\[analysis\]'"):
        write_report(report[0], tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_files_are_cut_at_line_ends_into_texts(tmp_path: Path) -> None:
    lines = [f"line {i} of the file\n" for i in range(50)]
    (tmp_path / "a").write_text("".join(lines))
    (tmp_path / "b").write_text("short")
    texts = list(read_texts([tmp_path / "a", tmp_path / "b"], texts=100, max_tokens=10))
    assert "".join(texts) == "".join(lines) + "short"
    assert all(len(text) >= 80 and text.endswith("\n") for text in texts[:-2])
    assert all(len(text) <= 160 for text in texts)
    assert list(read_texts([tmp_path / "a", tmp_path / "b"], texts=3, max_tokens=10)) == texts[:3]
    (tmp_path / "c").write_bytes(b"\xff\xfe\xfd")
    with pytest.raises(CheckpointError, match="c: cannot be read as text"):
        list(read_texts([tmp_path / "c"], texts=1, max_tokens=10))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    save_checkpoint(folder / "llama")
    (folder / "notes.txt").write_text("Values of the first layer reach the last one.\n" * 40)
    return folder / "llama"


def test_checkpoints_of_one_name_are_told_apart_and_from_uniform_attention(
    llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    retrofit(llama, tmp_path / "llama", method="resformer", verify="headers")
    monkeypatch.chdir(tmp_path / "llama")
    done = cli("analyze", llama, ".", "--text", llama.parent / "notes.txt", "--max-tokens", 8)
    names = [f"{folder.name}/llama" for folder in (llama.parent, tmp_path)]
    heads = [line.partition(": ") for line in done.stdout.splitlines() if "texts" in line]
    assert [head[0] for head in heads] == names
    # The first of 8 tokens gets 1 / 1 of the first query, ..., 1 / 8 of the eighth: 2.72 of 8.
    assert all("uniform attention: entropy 1.77, first share 0.34, first/others 3.6" in head[2] for head in heads)


def test_another_tokenizer_reads_for_all(tmp_path: Path) -> None:
    family_model("llama").save_pretrained(tmp_path / "mute")
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    named = analyze(tmp_path / "mute", ["four"], tokenizer=tmp_path / "tokenizer")
    given = analyze(tmp_path / "mute", ["four"], tokenizer=byte_tokenizer())
    assert named.quantities["entropy"]["mean"] == given.quantities["entropy"]["mean"]
    assert named.tokens == 4
    assert named.as_dict()["quantities"]["entropy"]["deviation"] == [None] * 6, "one text has no deviation"
    tokenizer.add_tokens([f"new {number}" for number in range(9999)])
    tokenizer.save_pretrained(tmp_path / "tokenizer")
    with pytest.raises(CheckpointError, match=r"has .* tokens, the model"):
        analyze(tmp_path / "mute", ["four"], tokenizer=tmp_path / "tokenizer")


def test_the_base_of_a_classifier_is_analysed(tmp_path: Path) -> None:
    ResFormerForSequenceClassification(tiny_config("resformer")).save_pretrained(tmp_path / "judge")
    assert analyze(tmp_path / "judge", TEXTS[:1]).method == "resformer"
