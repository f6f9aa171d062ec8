"""A naive twin of nanochat's decoder of each era, written from its description, and small runs of it on the disk.

Whole sequences only: no cache, no windows but by a mask, each token's gates spelled out.
"""

import json
import pickle
import sys
import types
from itertools import pairwise
from pathlib import Path
from typing import Any

import regex
import torch
from torch.nn.functional import rms_norm

#: Era -> (base of the rotary embedding, channels and limit of the gates, factor of q and k, divisor of the window)
ERAS = {
    0: (1e4, 0, 0, 1, 1),
    1: (1e4, 0, 0, 1, 2),
    2: (1e4, 32, 2, 1, 2),
    3: (1e5, 12, 3, 1.15, 3),
    4: (1e5, 12, 3, 1.2, 4),
}
SPECIAL = (
    "bos user_start user_end assistant_start assistant_end python_start python_end output_start output_end".split()
)
PATTERN = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}{1,2}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
)
#: 256 bytes and some words, as a training in their order makes them.
WORDS = ["th", "the", " t", " the", "in", "ing", " a", "an", "12", " 1", "er", "ll", "'ll", "\n\n", "  ", "aa", "aaa"]
RANKS = {**{bytes([byte]): byte for byte in range(256)}, **{word.encode(): 256 + n for n, word in enumerate(WORDS)}}
SIZES = {
    "sequence_len": 512,
    "vocab_size": len(RANKS) + len(SPECIAL),
    "n_layer": 6,
    "n_head": 4,
    "n_kv_head": 2,
    "n_embd": 64,
    "window_pattern": "SSSL",
}


def has_table(layer: int, layers: int) -> bool:
    return layer % 2 == (layers - 1) % 2


def window(era: int, context: int) -> int:
    """How many tokens before its own a token sees in layers of type S."""
    divisor = ERAS[era][4]
    return context // divisor if era < 3 else -(-context // divisor // 128) * 128


