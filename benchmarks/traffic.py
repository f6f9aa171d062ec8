"""What each method costs beside Llama: kernels and bytes of a forward, a backward and a decoding step.

    python benchmarks/traffic.py benchmarks/results/traffic.json [--time] [METHOD or SHAPE ...]
    python benchmarks/traffic.py benchmarks/results/traffic_compiled.json --compiled [METHOD or SHAPE ...]

Counted on the meta device, without memory, at real shapes: each operation that is no view is a kernel, and moves its
inputs and outputs. 8,192 tokens in bfloat16, coefficients in float32; attention itself is left out, on both sides. A
decoding step is one token after 128. On a GPU the same steps are timed too, with `sdpa`: `--time`. `minimum` is the
fewest bytes that the equation adds to Llama's.

`--compiled` counts what Inductor makes of a forward and a backward pass for a CPU, the model as one graph: its kernels,
and the buffers that they read and write. Nothing runs.
"""

import json
import math
import shlex
import statistics
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch
import torch._functorch.config
from torch._inductor.graph import GraphLowering
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM, LlamaConfig, __version__
from transformers.models.llama.modeling_llama import repeat_kv

from resformer import ResFormerConfig
from resformer.configuration import mixing_layers, value_layers
from resformer.configuration.methods import METHODS
from resformer.modeling.connection import kinds_in
from resformer.modeling.connections.attnres import opens_block
from resformer.modeling.connections.depth_average import DepthAverage
from resformer.modeling.connections.mudd import channels_of
from resformer.modeling.versions import CACHE

TOKENS, CONTEXT, ROUNDS, STEPS = 8192, 128, 3, 5
SHAPES: dict[str, dict[str, int]] = {
    "135M": dict(zip("LDFHKV", (30, 576, 1536, 9, 3, 49152), strict=True)),
    "1B": dict(zip("LDFHKV", (16, 2048, 8192, 32, 8, 128256), strict=True)),
    "8B": dict(zip("LDFHKV", (32, 4096, 14336, 32, 8, 128256), strict=True)),
}
NAMES = {
    "L": "num_hidden_layers",
    "D": "hidden_size",
    "F": "intermediate_size",
    "H": "num_attention_heads",
    "K": "num_key_value_heads",
    "V": "vocab_size",
}
#: Operations that launch nothing, beside views.
FREE = {
    "detach",
    "alias",
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "lift_fresh",
    "_unsafe_view",
}
#: Operations that write their first argument without reading it.
WRITES = {"copy_", "fill_", "zero_"}


class Traffic(TorchDispatchMode):
    """Counts what runs inside of it."""

    def __init__(self) -> None:
        super().__init__()
        self.kernels = self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        name, read = func.overloadpacket.__name__, {**(kwargs or {})}
        read.pop("out", None)
        if not func.is_view and name not in FREE:
            inputs = args[1:] if name in WRITES else args
            tensors = [each for each in tree_leaves((inputs, read, output)) if isinstance(each, torch.Tensor)]
            self.kernels += 1
            for each in tensors:  # what is repeated is read once
                sizes = (size for size, stride in zip(each.shape, each.stride(), strict=True) if stride)
                self.bytes += math.prod(sizes) * each.element_size()
        return output


def no_attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **kwargs: Any) -> Any:
    """In the place of attention: reads queries, keys and values, of the current tokens alone."""
    read = repeat_kv((key + value)[:, :, -query.shape[2] :], module.num_key_value_groups)
    return (query + read).transpose(1, 2), None


AttentionInterface.register("no_attention", no_attention)
AttentionMaskInterface.register("no_attention", lambda *args, **kwargs: None)


def config_of(method: str, shape: str) -> Any:
    sizes = {NAMES[letter]: size for letter, size in SHAPES[shape].items()}
    return LlamaConfig(**sizes) if method == "llama" else ResFormerConfig.for_method(method, **sizes)


