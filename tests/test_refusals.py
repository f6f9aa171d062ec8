"""What commands refuse: one line with the way out, the exit code, and nothing written.

The files of `snapshots/refusals` hold the commands, which run in a folder of broken things, and what they answer.
"""

import json
import re
import shlex
import shutil
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from string import Template
from typing import Any

import pytest
import torch
from checkpoints import SIZES, byte_tokenizer, change_json, save_checkpoint, save_notes
from conftest import SNAPSHOTS, assert_answers
from datasets import Dataset, DatasetDict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BertConfig, BitsAndBytesConfig

from resformer import ResFormerConfig, ResFormerForCausalLM, ResFormerForSequenceClassification, retrofit
from resformer.modeling.connection import KINDS
from resformer.names import RECORD
from resformer.training.options import TokenizeOptions
from resformer.training.tokenizing import tokenize

NOTES = "--data notes.txt --sample-by paragraph"
TEXT = "--block 32 --batch 4 --held-out 0.1 --held-out-blocks 6 --no-bf16"
SHAPE = "tiny:hidden_size=32:intermediate_size=48:num_hidden_layers=6:num_attention_heads=4"
#: What commands have in common.
COMMON = {
    "scratch": f"--sizes {SHAPE} {NOTES} --tokenizer bytes {TEXT}",
    "continued": f"--from source {NOTES} {TEXT}",
    "data": f"{NOTES} {TEXT}",
}
#: Method -> a field that keeps a retrofit of it from being exact.
LOSSY: dict[str, dict[str, Any]] = {
    **{name: {} for name in ("neutreno", "resformer-identity", "resformer-constant")},
    "resformer-gated": {"value_residual_init": [0.5, 1.0]},
    "depth-attention": {"depth_attention_init": 0.5},
}
#: What records say of the source's own connections.
RECORDS = {
    "no-record": {"value_residual": "x"},
    "other-record": {"value_residual": "dense"},
    "more-record": {"vocab_size": 7, "neutreno_lambda": 0.5},
}
#: Chat templates that do not fit.
TEMPLATES = {
    "mute": None,
    "stubborn": "{{ raise_exception('no') }}",
    "growing": "{{ messages | length }}{{ messages }}",
}
#: What other libraries say, in our messages, and the sizes of their files.
THEIRS = re.compile(
    r"(loaded: |loaded \(|give it: |of the Hub: |be used: |template: |select one of |the file of )"
    r".+?(?=\); | bytes that |$)"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of three layers, whole and broken, texts and folders with files of somebody else's."""
    folder = tmp_path_factory.mktemp("refusals")
    save = partial(save_checkpoint, num_hidden_layers=3)
    save(folder / "source")
    retrofit(folder / "source", folder / "retrofit", "resformer-denseformer")
    sizes = {**SIZES, "num_hidden_layers": 3}
    ResFormerForCausalLM(ResFormerConfig.for_method("svformer", **sizes)).save_pretrained(folder / "shared")
    byte_tokenizer().save_pretrained(folder / "shared")
    save(folder / "narrow", vocab_size=200)
    ResFormerForSequenceClassification(ResFormerConfig(**sizes, num_labels=3)).save_pretrained(folder / "classifier")
    BertConfig(**sizes).save_pretrained(folder / "bert")
    for name in ("gpt2", "phi3", "internlm2", "iquestcoder"):
        shutil.copytree(folder / "source", folder / name)
        change_json(folder / name / "config.json", model_type=name, clip_qkv=8.0)
    for name, fields in RECORDS.items():
        shutil.copytree(folder / "retrofit", folder / name)
        (folder / name / RECORD).write_text(json.dumps({"source_fields": fields}))
    for method, field in LOSSY.items():
        retrofit(folder / "source", folder / method, method, lossy=True, verify="headers", **field)
    for name in ("coded", "pickled", "torn", "gap"):
        shutil.copytree(folder / "source", folder / name)
    shutil.copytree(folder / "source", folder / "bare", ignore=shutil.ignore_patterns("*token*"))
    change_json(folder / "coded" / "config.json", auto_map={"AutoConfig": "code.Class"}, model_type="strange")
    code = {"AutoTokenizer": ["code.Class", None]}
    change_json(folder / "coded" / "tokenizer_config.json", auto_map=code, tokenizer_class="Class")
    weights = load_file(folder / "source" / "model.safetensors")
    (folder / "pickled" / "model.safetensors").unlink()
    torch.save(weights, folder / "pickled" / "pytorch_model.bin")
    torn = folder / "torn" / "model.safetensors"
    torn.write_bytes(torn.read_bytes()[:-8])
    missing = "model.layers.2.self_attn.q_proj.weight"
    whole = {name: tensor for name, tensor in weights.items() if name != missing}
    save_file(whole, folder / "gap" / "model.safetensors", {"format": "pt"})
    for name in ("forgetful", "wide"):
        shutil.copytree(folder / "retrofit", folder / name)
    coefficients = folder / "forgetful" / "model-00002-of-00002.safetensors"
    save_file(dict([*load_file(coefficients).items()][1:]), coefficients, {"format": "pt"})
    change_json(folder / "wide" / "config.json", vocab_size=333)
    in_8_bits = BitsAndBytesConfig(load_in_8bit=True)
    quantised = AutoModelForCausalLM.from_pretrained(folder / "retrofit", quantization_config=in_8_bits)
    quantised.save_pretrained(folder / "quantised")
    byte_tokenizer().save_pretrained(folder / "quantised")

    save_notes(folder)
    tokenize(TokenizeOptions(data=[str(folder / "notes.txt")], output=str(folder / "tokens"), tokenizer="bytes"))
    shutil.copytree(folder / "tokens", folder / "cut")
    file = next((folder / "cut").glob("train*.parquet"))
    file.write_bytes(file.read_bytes()[:-1])
    for name, text in {
        "tiny.txt": "Hardly any text.\n",
        "texts/a.txt": "",
        "full/mine.txt": "",
        "token.yaml": "token: 3k\n",
        "image.png": "\x89PNG",
        "broken.jsonl": '{"text": ',
        "empty.jsonl": "",
        "ids.jsonl": '{"input_ids": [5, 257]}\n' * 99,
        "rows.jsonl": '{"id": 0, "text": "one"}\n' * 200,
        "chats.jsonl": '{"messages": [{"role": "user", "content": "1"}, {"role": "assistant", "content": "2"}]}\n' * 40,
        "set.yaml": "set: 5\n",
        "half.json": '{"runs": []}',
        "odd.json": '{"results": {"arc": {}}, "configs": {"arc": 5}}',
        "untyped.json": '{"metrics": [{"name": "a", "value": 1, "dataset": "b", "split": "c", "stderr": "d"}]}',
        "gguf/x.gguf": "",
    }.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text)
    for name, template in TEMPLATES.items():
        tokenizer = byte_tokenizer()
        tokenizer.chat_template = template
        tokenizer.save_pretrained(folder / name)
    (folder / "loop").symlink_to("loop")
    one = Dataset.from_dict({"text": ["one"]})
    DatasetDict({"train": one, "test": one}).save_to_disk(folder / "saved")
    return folder