def random_weights(era: int) -> dict[str, torch.Tensor]:
    """Of no symmetry and no zeros, in nanochat's dtypes: tables in bfloat16."""
    draw = torch.Generator().manual_seed(0)
    width, layers, rows = SIZES["n_embd"], SIZES["n_layer"], -(-SIZES["vocab_size"] // 64) * 64
    values = SIZES["n_kv_head"] * width // SIZES["n_head"]

    def normal(*shape: int, deviation: float | None = None) -> torch.Tensor:
        return torch.randn(shape, generator=draw) * (deviation or 1.5 * shape[-1] ** -0.5)

    weights = {
        "transformer.wte.weight": normal(rows, width, deviation=0.8).bfloat16(),
        "lm_head.weight": normal(rows, width),
    }
    for n in range(layers):
        shapes = {"c_q": (width, width), "c_k": (values, width), "c_v": (values, width), "c_proj": (width, width)}
        weights |= {f"transformer.h.{n}.attn.{name}.weight": normal(*shape) for name, shape in shapes.items()}
        weights[f"transformer.h.{n}.mlp.c_fc.weight"] = normal(4 * width, width)
        weights[f"transformer.h.{n}.mlp.c_proj.weight"] = normal(width, 4 * width)
        if era >= 2 and has_table(n, layers):
            weights[f"value_embeds.{n}.weight"] = normal(rows, values, deviation=0.5).bfloat16()
            weights[f"transformer.h.{n}.attn.ve_gate.weight"] = normal(SIZES["n_kv_head"], ERAS[era][1])
    if era >= 1:
        weights["resid_lambdas"] = 1 + normal(layers, deviation=0.1)
        weights["x0_lambdas"] = normal(layers, deviation=0.3)
    if era >= 4:
        weights |= {"smear_gate.weight": normal(1, 24), "smear_lambda": torch.tensor([0.3])}
        weights["backout_lambda"] = torch.tensor([0.2])
    return weights


def rotated(x: torch.Tensor, base: float) -> torch.Tensor:
    """`(batch, tokens, heads, width)`, each pair of channels turned by minus its angle."""
    half = x.shape[-1] // 2
    angles = torch.arange(x.shape[1]).float()[:, None] / base ** (torch.arange(half).float() / half)
    cos, sin = (part.to(x.dtype)[None, :, None] for part in (angles.cos(), angles.sin()))
    first, second = x.split(half, dim=-1)
    return torch.cat([first * cos + second * sin, second * cos - first * sin], dim=-1)


@torch.no_grad()
def logits(
    era: int, weights: dict[str, torch.Tensor], ids: torch.Tensor, sizes: dict[str, Any] = SIZES,
    dtype: torch.dtype = torch.float32, softcap: float = 15.0,
) -> torch.Tensor:  # fmt: skip
    """Float32 logits of sequences `(batch, tokens)`."""
    base, channels, limit, factor, _ = ERAS[era]
    layers, heads, groups, width = (sizes[name] for name in ("n_layer", "n_head", "n_kv_head", "n_embd"))
    batch, tokens = ids.shape
    weights = {name: tensor if "lambda" in name else tensor.to(dtype) for name, tensor in weights.items()}

    def norm(x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, (x.shape[-1],))

    x = norm(weights["transformer.wte.weight"][ids])
    if era >= 4:
        smeared = x.clone()
        for t in range(1, tokens):
            gate = torch.sigmoid(x[:, t, :24] @ weights["smear_gate.weight"].T)
            smeared[:, t] += weights["smear_lambda"].to(dtype) * gate * x[:, t - 1]
        x = smeared
    first, middle = x, x
    for n in range(layers):
        if era >= 1:
            x = weights["resid_lambdas"][n] * x + weights["x0_lambdas"][n] * first
        block = {k.removeprefix(f"transformer.h.{n}."): v for k, v in weights.items() if f"transformer.h.{n}." in k}
        read = norm(x)
        q, k, v = ((read @ block[f"attn.c_{name}.weight"].T).view(batch, tokens, -1, width // heads) for name in "qkv")
        if era >= 2 and has_table(n, layers):
            gate = limit * torch.sigmoid(read[..., :channels] @ block["attn.ve_gate.weight"].T)
            v = v + gate[..., None] * weights[f"value_embeds.{n}.weight"][ids].view_as(v)
        q, k = (norm(rotated(each, base)) * factor for each in (q, k))
        ago = torch.arange(tokens)[:, None] - torch.arange(tokens)
        short = n < layers - 1 and sizes["window_pattern"][n % len(sizes["window_pattern"])] == "S"
        sees = (ago >= 0) & (ago <= window(era, sizes["sequence_len"]) if short else ago >= 0)
        k, v = (each.repeat_interleave(heads // groups, dim=2) for each in (k, v))
        scores = torch.einsum("bqhd,bkhd->bhqk", q, k) * (width // heads) ** -0.5
        probabilities = scores.float().masked_fill(~sees, -torch.inf).softmax(-1).to(dtype)
        y = torch.einsum("bhqk,bkhd->bqhd", probabilities, v).reshape(batch, tokens, width)
        x = x + y @ block["attn.c_proj.weight"].T
        x = x + torch.relu(norm(x) @ block["mlp.c_fc.weight"].T).square() @ block["mlp.c_proj.weight"].T
        middle = x if n == layers // 2 else middle
    if era >= 4:
        x = x - weights["backout_lambda"].to(dtype) * middle
    scores = (norm(x) @ weights["lm_head.weight"].T)[..., : sizes["vocab_size"]].float()
    return softcap * torch.tanh(scores / softcap)


def pickled(ranks: dict[bytes, int] = RANKS, protocol: int = 4) -> bytes:
    """As tiktoken pickles an `Encoding`, without tiktoken."""
    module: Any = types.ModuleType("tiktoken.core")
    module.Encoding = type("Encoding", (), {"__module__": "tiktoken.core", "__qualname__": "Encoding"})
    encoding = module.Encoding()
    tokens = {f"<|{name}|>": len(ranks) + n for n, name in enumerate(SPECIAL)}
    vars(encoding).update(name="rustbpe", pat_str=PATTERN, mergeable_ranks=ranks, special_tokens=tokens)
    before = {name: sys.modules.get(name) for name in ("tiktoken", "tiktoken.core")}
    sys.modules |= {"tiktoken": types.ModuleType("tiktoken"), "tiktoken.core": module}
    try:
        return pickle.dumps(encoding, protocol=protocol)
    finally:
        for name, old in before.items():
            sys.modules.pop(name) if old is None else sys.modules.update({name: old})


def encoded(text: str) -> list[int]:
    """tiktoken's numbers: of each word, the neighbours of the lowest rank are joined, the first of them first."""
    ids: list[int] = []
    for word in regex.findall(PATTERN, text):
        parts = [bytes([byte]) for byte in word.encode()]
        while pairs := [(RANKS[a + b], n) for n, (a, b) in enumerate(pairwise(parts)) if a + b in RANKS]:
            _, n = min(pairs)
            parts[n : n + 2] = [parts[n] + parts[n + 1]]
        whole = RANKS.get(word.encode())
        ids += [RANKS[part] for part in parts] if whole is None else [whole]
    return ids


def save_run(folder: Path, era: int, *, step: int = 100) -> dict[str, Any]:
    """Writes a run as nanochat does and returns its weights."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = random_weights(era)
    torch.save(tensors, folder / f"model_{step:06d}.pt")
    config = {name: size for name, size in SIZES.items() if era or name != "window_pattern"}
    (folder / f"meta_{step:06d}.json").write_text(json.dumps({"step": step, "model_config": config}))
    (folder / "tokenizer.pkl").write_bytes(pickled())
    return tensors


if __name__ == "__main__":  # for the commands of docs/converting.md
    save_run(Path(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 4)
