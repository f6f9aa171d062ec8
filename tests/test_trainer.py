"""The stock Trainer's options change how a model is trained, never what it learns; parts of a model learn alone."""

import copy
import math
import mmap
import re
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import TINY, others_slow, tiny_model, training_arguments, training_rows
from small_decoders import SEEING, seeing_model, small_decoder
from transformers import AutoModelForCausalLM, Trainer

import resformer
from resformer import ResFormerConfig, ResFormerForCausalLM, trl
from resformer.environment import peak_memory
from resformer.training.optimizer import (
    CONNECTIONS,
    ConnectionTrainer,
    check_muon,
    connections_by_kind,
    is_connection,
    scratch_rates,
    set_connection_rates,
)

#: One of every mechanism.
TRAINED = others_slow(
    "resformer-plus resformer-gated svformer resformer-denseformer depth-attention nanochat mhc".split(),
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
        of_the_trainer = ("connection_learning_rate", "muon_learning_rate", "optimizer_cls_and_kwargs", "optimizers")
        rest = {name: options.pop(name) for name in of_the_trainer if name in options}
        arguments = training_arguments(tmp_path / "run", **{"max_steps": 3, "learning_rate": 0.1, **options})
        return ConnectionTrainer(model=model, args=arguments, train_dataset=training_rows(16), **rest)

    return build


def trained(trainer: Trainer) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The loss of every step, and the weights after the last."""
    trainer.train()
    model = trainer.accelerator.unwrap_model(trainer.model)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses, {name: parameter.detach().clone() for name, parameter in model.named_parameters()}


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
    moved: dict[str, float] = {}
    for name, parameter in expected[1].items():  # of all layers together: a deep one may learn little in a few steps
        kind = re.sub(r"\.\d+\.", ".", name)
        moved[kind] = max(moved.get(kind, 0.0), (parameter - before[name]).abs().max().item())
    # The weights and scales of mHC are factors of each other that start at 0 and 0.01.
    assert min(moved.values()) > (0 if method == "mhc" else 1e-4), min(moved, key=lambda kind: moved[kind])
    for options in (
        {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4},
        {"activation_checkpointing": True},
    ):
        assert_trained_alike(trained(trainer(method, **options)), expected)


def test_weights_that_files_name_otherwise_are_resumed_and_kept(tmp_path: Path) -> None:
    """Those of experts: the stock Trainer would go on with the ones that it began with."""

    def run(steps: int, folder: str, **options: Any) -> ConnectionTrainer:
        torch.manual_seed(0)
        model = resformer.connect(small_decoder("qwen3_moe"), "resformer-denseformer")
        arguments = training_arguments(
            tmp_path / folder, max_steps=steps, save_strategy="steps", save_steps=2, **options
        )
        rows = training_rows(16)
        return ConnectionTrainer(model=model, args=arguments, train_dataset=rows, eval_dataset=rows[:4])

    expected = trained(run(4, "whole", learning_rate=0.1))
    trained(run(2, "cut", learning_rate=0.1))
    resumed = run(4, "cut", learning_rate=0.1)
    resumed.train(resume_from_checkpoint=True)
    assert all(torch.equal(each, expected[1][name]) for name, each in resumed.model.named_parameters())
    metric = {"metric_for_best_model": "loss", "greater_is_better": True, "eval_strategy": "steps", "eval_steps": 2}
    best = run(4, "best", learning_rate=0.1, load_best_model_at_end=True, **metric)
    trained(best)
    assert best.state.best_model_checkpoint == str(tmp_path / "best/checkpoint-2")
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "best/checkpoint-2").state_dict()
    assert all(torch.equal(each, saved[name]) for name, each in best.model.state_dict().items())


@pytest.mark.slow
@pytest.mark.parametrize("family", SEEING)
def test_a_model_that_sees_images_is_loaded_as_it_was_saved(family: str, tmp_path: Path) -> None:
    model = resformer.connect(seeing_model(family)[0], "denseformer")
    model.save_pretrained(tmp_path / "saved")
    expected = {name: each.clone() for name, each in model.state_dict().items()}
    for parameter in model.parameters():
        parameter.data.zero_()
    trainer = ConnectionTrainer(model=model, args=training_arguments(tmp_path / "run"))
    trainer._load_from_checkpoint(str(tmp_path / "saved"))
    assert all(torch.equal(each, expected[name]) for name, each in model.state_dict().items())


@pytest.mark.parametrize("model_type", ["resformer", "llama"])
def test_smoothed_labels_are_those_of_the_next_tokens(model_type: str, tmp_path: Path) -> None:
    model = tiny_model("resformer") if model_type == "resformer" else resformer.connect(small_decoder(model_type))
    ids = torch.arange(12).view(2, 6)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(
            model(input_ids=ids).logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten(), label_smoothing=0.2
        )
        stock = Trainer(model=model, args=training_arguments(tmp_path, label_smoothing_factor=0.2))
        got = stock.compute_loss(model, {"input_ids": ids, "labels": ids})
    assert torch.allclose(got, expected, atol=1e-5)


@pytest.mark.slow
def test_compiled_training_learns_what_the_plain_run_learns(trainer: Build) -> None:
    expected = trained(trainer("resformer-denseformer", {"num_hidden_layers": 2}))
    torch.compiler.reset()
    compiled = trainer("resformer-denseformer", {"num_hidden_layers": 2}, torch_compile=True)
    assert_trained_alike(trained(compiled), expected)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    compiled.save_model()
    again = AutoModelForCausalLM.from_pretrained(compiled.args.output_dir)
    for name, parameter in again.named_parameters():
        torch.testing.assert_close(parameter, expected[1][name], rtol=1e-4, atol=1e-5)


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


@pytest.mark.parametrize(
    ("method", "kinds"),
    {
        "transformer": set(),
        "denseformer": {"coefficients"},
        "resformer-plus": {"coefficients"},
        "depth-attention": {"gates"},
        "resformer-gated": {"coefficients", "gates"},
        "delta-attention-residuals": {"gates"},
        "attnres": {"gates"},
        "mudd": {"gates"},
        "mhc": {"gates"},
        "value-embeddings": {"gates", "tables"},
        "nanochat": {"coefficients", "gates", "tables"},
    }.items(),
)
def test_each_kind_of_a_connections_parameters_has_its_rate(method: str, kinds: set[str], trainer: Build) -> None:
    rates = scratch_rates(1e-3, method)
    assert rates == {
        "coefficients": 5e-2,
        "gates": 1e-3,
        "tables": pytest.approx(1.9e-2 if method == "nanochat" else 1e-3),
    }
    assert scratch_rates(0.5, None)["coefficients"] == 0.2
    given = {**rates, "tables": 7.0, "embeddings": 3.0}
    run = trainer(method, learning_rate=1e-3, weight_decay=0.1, connection_learning_rate=given)
    by_kind = connections_by_kind(run.model)
    assert {kind for kind, parameters in by_kind.items() if parameters} == kinds <= {*CONNECTIONS}
    groups = {id(p): group for group in run.create_optimizer().param_groups for p in group["params"]}
    for kind, parameters in by_kind.items():
        assert {groups[id(p)]["lr"] for p in parameters} <= {given[kind]}
    embedding = groups[id(run.model.get_input_embeddings().weight)]
    assert (len(embedding["params"]), embedding["lr"], embedding["weight_decay"]) == (1, 3.0, 0.0)
    assert sum(map(len, by_kind.values())) == sum(is_connection(name) for name, _ in run.model.named_parameters())


def test_each_experts_matrix_is_orthogonalised_by_itself(tmp_path: Path) -> None:
    model = small_decoder("qwen3_moe")
    assert check_muon(model).startswith("muon: 100.0% of the matrices but embeddings and head")
    arguments = training_arguments(tmp_path, learning_rate=1e-2, weight_decay=0.0)
    run = ConnectionTrainer(model=model, args=arguments, train_dataset=training_rows(4), muon_learning_rate=1e-2)
    optimizer = run.create_optimizer()
    experts = next(p for name, p in model.named_parameters() if p.ndim == 3)
    assert any(experts is p for group in optimizer.param_groups if group["muon"] for p in group["params"])
    twins = [torch.nn.Parameter(matrix.clone()) for matrix in experts.detach()]
    alone = torch.optim.Muon(twins, lr=1e-2, weight_decay=0.0, adjust_lr_fn="match_rms_adamw")
    for step in range(2):
        experts.grad = torch.randn(experts.shape, generator=torch.Generator().manual_seed(step))
        for matrix, gradient in zip(twins, experts.grad, strict=True):
            matrix.grad = gradient.clone()
        optimizer.step()
        alone.step()
    assert all(torch.equal(*pair) for pair in zip(twins, experts, strict=True))
    assert check_muon(small_decoder("gpt2")).endswith("AdamW: transformer.wpe.weight")  # positions
    with pytest.raises(ValueError, match=r"optim is muon, and .* has no matrix in its layers; leave --optim out"):
        check_muon(HeadAlone())


class HeadAlone(torch.nn.Module):
    """A model whose one matrix is its head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = torch.nn.Linear(4, 4)

    def get_input_embeddings(self) -> torch.nn.Module | None:
        return None

    get_output_embeddings = get_input_embeddings


def test_muon_takes_the_matrices_of_layers_and_adamw_the_rest(trainer: Build) -> None:
    rates = {"learning_rate": 1e-2, "muon_learning_rate": 2e-2, "connection_learning_rate": 3e-2}
    run = trainer("resformer-gated", **rates, weight_decay=0.1, adam_beta2=0.95, optim="adamw_torch")
    run.create_optimizer()
    model, optimizer = run.model, run.optimizer
    twin = copy.deepcopy(model)
    groups: dict[tuple[bool, float, float], list[Any]] = {}
    for name, parameter in twin.named_parameters():
        matrix, connection = parameter.ndim == 2 and not is_connection(name), is_connection(name)
        in_layers = matrix and "layers" in name
        rate = 3e-2 if connection else 2e-2 if in_layers else 1e-2
        groups.setdefault((in_layers, rate, 0.1 if matrix else 0.0), []).append(parameter)
    alone = [
        torch.optim.Muon(each, lr=rate, weight_decay=decay, adjust_lr_fn="match_rms_adamw")
        if muon
        else torch.optim.AdamW(each, lr=rate, weight_decay=decay, betas=(0.9, 0.95))
        for (muon, rate, decay), each in groups.items()
    ]
    assert len(alone) == 4
    for step in range(3):
        if step == 2:  # as from a checkpoint
            state = copy.deepcopy(optimizer.state_dict())
            run.optimizer = None
            optimizer = run.create_optimizer()
            optimizer.load_state_dict(state)
        for each, optimizers in ((model, [optimizer]), (twin, alone)):
            each(**run.data_collator([run.train_dataset[index] for index in range(4)])).loss.backward()
            for one in optimizers:
                one.step()
            each.zero_grad()
    for name, parameter in twin.named_parameters():
        assert torch.equal(parameter, model.get_parameter(name)), name


def test_an_optimizer_that_hides_its_parameters_is_warned_of(trainer: Build) -> None:
    run = trainer("resformer", connection_learning_rate=1e-2)
    hidden = torch.optim.SGD([torch.zeros(1)], lr=0.1)
    with pytest.warns(UserWarning, match="SGD has one learning rate"):
        set_connection_rates(hidden, run.model, dict.fromkeys(CONNECTIONS, 1e-2))


@pytest.mark.parametrize("rate", ["connection_learning_rate", "muon_learning_rate"])
def test_a_rate_that_would_not_be_used_is_refused_or_warned_of(rate: str, trainer: Build) -> None:
    for wrong in (-1, math.nan):
        with pytest.raises(ValueError, match=f"{rate} is {wrong}; expected 0 or more"):
            trainer("resformer", **{rate: wrong})
    given = torch.optim.SGD([torch.zeros(1)]), None
    with pytest.raises(ValueError, match="connection_learning_rate has coefficents; expected coefficients, gates"):
        trainer("resformer", connection_learning_rate={"coefficents": 0.1})
    with pytest.raises(ValueError, match=f"{rate} is 0, and `optimizers` has an optimizer of its own; leave one out"):
        trainer("resformer", optimizers=given, **{rate: 0})
    with pytest.warns(UserWarning, match=r"connection_learning_rate is 0.1, and no connection has parameters"):
        trainer("svformer", connection_learning_rate=0.1)


def test_an_adapter_that_leaves_connections_frozen_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def adapted(method: str, *, train: bool = False) -> Any:
        model = ResFormerForCausalLM(ResFormerConfig.for_method(method, **TINY))
        options: dict[str, Any] = {"task_type": "CAUSAL_LM", "r": 2, "target_modules": "all-linear"}
        if train:
            options["modules_to_save"] = resformer.connection_modules(model)
        return peft.get_peft_model(model, peft.LoraConfig(**options))

    words = re.escape("modules_to_save=['depth_average', 'value_residual'] in its configuration does.")
    with pytest.warns(UserWarning, match=f"^The adapter does not train the connections: {words}$"):
        adapted("resformer-denseformer")
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        trained = adapted("resformer-denseformer", train=True)
        adapted("transformer")
    connections = [
        name for name, parameter in trained.named_parameters() if is_connection(name) and parameter.requires_grad
    ]
    assert len(connections) == sum(is_connection(name) for name, _ in trained.base_model.model.named_parameters()) / 2
    # TRL's command line trains them, however its options are written.
    library = pytest.importorskip("trl")
    found: list[Any] = []

    def script(*given: Any, **named: Any) -> None:
        (arguments,) = library.TrlParser((library.ModelConfig,)).parse_args_and_config()
        found.append(getattr(library.get_peft_config(arguments), "modules_to_save", None))

    (tmp_path / "options.yaml").write_text("use_peft: true\n")
    monkeypatch.setattr("runpy.run_module", script)
    own = ["--use-peft", "--lora-modules-to-save", "value_residual"]
    asked = [["--use_peft"], ["--use-peft"], ["--use_peft=true"], ["--config", str(tmp_path / "options.yaml")]]
    for given in [[], own, *asked]:
        monkeypatch.setattr("trl.get_peft_config", library.get_peft_config)
        monkeypatch.setattr(sys, "argv", ["resformer.trl", "sft", *given])
        trl.main()
    nothing, chosen, *by_default = found
    assert (nothing, chosen) == (None, ["value_residual"])
    assert all({"value_residual", "depth_average"} <= set(names) for names in by_default)


def test_predictions_are_logits_without_the_cache(trainer: Build) -> None:
    predicted = trainer("svformer", use_cache=True).predict(training_rows(4)).predictions
    assert predicted.shape == (4, 12, TINY["vocab_size"])


def test_peak_memory_sees_an_allocation() -> None:
    before = peak_memory()
    with mmap.mmap(-1, before) as fresh:  # not what an allocator has kept
        for page in range(0, len(fresh), mmap.PAGESIZE):
            fresh[page] = 1
    assert peak_memory() > before