@pytest.fixture
def own_classes_left_out() -> Iterator[None]:
    """Those that other tests have defined, whose fields messages list."""
    kinds = [*KINDS]
    KINDS[:] = [each for each in kinds if each.fields_of]
    yield
    KINDS[:] = kinds


@pytest.mark.usefixtures("own_classes_left_out")
@pytest.mark.parametrize("command", sorted(path.stem for path in (SNAPSHOTS / "refusals").iterdir()))
def test_refusals_are_one_line_with_the_way_out_and_leave_nothing(
    command: str, folder: Path, invoke: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("builtins.input", lambda prompt="": pytest.fail(f"asks {prompt}"))

    def answer(asked: str) -> str:
        before, words = set(folder.rglob("*")), shlex.split(Template(asked).substitute(COMMON))
        monkeypatch.setattr("sys.argv", ["resformer", *words])
        done = invoke(folder, *words)
        assert done.exit_code in (2, 3), done.output
        assert done.stdout == "", asked
        assert set(folder.rglob("*")) == before, asked
        said = re.split(r"(?:^|\s)Error: ", done.stderr)[-1].strip()  # behind a bar
        assert [line.startswith("Try: ") for line in said.splitlines()] in ([False], [False, True]), done.stderr
        return f"{done.exit_code} " + THEIRS.sub(r"\1...", said)

    assert_answers(f"refusals/{command}", answer, tmp=folder)
