"""The stock Trainer's options change how a model is trained, never what it learns; parts of a model learn alone."""

import mmap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import COMBINATIONS, TINY, others_slow, tiny_config, tiny_model, training_arguments, training_rows
from transformers import AutoModelForCausalLM, Trainer

from resformer import ResFormerConfig, ResFormerForCausalLM
from resformer.configuration import key_sources, value_sources
from resformer.environment import peak_memory
from resformer.training.freezing import trained_parameters
from resformer.training.optimizer import ConnectionTrainer, is_connection, set_connection_learning_rate

#: One of every mechanism, and their combination.
TRAINED = others_slow(
    "transformer resformer resformer-plus resformer-dense resformer-gated depth-attention value-embeddings svformer "
    "cla2 denseformer resformer-denseformer neutreno attention-residuals".split(),
    ["resformer-gated", "resformer-denseformer", "svformer"],
)

Build = Callable[..., Trainer]


@pytest.fixture
def trainer(tmp_path: Path) -> Build:
    """`trainer("svformer", max_steps=2)`: a Trainer of a model that starts alike each time, on the same rows."""

    def build(method: str, model_fields: dict[str, Any] | None = None, **options: Any) -> Trainer:
        torch.manual_seed(0)
        fields = {**TINY, "num_hidden_layers": 4, "initializer_range": 0.2, **(model_fields or {})}
        model = ResFormerForCausalLM(ResFormerConfig.for_method(method, **fields))
        of_the_trainer = ("connection_learning_rate", "eval_dataset", "optimizer_cls_and_kwargs")
        rest = {name: options.pop(name) for name in of_the_trainer if name in options}
        arguments = training_arguments(tmp_path / "run", **{"max_steps": 3, "learning_rate": 0.1, **options})
        return ConnectionTrainer(model=model, args=arguments, train_dataset=training_rows(16), **rest)

    return build


