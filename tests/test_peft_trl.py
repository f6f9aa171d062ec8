"""PEFT adapters hold the connections beside LoRA, and TRL's trainers take the models as they are."""

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import SIZES, byte_tokenizer, save_checkpoint
from command_server import run
from datasets import Dataset
from hub_server import HubServer
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from small_decoders import small_decoder
from torch import nn
from torchao.quantization import Int8WeightOnlyConfig
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, PreTrainedModel, TorchAoConfig
from trl import DPOConfig, DPOTrainer, GRPOConfig, GRPOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer

import resformer
from resformer import ResFormerConfig, ResFormerForCausalLM, ResFormerForSequenceClassification
from resformer.modeling.any_decoder import Decoder
from resformer.modeling.connections import KINDS
from resformer.modeling.connections.value_residual import GateProjection
from resformer.training.chats import SupervisedTrainer
from resformer.training.optimizer import is_connection
from resformer.trl import FullPrecisionConnections

#: Every kind of module that PEFT copies, and layers without projections.
METHODS = (
    "resformer-plus resformer-gated resformer-denseformer svformer delta-attention-residuals depth-attention mudd "
    "nanochat mhc"
).split()
CONNECTIONS = [kind.name for kind in KINDS]
IDS = torch.arange(1, 41).view(2, 20)


def build(method: str, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """A model of 6 layers that starts alike each time; connections stay in float32."""
    torch.manual_seed(0)
    model = ResFormerForCausalLM(ResFormerConfig.for_method(method, **SIZES, initializer_range=0.2))
    for name, parameter in model.named_parameters():
        if not is_connection(name):
            parameter.data = parameter.data.to(dtype)
    return model


def adapt(model: PreTrainedModel, targets: str | list[str] = "all-linear", **options: Any) -> PeftModel:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=targets, **options)
    return get_peft_model(model, config)


def train(model: nn.Module, steps: int = 3) -> None:
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(IDS, labels=IDS).loss.backward()
        optimizer.step()


@torch.no_grad()
def logits_of(model: nn.Module) -> torch.Tensor:
    return model.eval()(IDS).logits


