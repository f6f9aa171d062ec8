"""Training on two ranks, data-, tensor-parallel or sharded with FSDP2, learns what one process learns, saved whole."""

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import yaml
from accelerate.commands.config import load_config_from_file
from accelerate.utils.deepspeed import HfDeepSpeedConfig
from checkpoints import save_checkpoint
from conftest import QUICK, VARIANTS, tiny_model, training_arguments
from transformers import AutoModelForCausalLM
from transformers.integrations import deepspeed

import resformer.training
from resformer import ResFormerForCausalLM, retrofit

ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "TRANSFORMERS_VERBOSITY": "error"}
CONFIGS = Path(next(iter(resformer.training.__path__))) / "configs"
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("fsdp", QUICK),
        *(pytest.param(kind, VARIANTS, marks=pytest.mark.slow) for kind in ("ddp", "fsdp", "accelerate", "tp")),
    ],
    ids=lambda each: each if isinstance(each, str) else len(each),
)
def test_a_step_on_two_ranks_is_the_step_of_one(kind: str, names: Sequence[str], tmp_path: Path) -> None:
    ids = torch.randint(3, 97, (4, 11), generator=torch.Generator().manual_seed(1))
    expected = {}
    fields = {"num_key_value_heads": 2} if kind == "tp" else {}  # each rank needs one
    for name in names:
        model = tiny_model(name, **fields).train()
        model.save_pretrained(tmp_path / name)
        torch.save(ids, tmp_path / name / "batch.pt")
        before = {key: parameter.detach().clone() for key, parameter in model.named_parameters()}
        model(ids, labels=ids).loss.backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        expected[name] = before, dict(model.named_parameters())

    worker = str(Path(__file__).with_name("distributed_worker.py"))
    command = [*TORCHRUN, worker, kind, *(str(tmp_path / name) for name in expected)]
    done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    failed = {path.parent.name: path.read_text() for path in tmp_path.glob("*/FAILED.txt")}
    assert not failed, failed

    for name, (before, after) in expected.items():
        model, info = AutoModelForCausalLM.from_pretrained(tmp_path / name / "trained", output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), name
        for key, parameter in model.named_parameters():
            moved = (after[key] - before[key]).abs().max()
            assert moved > 0, (name, key)
            assert (parameter - after[key]).abs().max() <= 1e-3 * moved, (name, key)


@pytest.mark.slow
def test_the_documented_script_trains_on_two_processes(tmp_path: Path) -> None:
    document = (Path(__file__).parents[1] / "docs/training.md").read_text(encoding="utf-8")
    (script,) = re.findall(r"^```python train.py\n(.*?)^```", document, flags=re.MULTILINE | re.DOTALL)
    (tmp_path / "train.py").write_text(script)
    (tmp_path / "notes.txt").write_text("Values of the first layer reach the last one.\n" * 16)
    save_checkpoint(tmp_path / "llama")
    retrofit(tmp_path / "llama", tmp_path / "start", "resformer-denseformer")
    options = "--max_steps 2 --learning_rate 1e-3 --use_cpu True --report_to none --save_strategy no".split()
    command = [*TORCHRUN, "train.py", "start", "notes.txt", "--output_dir", "out", *options]
    done = subprocess.run(
        command, cwd=tmp_path, env=ENVIRONMENT, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    start, trained = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("start", "out"))
    assert not [name for name, tensor in trained.items() if torch.equal(tensor, start[name])]


def test_the_fsdp2_configuration_is_read_by_accelerate() -> None:
    config = load_config_from_file(str(CONFIGS / "fsdp2.yaml"))
    settings = config.fsdp_config
    assert config.distributed_type == "FSDP"
    assert settings["fsdp_version"] == 2
    assert settings["fsdp_transformer_layer_cls_to_wrap"] in ResFormerForCausalLM._no_split_modules
    written = yaml.safe_load((CONFIGS / "fsdp2.yaml").read_text())
    assert written["fsdp_config"] == settings  # nothing is dropped or renamed


@pytest.mark.parametrize("stage", [2, 3])
def test_the_deepspeed_configurations_leave_nothing_open(
    stage: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deepspeed, "dep_version_check", lambda package: None)  # reading them takes no DeepSpeed
    arguments = training_arguments(tmp_path, gradient_accumulation_steps=2, bf16=True)

    class Reader(deepspeed.HfTrainerDeepSpeedConfig, HfDeepSpeedConfig):
        """Without DeepSpeed Transformers' class has lost its base, Accelerate's."""

    config = Reader(str(CONFIGS / f"zero{stage}.json"))
    try:
        config.trainer_config_process(arguments)
        config.trainer_config_finalize(arguments, tiny_model("resformer-denseformer"), 10)
    finally:
        deepspeed.unset_hf_deepspeed_config()
    assert config.config["zero_optimization"]["stage"] == stage
    assert config.config["bf16"]["enabled"] is True
    assert config.config["train_batch_size"] == 8
    assert "auto" not in str(config.config)
