"""Training on two ranks, data-, tensor-parallel or sharded with FSDP2, learns what one process learns, saved whole."""

import itertools
import re
from pathlib import Path

import any_decoder
import pytest
import torch
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from checkpoints import save_checkpoint
from command_server import python
from conftest import COMBINATIONS, QUICK, tiny_model, training_arguments
from small_decoders import small_decoder
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.integrations import deepspeed

import resformer.training
from resformer import retrofit

CONFIGS = Path(next(iter(resformer.training.__path__))) / "configs"
FAMILIES = ["gemma3_text", "qwen3_moe", "llama"]
#: Every kind of parameters, which ranks split or reduce, is in one of these.
SHARDED = ["transformer", "resformer-plus", "denseformer-4x5", "hyper-connections", "mhc", *COMBINATIONS, *FAMILIES]
TORCHRUN = "-m torch.distributed.run --standalone --nproc_per_node 2".split()


def connected(model_type: str) -> PreTrainedModel:
    model = resformer.connect(small_decoder(model_type), "resformer-denseformer").train()
    any_decoder.move(model)
    return model


@pytest.mark.slow
def test_a_step_on_two_ranks_is_the_step_of_one(tmp_path: Path) -> None:
    ids = torch.randint(3, 97, (4, 11), generator=torch.Generator().manual_seed(1))
    expected = {}
    shards = itertools.product(("fsdp", "ddp", "tp"), SHARDED)
    for kind, name in (*shards, *itertools.product(["accelerate"], [*QUICK, *FAMILIES])):
        fields = {"num_key_value_heads": 2} if kind == "tp" else {}  # each rank needs one
        model = connected(name) if name in FAMILIES else tiny_model(name, **fields).train()
        folder = tmp_path / kind / name
        model.save_pretrained(folder)
        torch.save(ids, folder / "batch.pt")
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        expected[folder] = before, dict(model.named_parameters())

    python(*TORCHRUN, Path(__file__).with_name("distributed_worker.py"), *expected)
    failed = {str(path): path.read_text() for path in tmp_path.glob("*/*/FAILED.txt")}
    assert not failed, failed

    for folder, (before, after) in expected.items():
        model, info = AutoModelForCausalLM.from_pretrained(folder / "trained", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), folder
        for key, parameter in model.named_parameters():
            moved = (after[key] - before[key]).abs().max()
            assert moved > 0, (folder, key)
            assert (parameter - after[key]).abs().max() <= 1e-3 * moved, (folder, key)


@pytest.mark.slow
def test_the_documented_script_trains_on_two_processes(tmp_path: Path) -> None:
    document = (Path(__file__).parents[1] / "docs/finetuning.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python train.py\n(.*?)^```", document, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "notes.txt").write_text("Values of the first layer reach the last one.\n" * 16)
    save_checkpoint(tmp_path / "llama")
    retrofit(tmp_path / "llama", tmp_path / "start", "resformer-denseformer")
    options = "--max_steps 2 --learning_rate 1e-3 --use_cpu True --report_to none --save_strategy no".split()
    python(*TORCHRUN, "train.py", "start", "notes.txt", "--output_dir", "out", *options, cwd=tmp_path)
    start, trained = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("start", "out"))
    assert not [name for name, tensor in trained.items() if torch.equal(tensor, start[name])]


@pytest.mark.parametrize("stage", [2, 3])
def test_the_deepspeed_configurations_leave_nothing_open(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "dep_version_check", lambda package: None)  # reading them takes no DeepSpeed
    arguments = training_arguments(tmp_path, gradient_accumulation_steps=2, bf16=True)
    model = tiny_model("resformer-denseformer")  # before: with stage 3 DeepSpeed builds the parts of a model

    class Reader(deepspeed.HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
        """Without DeepSpeed Transformers' class has lost its base, Accelerate's."""

    config = Reader(str(CONFIGS / f"zero{stage}.json"))
    try:
        config.trainer_config_process(arguments)
        config.trainer_config_finalize(arguments, model, 10)
    finally:
        deepspeed.unset_hf_deepspeed_config()
    assert config.config["zero_optimization"]["stage"] == stage
    assert config.config["bf16"]["enabled"] is True
    assert config.config["train_batch_size"] == 8
    assert "auto" not in str(config.config)
