"""fp8 checkpoints are dequantised to the numbers that Transformers makes of them, and rounding is said."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoints import change_json, save_checkpoint
from conftest import assert_said
from huggingface_hub import ModelCard
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, FineGrainedFP8Config

from resformer import inspect, retrofit, verify
from resformer.convert import CheckpointError, VerificationError
from resformer.convert.quantisation import Dequantised
from resformer.convert.safetensors_format import Tensor
from resformer.convert.source import open_source

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


@pytest.mark.parametrize(
    ("scale_dtype", "rounds"),
    [(torch.float32, True), (torch.bfloat16, True), (torch.uint8, False), (torch.float8_e8m0fnu, False)],
)
def test_fp8_becomes_what_transformers_makes_of_it(scale_dtype: torch.dtype, rounds: bool, tmp_path: Path) -> None:
    save_fp8(tmp_path / "fp8", scale_dtype)
    report = retrofit(tmp_path / "fp8", tmp_path / "out", verify="logits")
    assert report.logits.identical
    assert (report.dequantised, report.exact, report.source_dtype) == (True, not rounds, "bfloat16")
    stored = load_file(tmp_path / "fp8" / "model.safetensors")
    written = {name: t for file in (tmp_path / "out").glob("*.safetensors") for name, t in load_file(file).items()}
    count = 0
    for name, scales in stored.items():
        if name.endswith("_scale_inv"):
            scales = (scales.double() - 127).exp2() if scale_dtype is torch.uint8 else scales.double()
            weight = stored[name.removesuffix("_scale_inv")].double()
            exact = weight * scales.repeat_interleave(BLOCK[0], 0).repeat_interleave(BLOCK[1], 1)
            count += int((exact != written[name.removesuffix("_scale_inv")].double()).sum())
    assert report.dequantising_rounded == count
    assert (count > 0) == rounds
    assert retrofit(tmp_path / "fp8", tmp_path / "none", dry_run=True).dequantising_rounded is None
    note = "42 fp8 tensors are dequantised to bfloat16."
    assert note in report.warnings[0]
    inspection = inspect(tmp_path / "fp8")
    assert note in inspection.warnings[0]
    assert inspection.bytes == (tmp_path / "fp8" / "model.safetensors").stat().st_size
    assert verify(tmp_path / "fp8", tmp_path / "out", verify="hashes").same
    (tensor, *_) = open_source(tmp_path / "fp8").fetch().fp8
    pieces = [bytes(piece) for piece in tensor.pieces(100)]
    assert b"".join(pieces) == b"".join(tensor.pieces())
    assert {len(piece) for piece in pieces[:-1]} == {100}
    dequantise = FineGrainedFP8Config(dequantize=True, weight_block_size=BLOCK)
    expected = AutoModelForCausalLM.from_pretrained(
        tmp_path / "fp8", quantization_config=dequantise, dtype=torch.bfloat16
    ).state_dict()
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "out").state_dict()
    assert {
        name: tensor for name, tensor in converted.items() if not torch.equal(tensor, expected.get(name, tensor))
    } == {}
    assert converted.keys() - expected.keys() == {"model.value_residual.bias"}
    card = ModelCard.load(tmp_path / "out" / "README.md").text
    assert "identical to the source's (which Transformers dequantises to bfloat16) to the bit" in card
    assert (f"weights to bfloat16 rounded {count:,} numbers" in card) == rounds
    assert "quantization_config" not in json.loads((tmp_path / "out" / "config.json").read_text())


def test_a_wrong_dequantisation_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_fp8(tmp_path / "fp8", torch.uint8)
    scales = Dequantised._numbers
    monkeypatch.setattr(Dequantised, "_numbers", lambda self: 3 * scales(self))
    with pytest.raises(VerificationError, match="is not exact, the logits differ"):
        retrofit(tmp_path / "fp8", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_fp8_that_transformers_does_not_find_is_said_not_to_be_compared(tmp_path: Path) -> None:
    save_fp8(tmp_path / "fp8", torch.uint8)
    (tmp_path / "fp8" / "model.safetensors").rename(tmp_path / "fp8" / "model-00001-of-00001.safetensors")
    report = retrofit(tmp_path / "fp8", tmp_path / "out")
    assert (report.verified, report.logits) == ("hashes", None)
    assert "what Transformers makes of the fp8 weights: it finds no model.safetensors" in report.warnings[-1]
    with pytest.raises(CheckpointError, match="Transformers cannot dequantise it"):
        retrofit(tmp_path / "fp8", tmp_path / "again", verify="logits")


#: What is done to the tensors.
SCALES: dict[str, Callable[[dict[str, torch.Tensor]], object]] = {
    "absent": lambda tensors: tensors.pop(f"{NAME}_scale_inv"),
    "no whole blocks": lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(5, 2)}),
    "no blocks": lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(0, 2)}),
    "integers": lambda tensors: tensors.update({f"{NAME}_scale_inv": torch.ones(6, 2).int()}),
    "of another name": lambda tensors: tensors.update({f"{NAME}_scale": torch.ones(6, 2)}),
    "a smaller last block": lambda tensors: tensors.update(
        {NAME: tensors[NAME][:12].clone(), f"{NAME}_scale_inv": torch.ones(2, 2)}
    ),
}
FORMATS: dict[str, Any] = {
    "bitsandbytes": {"quant_method": "bitsandbytes", "load_in_4bit": True},
    "bitsandbytes, 8 bits": {"load_in_8bit": True},
    "compressed-tensors": {"quant_method": "compressed-tensors"},
    "gptq": {"quant_method": "gptq", "bits": 4},
    "awq": {"quant_method": "awq"},
    "a list": [1],
    **{
        f"blocks of {block}": {"quant_method": "fp8", "weight_block_size": block}
        for block in (0, "8", [8, 0], [8, "16"], {"rows": 8})
    },
}


def test_what_is_not_dequantised_is_refused_with_the_way_out(tmp_path: Path) -> None:
    said = {}

    def refused(case: str) -> None:
        with pytest.raises(CheckpointError) as caught:
            retrofit(tmp_path / "fp8", tmp_path / "out", verify="headers")
        said[case] = str(caught.value)

    save_fp8(tmp_path / "fp8", torch.float32)
    for case, change in SCALES.items():
        tensors = load_file(tmp_path / "fp8" / "model.safetensors")
        change(tensors)
        save_file(tensors, tmp_path / "fp8" / "model.safetensors")
        refused(case)
        save_fp8(tmp_path / "fp8", torch.float32)
    for case, quantisation in FORMATS.items():
        change_json(tmp_path / "fp8" / "config.json", quantization_config=quantisation)
        refused(case)
    assert_said("quantised", said, tmp=tmp_path)


def test_weights_on_the_hub_are_not_on_this_disk(tmp_path: Path) -> None:
    weight, scales = (Tensor(name, "F8_E4M3", (2, 2), (tmp_path / "absent", 0)) for name in ("w", "w_scale_inv"))
    dequantised = Dequantised("w", "BF16", (2, 2), memoryview(b""), weight, scales)
    assert not dequantised.on_this_disk