def losses(trainer: Trainer) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def trained(trainer: Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step, and the weights after the last."""
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    return losses(trainer), {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


def assert_trained_alike(
    got: tuple[list[float], dict[str, torch.Tensor]], expected: tuple[list[float], dict[str, torch.Tensor]]
) -> None:
    torch.testing.assert_close(got[0], expected[0], rtol=1e-5, atol=0.0)
    assert got[1].keys() == expected[1].keys()
    for name, parameter in expected[1].items():
        torch.testing.assert_close(
            got[1][name], parameter, rtol=1e-4, atol=1e-5, msg=lambda text, name=name: name + text
        )


@pytest.mark.parametrize("method", TRAINED)
def test_accumulation_and_checkpointing_learn_what_the_plain_run_learns(method: str, trainer: Build) -> None:
    plain = trainer(method)
    before = {name: parameter.detach().clone() for name, parameter in plain.model.named_parameters()}
    expected = trained(plain)
    for name, parameter in expected[1].items():
        assert (parameter - before[name]).abs().max() > 1e-4, name
    for options in (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"activation_checkpointing": True},
    ):
        assert_trained_alike(trained(trainer(method, **options)), expected)


@pytest.mark.parametrize("method", ["resformer-gated", "resformer-denseformer"])
def test_bf16_trains_close_to_float32(method: str, trainer: Build) -> None:
    expected, got = trained(trainer(method)), trained(trainer(method, bf16=True))
    assert got[0] != expected[0]
    torch.testing.assert_close(got[0], expected[0], rtol=0.02, atol=0.0)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["resformer-gated", "resformer-denseformer"])
def test_compiled_training_learns_what_the_plain_run_learns(method: str, trainer: Build) -> None:
    expected = trained(trainer(method, {"num_hidden_layers": 2}))
    torch.compiler.reset()
    compiled = trainer(method, {"num_hidden_layers": 2}, torch_compile=True)
    assert_trained_alike(trained(compiled), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    compiled.save_model()
    again = AutoModelForCausalLM.from_pretrained(compiled.args.output_dir)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter, expected[1][name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("method", TRAINED)
def test_a_resumed_run_is_the_uninterrupted_one_bit_for_bit(method: str, dtype: torch.dtype, trainer: Build) -> None:
    def build() -> Trainer:
        options = {"max_steps": 4, "save_strategy": "steps", "save_steps": 2, "lr_scheduler_type": "cosine"}
        options |= {"optim": "adamw_torch", "learning_rate": 1e-2, "weight_decay": 0.1}
        built = trainer(method, {"attention_dropout": 0.2}, connection_learning_rate=3e-2, **options)
        for name, parameter in built.model.named_parameters():
            if not is_connection(name):
                parameter.data = parameter.data.to(dtype)
        return built

    whole = build()
    expected = trained(whole)
    again = build()
    again.train(resume_from_checkpoint=str(Path(again.args.output_dir) / "checkpoint-2"))
    assert losses(again) == expected[0]
    assert len(expected[0]) == 4
    for name, parameter in again.model.named_parameters():
        assert torch.equal(parameter, expected[1][name]), name
    states = [run.optimizer.state_dict()["state"] for run in (again, whole)]
    assert states[0].keys() == states[1].keys()
    for mine, theirs in zip(states[0].values(), states[1].values(), strict=True):
        assert all(torch.equal(mine[key], theirs[key]) for key in ("step", "exp_avg", "exp_avg_sq"))


#: What is asked of the Trainer -> the name of the optimizer's class that it makes.
OPTIMIZERS: dict[str, tuple[dict[str, Any], str]] = {
    "adamw_torch": ({"optim": "adamw_torch"}, "AdamW"),
    "adamw_bnb_8bit": ({"optim": "adamw_bnb_8bit"}, "AdamW"),
    "galore_adamw": ({"optim": "galore_adamw", "optim_target_modules": "all-linear", "optim_args": "rank=4"}, "AdamW"),
    "adafactor": ({"optim": "adafactor"}, "Adafactor"),
    "optimizer_cls_and_kwargs": ({"optimizer_cls_and_kwargs": (torch.optim.RMSprop, {"lr": 1e-3})}, "RMSprop"),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_connections_have_their_rate_with_every_optimizer(name: str, trainer: Build) -> None:
    for prefix, package in (("adamw_bnb", "bitsandbytes"), ("galore", "galore_torch")):
        if name.startswith(prefix):
            pytest.importorskip(package)
    options, class_name = OPTIMIZERS[name]
    run = trainer(
        "resformer-gated", **{"learning_rate": 1e-3, "weight_decay": 0.1, "connection_learning_rate": 2e-2, **options}
    )
    before = {key: parameter.detach().clone() for key, parameter in run.model.named_parameters()}
    run.train()
    optimizer = run.optimizer.optimizer
    assert class_name in type(optimizer).__name__
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    assert len(groups) == sum(len(group["params"]) for group in optimizer.param_groups) == len(before)
    for key, parameter in run.model.named_parameters():
        rate = 2e-2 if is_connection(key) else 1e-3
        assert groups[id(parameter)]["lr"] == rate, key
        assert groups[id(parameter)]["weight_decay"] == 0.0 or not is_connection(key), key
        assert (parameter - before[key]).abs().max() > 0, key
    if name == "adamw_bnb_8bit":  # Transformers' rule for embeddings, which 8 bits train badly
        first = optimizer.param_groups[0]
        assert first["params"][0] is run.model.get_input_embeddings().weight
        assert [optimizer.get_config(0, index, first)["optim_bits"] for index in (0, 1)] == [32, 8]


@pytest.mark.parametrize("rate", [None, 2.0])
def test_groups_hold_every_parameter_once_and_never_decay_a_connection(
    method: str, rate: float | None, tmp_path: Path
) -> None:
    model = ResFormerForCausalLM(tiny_config(method))
    arguments = training_arguments(tmp_path, optim="adamw_torch", learning_rate=1.0, weight_decay=0.1)
    groups = ConnectionTrainer(model=model, args=arguments, connection_learning_rate=rate).create_optimizer()
    held = [id(parameter) for group in groups.param_groups for parameter in group["params"]]
    assert sorted(held) == sorted(id(parameter) for parameter in model.parameters())
    settings = {id(p): (group["lr"], group["weight_decay"]) for group in groups.param_groups for p in group["params"]}
    for name, parameter in model.named_parameters():
        if is_connection(name):
            assert settings[id(parameter)] == (rate or 1.0, 0.0), name
        else:
            assert settings[id(parameter)] == (1.0, 0.1 if parameter.dim() == 2 else 0.0), name


def test_an_optimizer_that_hides_its_parameters_is_warned_of(trainer: Build) -> None:
    run = trainer("resformer", connection_learning_rate=1e-2)
    hidden = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.warns(UserWarning, match="SGD does not hold the connections"):
        set_connection_learning_rate(hidden, run.model, 1e-2)


@pytest.mark.parametrize("variant", [*COMBINATIONS, "svformer", "cla2"])
def test_sharing_trains_what_reads_and_what_is_read(variant: str) -> None:
    model = tiny_model(variant)
    names = {name for name, _ in model.named_parameters()}
    expected = {name for name in names if is_connection(name)}
    for n in range(6):
        key, value = key_sources(model.config)[n], value_sources(model.config)[n]
        layer = f"model.layers.{n}."
        read = {f"{layer}self_attn.k_proj": n in [k for m, k in enumerate(key_sources(model.config)) if m > n],
                f"{layer}self_attn.v_proj": n in [v for m, v in enumerate(value_sources(model.config)) if m > n],
                f"{layer}self_attn.q_proj": (key, value) != (n, n), f"{layer}self_attn.o_proj": (key, value) != (n, n),
                f"{layer}input_layernorm": (key, value) != (n, n)}  # fmt: skip
        expected |= {f"{module}.{kind}" for module, trained in read.items() for kind in ("weight", "bias") if trained}
    assert set(trained_parameters(model, "sharing")) == expected & names
    assert trained_parameters(model, "all") == [name for name, _ in model.named_parameters()]
    connections = [name for name in names if is_connection(name)]
    if connections:
        assert sorted(trained_parameters(model, "connections")) == sorted(connections)


def test_predictions_are_logits_without_the_cache(trainer: Build) -> None:
    predicted = trainer("svformer", use_cache=True).predict(training_rows(4)).predictions
    assert predicted.shape == (4, 12, TINY["vocab_size"])


def test_peak_memory_sees_an_allocation() -> None:
    before = peak_memory()
    with mmap.mmap(-1, before) as fresh:  # not what an allocator has kept
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
    assert peak_memory() > before
