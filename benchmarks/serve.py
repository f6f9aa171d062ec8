"""vLLM against Transformers: tokens and log probabilities of families with connections, and the speed.

    .venv-vllm/bin/python benchmarks/serve.py families --output benchmarks/results/vllm_families.json
    .venv-vllm/bin/python benchmarks/serve.py speed --output benchmarks/results/vllm_speed.json

`families`: random models of 6 layers whose coefficients are moved; prompts of 7, 40 and 130 tokens in one batch, then
one that shares a page with the third; 64 tokens computed at a time, 16 greedy tokens each, beside `generate`.

`speed`: 32 prompts of 256 random tokens, 64 new tokens each. Every arm runs in a process of its own that is kept, one
at a time, in an order that turns with the rounds. A ratio is the median over the rounds of the ratio within a round,
of seconds on one thread of the processor, as other processes may hold it.
"""

import argparse
import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, ContinuousBatchingConfig, GenerationConfig, LlamaConfig

import resformer
from resformer import METHODS, connect

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_DISABLE_COMPILE_CACHE": "1",
}
COMMON: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "max_position_embeddings": 512}
SMALL = {"vocab_size": 300, "hidden_size": 128, "intermediate_size": 192, "num_hidden_layers": 6, "head_dim": 32}
SMALL |= {"num_attention_heads": 4, "num_key_value_heads": 2, "pad_token_id": 0, **COMMON}
MIXTURE = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
WINDOWS = {"sliding_window": 16, "layer_types": (["sliding_attention"] * 2 + ["full_attention"]) * 2}
#: Family -> what differs in its small model.
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": MIXTURE,
    "gemma3_text": WINDOWS,
    "gemma2": WINDOWS,
    "mistral": {"sliding_window": None},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "qwen2": {},
    "olmo2": {},
    "olmo3": WINDOWS,
    "phi3": {},
    "glm4": {},
    "granite": {"logits_scaling": 3.0},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, **WINDOWS},
    "smollm3": {},
    "hyperclovax": {},  # is refused
}
#: What all families are tried with; `EACH` with every method.
SOME = ("resformer", "resformer-denseformer", "svformer", "cla2")
EACH = ("llama", "qwen3", "qwen3_moe", "gemma3_text")
COMPILED = [*((family, method) for family in EACH for method in SOME), ("qwen3", "value-embeddings")]
COMPILED += [("qwen3", "nanochat"), ("qwen3", "delta-attention-residuals"), ("qwen3", "depth-attention")]
LARGE = {"vocab_size": 32000, "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 12}
LARGE |= {"num_attention_heads": 8, "num_key_value_heads": 4, "tie_word_embeddings": True, **COMMON}
IDS = torch.randint(1, 300, (32, 256), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [IDS[0][:7], IDS[1][:40], IDS[2][:130], IDS[2][:128] + IDS[3][:10]]
NEW = 16
ARMS = {  # arm -> (method, or Llama's own class; engine)
    "Transformers' continuous batching, Llama": ("llama", "transformers"),
    "Llama": ("llama", "vllm"),
    **{method: (method, "vllm") for method in ("transformer", "resformer", "svformer", "denseformer", "cla2")},
}


def save(method: str, config: Any, folder: Path) -> None:
    """A random model with its coefficients moved."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config)
    if method != "llama":
        connect(model, method, lossy=True)
    for name, parameter in model.named_parameters():
        scale = 0.3 if any(part in name for part in ("value_", "depth_", "residuals")) else 0.15
        around = parameter.data if "hyper" in name else ("norm" in name or "embedding_residual" in name)
        parameter.data = torch.randn(parameter.shape) * scale + around
    model.save_pretrained(folder)


def vllm_engine(folder: Path, dtype: str, **options: Any) -> Any:
    from vllm import LLM

    return LLM(str(folder), dtype=dtype, skip_tokenizer_init=True, **{"enforce_eager": True, **options})


def vllm_answers(llm: Any, prompts: list[list[int]], tokens: int, **options: Any) -> list[Any]:
    from vllm import SamplingParams

    asked = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True, detokenize=False, **options)
    return llm.generate([{"prompt_token_ids": each} for each in prompts], asked, use_tqdm=False)


def generated(folder: Path) -> list[Any]:
    """What Transformers makes of each prompt."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    asked = {"max_new_tokens": NEW, "do_sample": False, "output_logits": True, "return_dict_in_generate": True}
    return [model.generate(torch.tensor([prompt]), **asked) for prompt in PROMPTS]


def served(folder: Path, expected: list[Any], **options: Any) -> dict[str, Any]:
    """What vLLM makes of them, beside that."""
    llm = vllm_engine(folder, "float32", max_num_batched_tokens=64, max_num_seqs=8, **options)
    answers = [each for part in (PROMPTS[:3], PROMPTS[3:]) for each in vllm_answers(llm, part, NEW, logprobs=0)]
    equal, largest = 0, 0.0
    for output, answer in zip(expected, answers, strict=True):
        wanted = torch.cat(output.logits).log_softmax(-1)
        tokens = output.sequences[0, -NEW:].tolist()
        for step, (token, found) in enumerate(zip(tokens, answer.outputs[0].logprobs, strict=True)):
            if answer.outputs[0].token_ids[step] != token:  # what follows has another prefix
                break
            equal += 1
            largest = max(largest, abs(found[token].logprob - wanted[step, token].item()))
    cache = llm.llm_engine.vllm_config.cache_config
    row = {"equal": equal, "of": NEW * len(PROMPTS), "largest": largest, "of pages": answers[3].num_cached_tokens}
    row["tokens of cache"] = cache.num_gpu_blocks * cache.block_size
    llm.llm_engine.engine_core.shutdown()
    return row


def compare_families(cases: list[tuple[str, str, str]], rows: list[dict[str, Any]], write: Any) -> None:
    """Of each (family, method, "eager", "compiled" or "two ranks")."""
    options = {"eager": {}, "compiled": {"enforce_eager": False}, "two ranks": {"tensor_parallel_size": 2}}
    with tempfile.TemporaryDirectory() as scratch:
        # vLLM decorates our classes in its process: what Transformers gives comes first.
        expected: dict[Path, Any] = {}
        for family, method in dict.fromkeys((family, method) for family, method, _ in cases):
            folder = Path(scratch, family, method)
            try:
                save(method, AutoConfig.for_model(family, **{**SMALL, **FAMILIES[family]}), folder)
                expected[folder] = generated(folder)
            except ValueError as error:  # `connect` refuses it
                expected[folder] = error
        for family, method, mode in cases:
            folder = Path(scratch, family, method)
            row = {"family": family, "method": method, "mode": mode}
            try:
                if isinstance(expected[folder], ValueError):
                    raise expected[folder]
                row |= served(folder, expected[folder], **options[mode])
            except (RuntimeError, ValueError) as error:
                row["error"] = str(error).splitlines()[0]
            rows.append(row)
            print(row, flush=True)
            write()


def chosen_cases(options: argparse.Namespace) -> list[tuple[str, str, str]]:
    if options.case:
        return [tuple(each) for each in options.case]
    plain = {"transformer", "llama"}
    eager = [
        (family, method, "eager")
        for family in FAMILIES
        for method in ([each for each in METHODS if each not in plain] if family in EACH else SOME)
    ]
    return eager + [(*each, "compiled") for each in COMPILED] + [("qwen3", "resformer-gated", "two ranks")]


def arm(model: str, engine: str) -> None:
    """Answers each line of stdin with the seconds of one run, on the clock and on the processor."""
    with tempfile.TemporaryDirectory() as scratch:
        save(model, LlamaConfig(**LARGE), Path(scratch))
        if engine == "vllm":
            llm = vllm_engine(Path(scratch), "float32", enable_prefix_caching=False, num_gpu_blocks_override=128)
        else:
            loaded = AutoModelForCausalLM.from_pretrained(scratch, dtype=torch.float32).eval()

    def run(prompts: list[list[int]], tokens: int) -> tuple[float, float]:
        began = time.perf_counter(), time.process_time()
        if engine == "vllm":
            made = [len(each.outputs[0].token_ids) for each in vllm_answers(llm, prompts, tokens)]
        else:
            settings = GenerationConfig(max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0)
            pages = ContinuousBatchingConfig(num_blocks=64, max_batch_tokens=2048)  # of 256 tokens
            answers = loaded.generate_batch(prompts, settings, continuous_batching_config=pages)
            made = [len(each.generated_tokens) for each in answers.values()]
        seconds = time.perf_counter() - began[0], time.process_time() - began[1]
        assert made == [tokens] * len(prompts), made
        return seconds

    run(IDS[:2], 4)
    print("SECONDS", flush=True)
    for _ in sys.stdin:
        print("SECONDS", *run(IDS, 64), flush=True)


def compare_speed(rows: dict[str, list[list[float]]], rounds: int, write: Any) -> None:
    def answer(process: Any) -> list[float]:
        for line in process.stdout:
            if line.startswith("SECONDS"):
                return [float(each) for each in line.split()[1:]]
        raise SystemExit(f"{process.args}: ended")

    processes = {}
    for name, (model, engine) in ARMS.items():
        command = [sys.executable, __file__, "arm", "--arm", model, engine]
        processes[name] = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1)
        answer(processes[name])
        print(name, "is ready", flush=True)
    for number in range(rounds):
        order = list(ARMS)[number % len(ARMS) :] + list(ARMS)[: number % len(ARMS)]
        for name in order:
            processes[name].stdin.write("go\n")
            rows.setdefault(name, []).append(answer(processes[name]))
            print(number, name, rows[name][-1], flush=True)
        write()
    for process in processes.values():
        process.stdin.close()
        process.wait()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=("families", "speed", "arm"))
    parser.add_argument("--arm", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--case", nargs=3, action="append", metavar=("FAMILY", "METHOD", "MODE"), help="only these")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    if options.part == "arm":
        return arm(*options.arm)
    from vllm import __version__ as vllm_version

    versions = {"vllm": vllm_version, "transformers": transformers.__version__, "torch": torch.__version__}
    results: dict[str, Any] = {
        "command": shlex.join(["python", *sys.argv]),
        "versions": {"resformer": resformer.__version__, **versions, "python": platform.python_version()},
        "threads": torch.get_num_threads(),
    }

    def write() -> None:
        llama = results.get("seconds", {}).get("Llama")
        for name, runs in results.get("seconds", {}).items():
            results.setdefault("arms", {})[name] = {
                "tokens a second": statistics.median(32 * 64 / cpu for _, cpu in runs),
                "of Llama": statistics.median(base / cpu for (_, cpu), (_, base) in zip(runs, llama, strict=True)),
            }
        options.output.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")

    if options.part == "families":
        compare_families(chosen_cases(options), results.setdefault("rows", []), write)
        return None
    compare_speed(results.setdefault("seconds", {}), options.rounds, write)
    return None


if __name__ == "__main__":
    main()
