"""What only a GPU can show: its kernels in every method, compiled, cached, checkpointed, sharded and quantised.

`make test-gpu` runs these tests. With RESFORMER_TEST_DEVICE=cpu they run on a CPU, which tries out the tests alone.
"""

import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from conftest import TinyModel
from torch import distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, CompileConfig, PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from resformer import GrowingCache, ResFormerConfig
from resformer.modeling.depth_average import DepthAverage, depth_average
from resformer.training.optimizer import is_connection

DEVICE = os.environ.get("RESFORMER_TEST_DEVICE", "cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(DEVICE == "cuda" and not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Heads of width 32: flex attention takes none below 16.
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 256}
LAYERS, WIDEST, TOKENS, PADDING = 6, 192, 160, 45
#: Every mechanism is in one of these; compiling every method takes too long.
COMPILED = pytest.mark.parametrize("variant", ["resformer", "svformer", "gated-sink"], indirect=True)

Tensors = dict[str, torch.Tensor]


def tolerance(dtype: torch.dtype, roundings: int = 48 * LAYERS) -> float:
    """Twice the relative error expected of so many roundings, one after the other.

    They are independent and at most `eps` / 2 each: n of them add up to sqrt(n) `eps` / 2. A layer's forward pass has
    about 16 (norms, projections, rotation, mixing, softmax, products, sums) and its backward pass 32. bfloat16 sums are
    accumulated in float32 and rounded once; from float32 on, each of up to `WIDEST` terms rounds.
    """
    return torch.finfo(dtype).eps * math.sqrt(roundings * (WIDEST if dtype.itemsize >= 4 else 1))


def assert_close(got: Tensors, expected: Tensors, allowed: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (got[name].double().cpu() - tensor.double().cpu()).norm() / tensor.double().norm().cpu()
        assert difference <= allowed, f"{name}: {difference:.2e} > {allowed:.2e}"  # false for NaN


@pytest.fixture(scope="session", autouse=True)
def _versions(record_testsuite_property: Callable[[str, object], None]) -> None:
    record_testsuite_property(
        "device", torch.cuda.get_device_name() if DEVICE == "cuda" and torch.cuda.is_available() else DEVICE
    )
    record_testsuite_property("versions", f"torch {torch.__version__}, transformers {transformers.__version__}")


@pytest.fixture
def model_of(tiny_model: TinyModel) -> TinyModel:
    """`model_of("svformer", torch.bfloat16, "cpu")`: connections in float32, as they are loaded. Matrices keep the size
    of their input, so that no layer magnifies the errors of those before it, and are exact in bfloat16."""

    def build(method: str, dtype: torch.dtype = torch.float32, device: str = DEVICE, **options: Any) -> PreTrainedModel:
        model = tiny_model(method, **SHAPE, **options)
        for name, parameter in model.named_parameters():
            if parameter.dim() == 2:
                parameter.data /= 0.3 * math.sqrt(parameter.shape[1])
            parameter.data = parameter.data.bfloat16().to(torch.float32 if is_connection(name) else dtype)
        return model.to(device)

    return build


def ids_and_mask() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, one padded on the left."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :PADDING] = 0
    return torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(1)) * mask, mask


def step(model: PreTrainedModel, forward: Any = None, backward: bool = True) -> Tensors:
    """Logits of a forward pass, which compilers wrap, and gradients of all parameters."""
    ids, mask = (tensor.to(model.device) for tensor in ids_and_mask())
    with torch.set_grad_enabled(backward):
        logits = (model if forward is None else forward)(ids, attention_mask=mask, use_cache=False).logits.float()
        if backward:
            labels = ids.masked_fill(mask == 0, -100)
            cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    whole = {name: parameter.grad for name, parameter in model.named_parameters()} if backward else {}
    gradients = {name: getattr(grad, "full_tensor", lambda grad=grad: grad)() for name, grad in whole.items()}
    return {"logits": logits[mask.bool()].detach(), **gradients}


@pytest.mark.parametrize(
    "kind", ["sdpa float32", "sdpa bfloat16", "flash_attention_2 bfloat16", "flex_attention bfloat16"]
)
def test_logits_and_gradients_are_those_of_a_cpu_in_float32(method: str, kind: str, model_of: TinyModel) -> None:
    attention, dtype = kind.split()[0], getattr(torch, kind.split()[1])
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash_attn is not installed")
    backward = attention != "flex_attention" or DEVICE != "cpu"  # flex attention has no backward pass there
    expected = step(model_of(method, device="cpu"), backward=backward)
    got = step(model_of(method, dtype, attention=attention), backward=backward)
    assert_close(got, expected, tolerance(dtype))


@COMPILED
def test_a_compiled_step_is_the_plain_one(variant: str, model_of: TinyModel) -> None:
    torch.compiler.reset()
    model = model_of(variant)
    got = step(model, torch.compile(model, fullgraph=True))
    assert_close(got, step(model_of(variant, device="cpu")), tolerance(torch.float32))


