"""What a training step keeps for its backward pass, by the byte, against Llama's; the memory that is predicted."""

import json
from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from resformer import ResFormerConfig, ResFormerForCausalLM

LAYERS, WIDTH, HEADS, TOKENS = 12, 64, 2, 96
VALUE_WIDTH = 16 * HEADS
#: Of the shape of the models that are trained, with little of a head, which all models have alike.
SHAPE = {
    "hidden_size": WIDTH,
    "intermediate_size": 192,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": HEADS,
    "vocab_size": 16,
}
#: Depth attention with 8 blocks: sublayers, and deltas that all of them read together.
SUBLAYERS, READ = 2 * LAYERS, sum(2 * (LAYERS - start) for start in (0, 1, 3, 4, 6, 7, 9, 10))
#: Method -> numbers a token that it keeps beyond Llama's, less those that it does not need to keep.
BEYOND_LLAMA = {
    # V_n beside V'_n, for the gradient of a learned coefficient.
    **dict.fromkeys(("resformer", "resformer-plus", "resformer-dense"), (LAYERS - 1) * VALUE_WIDTH),
    "resformer-gated": (LAYERS - 1) * (VALUE_WIDTH + 2 * HEADS),  # and a gate and its tanh
    # In the upper half: V_n, V~_n, the mean query and two keys before the rotary embedding; two weights a head.
    "depth-attention": LAYERS // 2 * (5 * VALUE_WIDTH + 2 * HEADS),
    "value-embeddings": LAYERS // 3 * (VALUE_WIDTH + 2 * HEADS),  # rows, and a gate and its sigmoid
    # What the attention gives beside what the output projection reads.
    "neutreno": (LAYERS - 1) * WIDTH,
    "resformer-neutreno": (LAYERS - 1) * WIDTH,
    "svformer": -(LAYERS - 1) * VALUE_WIDTH,
    "cla2": -LAYERS * VALUE_WIDTH,
    "fusedkv-lite": -LAYERS * VALUE_WIDTH,
    # X_j beside Y_j of all averages but the last, of which the norm keeps Y alone and the weights' gradients need X.
    "denseformer": LAYERS * WIDTH,
    "denseformer-4x5": 2 * WIDTH,
    "resformer-denseformer": LAYERS * WIDTH + (LAYERS - 1) * VALUE_WIDTH,
    # The deltas and their scales; for each that is read a dot product, a gated weight and, for the null source too, one
    # before the gate; and a copy of w.
    "attention-residuals": 8 * (WIDTH + 1) + HEADS * (3 * READ + SUBLAYERS) + SUBLAYERS * WIDTH / TOKENS,
}
#: Below float32 norms keep a copy of what they read, so that X_j is kept for the averages alone.
BEYOND_LLAMA_BELOW_FLOAT32 = {
    **BEYOND_LLAMA,
    "depth-attention": LAYERS // 2 * (5 * VALUE_WIDTH + 6 * HEADS),  # the weights in float32 too
    "denseformer": (LAYERS + 1) * WIDTH,
    "denseformer-4x5": 5 * WIDTH,  # X_1, X_5, X_2, X_6, X_10
    "resformer-denseformer": (LAYERS + 1) * WIDTH + (LAYERS - 1) * VALUE_WIDTH,
    # In float32, of twice the size: a copy of the deltas, their scales, dot products and weights, and w for each block.
    "attention-residuals": 3 * 8 * WIDTH + 16 + HEADS * (5 * READ + 2 * SUBLAYERS) + 2 * READ * WIDTH / TOKENS,
}


def kept_bytes(model: PreTrainedModel, dtype: torch.dtype = torch.float32) -> int:
    """Bytes of the distinct memory, parameters aside, that autograd keeps after a forward pass."""
    model = model.to(dtype).train()
    parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage  # alive, so that no other gets its place
        return tensor

    ids = torch.randint(16, (1, TOKENS))
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
    assert loss.requires_grad
    return sum(storage.nbytes() for pointer, storage in kept.items() if pointer not in parameters)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_training_step_keeps_what_llamas_does_and_what_the_method_needs(method: str, dtype: torch.dtype) -> None:
    llama = kept_bytes(LlamaForCausalLM(LlamaConfig(**SHAPE)), dtype)
    mine = kept_bytes(ResFormerForCausalLM(ResFormerConfig.for_method(method, **SHAPE)), dtype)
    expected = BEYOND_LLAMA if dtype == torch.float32 else BEYOND_LLAMA_BELOW_FLOAT32
    beyond_per_token = (mine - llama) / (TOKENS * dtype.itemsize)
    # Coefficients come on top: less than a quarter of a state.
    assert beyond_per_token == pytest.approx(expected.get(method, 0), abs=WIDTH / 4)


def test_documents_have_the_committed_figures() -> None:
    root = Path(__file__).parents[1]
    results = json.loads((root / "benchmarks" / "results" / "adapter_memory.json").read_text(encoding="utf-8"))
    adapters = (root / "docs" / "8b.md").read_text(encoding="utf-8")
    for run in results["adapters of 8B"]:
        parts = run["weights"], run["gradients"] + run["optimizer"], run["activations"], run["peak"]
        row = " | ".join([f"{run['block']:,}", *(f"{part / 1e9:.1f} GB" for part in parts)])
        assert f"| {row} |" in adapters
