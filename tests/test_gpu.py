"""What only a GPU can show: its kernels for attention, and offloaded caches.

Of the other files, the tests that take `device` run on a GPU too.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from conftest import tiny_model
from torch.nn.functional import cross_entropy
from transformers import PreTrainedModel
from transformers.utils import is_flash_attn_2_available

from resformer import GrowingCache
from resformer.training.optimizer import is_connection

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

#: Heads of width 32: flex attention takes none below 16.
SHAPE = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 256}
LAYERS, WIDEST, TOKENS, PADDING = 6, 192, 160, 45
Tensors = dict[str, torch.Tensor]


def tolerance(dtype: torch.dtype) -> float:
    """Twice the relative error expected of 48 roundings a layer, one after the other.

    They are independent and at most `eps` / 2 each: n of them add up to sqrt(n) `eps` / 2. A layer's forward pass has
    about 16 (norms, projections, rotation, mixing, softmax, products, sums) and its backward pass 32. bfloat16 sums are
    accumulated in float32 and rounded once; from float32 on, each of up to `WIDEST` terms rounds.
    """
    return torch.finfo(dtype).eps * math.sqrt(48 * LAYERS * (WIDEST if dtype.itemsize >= 4 else 1))


def assert_close(got: Tensors, expected: Tensors, allowed: float) -> None:
    assert got.keys() == expected.keys()
    for name, tensor in expected.items():
        difference = (got[name].double().cpu() - tensor.double().cpu()).norm() / tensor.double().norm().cpu()
        assert difference <= allowed, f"{name}: {difference:.2e} > {allowed:.2e}"  # false for NaN


@pytest.fixture(scope="session", autouse=True)
def _versions(record_testsuite_property: Callable[[str, object], None]) -> None:
    if torch.cuda.is_available():
        record_testsuite_property("device", torch.cuda.get_device_name())
    record_testsuite_property("versions", f"torch {torch.__version__}, transformers {transformers.__version__}")


def model_of(method: str, dtype: torch.dtype = torch.float32, device: str = "cuda", **options: Any) -> PreTrainedModel:
    """Connections in float32, as they are loaded. Matrices keep the size of their input, so that no layer magnifies the
    errors of those before it, and are exact in bfloat16."""
    model = tiny_model(method, **SHAPE, **options)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 2:
            parameter.data /= 0.3 * math.sqrt(parameter.shape[1])
        parameter.data = parameter.data.bfloat16().to(torch.float32 if is_connection(name) else dtype)
    return model.to(device)


def ids_and_mask() -> tuple[torch.Tensor, torch.Tensor]:
    """Two sequences, one padded on the left."""
    mask = torch.ones(2, TOKENS, dtype=torch.long)
    mask[1, :PADDING] = 0
    return torch.randint(3, 97, mask.shape, generator=torch.Generator().manual_seed(1)) * mask, mask


def step(model: PreTrainedModel) -> Tensors:
    """Logits of a forward pass and gradients of all parameters."""
    ids, mask = (tensor.to(model.device) for tensor in ids_and_mask())
    logits = model(ids, attention_mask=mask, use_cache=False).logits.float()
    labels = ids.masked_fill(mask == 0, -100)
    cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()).backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"logits": logits[mask.bool()].detach(), **gradients}


@pytest.mark.parametrize(
    "kind", ["sdpa float32", "sdpa bfloat16", "flash_attention_2 bfloat16", "flex_attention bfloat16"]
)
def test_logits_and_gradients_are_those_of_a_cpu_in_float32(method: str, kind: str) -> None:
    attention, dtype = kind.split()[0], getattr(torch, kind.split()[1])
    if attention == "flash_attention_2" and not is_flash_attn_2_available():
        pytest.skip("flash_attn is not installed")
    expected = step(model_of(method, device="cpu"))
    assert_close(step(model_of(method, dtype, attention=attention)), expected, tolerance(dtype))


def test_an_offloaded_cache_gives_the_uncached_logits(method: str) -> None:
    model = model_of(method)
    ids = ids_and_mask()[0][:1].cuda()
    cache = GrowingCache(model.config, offloading=True)
    with torch.no_grad():
        parts = [model(part, past_key_values=cache).logits for part in ids.split([100, 1, 20, *[1] * 39], dim=1)]
        expected = model(ids, use_cache=False).logits
    assert_close({"logits": torch.cat(parts, 1)}, {"logits": expected}, tolerance(torch.float32))
