"""Turns the values of every layer towards those of layer 0, without changing what the model computes.

    python benchmarks/align_values.py CHECKPOINT OUTPUT

In a trained model, head h of layer n has no reason to use its channels as V_0's head h does, so a sum of both mixes
unrelated numbers. Each head of layer n is matched with a head of layer 0, its query heads moved along, and turned
by the orthogonal matrix R that takes V_n closest to V_0 (Procrustes): v_proj becomes R^T W_V and o_proj W_O R.
"""

import argparse
import json
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from resformer.shrinking.refit import assign_heads
from resformer.training.data import STANDARD_HELD_OUT, is_held_out, standard_library


@torch.no_grad()
def aligned(model: Any, blocks: torch.Tensor) -> dict[str, list[float]]:
    """Aligns a LlamaForCausalLM in place. Returns the mean cosine of V_n and V_0, of each layer, before and after."""
    config, values = model.config, []
    hooks = [
        layer.self_attn.v_proj.register_forward_hook(lambda module, args, output: values.append(output.flatten(0, 1)))
        for layer in model.model.layers
    ]
    model(blocks)
    for hook in hooks:
        hook.remove()
    heads, width = config.num_key_value_heads, config.head_dim
    first, *later = [each.double().unflatten(-1, (heads, width)).transpose(0, 1) for each in values]
    cosines: dict[str, list[float]] = {"before": [], "after": []}
    for layer, own in zip(model.model.layers[1:], later, strict=True):
        left, size, right = torch.linalg.svd(torch.einsum("gti,htj->ghij", own, first))
        order = assign_heads(-size.sum(-1))  # head g becomes head order[g]
        moved = torch.tensor(order).argsort()
        turn = torch.stack([left[g, order[g]] @ right[g, order[g]] for g in moved.tolist()])
        cosines["before"].append(torch.cosine_similarity(own, first, dim=-1).mean().item())
        cosines["after"].append(torch.cosine_similarity(own[moved] @ turn, first, dim=-1).mean().item())

        attention = layer.self_attn
        for projection in (attention.q_proj, attention.k_proj, attention.v_proj):
            weight = projection.weight.unflatten(0, (heads, -1, width))[moved]
            if projection is attention.v_proj:
                weight = torch.einsum("hqij,hik->hqkj", weight.double(), turn).to(weight)
            projection.weight.copy_(weight.flatten(0, 2))
        weight = attention.o_proj.weight.unflatten(1, (heads, -1, width))[:, moved]
        weight = torch.einsum("ohqi,hik->ohqk", weight.double(), turn).to(weight)
        attention.o_proj.weight.copy_(weight.flatten(1))
    return cosines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--texts", type=int, default=16, help="files of the standard library's training part")
    parser.add_argument("--block", type=int, default=256, help="tokens of a sequence")
    arguments = parser.parse_args()
    model = AutoModelForCausalLM.from_pretrained(arguments.checkpoint)
    tokenizer = AutoTokenizer.from_pretrained(arguments.checkpoint)
    if model.config.model_type != "llama" or model.config.attention_bias:
        raise SystemExit(f"{arguments.checkpoint}: expected a Llama checkpoint without biases.")
    files = (file["text"] for file in standard_library() if not is_held_out(file["group"], STANDARD_HELD_OUT))
    ids = tokenizer("\n".join(islice(files, arguments.texts)), return_tensors="pt").input_ids[0]
    blocks = ids[: len(ids) // arguments.block * arguments.block].view(-1, arguments.block)[:: arguments.texts]
    before = model(blocks[:2]).logits
    report = aligned(model, blocks)
    report["largest difference of logits"] = (model(blocks[:2]).logits - before).abs().max().item()
    model.save_pretrained(arguments.output)
    tokenizer.save_pretrained(arguments.output)
    (arguments.output / "aligned.json").write_text(json.dumps(report, indent=2), encoding="utf-8")
    print(json.dumps(report))


if __name__ == "__main__":
    main()
