"""What callers expect of a Transformers model: outputs, padding, packing, backends, training, saving, compiling."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import cpu_offload
from accelerate.hooks import AlignDevicesHook, add_hook_to_module
from conftest import RAGGED, VARIANTS, Batch, moved, others_slow, tiny_model
from torch import nn
from torch.nn.utils.parametrizations import weight_norm
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    PreTrainedModel,
)
from transformers.distributed.pipeline_parallel import PipelineIdentityLayer
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils import is_flash_attn_2_available

from resformer import (
    ResFormerForQuestionAnswering,
    ResFormerForSequenceClassification,
    ResFormerForTokenClassification,
    ResFormerModel,
)
from resformer.modeling.connecting import disconnected
from resformer.training.optimizer import is_connection


def logits_of(model: PreTrainedModel, *args: Any, **inputs: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(*args, **inputs).logits


def assert_close(got: torch.Tensor, expected: torch.Tensor, tolerance: float = 1e-5) -> None:
    """Within `tolerance` of the largest number; logits of the tiny models go up to about 8."""
    assert got.shape == expected.shape
    assert (got - expected).abs().max() <= tolerance * expected.abs().max()


def test_recorded_states_are_attention_weights_embeddings_raw_blocks_and_the_normed_output(variant: str) -> None:
    model = tiny_model(variant, attention="eager")
    ids, raw = RAGGED["input_ids"][:1], []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _module, _args, output: raw.append(output))
    with torch.no_grad():
        output = model.model(ids, output_attentions=True, output_hidden_states=True)
        plain = model.model(ids)
    embeddings, *blocks, last = output.hidden_states
    scale = model.model.layers[0].embedding_residual.weight.sum() if model.config.embedding_residual else 1.0  # r + s
    torch.testing.assert_close(embeddings, scale * model.model.embed_tokens(ids), rtol=1e-6, atol=1e-7)
    for recorded, expected in zip(blocks, raw[:5], strict=True):
        assert torch.equal(recorded, expected)
    assert torch.equal(last, output.last_hidden_state)
    assert [weights.shape for weights in output.attentions] == [(1, 4, 11, 11)] * 6  # what they are: test_analysis.py
    assert plain.attentions is plain.hidden_states is None


def test_embeddings_give_the_logits_of_their_tokens(variant: str) -> None:
    model = tiny_model(variant)
    expected = logits_of(model, **RAGGED)
    embeddings = model.get_input_embeddings()(RAGGED["input_ids"])
    embedded = {"inputs_embeds": embeddings, "attention_mask": RAGGED["attention_mask"]}
    if model.config.value_embeddings:
        with pytest.raises(ValueError, match=r"`value_embeddings` looks up .* pass `input_ids`"):
            model(**embedded)
    else:
        assert torch.equal(logits_of(model, **embedded), expected)
    for wrong in ({}, {"input_ids": RAGGED["input_ids"], "inputs_embeds": embeddings}):
        with pytest.raises(ValueError, match="exactly one of input_ids or inputs_embeds"):
            model(**wrong)


with_a_smear = pytest.mark.parametrize("variant", [*others_slow(VARIANTS), "smear"], indirect=True)


def labels_of(batch: Batch) -> torch.Tensor:
    return batch["input_ids"].masked_fill(batch["attention_mask"] == 0, -100)


@with_a_smear
@pytest.mark.parametrize("use_cache", [None, True, False], ids=["default", "cache", "no-cache"])
def test_packed_sequences_equal_separate_ones(variant: str, use_cache: bool | None) -> None:
    for attention in ("sdpa", "eager"):
        model = tiny_model(variant, attention=attention).double()  # averages amplify what float32 rounds
        sequences = [ids[mask.bool()] for ids, mask in zip(*RAGGED.values(), strict=True)]
        packed = torch.cat(sequences)[None]
        starts = (2 * (n % 2) for n in range(len(sequences)))
        positions = [torch.arange(len(sequence)) + start for sequence, start in zip(sequences, starts, strict=True)]
        options = {} if use_cache is None else {"use_cache": use_cache}
        got = logits_of(model, packed, position_ids=torch.cat(positions)[None], **options)[0]
        alone = zip(sequences, positions, strict=True)
        expected = torch.cat([logits_of(model, ids[None], position_ids=each[None])[0] for ids, each in alone])
        assert_close(got, expected)
        # The control: in one sequence they would see each other.
        assert (logits_of(model, packed)[0, 11:] - expected[11:]).abs().max() > 0.1


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["crossed-sharing", "gated-sink"], indirect=True)
@pytest.mark.parametrize("attention", ["flex_attention", "flash_attention_2"])
def test_other_kernels_equal_sdpa(variant: str, attention: str, device: str) -> None:
    flash = attention == "flash_attention_2"
    if flash and (device == "cpu" or not is_flash_attn_2_available()):
        pytest.skip("flash_attn needs a GPU")
    model = tiny_model(variant, head_dim=32, dtype=torch.bfloat16 if flash else torch.float32).to(device)
    batch = moved(RAGGED, device)
    sdpa = logits_of(model, **batch)
    model.set_attn_implementation(attention)
    real = batch["attention_mask"].bool()
    assert_close(logits_of(model, **batch)[real], sdpa[real], 0.1 if flash else 1e-5)


def test_attention_functions_get_their_arguments(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # FlashAttention reads the window from here, and serving engines hand down arguments of their own.
    calls = []

    def spy(module: nn.Module, query: torch.Tensor, *args: Any, **kwargs: Any) -> tuple[torch.Tensor, None]:
        calls.append({"layer": module.layer_idx, "groups": module.num_key_value_groups, **kwargs})
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, *args, **kwargs)

    monkeypatch.setitem(AttentionInterface._global_mapping, "spy", spy)
    monkeypatch.setitem(AttentionMaskInterface._global_mapping, "spy", ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
    model = tiny_model(variant, attention_dropout=0.25)
    expected = logits_of(model, **RAGGED)
    model.set_attn_implementation("spy")
    assert torch.equal(logits_of(model, **RAGGED, some_engine_argument="kept"), expected)
    assert [call["layer"] for call in calls] == list(range(6))
    for call in calls:
        assert call["scaling"] == model.config.head_dim**-0.5
        assert call["groups"] == 4 // model.config.num_key_value_heads
        assert call["some_engine_argument"] == "kept"
        assert call["dropout"] == 0.0
    calls.clear()
    logits_of(model.train(), **RAGGED)
    assert [call["dropout"] for call in calls] == [0.25] * 6


def loss_and_gradients(model: PreTrainedModel, batch: Batch) -> tuple[torch.Tensor, dict[str, torch.Tensor | None]]:
    model.zero_grad()
    loss = model(**batch, labels=labels_of(batch)).loss
    loss.backward()
    return loss.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
@with_a_smear
def test_gradient_checkpointing_changes_no_gradient_where_connections_alone_learn(variant: str, device: str) -> None:
    """Where all learn: test_edges.py."""
    model, batch = tiny_model(variant).to(device).train(), moved(RAGGED, device)
    if not any(is_connection(name) for name, _ in model.named_parameters()):
        pytest.skip("nothing is added")
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(is_connection(name) or "smear" in name)
    loss, expected = loss_and_gradients(model, batch)
    calls = []
    model.model.layers[-1].self_attn.register_forward_hook(lambda *_: calls.append(1))
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={})  # as PEFT does for quantised models
    model.enable_input_require_grads()
    checkpointed, gradients = loss_and_gradients(model, batch)
    assert len(calls) == 2  # forwards, and again when going backwards
    assert torch.equal(checkpointed, loss)
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-6)


def test_autocast_trains_every_mixing_parameter(variant: str) -> None:
    model = tiny_model(variant).train()
    full, _ = loss_and_gradients(model, RAGGED)
    model.zero_grad()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = model(**RAGGED, labels=labels_of(RAGGED)).loss
    loss.backward()
    assert loss.isfinite()
    torch.testing.assert_close(loss.detach(), full, rtol=0.1, atol=0.1, check_dtype=False)
    for name, parameter in model.named_parameters():
        assert parameter.dtype == parameter.grad.dtype == torch.float32, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.any(), name


@pytest.mark.parametrize("kept", ["nothing", "modules of the model alone", "every added parameter"])
def test_mixing_parameters_of_a_bfloat16_model_train_in_bfloat16_or_in_float32(variant: str, kept: str) -> None:
    # PEFT's `modules_to_save` and careful trainers leave the gates within the layers as they are.
    _, exact = loss_and_gradients(tiny_model(variant, seed=1).train(), RAGGED)
    model = tiny_model(variant, dtype=torch.bfloat16, seed=1).train()
    plain = logits_of(model, **RAGGED)
    for name, parameter in model.named_parameters():
        if is_connection(name) and (kept.startswith("every") or (kept != "nothing" and ".layers." not in name)):
            parameter.data = parameter.data.float()
    got = logits_of(model, **RAGGED)
    assert got.dtype == torch.bfloat16
    # These two work their products out in the parameters' dtype; the rest is the same to the bit.
    products = model.config.value_residual == "learnable_plus" or model.config.hyper_connections == "static"
    assert_close(got, plain, 0.1 if products else 0.0)
    _, gradients = loss_and_gradients(model, RAGGED)
    for name, parameter in model.named_parameters():
        assert gradients[name].dtype == parameter.dtype, name
        assert gradients[name].isfinite().all(), name
        assert gradients[name].any(), name
    of_kind: dict[str, list[str]] = {}  # the same coefficients of all layers
    for name in filter(is_connection, gradients):
        of_kind.setdefault(re.sub(r"\d+", "*", name), []).append(name)
    for kind, names in of_kind.items():
        got, expected = (torch.cat([each[name].float().flatten() for name in names]) for each in (gradients, exact))
        assert torch.cosine_similarity(got, expected, dim=0) > 0.9, kind


@pytest.mark.parametrize("variant", ["resformer", "nanochat"], indirect=True)
@pytest.mark.parametrize("tied", [False, True])
def test_resized_embeddings_keep_the_old_tokens(variant: str, tied: bool) -> None:
    model = tiny_model(variant, tie_word_embeddings=tied)
    expected = logits_of(model, **RAGGED)
    model.resize_token_embeddings(105)
    assert model.config.vocab_size == model.vocab_size == 105
    got = logits_of(model, **RAGGED)
    assert got.shape[-1] == 105
    assert_close(got[..., :97], expected, 1e-6)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == tied
    assert model(torch.tensor([[100, 104]]), labels=torch.tensor([[100, 104]])).loss.isfinite()
    model.resize_token_embeddings(97)
    assert_close(logits_of(model, **RAGGED), expected, 1e-6)


HEADS = {
    "sequence": (ResFormerForSequenceClassification, AutoModelForSequenceClassification),
    "token": (ResFormerForTokenClassification, AutoModelForTokenClassification),
    "question": (ResFormerForQuestionAnswering, AutoModelForQuestionAnswering),
}
WITH_HEADS = ["resformer", "svformer", "resformer-denseformer", "kitchen-sink"]


@pytest.mark.parametrize("head", HEADS)
@pytest.mark.parametrize("variant", others_slow(WITH_HEADS, ["resformer"]), indirect=True)
def test_task_heads_train_and_reload(variant: str, head: str, tmp_path: Path) -> None:
    model_class, auto_class = HEADS[head]
    model = tiny_model(variant, model_class=model_class, num_labels=5 if head != "question" else 2)
    labels: dict[str, Any] = {
        "sequence": {"labels": torch.tensor([0, 4, 2])},
        "token": {"labels": torch.randint(0, 5, (3, 11))},
        "question": {"start_positions": torch.tensor([5, 6, 7]), "end_positions": torch.tensor([8, 9, 10])},
    }[head]
    output = model.train()(**RAGGED, **labels)
    output.loss.backward()
    assert all(parameter.grad is not None and parameter.grad.any() for parameter in model.parameters())

    model.save_pretrained(tmp_path)
    again, info = auto_class.from_pretrained(tmp_path, output_loading_info=True)
    assert type(again) is model_class
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        expected, got = model.eval()(**RAGGED), again.eval()(**RAGGED)
    shapes = {"sequence": [(3, 5)], "token": [(3, 11, 5)], "question": [(3, 11), (3, 11)]}[head]
    names = ["start_logits", "end_logits"] if head == "question" else ["logits"]
    for name, shape in zip(names, shapes, strict=True):
        assert got[name].shape == shape
        assert_close(got[name], expected[name], 1e-6)
    if head == "sequence":  # reads the last token that is not padding
        right = again(RAGGED["input_ids"].flip(1), attention_mask=RAGGED["attention_mask"].flip(1))
        for row, real in enumerate((11, 6, 8)):
            assert_close(got.logits[row], logits_of(again, RAGGED["input_ids"][row : row + 1, -real:])[0])
            assert_close(right.logits[row], logits_of(again, RAGGED["input_ids"][row : row + 1].flip(1)[:, :real])[0])

    if variant == "resformer" or head == "sequence":  # what is below a head is compiled for each variant once
        whole = torch.compile(model, backend="eager", fullgraph=True)(**RAGGED, **labels)
        assert_close(whole.loss, model(**RAGGED, **labels).loss)
    model.loss_function = lambda *given, **named: torch.tensor(7.0)  # a user's own
    assert model(**RAGGED, **labels).loss == 7


@pytest.mark.parametrize(
    ("dtype", "shard"), [(torch.float32, "5GB"), (torch.float16, "5GB"), (torch.bfloat16, "8KB")], ids=str
)
def test_saving_and_reloading_keeps_every_bit(variant: str, dtype: torch.dtype, shard: str, tmp_path: Path) -> None:
    model = tiny_model(variant, dtype=dtype)
    coefficients = {name for name, _ in model.named_parameters() if is_connection(name) and "table" not in name}
    for name in coefficients:  # which stay in float32, and need it
        parameter = model.get_parameter(name)
        parameter.data = parameter.data.float() * 1.001
    model.save_pretrained(tmp_path, max_shard_size=shard)
    assert len(list(tmp_path.glob("*.safetensors"))) == 1 if shard == "5GB" else len(list(tmp_path.iterdir())) > 5
    again, info = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert {**again.config.to_dict(), "_name_or_path": ""} == model.config.to_dict()
    state = model.state_dict()
    assert again.state_dict().keys() == state.keys()
    for name, tensor in again.state_dict().items():
        assert tensor.dtype == (torch.float32 if name in coefficients else dtype), name
        assert torch.equal(tensor, state[name]), name
    base = AutoModel.from_pretrained(tmp_path)
    assert type(base) is ResFormerModel
    assert all(torch.equal(tensor, state[f"model.{name}"]) for name, tensor in base.state_dict().items())
    # As Transformers' common tests ask.
    assert not again._keep_in_fp32_modules & again._keep_in_fp32_modules_strict
    for kept in again._keep_in_fp32_modules | again._keep_in_fp32_modules_strict:
        assert any(re.search(rf"(?:^|\.){kept}(?:\.|$)", name) for name in state), kept


@pytest.mark.filterwarnings("ignore:.*on the meta device")
def test_layers_offloaded_by_accelerate_give_the_same_logits(variant: str) -> None:
    model = tiny_model(variant)
    expected = logits_of(model, **RAGGED)
    matrices = model.model.value_mixing_matrix(), model.model.depth_mixing_matrix()
    tokens = model.generate(**RAGGED, max_new_tokens=4, do_sample=False)
    offloaded = cpu_offload(model, execution_device=torch.device("cpu"))
    assert all(parameter.device.type == "meta" for parameter in offloaded.parameters())
    assert_close(logits_of(offloaded, **RAGGED), expected, 1e-6)
    assert torch.equal(offloaded.generate(**RAGGED, max_new_tokens=4, do_sample=False), tokens)
    got = offloaded.model.value_mixing_matrix(), offloaded.model.depth_mixing_matrix()
    torch.testing.assert_close(got, matrices, rtol=0, atol=0, equal_nan=True)


def test_pipeline_stages_are_refused_by_name() -> None:
    # What transformers.distributed makes of the layers that live in another stage.
    model = tiny_model("resformer")
    for n in (3, 4, 5):
        model.model.layers[n] = PipelineIdentityLayer()
    with pytest.raises((ValueError, NotImplementedError), match=r"(?i)pipeline"):
        model(**RAGGED)


@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing_enable:FutureWarning")
def test_reentrant_checkpointing_is_refused() -> None:
    with pytest.raises(ValueError, match=r"Reentrant gradient checkpointing.*\{'use_reentrant': False\}"):
        tiny_model("resformer").gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": True})


@pytest.mark.parametrize("variant", ["resformer", "resformer-dense", "denseformer", "svformer"], indirect=True)
def test_a_pruned_layer_takes_its_coefficients_along_or_is_missed(variant: str) -> None:
    model, naive = tiny_model(variant), tiny_model(variant)
    del model.model.layers[3]
    if variant in ("denseformer", "resformer-dense"):
        missed = "cannot be removed, moved" if variant == "denseformer" else "Layer 4 reads the raw_values of layer 3"
        with pytest.raises(ValueError, match=missed):
            model(**RAGGED)
        return
    # The same function: a layer 3 that adds nothing to the stream.
    for part in (naive.model.layers[3].self_attn.o_proj, naive.model.layers[3].mlp.down_proj):
        part.weight.data.zero_()
    torch.testing.assert_close(logits_of(model, **RAGGED), logits_of(naive, **RAGGED))
    model.model.layers = model.model.layers[:2]  # a list of its own
    assert len(model.model(RAGGED["input_ids"], output_hidden_states=True).hidden_states) == 3
    del model.model.layers[0]
    with pytest.raises(ValueError, match=r"reads the .*values of layer 0, which has been removed or comes later"):
        model(**RAGGED)


def test_the_first_layers_of_a_checkpoint_load_alone(method: str, tmp_path: Path) -> None:
    model = tiny_model(method)
    model.save_pretrained(tmp_path)
    refused = {
        "resformer-plus": "in mode 'learnable_plus' all layers",
        "nanochat": "`backout` takes the middle",
        "mudd": "`mudd` has other channels after the last layer",
    }
    refused["attnres"] = "with `attnres` the final norm"
    if method in refused:
        with pytest.raises(ValueError, match=f"`num_hidden_layers`=4 of 6 layers: {refused[method]}"):
            AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=4)
        if method in ("nanochat", "attnres"):
            del model.model.layers[4:]
            with pytest.raises(ValueError, match=r"Layer 5, the last, has been removed, and `(backout|attnres)` acts"):
                model(**RAGGED)
        return
    first, info = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=4, output_loading_info=True)
    assert not info["missing_keys"]
    assert all(re.search(r"layers\.[45]\.", name) for name in info["unexpected_keys"])
    del model.model.layers[4:]
    assert torch.equal(logits_of(first, **RAGGED), logits_of(model, **RAGGED))


def test_blocks_that_the_first_layers_cannot_keep_are_refused(tmp_path: Path) -> None:
    tiny_model("delta-attention-residuals", delta_attention_residual_blocks=4).save_pretrained(
        tmp_path
    )  # they begin at 0, 1, 3, 4
    with pytest.raises(
        ValueError, match=r"blocks of `delta_attention_residuals` begin at layers \[0, 1, 3, 4\], which are no"
    ):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=5)
    off = AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=5, delta_attention_residuals=False)
    assert off.config.num_hidden_layers == 5
    assert (
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=3).config.delta_attention_residual_blocks == 2
    )


def test_parametrized_connections_compute_with_the_weights_that_they_are_given(variant: str) -> None:
    model = tiny_model(variant)
    expected = logits_of(model, **RAGGED)
    for module in [each for name, each in model.named_modules() if is_connection(name)]:
        for name, _ in [*module.named_parameters(recurse=False)]:
            weight_norm(module, name)
    assert_close(logits_of(model, **RAGGED), expected)


def test_a_layer_or_an_attention_alone_says_why_it_does_not_run() -> None:
    model, hidden = tiny_model("resformer"), torch.randn(1, 5, 32)
    positions = model.model.rotary_emb(hidden, position_ids=torch.arange(5)[None])
    layer = model.model.layers[2]
    with pytest.raises(ValueError, match="Layer 2 is called alone"):
        layer(hidden, position_embeddings=positions)
    with pytest.raises(ValueError, match="LlamaAttention is called alone"):
        layer.self_attn(hidden, position_embeddings=positions)
    with disconnected(model):
        assert layer(hidden, position_embeddings=positions).shape == hidden.shape


@pytest.mark.parametrize("start", [0.0, None])
def test_rows_that_are_added_to_a_table_start_as_it_does(start: float | None) -> None:
    model = tiny_model("value-embeddings", value_embeddings_init=start)
    model.resize_token_embeddings(105, mean_resizing=False)
    for layer in model.model.layers[4:]:
        table = layer.value_embedding.table.weight
        assert len(table) == 105
        assert bool(table[97:].any()) == (start is None)


def copies_to_the_second_device(model: PreTrainedModel) -> int:
    """How many numbers cross over to "meta", where the upper half of the layers is, in a forward pass."""
    copied = []

    class Count(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            result = func(*args, **(kwargs or {}))
            if func is torch.ops.aten._to_copy.default and args[0].device != result.device:
                copied.append(result.numel())
            return result

    for layer in [*model.model.layers[3:], model.model.norm]:
        add_hook_to_module(layer, AlignDevicesHook("meta"), append=True)
        layer.to("meta")
    with torch.no_grad(), Count():
        model.model(torch.arange(1, 12)[None], use_cache=False)
    return sum(copied)


def test_what_crosses_layers_is_moved_once_to_a_device() -> None:
    states, values = 11 * 32, 11 * 16
    llama = copies_to_the_second_device(tiny_model())
    more = {
        "resformer": values,
        "resformer-identity": values,
        "resformer-plus": values,
        "neutreno": values,
        "svformer": values,
        "resformer-dense": 3 * values,
        "denseformer": 4 * states - states,  # X_0 .. X_3; X_3 is the stream's
    }
    for method, expected in more.items():
        got = copies_to_the_second_device(tiny_model(method)) - llama
        assert expected <= got <= expected + states + 64, (method, got)  # the stream, and coefficients
