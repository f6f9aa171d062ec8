"""The servers of docs/serving.md answer the `openai` client; the plan of tensor parallelism names what a model has."""

import os
import re
import socket
import string
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SIZES, byte_tokenizer
from conftest import tiny_model
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils.import_utils import is_serve_available

from resformer import ResFormerConfig, ResFormerForCausalLM, bundle

PAGE = (Path(__file__).parents[1] / "docs" / "serving.md").read_text(encoding="utf-8")
PROMPT = "Keys and values of"
STARTS = re.findall(r"^    ((?:resformer serve|vllm serve) .*)$", PAGE, re.MULTILINE)
CLIENT, SCORES = re.findall(r"^```python\n(.*?)^```", PAGE[PAGE.index("An OpenAI server") :], re.MULTILINE | re.DOTALL)
TRANSFORMERS = [pytest.mark.slow, pytest.mark.skipif(not is_serve_available(), reason="no `transformers serve`")]
VLLM = [pytest.mark.vllm, pytest.mark.skipif(find_spec("vllm") is None, reason="no vLLM: make test-vllm")]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SVFormer that also mixes, with a tokenizer and a chat template; its bundle in `bundle` beside it."""
    folder = tmp_path_factory.mktemp("served") / "checkpoint"
    torch.manual_seed(0)
    sharing = {"value_sources": [0, 1, 1, 3, 3, 3], "value_residual": "learnable", "dwa": True, "head_dim": 32}
    model = ResFormerForCausalLM(ResFormerConfig(**SIZES, **sharing))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    letters = byte_tokenizer()(string.ascii_letters).input_ids
    others = [token for token in range(SIZES["vocab_size"]) if token not in letters]
    model.lm_head.weight.data[others] = 0.0  # bytes that are no whole characters are shown in several ways
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    bundle(folder, folder.parent / "bundle", progress=False)
    return folder


def expected_text(checkpoint: Path, tokens: int) -> str:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    got = model.generate(ids, max_new_tokens=tokens, do_sample=False, use_cache=False)[0, ids.shape[1] :]
    return tokenizer.decode(got, skip_special_tokens=True)


@contextmanager
def serving(command: str, log: Path, **environment: str) -> Iterator[int]:
    """Runs the page's command on a free port."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program, *arguments = command.replace("8000", str(port)).split()
    launch = {
        "resformer": [sys.executable, "-m", "resformer"],
        "vllm": [sys.executable, "-m", "vllm.entrypoints.cli.main"],
    }[program]
    quiet = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1", **environment}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*launch, *arguments], env={**os.environ, **quiet}, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert server.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
                time.sleep(0.2)
            yield port
        finally:
            server.terminate()
            server.wait(30)


@pytest.mark.parametrize(
    ("start", "options"),
    [
        pytest.param(0, "--device cpu", id="transformers", marks=TRANSFORMERS),
        pytest.param(
            0,
            "--device cpu --continuous-batching --cb-max-memory-percent 0.1",
            id="transformers, continuous batching",
            marks=TRANSFORMERS,
        ),
        pytest.param(1, "--enforce-eager --dtype float32", id="vllm", marks=VLLM),
        pytest.param(2, "--dtype float32", id="vllm, a bundle, compiled", marks=VLLM),
    ],
)
def test_the_pages_servers_answer_the_pages_client(start: int, options: str, checkpoint: Path, tmp_path: Path) -> None:
    text = expected_text(checkpoint, 12)
    assert len(text) > 3
    kind = "bundle" if "bundle" in STARTS[start] else "checkpoint"
    served = str(checkpoint.parent / kind)
    # A bundle is for a vLLM that knows nothing of us: no plug-in is called.
    environment = {"VLLM_CPU_KVCACHE_SPACE": "1", **({"VLLM_PLUGINS": ""} if kind == "bundle" else {})}
    command = STARTS[start].replace(f"path/to/{kind}", served)
    with serving(f"{command} {options}", tmp_path / "log", **environment) as port:
        found: dict[str, Any] = {}
        exec(CLIENT.replace("8000", str(port)).replace("path/to/checkpoint", served), found)
        assert (found["completion"], found["chat"]) == (text, text)
        assert found["streamed"].rstrip("\ufffd") == text.rstrip(
            "\ufffd"
        )  # half a character at the end is not streamed
        if command.startswith("vllm"):
            exec(SCORES, found)
            scores = found["choice"].logprobs.token_logprobs
            model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
            ids = AutoTokenizer.from_pretrained(checkpoint)(PROMPT, return_tensors="pt").input_ids
            wanted = model.generate(
                ids, max_new_tokens=12, do_sample=False, output_logits=True, return_dict_in_generate=True
            ).logits
            assert scores == pytest.approx([each.log_softmax(-1).max().item() for each in wanted], abs=1e-3)


def test_the_tensor_parallel_plan_names_what_the_model_has(variant: str) -> None:
    model = tiny_model(variant)
    names = {re.sub(r"\d+", "*", name.rpartition(".")[0]) for name in model.state_dict()}
    assert model.tp_plan.keys() <= names | {re.sub(r"\d+", "*", name) for name in model.state_dict()}
    replicated = r"norm|depth_average|attention_residuals|attnres|mudd|embedding_residual|backout|hyper_connections"
    assert {name for name in names if not re.search(replicated, name)} <= model.tp_plan.keys()
