"""Tiny models with random parameters, the same in every test file."""

import gc
import json
import os
import re
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

import command_server
import datasets
import hypothesis
import pytest
import torch
from click.testing import Result
from hub_server import Commands, HubServer
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, TrainerCallback, TrainingArguments
from typer.testing import CliRunner

from resformer import METHODS, ResFormerConfig, connected_config
from resformer.cli import app
from resformer.configuration.methods import connections_of, method_fields
from resformer.modeling.connections import KINDS

Batch = dict[str, torch.Tensor]

#: One model small enough for a core and a second: 6 layers, 4 query and 2 key/value heads of width 8.
TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}

#: What the named methods leave out: half-sharing layers, anchors, and everything at once.
COMBINATIONS: dict[str, dict[str, Any]] = {
    "svformer-anchors": {"value_sources": [0, 0, 0, 3, 3, 3]},
    "shared-keys": {"key_sources": [0, 0, 0, 3, 3, 3]},
    "crossed-sharing": {"key_sources": [0, 0, 2, 2, 4, 4], "value_sources": [0, 1, 1, 1, 0, 5]},
    "kitchen-sink": {
        "value_residual": "dense",
        "neutreno_lambda": 0.3,
        "value_sources": [0, 1, 0, 3, 0, 3],
        "key_sources": [0, 1, 2, 1, 2, 1],
        "dwa": True,
        "dwa_dilation": 2,
        "dwa_period": 2,
        "delta_attention_residuals": True,
        "delta_attention_residual_blocks": 4,
        "attention_bias": True,
        "mlp_bias": True,
        "head_dim": 12,
        "tie_word_embeddings": True,
    },
    "mudd-normed": {
        "mudd": True,
        "mudd_channels": "vkr",
        "mudd_norm": True,
        "value_sources": [0, 1, 0, 3, 0, 3],
        "key_sources": [0, 1, 2, 1, 2, 1],
    },
    "attnres-in-full": {"attnres": True, "attnres_init": 0.5},
    "gated-sink": {
        "value_residual": "gated",
        "neutreno_lambda": 0.3,
        "value_sources": [0, 1, 1, 3, 3, 5],
        "key_sources": [0, 1, 2, 2, 4, 4],
        "value_embeddings": [1, 5],
        "value_embeddings_gate_channels": 7,
        "value_embeddings_gate_limit": 2.0,
        "dwa": True,
        "embedding_residual": True,
        "backout": True,
        "num_key_value_heads": 1,
    },
    "depth-sink": {
        "value_residual": "depth_attention",
        "depth_attention_stride": 2,
        "value_residual_layers": [2, 4, 5],
        "neutreno_lambda": 0.3,
        "key_sources": [0, 1, 0, 1, 4, 1],
        "dwa": True,
        "value_embeddings": [0, 4],
        "attnres": True,
        "attnres_blocks": 4,
        "attnres_init": 0.5,
    },
    "static-streams": {"hyper_connections": "static", "value_sources": [0] * 6, "dwa": True},
    "unmixed-streams": {"hyper_connections": "ihc", "hyper_streams": 3, "value_residual": "learnable"},
}

#: nanochat's decoder, whose layers read the token before too, and windows in it.
SMEAR = {"head_dim": 8, "smear": True}
WINDOWS = {"sliding_window": 4, "layer_types": ["sliding_attention"] * 5 + ["full_attention"]}
#: Decoders of other families: the model type, a method or none, and what it sets.
FAMILIES: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "smear": ("nanochat_2026", "nanochat", {**SMEAR, **WINDOWS}),
    "smear-everywhere": ("nanochat_2026", "nanochat", SMEAR),
    "smear-alone": ("nanochat_2026", None, {**SMEAR, **WINDOWS}),
    "smear-alone-everywhere": ("nanochat_2026", None, SMEAR),
    "llama-alone": ("llama", None, {}),
    "mistral-alone": ("mistral", None, {"sliding_window": 8}),
    "qwen3-alone": ("qwen3", None, {"head_dim": 12}),
}

#: Methods that are others with other coefficients or layers, or two of them together: the twin has them too.
ALIKE = "resformer-constant resformer-sparse resformer-neutreno resformer-denseformer cla2 value-embeddings".split()
VARIANTS = [*(name for name in METHODS if name not in ALIKE), *COMBINATIONS]
#: Every mechanism is in one of these: `make test` runs them, `make test-slow` the others.
QUICK = ("transformer resformer resformer-plus svformer denseformer-4x5 kitchen-sink gated-sink depth-sink").split()


