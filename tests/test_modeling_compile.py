"""Every method compiles whole, once, for all steps of decoding, and exports with any batch and length.

Some are compiled by `make test`, the rest by `make test-slow`.
"""

import copy
from typing import Any

import pytest
import torch
from conftest import COMBINATIONS, RAGGED, Batch, moved, others_slow, tiny_model
from torch._dynamo.testing import CompileCounter
from transformers import CompileConfig, DynamicCache, GenerationConfig, PreTrainedModel
from transformers.exporters.exporter_dynamo import DynamoConfig, DynamoExporter
from transformers.exporters.utils import decompose_prefill_decode, get_leaf_tensors
from transformers.integrations.executorch import TorchExportableModuleForDecoderOnlyLM

import resformer
from resformer import GrowingCache
from resformer.modeling.versions import CACHE

#: Other coefficients of a method, and two together, compile as it does.
OTHERS = "transformer resformer-identity resformer-constant resformer-sparse resformer-neutreno resformer-denseformer"
METHODS = [name for name in resformer.METHODS if name not in OTHERS.split()]
#: Each is in one of these.
EVERY_MECHANISM = others_slow(
    "resformer-plus mudd hyper-connections mhc kitchen-sink gated-sink depth-sink unmixed-streams".split(),
    ["depth-sink"],
)


@pytest.fixture
def small(request: pytest.FixtureRequest) -> PreTrainedModel:
    """A model of the test's `variant` or `method`; three layers do for a named method, compilers take long enough."""
    name = request.getfixturevalue("method" if "method" in request.fixturenames else "variant")
    return tiny_model(name) if name in COMBINATIONS else tiny_model(name, num_hidden_layers=5 if "4x5" in name else 3)


def decoded(model: PreTrainedModel, batch: Batch, **options: Any) -> Any:
    return model.generate(**batch, do_sample=False, output_logits=True, return_dict_in_generate=True, **options)


@pytest.mark.parametrize("variant", EVERY_MECHANISM, indirect=True)
def test_generate_with_a_static_cache_compiles_one_whole_graph(
    small: PreTrainedModel, variant: str, device: str
) -> None:
    model, batch, backend = small.to(device), moved(RAGGED, device), CompileCounter()
    expected = decoded(model, batch, max_new_tokens=6, use_cache=False)
    torch.compiler.reset()
    # A function, since `generate` copies the configuration, and functions stay what they are.
    compilation = CompileConfig(fullgraph=True, backend=lambda *graph: backend(*graph), mode=None)
    compilation._compile_all_devices = True  # generate compiles on accelerators only, unless told
    options = {"cache_implementation": "static", "compile_config": compilation}
    got = decoded(model, batch, max_new_tokens=6, **options)
    assert torch.equal(got.sequences, expected.sequences)
    for mine, naive in zip(got.logits, expected.logits, strict=True):
        torch.testing.assert_close(mine, naive, rtol=1e-4, atol=1e-4)
    assert backend.frame_count == 1
    # A shorter prompt and fewer tokens: the same graph.
    start = {name: tensor[:, 2:] for name, tensor in batch.items()}
    again = decoded(model, start, max_new_tokens=4, **options)
    assert torch.equal(again.sequences, decoded(model, start, max_new_tokens=4, use_cache=False).sequences)
    assert backend.frame_count == 1


@pytest.mark.parametrize("variant", EVERY_MECHANISM, indirect=True)
def test_exporting_every_method_with_dynamic_batch_and_length(small: PreTrainedModel, variant: str) -> None:
    model = small
    shape = {0: torch.export.Dim.DYNAMIC, 1: torch.export.Dim.DYNAMIC}
    with torch.no_grad():
        program = torch.export.export(
            model,
            (),
            kwargs={**RAGGED, "use_cache": False},
            dynamic_shapes={"input_ids": shape, "attention_mask": shape, "use_cache": None},
        ).module()
        for rows, columns in ((3, 11), (2, 8), (2, 9), (5, 17)):
            ids = torch.randint(3, 97, (rows, columns))
            mask = torch.ones_like(ids)
            mask[1, :3] = 0
            got = program(input_ids=ids, attention_mask=mask, use_cache=False).logits
            expected = model(ids, attention_mask=mask).logits
            assert (got - expected)[mask.bool()].abs().max() <= 1e-5 * expected[mask.bool()].abs().max()