def minimum(config: Any) -> dict[str, int]:
    """Forward and backward, the bytes of each layer's equation: its tensors once each. Empty where they are not clear.

    Of l1 V_0 + l2 V_n, forward V_0, V_n and V'_n; backward dV'_n, V_0, V_n, dV_n, and the sum dV_0 read and written. Of
    an average, forward what it reads and writes; backward all gradients that a state takes, the state and its own. MUDD
    and AttnRes are averages; of MUDD's channels all but one need a norm of their own. Of n streams a sublayer reads and
    writes each, with f(r) and r, where Llama adds f to x; backward their gradients too.
    """
    kinds, mode = {kind.name for kind in kinds_in(config)}, config.value_residual
    known = {"value_residual", "neutreno", "depth_average", "mudd", "mudd_attention", "attnres", "hyper_connections"}
    if not kinds or kinds - known or mode == "depth_attention" or config.mudd_norm:
        return {}
    state, gate = (TOKENS * size * 2 for size in (config.hidden_size, config.num_key_value_heads))
    values, layers = gate * config.head_dim, mixing_layers(config)
    own_is_one = config.value_residual_init[1] == 1  # then dV_n is dV'_n
    of_a_layer = {
        "none": (0, 0),
        "identity": (3 * values, 4 * values),
        "constant": (3 * values, (3 if own_is_one else 4) * values),
        "learnable": (3 * values, 6 * values),
        "learnable_plus": (3 * values, 6 * values),
        # W h is a product by itself: h, and backward h and the sum dh too
        "gated": (3 * values + 2 * gate + state, 6 * values + 3 * gate + 3 * state),
        "dense": (0, 0),
    }
    parts = [tuple(len(layers) * each for each in of_a_layer[mode])]
    if mode == "dense":
        parts.append(of_averages([value_layers(config, layer) for layer in layers], values))
    if "depth_average" in kinds:
        parts.append(of_averages([DepthAverage(config, layer).columns for layer in DepthAverage.layers(config)], state))
    if "neutreno" in kinds:  # A V' read and U written, V_0, V'; backward dU, and the sums dV_0 and dV' read and written
        parts += [(2 * state + 2 * values, state + 4 * values)] * (config.num_hidden_layers - 1)
    if "mudd" in kinds:
        channels = [channels_of(config, block) for block in range(1, config.num_hidden_layers + 1)]
        parts.append(of_averages([range(block + 2) for block in range(len(channels))], state, [*map(len, channels)]))
        norms = sum(max(0, len(each.replace("r", "")) - 1) for each in channels)
        parts.append((2 * norms * state, 3 * norms * state))
    if "attnres" in kinds:
        opens = [opens_block(config, i) for i in range(2 * config.num_hidden_layers)]
        # By the last output in them: the sums that have ended, and the last as far as it has come.
        rows = [[j for j in range(i + 1) if j == i or opens[j]] for i in range(1, len(opens) + 1)]
        sums = opens.count(False)  # backward, a gradient of one is that of the one before it too
        parts += [of_averages(rows, state), (3 * sums * state, sums * state)]
    if "hyper_connections" in kinds:
        n, sublayers = config.hyper_streams, 2 * config.num_hidden_layers
        parts.append((((2 * n - 1) * sublayers + n + 1) * state, (3 * n * sublayers + n + 1) * state))
    return dict(zip(("forward", "backward"), map(sum, zip(*parts, strict=True)), strict=True))


def of_averages(rows: Sequence[Sequence[int]], state: int, sums: Sequence[int] = ()) -> tuple[int, int]:
    """Of averages over these states; `sums` is how many each reader makes of them, or 1."""
    readers = Counter[int]()
    for row, made in zip(rows, sums or [1] * len(rows), strict=True):
        readers.update(dict.fromkeys(row, made))
    written = sum(sums) or len(rows)
    return (sum(map(len, rows)) + written) * state, sum(number + 2 for number in readers.values()) * state


def build(method: str, shape: str, device: str) -> Any:
    made = config_of(method, shape)
    attention = "sdpa" if device == "cuda" else "no_attention"
    with torch.device(device):
        return AutoModelForCausalLM.from_config(made, dtype=torch.bfloat16, attn_implementation=attention)


def steps(model: Any, device: str) -> dict[str, Callable[[], object]]:
    """Forward, backward and decoding, to be run in this order."""
    ids = torch.zeros(1, TOKENS, dtype=torch.long, device=device)
    mask = torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16, device=device) if device == "meta" else None
    hidden = [None]

    def forward() -> None:
        hidden[0] = model.base_model(input_ids=ids, attention_mask=mask, use_cache=False).last_hidden_state

    def backward() -> None:
        torch.autograd.backward(hidden[0], torch.empty_like(hidden[0]))

    with torch.no_grad():
        cache = model.base_model(input_ids=ids[:, :CONTEXT], attention_mask=mask, use_cache=True)[CACHE]

    @torch.no_grad()
    def decode() -> None:
        model.base_model(input_ids=ids[:, :1], attention_mask=mask, use_cache=True, **{CACHE: cache})

    return {"forward": forward, "backward": backward, "decode": decode}


