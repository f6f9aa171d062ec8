"""fp8 checkpoints are dequantised to the numbers that Transformers makes of them, and rounding is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_json, save_checkpoint
from conftest import assert_answers, assert_said
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file

from resformer import inspect, retrofit, revert, verify
from resformer.convert import CheckpointError

BLOCK = (8, 16)
NAME = "model.layers.0.mlp.up_proj.weight"


def save_fp8(folder: Path, scale_dtype: torch.dtype, **config: Any) -> None:
    """A small Llama whose projections are in fp8, one scale a block."""
    save_checkpoint(folder, dtype=torch.bfloat16)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "_proj.weight" in name]:
        rows, columns = tensors[name].shape
        blocks = tensors[name].float().view(rows // BLOCK[0], BLOCK[0], columns // BLOCK[1], BLOCK[1])
        scales = blocks.abs().amax((1, 3)) / 448
        if scale_dtype in (torch.uint8, torch.float8_e8m0fnu):
            scales = scales.log2().ceil().exp2()
        tensors[name] = (blocks / scales[:, None, :, None]).to(torch.float8_e4m3fn).view(rows, columns)
        stored = scales.log2() + 127 if scale_dtype is torch.uint8 else scales
        tensors[f"{name}_scale_inv"] = stored.to(scale_dtype)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    quantisation = {"quant_method": "fp8", "weight_block_size": BLOCK, **config}
    change_json(folder / "config.json", quantization_config=quantisation)


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16, torch.uint8, torch.float8_e8m0fnu])
def test_fp8_becomes_what_transformers_makes_of_it(scale_dtype: torch.dtype, tmp_path: Path) -> None:
    save_fp8(tmp_path / "fp8", scale_dtype)
    report = retrofit(tmp_path / "fp8", tmp_path / "out", verify="logits")
    assert report.logits.identical
    assert (report.dequantised, report.exact, report.source_dtype) == (True, True, "bfloat16")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    written = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    for name, scales in stored.items():
        if name.endswith("_scale_inv"):
            scales = (scales.float() - 127).exp2() if scale_dtype is torch.uint8 else scales.float()
            products = stored[name.removesuffix("_scale_inv")].float()
            products *= scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            assert torch.equal(products.bfloat16(), written[name.removesuffix("_scale_inv")]), name
    note = "42 fp8 tensors are dequantised to bfloat16."
    assert note in report.warnings[0]
    inspection = inspect(tmp_path / "fp8")
    assert note in inspection.warnings[0]
    assert inspection.bytes == (tmp_path / "fp8" / "model.safetensors").stat().st_size
    assert verify(tmp_path / "fp8", tmp_path / "out", verify="hashes").same
    card = ModelCard.load(tmp_path / "out" / "README.md").text
    assert "identical to the source's (which Transformers dequantises to bfloat16) to the bit" in card
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_connections_are_taken_out_of_fp8(tmp_path: Path) -> None:
    for name in ("fp8", "ours"):
        save_fp8(tmp_path / name, torch.float32)
    tensors = load_file(tmp_path / "ours" / "model.safetensors")
    tensors["model.value_residual.bias"] = torch.tensor([0.0, 1.0] * 5)
    save_file(tensors, tmp_path / "ours" / "model.safetensors")
    change_json(tmp_path / "ours" / "config.json", model_type="resformer", value_residual="learnable")
    assert revert(tmp_path / "ours", tmp_path / "back", verify="logits").logits.identical
    assert verify(tmp_path / "fp8", tmp_path / "back", verify="hashes").same


#: What is done to the tensors.
SCALES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "absent": lambda tensors: tensors.pop(f"{NAME}_scale_inv"),
    "no whole blocks": lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(5, 2)}),
    "no blocks": lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(0, 2)}),
    "of another name": lambda tensors: tensors.update({f"{NAME}_scale": torch.ones(6, 2)}),
    "a smaller last block": lambda tensors: tensors.update(
        {NAME: tensors[NAME][:12].clone(), f"{NAME}_scale_inv": torch.ones(2, 2)}
    ),
}


def test_what_is_not_dequantised_is_refused_with_the_way_out(tmp_path: Path) -> None:
    def refused(quantisation: str = "") -> str:
        if quantisation:
            change_json(tmp_path / "fp8" / "config.json", quantization_config=json.loads(quantisation))
        with pytest.raises(CheckpointError) as caught:
            retrofit(tmp_path / "fp8", tmp_path / "out", verify="headers")
        return str(caught.value)

    said = {}
    for case, change in SCALES.items():
        save_fp8(tmp_path / "fp8", torch.float32)
        tensors = load_file(tmp_path / "fp8" / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "fp8" / "model.safetensors")
        said[case] = refused()
    save_fp8(tmp_path / "fp8", torch.float32)
    weights = tmp_path / "fp8" / "model.safetensors"
    renamed = weights.rename(weights.with_name("model-00001-of-00001.safetensors"))
    said["of a file that Transformers does not find"] = refused()
    renamed.rename(weights)
    assert_said("quantised", said, tmp=tmp_path)
    assert_answers("quantised-formats", refused, tmp=tmp_path)