@pytest.mark.parametrize(
    ("targets", "dtype"), [("all-linear", torch.float32), (["q_proj", "v_proj"], torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("method", METHODS)
def test_an_adapter_trains_saves_reloads_and_merges_lora_and_connections(
    method: str, targets: str | list[str], dtype: torch.dtype, tmp_path: Path
) -> None:
    base = build(method, dtype)
    source = {name: tensor.clone() for name, tensor in base.state_dict().items()}
    expected_base = logits_of(base)
    connections = {name for name in source if is_connection(name)}
    model = adapt(base, targets, modules_to_save=CONNECTIONS)
    before = {name: p.detach().clone() for name, p in model.named_parameters() if p.requires_grad}
    assert sum(is_connection(name) for name in before) == len(connections)
    lora = {name.split(".lora_")[0].rsplit(".", 1)[1] for name in before if "lora_" in name}
    everything = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
    assert lora == (everything if targets == "all-linear" else {"q_proj", "v_proj"})

    train(model)
    for name, parameter in model.named_parameters():
        if name in before:
            assert not torch.equal(parameter, before[name]), name
            assert parameter.dtype == torch.float32, name
    expected = logits_of(model)
    assert (expected - expected_base).abs().max() > 0.1

    model.save_pretrained(tmp_path)
    again = PeftModel.from_pretrained(build(method, dtype), tmp_path)
    assert torch.equal(logits_of(again), expected)
    with again.disable_adapter():
        assert torch.equal(logits_of(again), expected_base)

    # LoRA is taken out. The connections are PEFT's trained copies, which it puts in place of the originals.
    unloaded = again.unload()
    assert type(unloaded) is ResFormerForCausalLM
    assert unloaded.state_dict().keys() == source.keys()
    for name, tensor in unloaded.state_dict().items():
        assert torch.equal(tensor, source[name]) != (name in connections), name

    def matrices(decoder: PreTrainedModel) -> tuple[torch.Tensor, torch.Tensor]:
        return decoder.value_mixing_matrix(), decoder.depth_mixing_matrix()

    adapted = matrices(model.base_model.model.model)
    merged = model.merge_and_unload()
    torch.testing.assert_close(adapted, matrices(merged.model), rtol=0, atol=0, equal_nan=True)
    assert merged.state_dict().keys() == source.keys()
    difference = (logits_of(merged) - expected).float().norm() / expected.float().norm()
    assert difference < (1e-5 if dtype == torch.float32 else 0.05)  # weights of bfloat16 take LoRA's part rounded
    merged.save_pretrained(tmp_path / "merged")
    assert torch.equal(logits_of(AutoModelForCausalLM.from_pretrained(tmp_path / "merged")), logits_of(merged))


def test_connections_left_out_of_an_adapter_stay_and_gates_take_lora() -> None:
    model = adapt(build("resformer-gated"))
    assert any("gate.lora_A" in name for name, _ in model.named_parameters())
    train(model)
    expected = logits_of(model)
    merged = model.merge_and_unload()
    assert (logits_of(merged) - expected).abs().max() <= 1e-5 * expected.abs().max()
    merged, plain = (each.model.layers[1].value_residual for each in (merged, build("resformer-gated")))
    assert merged.gate.weight.any()  # it started at 0
    assert torch.equal(merged.weight, plain.weight)


TEXTS = ["Values of the first layer reach the last one. " * n for n in (1, 3, 2, 1, 2, 1, 3, 1)]


def sft(
    folder: Path, model: PreTrainedModel, callbacks: Any = None, kind: type[SFTTrainer] = SFTTrainer, **options: Any
) -> SFTTrainer:
    config = SFTConfig(folder, **{"max_steps": 2, "report_to": "none", "use_cpu": True, "bf16": False, **options})
    texts = Dataset.from_dict({"text": TEXTS})
    return kind(model, config, train_dataset=texts, processing_class=byte_tokenizer(), callbacks=callbacks)


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"loss_type": "dft"}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.5}),
        ("qwen3_moe", {"router_aux_loss_coef": 0.5, "loss_type": "dft"}),
    ],
)
@pytest.mark.parametrize("accumulate", [1, 4])
def test_options_of_the_loss_are_trls(family: str, options: dict[str, Any], accumulate: int, tmp_path: Path) -> None:
    options = {**options, "per_device_train_batch_size": 8 // accumulate, "gradient_accumulation_steps": accumulate}
    options |= {"optim": "sgd", "learning_rate": 1.0, "max_grad_norm": 0.0, "logging_steps": 1, "max_steps": 3}
    trained = []
    for kind in (SFTTrainer, SupervisedTrainer):
        torch.manual_seed(0)
        trainer = sft(tmp_path, small_decoder(family, vocab_size=300), kind=kind, **options)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        trained.append(({name: value.clone() for name, value in trainer.model.state_dict().items()}, losses))
    (expected, losses), (found, own) = trained
    assert own == pytest.approx(losses, rel=1e-5)
    assert losses[2] != pytest.approx(losses[0], rel=1e-3)
    assert all(torch.allclose(found[name], value, atol=1e-5) for name, value in expected.items())


@pytest.mark.parametrize("method", METHODS)
def test_packing_gives_each_text_the_loss_and_the_gradients_it_has_alone(method: str, tmp_path: Path) -> None:
    options = {"packing": True, "max_length": 192, "per_device_train_batch_size": 4, "weight_decay": 0.1}
    packed = sft(tmp_path, build(method), **options)
    (batch,) = packed.get_train_dataloader()
    assert batch["input_ids"].shape[0] == 1
    starts = (batch["position_ids"][0] == 0).nonzero().flatten().tolist()
    assert len(starts) == len(TEXTS)
    packed.model(**batch).loss.backward()
    decayed = {
        id(p) for group in packed.create_optimizer().param_groups if group["weight_decay"] for p in group["params"]
    }
    assert not [name for name, p in packed.model.named_parameters() if is_connection(name) and id(p) in decayed]

    alone = build(method)
    tokens = sum(len(text) for text in TEXTS)  # each text's bytes and its end, less the first, which none predicts
    ids = [text[None] for text in batch["input_ids"][0].tensor_split(starts[1:])]
    assert sum(text.shape[1] - 1 for text in ids) == tokens
    loss = sum(alone(text, labels=text, num_items_in_batch=tokens).loss for text in ids)
    loss.backward()
    for (name, parameter), packed_parameter in zip(alone.named_parameters(), packed.model.parameters(), strict=True):
        difference = (packed_parameter.grad - parameter.grad).abs().max()
        assert difference <= 1e-4 * parameter.grad.abs().max(), name


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of every kind of connection with parameters, which start as plain Llama, and a chat template."""
    folder = tmp_path_factory.mktemp("named") / "checkpoint"
    torch.manual_seed(0)
    ResFormerForCausalLM(ResFormerConfig(**SIZES, **GATED, dwa=True)).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


GATED = {"value_residual": "gated", "value_residual_init": [0.0, 1.0]}
PAIRS = {"prompt": ["two and two are"] * 4, "chosen": [" four"] * 4, "rejected": [" five"] * 4}
COMMON = {"report_to": "none", "use_cpu": True, "bf16": False, "max_steps": 3, "logging_steps": 1}


@pytest.mark.slow
def test_trainers_build_a_model_by_its_name_and_train_it(checkpoint: Path, tmp_path: Path) -> None:
    """SFT and DPO, of any decoder: below."""
    lengths = {"num_generations": 2, "max_completion_length": 4, "per_device_train_batch_size": 2}
    pairs = Dataset.from_dict(PAIRS)
    trainers = [
        GRPOTrainer(
            str(checkpoint),
            args=GRPOConfig(tmp_path, **COMMON, **lengths),
            reward_funcs=lambda completions, **_: [float(len(text)) for text in completions],
            train_dataset=pairs.select_columns("prompt"),
        ),
        RewardTrainer(str(checkpoint), RewardConfig(tmp_path, **COMMON), train_dataset=pairs),
    ]
    for trainer in trainers:
        model_class = ResFormerForSequenceClassification if type(trainer) is RewardTrainer else ResFormerForCausalLM
        assert type(trainer.model) is model_class
        gates = [module for module in trainer.model.modules() if isinstance(module, GateProjection)]
        trainer.train()
        assert gates
        assert all(gate.weight.any() for gate in gates)  # they started at 0


def test_no_plain_model_is_the_reference_of_connections_that_act(tmp_path: Path) -> None:
    name = str(tmp_path / "plain")
    save_checkpoint(tmp_path / "plain")

    def trainer(model: PreTrainedModel) -> DPOTrainer:
        args = DPOConfig(tmp_path, **COMMON)
        return DPOTrainer(model, args=args, train_dataset=Dataset.from_dict(PAIRS), processing_class=byte_tokenizer())

    learned = resformer.connect(AutoModelForCausalLM.from_pretrained(name), "denseformer")
    assert torch.equal(logits_of(trainer(learned).ref_model), logits_of(learned))  # TRL loads what has its name
    with torch.no_grad():
        for parameter in (each for where, each in learned.named_parameters() if is_connection(where)):
            parameter.add_(0.5)
    resformer.save_connections(learned, tmp_path / "learned")
    for method in (str(tmp_path / "learned"), "svformer"):
        model = resformer.connect(AutoModelForCausalLM.from_pretrained(name), method, lossy=True)
        with pytest.raises(OSError, match="Repo id must"):
            trainer(model)
    model = resformer.connect(AutoModelForCausalLM.from_pretrained(name), str(tmp_path / "learned"))
    assert not model.name_or_path  # what PEFT calls the base of an adapter
    assert resformer.disconnect(model, lossy=True).config._name_or_path == name


@pytest.fixture(scope="module")
def hub(checkpoint: Path) -> Iterator[HubServer]:
    with HubServer() as hub:
        hub.add("you/gated", checkpoint)
        yield hub


def trl(hub: HubServer, folder: Path, command: str, rows: list[dict[str, Any]], *options: str) -> Path:
    """Runs three steps of `resformer trl COMMAND` on the checkpoint of the Hub; returns what it wrote."""
    (folder / "data").mkdir()
    (folder / "data" / "train.jsonl").write_text("\n".join(json.dumps(row) for row in rows))
    fixed = "--model_name_or_path you/gated --dataset_name data --output_dir out --use_cpu --bf16 false --max_steps 3"
    environment = {**os.environ, **hub.environment(folder / "home")}
    more = ["--report_to", "none", "--learning_rate", "1e-3", *options]
    words = ["-m", "resformer", "trl", command, *fixed.split(), *more]
    done = run(*words, cwd=folder, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder / "out"


CHATS = [
    {"messages": [{"role": "user", "content": f"{n} + 1"}, {"role": "assistant", "content": f"{n + 1}."}]}
    for n in range(20)
]
LORA = ["--use_peft", "--lora_r", "4", "--lora_modules_to_save", *CONNECTIONS]


@pytest.mark.parametrize("bits", [4, pytest.param(32, marks=pytest.mark.slow)])
def test_an_adapter_of_the_command_line_is_pushed_loaded_and_merged(
    bits: int, hub: HubServer, checkpoint: Path, tmp_path: Path
) -> None:
    quantised = [] if bits == 32 else ["--load_in_4bit"]
    push = ["--push_to_hub", "--hub_model_id", "you/adapter"]
    hub.repositories.pop("you/adapter", None)
    out = trl(hub, tmp_path, "sft", CHATS, *LORA, *quantised, *push)
    assert (
        hub.repositories["you/adapter"]["adapter_model.safetensors"] == (out / "adapter_model.safetensors").read_bytes()
    )
    trained = load_file(out / "adapter_model.safetensors")
    assert {name.split(".lora_")[0].rpartition(".")[2] for name in trained if "lora_" in name} == {"q_proj", "v_proj"}
    before = load_file(checkpoint / "model.safetensors")
    connections = {name for name in before if is_connection(name)}
    for name in connections:
        after = trained[f"base_model.model.{name}"]
        assert after.dtype == torch.float32
        assert not torch.equal(after, before[name]), name

    merged = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(checkpoint), out).merge_and_unload()
    assert type(merged) is ResFormerForCausalLM
    assert merged.state_dict().keys() - {"lm_head.weight"} == before.keys() - {"lm_head.weight"}
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert torch.equal(again.generate(IDS[:1], max_new_tokens=4), merged.generate(IDS[:1], max_new_tokens=4))


def test_connections_of_a_quantised_model_keep_every_bit_until_they_learn(
    checkpoint: Path, tmp_path: Path, device: str
) -> None:
    four_bits = BitsAndBytesConfig(load_in_4bit=True)
    quantised = AutoModelForCausalLM.from_pretrained(
        checkpoint, quantization_config=four_bits, dtype=torch.float32, device_map=device
    )
    with torch.no_grad():
        quantised.model.layers[1].value_residual.weight.fill_(1.2345678)
    model = adapt(quantised, modules_to_save=CONNECTIONS)
    options = {"learning_rate": 1e-5, "use_cpu": device == "cpu"}
    trainer = sft(tmp_path, model, callbacks=[FullPrecisionConnections()], **options)
    name = "base_model.model.model.layers.1.value_residual.modules_to_save.default.weight"
    trained = dict(model.named_parameters())[name]
    assert trained.dtype == torch.float32
    assert torch.equal(trained, torch.full_like(trained, 1.2345678))
    trainer.train()
    assert (trained != 1.2345678).all()  # bfloat16 would round each step away


FAMILIES = ["gemma3_text", *(pytest.param(each, marks=pytest.mark.slow) for each in ("qwen3_moe", "llama"))]
families = pytest.mark.parametrize("model_type", FAMILIES)


def connected(model_type: str, method: str = "resformer-denseformer") -> PreTrainedModel:
    """A small decoder of another family with connections that start plainly, for byte tokens; or one of ours."""
    if model_type == "resformer":
        return ResFormerForCausalLM(ResFormerConfig.for_method("resformer-gated", **SIZES))
    model = small_decoder(model_type)
    model.resize_token_embeddings(len(byte_tokenizer()))
    return resformer.connect(model, method)


def coefficients(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if is_connection(name)}


@families
@pytest.mark.parametrize("adapter", [False, True], ids=["full", "lora"])
def test_trl_trains_connections_of_any_decoder_fully_and_by_lora(
    model_type: str, adapter: bool, tmp_path: Path
) -> None:
    lora = {"peft_config": LoraConfig(r=4, target_modules="all-linear", modules_to_save=CONNECTIONS)} if adapter else {}
    tuned = {**COMMON, "learning_rate": 1e-3}
    source = tmp_path / "source"
    connected(model_type).save_pretrained(source)
    byte_tokenizer().save_pretrained(source)
    pairs, texts = Dataset.from_dict(PAIRS), Dataset.from_dict({"text": TEXTS})
    for trainer in (
        SFTTrainer(str(source), SFTConfig(tmp_path, **tuned), train_dataset=texts, **lora),
        DPOTrainer(str(source), args=DPOConfig(tmp_path, **tuned), train_dataset=pairs, **lora),
    ):
        before = {n: each for n, each in coefficients(trainer.model).items() if "original_module" not in n}
        trainer.train()
        after = coefficients(trainer.model)
        assert before
        assert not [name for name in before if torch.equal(before[name], after[name])]
        trainer.save_model(tmp_path / "saved")
        if adapter:
            again = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(source), tmp_path / "saved")
        else:
            again = AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
        assert torch.allclose(logits_of(again), logits_of(trainer.model), atol=1e-5)


@families
def test_adapters_find_in_connected_families_what_they_find_without_connections(model_type: str) -> None:
    experts = {"r": 4, "target_modules": ["gate_proj", "up_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    for options in ({"task_type": "CAUSAL_LM"}, experts) if model_type != "qwen3_moe" else (experts,):
        models = small_decoder(model_type), connected(model_type)
        names = [
            {n for n, _ in get_peft_model(m, LoraConfig(**options)).named_parameters() if "lora" in n} for m in models
        ]
        assert names[0] == names[1] != set()


@pytest.mark.parametrize(
    "method", ["resformer-denseformer", "resformer-gated", "mudd", "hyper-connections", "mhc", "attnres"]
)
def test_connections_that_an_adapter_trains_are_saved_alone(method: str, tmp_path: Path) -> None:
    base = small_decoder("llama")
    model = adapt(resformer.connect(small_decoder("llama"), method), modules_to_save=CONNECTIONS)
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * ("modules_to_save" in name)
    resformer.save_connections(model, tmp_path / "trained")
    with model.disable_adapter():
        resformer.save_connections(model, tmp_path / "original")
    for folder, expected in (("trained", logits_of(model)), ("original", logits_of(base))):
        assert torch.equal(logits_of(resformer.connect(small_decoder("llama"), str(tmp_path / folder))), expected)
    model.save_pretrained(tmp_path / "adapter")
    with pytest.warns(UserWarning, match=r"connections that the model lacks, and they are left out: \['"):
        PeftModel.from_pretrained(small_decoder("llama"), tmp_path / "adapter")
    with pytest.warns(UserWarning, match=r"connections that the model lacks, and they are left out: \['"):
        small_decoder("llama").load_adapter(tmp_path / "adapter")
    with pytest.raises(ValueError, match="PEFT has wrapped it: merge or unload the adapter first"):
        resformer.connect(
            get_peft_model(small_decoder("llama"), LoraConfig(target_modules=["q_proj"])).get_base_model()
        )
    for name, parameter in model.named_parameters():
        parameter.data += 0.1 * ("lora_B" in name)
    with pytest.raises(ValueError, match="by training, merging or an adapter"):
        resformer.save_connections(model, tmp_path / "without")
    with model.disable_adapter():
        resformer.save_connections(model, tmp_path / "original")
    if method == "resformer-gated":
        with pytest.raises(ValueError, match="has an adapter: take `merge_and_unload"):
            resformer.save_connections(adapt(resformer.connect(base, method)), tmp_path / "gates")


@families
def test_values_of_a_replaced_projection_are_mixed_once(model_type: str) -> None:
    model = adapt(connected(model_type, "resformer"), ["v_proj"])
    layers = Decoder(model.get_base_model()).layers
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
        layers[1].value_residual.weight.copy_(torch.tensor([0.25, -2.0]))
    seen: list[torch.Tensor] = []
    for module in (layers[1].value_residual, *(layer.self_attn._modules["v_proj"] for layer in layers[:2])):
        module.register_forward_hook(lambda _module, _args, output: seen.append(output.flatten(2)))
    logits_of(model)
    first, own, mixed = seen
    assert torch.allclose(mixed, 0.25 * first - 2.0 * own, atol=1e-6)
    merged = model.merge_and_unload()
    assert type(Decoder(merged).layers[1].self_attn._modules["v_proj"]) is nn.Linear
    logits_of(merged)
    assert torch.allclose(seen[-1], mixed, atol=1e-5)


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """4 bits as on any processor: those with bfloat16 pack them, after which nothing is learned through them."""
    monkeypatch.setattr("bitsandbytes.nn.modules.has_avx512bf16", lambda: False)


@pytest.mark.parametrize("model_type", ["resformer", "nanochat_2026", *FAMILIES])
@pytest.mark.parametrize("how", ["bitsandbytes 8", "bitsandbytes 4", "torchao"])
@pytest.mark.usefixtures("unpacked")
def test_quantised_decoders_of_any_family_keep_their_connections(model_type: str, how: str, tmp_path: Path) -> None:
    """And nanochat's decoder its smear."""
    model = connected(model_type)
    expected = {name: p for name, p in model.named_parameters() if is_connection(name) or "smear" in name}
    with torch.no_grad():
        for parameter in expected.values():
            parameter.add_(0.123456789)
    model.save_pretrained(tmp_path)
    options: Any = TorchAoConfig(Int8WeightOnlyConfig())
    if how != "torchao":
        options = BitsAndBytesConfig(load_in_4bit=how.endswith("4"), load_in_8bit=how.endswith("8"))
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=options, dtype=torch.float32)
    assert type(loaded.base_model.layers[1].self_attn._modules["v_proj"].weight) is not nn.Parameter
    assert all(torch.equal(loaded.get_parameter(name), parameter) for name, parameter in expected.items())
    similarity = torch.cosine_similarity(logits_of(loaded).float(), logits_of(model), dim=-1)
    assert similarity.median() > (0.9 if how.endswith("4") else 0.99)


QUANTISED = {"bitsandbytes": BitsAndBytesConfig(load_in_4bit=True), "torchao": TorchAoConfig(Int8WeightOnlyConfig())}


@pytest.mark.usefixtures("unpacked")
@pytest.mark.parametrize("how", QUANTISED)
def test_a_quantised_model_can_be_connected_and_trained(how: str, tmp_path: Path) -> None:
    small_decoder("gemma3_text").save_pretrained(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, quantization_config=QUANTISED[how], dtype=torch.float32)
    expected = logits_of(model)
    model = resformer.connect(model, "resformer-denseformer")
    assert torch.equal(logits_of(model), expected)
    resformer.save_connections(model, tmp_path / "alone")
    before = coefficients(model)
    train(adapt(model, ["q_proj"], modules_to_save=CONNECTIONS))
    after = {name.replace("modules_to_save.default.", ""): each for name, each in coefficients(model).items()}
    assert not [name for name in before if torch.equal(before[name], after[name])]