def counted(method: str, shape: str) -> dict[str, dict[str, int]]:
    """Of each step: kernels, bytes, and the minimum. The head and the loss, alike on both sides, are left out."""
    found = {}
    for name, step in steps(build(method, shape, "meta"), "meta").items():
        with Traffic() as traffic:
            step()
        found[name] = {"kernels": traffic.kernels, "bytes": traffic.bytes}
    return with_minimum(found, method, shape)


class AllCompiled(Exception):
    """In the place of running it."""


def counted_compiled(method: str, shape: str) -> dict[str, dict[str, int]]:
    """As `counted`, of what Inductor makes of forward and backward."""
    found: dict[str, dict[str, int]] = {}

    def count(graph: GraphLowering) -> Any:
        graph.init_wrapper_code()
        graph._update_scheduler()
        moved, kernels, _ = graph.count_bytes()
        found["backward" if graph.is_backward else "forward"] = {"kernels": len(kernels), "bytes": moved}
        return SimpleNamespace(call=run, key="", path="", __file__="")

    def run(inputs: Any) -> None:
        raise AllCompiled

    torch.compiler.reset()
    model = build(method, shape, "cpu").base_model
    ids, mask = torch.zeros(1, TOKENS, dtype=torch.long), torch.zeros(1, 1, 1, 1, dtype=torch.bfloat16)
    settings = {"force_non_lazy_backward_lowering": True, "enable_autograd_cache": False}
    with (
        patch.object(GraphLowering, "compile_to_module", count),
        torch._functorch.config.patch(settings),
        torch._inductor.config.patch({"fx_graph_cache": False}),
        suppress(AllCompiled),
    ):
        torch.compile(model, fullgraph=True)(input_ids=ids, attention_mask=mask, use_cache=False)
    return with_minimum(found, method, shape)


def with_minimum(found: dict[str, dict[str, int]], method: str, shape: str) -> dict[str, dict[str, int]]:
    for name, least in minimum(config_of(method, shape)).items() if method != "llama" else ():
        found[name]["minimum"] = least
    return found


def timed(methods: list[str], shape: str) -> dict[str, dict[str, float]]:
    """Median milliseconds of each step after a first one, the methods in turn."""
    found: dict[str, dict[str, list[float]]] = {method: {} for method in methods}
    for _ in range(ROUNDS):
        for method in methods:  # one model at a time: eight billion parameters, and gradients
            model = build(method, shape, "cuda")
            of_model = steps(model, "cuda")
            for number in range(STEPS + 1):
                for name, step in of_model.items():
                    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
                    torch.cuda.synchronize()
                    start.record()
                    step()
                    end.record()
                    torch.cuda.synchronize()
                    if number:
                        found[method].setdefault(name, []).append(start.elapsed_time(end))
                model.zero_grad()
    return {method: {name: statistics.median(each) for name, each in of.items()} for method, of in found.items()}


def main() -> None:
    output, *words = sys.argv[1:]
    shapes = [word for word in words if word in SHAPES] or [*SHAPES]
    chosen = [word for word in words if word in METHODS] or [name for name in METHODS if name != "transformer"]
    if unknown := {*words} - {*SHAPES, *METHODS, "--time", "--compiled"}:
        raise SystemExit(f"neither a method nor a shape: {', '.join(sorted(unknown))}")
    methods = ["llama", *chosen]
    report: dict[str, Any] = {"command": shlex.join(["python", "benchmarks/traffic.py", *sys.argv[1:]])}
    report |= {"tokens": TOKENS, "torch": torch.__version__, "transformers": __version__}
    count = counted_compiled if "--compiled" in words else counted
    report["counted"] = {shape: {method: count(method, shape) for method in methods} for shape in shapes}
    if "--time" in words:
        report["gpu"] = torch.cuda.get_device_name()
        report["milliseconds"] = {shape: timed(methods, shape) for shape in shapes}
    Path(output).write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    for shape, rows in report["counted"].items():
        print(f"{shape}: kernels, GB of {', '.join(rows['llama'])}, of Llama, then what others have more, and least GB")
        for method, row in rows.items():
            llama = {
                name: each if method != "llama" else {"kernels": 0, "bytes": 0} for name, each in rows["llama"].items()
            }
            cells = [
                f"{each['kernels'] - llama[name]['kernels']:6} {(each['bytes'] - llama[name]['bytes']) / 1e9:7.1f}"
                f" {each['minimum'] / 1e9 if 'minimum' in each else math.nan:7.1f}"
                for name, each in row.items()
            ]
            print(f"  {method:24}", *cells)


if __name__ == "__main__":
    main()