@COMPILED
def test_compiled_steps_on_a_static_cache_are_the_uncached_ones(variant: str, model_of: TinyModel) -> None:
    torch.compiler.reset()
    model = model_of(variant)
    ids, mask = (tensor.to(DEVICE) for tensor in ids_and_mask())
    compilation = CompileConfig(fullgraph=True)
    compilation._compile_all_devices = True  # generate compiles on accelerators only, unless told
    options = {"cache_implementation": "static", "compile_config": compilation, "max_new_tokens": 6, "do_sample": False}
    out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    mask = torch.cat((mask, mask.new_ones(2, 6)), dim=1)
    with torch.no_grad():
        expected = model(out.sequences, attention_mask=mask, use_cache=False).logits[:, -7:-1]
    assert_close({"logits": torch.stack(out.logits, 1)}, {"logits": expected}, tolerance(torch.float32))


@pytest.mark.parametrize("offloading", [False, True])
def test_a_growing_cache_gives_the_uncached_logits(method: str, offloading: bool, model_of: TinyModel) -> None:
    if offloading and DEVICE == "cpu":
        pytest.skip("offloading needs an accelerator")
    model = model_of(method)
    ids = ids_and_mask()[0][:1].to(DEVICE)
    cache = GrowingCache(model.config, offloading=offloading)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([100, 1, 20, *[1] * 39], dim=1)]
        expected = model(ids, use_cache=False).logits
    assert_close({"logits": torch.cat(parts, 1)}, {"logits": expected}, tolerance(torch.float32))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("form", ["grouped", "ungrouped", "inference"])
def test_depth_averages_are_the_plain_sums(form: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DepthAverage, "group", lambda self, dtype: 8 if form == "grouped" else 0)
    module = depth_average(ResFormerConfig(num_hidden_layers=24, num_attention_heads=2, dwa=True))
    module.bias.data = torch.randn_like(module.bias.data).to(torch.promote_types(dtype, torch.float32))
    weights = module.bias.detach().double().requires_grad_()
    plain = [torch.randn(2, 3, 64).to(dtype).double().requires_grad_() for _ in range(25)]
    rows = iter(weights.split(module.sizes))
    sums = plain[:1] + [sum(w * x for w, x in zip(next(rows), plain[:n], strict=True)) for n in range(2, 26)]

    module.to(DEVICE)
    states = [state.detach().to(DEVICE, dtype).requires_grad_() for state in plain]
    with torch.set_grad_enabled(form != "inference"):
        running = module.start(module())
        averages = [running.append(state) for state in states]
    got, expected = torch.stack(averages), torch.stack(sums)
    pairs = {"averages": (got, expected)}
    if form != "inference":
        upstream = torch.randn_like(expected)
        got = torch.autograd.grad(got, [module.bias, *states], upstream.to(got))
        expected = torch.autograd.grad(expected, [weights, *plain], upstream)
        pairs |= {str(n): pair for n, pair in enumerate(zip(got, expected, strict=True))}
    got, expected = ({name: pair[side].detach() for name, pair in pairs.items()} for side in (0, 1))
    assert_close(got, expected, tolerance(dtype, roundings=25))  # the terms of a sum


def test_gradient_checkpointing_leaves_the_gradients(method: str, model_of: TinyModel) -> None:
    model = model_of(method).train()
    expected = step(model)
    model.zero_grad()
    model.gradient_checkpointing_enable()
    assert_close(step(model), expected, tolerance(torch.float32))


@pytest.fixture(scope="module")
def _one_rank() -> Iterator[None]:
    dist.init_process_group("nccl" if DEVICE == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("_one_rank")
def test_fsdp2_on_one_rank_gives_the_same_gradients(method: str, model_of: TinyModel) -> None:
    model = model_of(method)
    mesh = dist.device_mesh.init_device_mesh(DEVICE, (1,))
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    assert_close(step(model), step(model_of(method, device="cpu")), tolerance(torch.float32))


def test_qlora_steps_train_the_adapter_and_the_connections(model_of: TinyModel, tmp_path: Path) -> None:
    pytest.importorskip("bitsandbytes")
    peft = pytest.importorskip("peft")
    model_of("resformer-gated", device="cpu", dwa=True).save_pretrained(tmp_path)
    four_bits = BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=torch.bfloat16)
    options = {"quantization_config": four_bits, "dtype": torch.bfloat16, "device_map": {"": DEVICE}}
    base = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    lora = peft.LoraConfig(target_modules="all-linear", r=4, modules_to_save=["value_residual", "depth_average"])
    model = peft.get_peft_model(base, lora).train()
    model.gradient_checkpointing_enable()
    model.enable_input_require_grads()
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    before = {name: parameter.detach().clone() for name, parameter in trained.items()}
    optimizer = torch.optim.AdamW(trained.values(), lr=1e-2)
    ids, losses = ids_and_mask()[0][:1].to(DEVICE), []
    for _ in range(3):
        loss = model(ids, labels=ids).loss
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert losses[0] > losses[1] > losses[2]
    assert sum(is_connection(name) for name in trained) > 2
    for name, parameter in trained.items():
        assert parameter.dtype == torch.float32, name
        assert not torch.equal(parameter, before[name]), name