def others_slow(names: Iterable[str], quick: Collection[str] = QUICK) -> list[Any]:
    """Parameters of which those that are not in `quick` are marked slow."""
    return [name if name in quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


hypothesis.settings.register_profile("quick", max_examples=50, deadline=None)
hypothesis.settings.register_profile("full", max_examples=400, deadline=None)  # pytest --hypothesis-profile=full
hypothesis.settings.load_profile("quick")


def pytest_sessionfinish() -> None:
    command_server.stop()


@pytest.fixture(autouse=True, scope="session")
def _nothing_outside(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """No network, and no cache of the user's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
        patch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path_factory.mktemp("datasets"))
        yield


@pytest.fixture(autouse=True)
def _what_is_kept_is_walked_once() -> None:
    """Training libraries call `gc.collect`, which walks all that was ever imported or compiled, for 0.1 s and more."""
    if len(gc.get_objects()) > 30_000:
        gc.collect()
        gc.freeze()


@pytest.fixture(autouse=True)
def _same_random_numbers_for_every_test() -> None:
    torch.manual_seed(0)


@pytest.fixture(params=list(METHODS))
def method(request: pytest.FixtureRequest) -> str:
    """Every named method in turn."""
    return request.param


@pytest.fixture(params=others_slow(VARIANTS))
def variant(request: pytest.FixtureRequest) -> str:
    """Every mechanism and every combination in turn; `indirect=True` makes another choice."""
    return request.param


@pytest.fixture(
    params=others_slow([*VARIANTS, *FAMILIES], [*QUICK, "smear", "smear-alone-everywhere", "mistral-alone"])
)
def decoder(request: pytest.FixtureRequest) -> str:
    """Every variant and every decoder of another family in turn."""
    return request.param


@pytest.fixture(
    scope="session",
    params=[
        "cpu",
        pytest.param(
            "cuda",
            marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")],
        ),
    ],
)
def device(request: pytest.FixtureRequest) -> str:
    """The CPU, and a GPU where there is one: `make test-gpu`."""
    return request.param


def moved(batch: Batch, device: str) -> Batch:
    return {name: tensor.to(device) for name, tensor in batch.items()}


def tiny_config(variant: str = "transformer", **fields: Any) -> Any:
    """The configuration of a method or combination, with fields on top."""
    if variant in FAMILIES:
        family, method, own = FAMILIES[variant]
        return family_config(family, method, **own, **fields)
    if variant in COMBINATIONS:
        return ResFormerConfig(**{**TINY, **COMBINATIONS[variant], **fields})
    return ResFormerConfig.for_method(variant, **{**TINY, **fields})


def family_config(model_type: str, variant: str | None, **fields: Any) -> Any:
    """As `tiny_config`, of another family; `None` is the family's own."""
    plain = AutoConfig.for_model(model_type, **{**TINY, **fields})
    if variant is None:
        return plain
    return connected_config(plain, variant if variant in METHODS else connections_of(tiny_config(variant)))


def starting_as_llama(method: str, num_layers: int) -> dict[str, Any]:
    """The connection fields of a retrofit."""
    fields = method_fields(method, num_layers)
    for kind in KINDS:
        fields = kind.plain_start(fields) | fields
    return fields


def randomise(model: PreTrainedModel, seed: int = 0) -> PreTrainedModel:
    """Draws every parameter anew, the mixing ones too, from numbers that float32 holds exactly."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        mixing = any(part in name for part in ("value_residual", "value_embedding", "depth_average"))
        # Larger queries over depth choose one source by a hair, and rounding chooses another; sums of sums would grow.
        size = 0.5 if mixing else 0.1 if "attnres" in name or ".mudd." in name else 0.3
        noise = torch.randn(parameter.shape, generator=generator) * size
        around_one = re.search("norm|embedding_residual|mudd.pre", name)  # a layer forgets the stream at 0
        around_start = 0.3 * noise + parameter.data if "hyper" in name else noise  # streams grow with depth elsewhere
        parameter.data.copy_(noise + 1.0 if around_one else around_start)
    return model


def tiny_model(
    variant: str = "transformer",
    *,
    model_class: type[PreTrainedModel] | None = None,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
    **fields: Any,
) -> PreTrainedModel:
    """A model of a variant with random parameters, in eval mode."""
    config = tiny_config(variant, **fields)
    config._attn_implementation = attention
    model = model_class(config) if model_class else AutoModelForCausalLM.from_config(config)
    return randomise(model, seed).to(dtype).eval()


def three_prompts() -> Batch:
    mask = torch.ones(3, 11, dtype=torch.long)
    mask[1, :5] = 0
    mask[2, :3] = 0
    ids = torch.randint(3, 97, (3, 11), generator=torch.Generator().manual_seed(1)) * mask
    return {"input_ids": ids, "attention_mask": mask}


#: Prompts of 11, 6 and 8 tokens, padded on the left.
RAGGED = three_prompts()


def training_rows(count: int) -> list[Batch]:
    """Random tokens; row n has labels on its last n mod 9 + 3 tokens only, so that batches differ in their number."""
    ids = torch.randint(3, TINY["vocab_size"], (count, 12), generator=torch.Generator().manual_seed(0))
    labels = ids.clone()
    for n in range(count):
        labels[n, : 9 - n % 9] = -100
    return [{"input_ids": ids[n], "labels": labels[n]} for n in range(count)]


def training_arguments(folder: Path, **options: Any) -> TrainingArguments:
    """SGD, whose steps follow the gradients: AdamW's first steps are signs, which rounding turns over near 0."""
    fixed: dict[str, Any] = {
        "per_device_train_batch_size": 4,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "logging_steps": 1,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return TrainingArguments(folder, **{**fixed, **options})


class Stop(TrainerCallback):
    """Interrupts a training after a step at which `when(state)` is true."""

    def __init__(self, when: Callable[[Any], bool]):
        self.when = when

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.when(state):
            raise KeyboardInterrupt


def cli(*arguments: object) -> Result:
    """`resformer ARGUMENTS` in this process."""
    return CliRunner().invoke(app, [*map(str, arguments)])


SNAPSHOTS = Path(__file__).parent / "snapshots"
WRITE_SNAPSHOTS = os.environ.get("SNAPSHOTS") == "write"


def assert_snapshot(name: str, text: str) -> None:
    """Compares a text with the file in `snapshots`; SNAPSHOTS=write writes it: read the diff before you commit it."""
    if WRITE_SNAPSHOTS:
        (SNAPSHOTS / name).write_text(text, encoding="utf-8")
    assert text == (SNAPSHOTS / name).read_text(encoding="utf-8"), f"{name} differs: SNAPSHOTS=write writes it anew"


def assert_said(name: str, said: dict[str, str], **places: object) -> None:
    """Compares whole messages, by their cases, with `snapshots/NAME.json`; `tmp=path` puts `<tmp>` for a path."""
    for place, path in places.items():
        said = {case: text.replace(str(path), f"<{place}>") for case, text in said.items()}
    said = {case: text.replace(", ".join(METHODS), "<methods>") for case, text in said.items()}
    said = {case: re.sub(r"\b[0-9a-f]{40,}\b", "<hash>", text) for case, text in said.items()}
    assert_snapshot(f"{name}.json", json.dumps(said, indent=0, ensure_ascii=False) + "\n")


def assert_one_said(name: str, case: str, said: str) -> None:
    """Compares the message of one case, where each is a test of its own."""
    expected = json.loads((SNAPSHOTS / f"{name}.json").read_text(encoding="utf-8"))
    assert_said(name, {**expected, case: said})


def assert_answers(name: str, answer: Callable[[str], str], **places: object) -> None:
    """Asks every case of `snapshots/NAME.json` again, and compares the answers."""
    asked = json.loads((SNAPSHOTS / f"{name}.json").read_text(encoding="utf-8"))
    assert_said(name, {case: answer(case) for case in asked}, **places)


@pytest.fixture(scope="session")
def hub_commands(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Commands]:
    with HubServer() as hub:
        yield Commands(hub, tmp_path_factory.mktemp("hub"))


@pytest.fixture
def commands(hub_commands: Commands, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Commands:
    """Runs commands in `tmp_path` against an empty Hub."""
    hub_commands.hub.reset()
    hub_commands.direct(monkeypatch)
    monkeypatch.chdir(tmp_path)
    return hub_commands


@pytest.fixture
def invoke(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Result]:
    """`invoke(folder, "finetune", "source")`: `resformer finetune source` in this process and in that folder."""

    def run(folder: Path, *arguments: object) -> Result:
        monkeypatch.chdir(folder)
        datasets.disable_progress_bars()  # as the command itself does off a terminal, before tqdm is imported
        result = cli(*arguments)
        datasets.enable_progress_bars()
        return result

    return run


def windowed_model(variant: str, window: int) -> PreTrainedModel:
    """As `tiny_model`, in Mistral's class, whose layers all have a sliding window."""
    return randomise(AutoModelForCausalLM.from_config(family_config("mistral", variant, sliding_window=window))).eval()