GRAPHS = {
    "resformer": 2, "svformer": 2, "cla2": 2, "neutreno": 2, "resformer-gated": 2,
    "denseformer": 1, "delta-attention-residuals": 2, "mudd": 2, "fusedkv-lite": 4, "depth-attention": 4,
    "attnres": 5, "mhc": 4,
}  # fmt: skip


@pytest.mark.parametrize("method", others_slow(METHODS, ["resformer", "cla2", "resformer-dense"]))
def test_layers_of_a_kind_share_one_graph(method: str) -> None:
    # As with Accelerate's `compile_regions` and FSDP2: each layer is compiled by itself.
    model = tiny_model(method, num_hidden_layers=12).train()
    inputs = {**RAGGED, "labels": RAGGED["input_ids"], "use_cache": False}
    expected, backend = model(**inputs).loss, CompileCounter()
    torch.compiler.reset()
    for layer in model.model.layers:
        layer.compile(backend=backend, fullgraph=True)
    loss = model(**inputs).loss
    loss.backward()
    torch.testing.assert_close(loss, expected)
    assert backend.frame_count <= GRAPHS.get(method, 3)


@pytest.mark.parametrize(
    "method",
    others_slow("resformer denseformer depth-attention mudd mhc attnres".split(), ["mudd"]),
    indirect=True,
)
def test_batches_of_any_size_train_in_two_graphs(small: PreTrainedModel, method: str) -> None:
    backend = CompileCounter()
    torch.compiler.reset()
    compiled = torch.compile(small.train(), backend=backend, fullgraph=True)
    for shape in ((2, 8), (3, 11), (4, 9), (2, 17), (5, 12)):
        ids = torch.randint(3, 97, shape)
        compiled(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    assert backend.frame_count == 2  # as plain Llama: one for the first sizes, one for all


@pytest.mark.slow
@pytest.mark.parametrize("method", ["svformer"], indirect=True)
def test_compiled_and_plain_calls_continue_one_anothers_cache(method: str) -> None:
    # Growing in place breaks graphs: compiled calls concatenate, with a GrowingCache too.
    model = tiny_model(method, num_hidden_layers=2)
    ids = RAGGED["input_ids"][:1]
    expected = model(ids, use_cache=False).logits
    torch.compiler.reset()
    compiled = torch.compile(model, backend="eager", dynamic=True)
    calls = ((model, 4, 5), (compiled, 5, 6), (compiled, 6, 7), (model, 7, 8), (compiled, 8, 11))
    for first, made in ((compiled, DynamicCache), (model, GrowingCache)):
        cache, parts = made(config=model.config), []
        for call, start, end in ((first, 0, 4), *calls):
            with torch.no_grad():
                output = call(ids[:, start:end], **{CACHE: cache}, use_cache=True)
            cache, parts = output[CACHE], [*parts, output.logits]
        assert type(cache) is made
        torch.testing.assert_close(torch.cat(parts, dim=1), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    "method",
    others_slow("resformer-gated svformer depth-attention mudd".split(), ["resformer-gated", "svformer"]),
    indirect=True,
)
def test_exported_decoding_step_with_a_static_cache_equals_uncached(small: PreTrainedModel, method: str) -> None:
    model = small
    cache = {"batch_size": 1, "max_cache_len": 16}
    model.generation_config = GenerationConfig(use_cache=True, cache_implementation="static", cache_config=cache)
    exporter = TorchExportableModuleForDecoderOnlyLM(model, **cache)
    step = exporter.export(input_ids=torch.tensor([[5]]), cache_position=torch.tensor([0])).module()
    ids = torch.tensor([[5, 7, 9, 11, 13]])
    steps = [step(input_ids=ids[:, at : at + 1], cache_position=torch.tensor([at])) for at in range(5)]
    with torch.no_grad():
        torch.testing.assert_close(torch.cat(steps, dim=1), model(ids, use_cache=False).logits, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("variant", ["crossed-sharing"], indirect=True)
def test_exported_prefill_and_decoding_step_return_the_models_logits_and_cache(
    small: PreTrainedModel, variant: str
) -> None:
    for model, inputs in decompose_prefill_decode(small, RAGGED).values():
        inputs = {name: value for name, value in inputs.items() if name not in ("use_cache", "return_dict")}
        program = DynamoExporter().export(model, copy.deepcopy(inputs), config=DynamoConfig(dynamic=True))
        with torch.no_grad():
            got, expected = (get_leaf_tensors(each(**copy.deepcopy(inputs))) for each in (program, model))
        assert got.keys() == expected.keys()
        for name, tensor in expected.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-4, atol=1e-4)
