"""`transformers serve` answers the `openai` client with our checkpoints, and serving backends find what they need."""

import inspect
import os
import re
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SIZES, byte_tokenizer
from conftest import Batch, TinyModel
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, AutoTokenizer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.utils.import_utils import is_serve_available

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.configuration import key_sources, value_sources

PROMPT = "Keys and values of"

needs_server = pytest.mark.skipif(
    not is_serve_available(), reason="`transformers serve` needs fastapi, uvicorn and openai: pip install '.[test]'"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random SVFormer that also mixes, with a tokenizer and a chat template."""
    folder = tmp_path_factory.mktemp("served") / "model"
    torch.manual_seed(0)
    sharing = {"value_sources": [0, 1, 1, 3, 3, 3], "value_residual": "learnable", "dwa": True}
    model = ResFormerForCausalLM(ResFormerConfig(**SIZES, **sharing))
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


def expected_text(checkpoint: Path, tokens: int) -> str:
    model = AutoModelForCausalLM.from_pretrained(checkpoint).eval()
    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    got = model.generate(ids, max_new_tokens=tokens, do_sample=False, use_cache=False)[0, ids.shape[1] :]
    return tokenizer.decode(got, skip_special_tokens=True)


def serve(checkpoint: Path, log: Path, *options: str) -> Iterator[str]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "resformer.serving", str(checkpoint), "--host", "127.0.0.1", "--port", str(port)]
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    with log.open("w") as output:
        server = subprocess.Popen(
            [*command, "--device", "cpu", *options], env=environment, stdout=output, stderr=subprocess.STDOUT
        )
        try:
            while True:
                with socket.socket() as probe:
                    if probe.connect_ex(("127.0.0.1", port)) == 0:
                        break
                assert server.poll() is None, f"the server ended: {log.read_text()[-3000:]}"
                time.sleep(0.2)
            yield f"http://127.0.0.1:{port}/v1"
        finally:
            server.terminate()
            server.wait(30)


@needs_server
@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [(), ("--continuous-batching", "--cb-max-memory-percent", "0.1")],
    ids=["one by one", "continuous batching"],
)
def test_served_checkpoint_answers_the_openai_client(
    checkpoint: Path, options: tuple[str, ...], tmp_path: Path
) -> None:
    from openai import OpenAI

    text = expected_text(checkpoint, 12)
    assert len(text) > 3
    for address in serve(checkpoint, tmp_path / "log", *options):
        client = OpenAI(base_url=address, api_key="none", timeout=120, max_retries=0)
        request: dict[str, Any] = {
            "model": str(checkpoint),
            "messages": [{"role": "user", "content": PROMPT}],
            "max_tokens": 12,
            "temperature": 0.0,
        }
        answer = client.chat.completions.create(**request, extra_body={"generation_config": GREEDY})
        assert answer.choices[0].message.content == text
        pieces = client.chat.completions.create(**request, extra_body={"generation_config": GREEDY}, stream=True)
        streamed = "".join(piece.choices[0].delta.content or "" for piece in pieces if piece.choices)
        assert streamed.rstrip("\ufffd") == text.rstrip("\ufffd")  # half a character at the end is not streamed


GREEDY = '{"do_sample": false, "max_new_tokens": 12, "eos_token_id": 0, "pad_token_id": 0}'


# What vLLM's and SGLang's Transformers backends ask of a model


@pytest.fixture
def engine() -> Iterator[tuple[str, dict[int, dict[str, Any]]]]:
    """An attention function as an engine brings one: keeps its own cache, finds each layer's by `layer_idx`."""
    notes: dict[int, dict[str, Any]] = {}

    def attend(
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        attention_instances: dict[int, list[torch.Tensor]],
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        pages = attention_instances[module.layer_idx]
        notes[module.layer_idx] = {"new": key.shape, "values": value.shape, "mask": attention_mask, **kwargs}
        pages.append((key, value))
        keys, values = (torch.cat(parts, dim=2) for parts in zip(*pages, strict=True))
        past = keys.shape[2] - query.shape[2]
        seen = torch.ones(query.shape[2], keys.shape[2], dtype=torch.bool).tril(past)
        return ALL_ATTENTION_FUNCTIONS["sdpa"](module, query, keys, values, seen[None, None], scaling=kwargs["scaling"])

    AttentionInterface.register("engine", attend)
    yield "engine", notes
    del AttentionInterface._global_mapping["engine"]


def test_an_engines_attention_sees_each_layer_once_with_the_current_tokens(
    tiny_model: TinyModel, variant: str, ragged: Batch, engine: tuple[str, dict[int, dict[str, Any]]]
) -> None:
    # As vLLM's backend calls it: no cache of ours, its own arguments, the base model, `return_dict=False`.
    name, notes = engine
    model = tiny_model(variant, sliding_window=None, layer_types=None)
    ids = ragged["input_ids"][:1]
    with torch.no_grad():
        expected = model.model(ids, use_cache=False).last_hidden_state
        model.set_attn_implementation(name)
        pages: dict[int, list[Any]] = {layer: [] for layer in range(6)}
        for part, positions in (
            (ids[:, :7], torch.arange(7)),
            *((ids[:, n : n + 1], torch.tensor([n])) for n in range(7, 11)),
        ):
            notes.clear()
            got = model.model(
                input_ids=part,
                position_ids=positions[None],
                use_cache=False,
                return_dict=False,
                attention_mask=dict.fromkeys(model.config.layer_types),
                attention_instances=pages,
            )[0]
            assert sorted(notes) == list(range(6)), "one attention call for each layer"
            shape = (1, model.config.num_key_value_heads, part.shape[1], model.config.head_dim)
            assert all(note["new"] == note["values"] == shape for note in notes.values())
            torch.testing.assert_close(got, expected[:, positions], rtol=1e-4, atol=1e-4)


def test_every_level_hands_arguments_down(tiny_model: TinyModel) -> None:
    model = tiny_model("resformer")
    for module in (model, model.model, model.model.layers[0], model.model.layers[0].self_attn):
        kinds = [parameter.kind for parameter in inspect.signature(type(module).forward).parameters.values()]
        assert inspect.Parameter.VAR_KEYWORD in kinds, type(module)
    assert model._supports_attention_backend


def test_the_only_list_of_modules_is_the_layers(tiny_model: TinyModel, variant: str) -> None:
    # An engine takes a ModuleList, or anything as long as the layers, for the layers.
    model = tiny_model(variant)
    lists = [name for name, module in model.named_modules() if isinstance(module, nn.ModuleList)]
    assert lists == ["model.layers"]
    assert [layer.self_attn.layer_idx for layer in model.model.layers] == list(range(6))


def test_projections_are_linear_layers_that_engines_may_replace(tiny_model: TinyModel, variant: str) -> None:
    model = tiny_model(variant)
    plan = model.config.base_model_tp_plan
    for n, layer in enumerate(model.model.layers):
        names = [name for name, module in layer.named_modules() if isinstance(module, nn.Linear)]
        for name in names:
            assert f"layers.*.{name}" in plan, name
        assert ("self_attn.k_proj" in names) == (key_sources(model.config)[n] == n)
        assert ("self_attn.v_proj" in names) == (value_sources(model.config)[n] == n)

    class EngineLinear(nn.Module):  # vLLM's have a weight, and `input_size` for `in_features`
        def __init__(self, linear: nn.Linear):
            super().__init__()
            self.weight, self.bias = linear.weight, linear.bias

        def forward(self, states: torch.Tensor) -> torch.Tensor:
            return nn.functional.linear(states, self.weight, self.bias)

    ids = torch.arange(12).view(2, 6)
    expected = model(ids).logits
    for name, module in [*model.model.named_modules()]:
        if isinstance(module, nn.Linear):
            model.model.set_submodule(name, EngineLinear(module))
    assert torch.equal(model(ids).logits, expected)


def test_the_tensor_parallel_plan_names_what_the_model_has(tiny_model: TinyModel, variant: str) -> None:
    model = tiny_model(variant)
    names = {re.sub(r"\d+", "*", name.rpartition(".")[0]) for name in model.state_dict()}
    assert model.tp_plan.keys() <= names | {re.sub(r"\d+", "*", name) for name in model.state_dict()}
    replicated = ("norm", "depth_average", "attention_residuals")
    assert {name for name in names if not any(part in name for part in replicated)} <= model.tp_plan.keys()
