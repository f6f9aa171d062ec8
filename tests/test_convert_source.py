"""A source is what Transformers makes of its folder: the result is the same, or the source is refused by name."""

import json
import re
from pathlib import Path

import pytest
import torch
from checkpoints import change_json, save_checkpoint
from command_server import python
from default_load import look
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoTokenizer

from resformer import retrofit
from resformer.convert import CheckpointError, VerificationError
from resformer.convert.connected_families import _check_sizes
from resformer.modeling.measured import MEASURED

#: Of each family: sets each whole number of config.json to 2^31 - 1, and to what most are allowed to be, and a dry run
#: reads it with 3 GB to spare.
HUGE = """
import json, resource, sys, time
from pathlib import Path
tests, *families = sys.argv[1:]
sys.path.insert(0, tests)
from small_decoders import small_config
from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
import resformer
from resformer.errors import ResFormerError

def numbers(values, path=()):
    for key, value in values.items():
        if type(value) is int:
            yield (*path, key)
        elif isinstance(value, dict):
            yield from numbers(value, (*path, key))

most = resource.getrlimit(resource.RLIMIT_AS)[1]
for folder in map(Path, families):
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    config = small_config(folder.name)
    MODEL_FOR_CAUSAL_LM_MAPPING[type(config)](config).save_pretrained(folder)
    text = (folder / "config.json").read_text()
    used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 3 * 2**30, most))
    paths = [*numbers(json.loads(text)), ("num_labels",)]
    for path, value in [(path, value) for path in paths for value in (2**31 - 1, 2**25)]:
        content = json.loads(text)
        place = content
        for name in path[:-1]:
            place = place[name]
        place[path[-1]] = value
        (folder / "config.json").write_text(json.dumps(content))
        start = time.process_time()
        try:
            resformer.retrofit(folder, "out", "denseformer", dry_run=True, progress=False)
        except ResFormerError as error:
            assert "Cannot allocate" not in str(error) and "memory" not in str(error), (folder, path, error)
        assert time.process_time() - start < 30, (folder, path)
"""


#: Dense and sparse ones, with latents, states, positions of a table and towers.
NUMBERED = (
    "llama xglm gpt_neo gptj gemma3 gpt_oss bloom deepseek_v3 falcon_h1 gemma4_text glm4 mamba2 opt qwen3_moe".split()
)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="no limit on memory")
@pytest.mark.parametrize("families", [NUMBERED[:1], pytest.param(NUMBERED[1:], marks=pytest.mark.slow)], ids=len)
def test_no_number_of_a_configuration_takes_memory(families: list[str], tmp_path: Path) -> None:
    path = str(Path(retrofit.__code__.co_filename).parents[2])
    python("-c", HUGE, Path(__file__).parent, *families, cwd=tmp_path, PYTHONPATH=path)


@pytest.mark.parametrize("family", sorted(MEASURED))
def test_sizes_that_transformers_gives_a_family_are_plausible(family: str, tmp_path: Path) -> None:
    content = json.loads(CONFIG_MAPPING[family]().to_json_string(use_diff=False))
    _check_sizes(tmp_path, content, CONFIG_MAPPING[family])


def test_positions_are_bounded_where_a_family_makes_a_table_of_them(tmp_path: Path) -> None:
    for family, positions in {"gpt_neo": 2**20, "jamba": 2**23}.items():
        save_checkpoint(tmp_path / family, family)
        change_json(tmp_path / family / "config.json", max_position_embeddings=positions)
    assert retrofit(tmp_path / "jamba", tmp_path / "out").logits.identical
    with pytest.raises(CheckpointError, match=r"makes tables of 1,.*max_position_embeddings"):
        retrofit(tmp_path / "gpt_neo", tmp_path / "refused")


def test_what_a_folder_of_transformers_has_beside_the_model_is_its_too(tmp_path: Path) -> None:
    """Templates by name, with a space in it; a BOM, with which Transformers reads no settings; what it ignores."""
    save_checkpoint(tmp_path / "source")
    (tmp_path / "source" / "additional_chat_templates").mkdir()
    (tmp_path / "source" / "additional_chat_templates" / "tool use.jinja").write_text("{{ tools }}")
    (tmp_path / "source" / "generation_config.json").write_bytes(b'\xef\xbb\xbf{"temperature": 0.2}')
    tensors = load_file(tmp_path / "source" / "model.safetensors")
    more = {"model.layers.61.mtp.weight": torch.ones(3), "model.rotary_emb.inv_freq": torch.ones(4)}
    save_file({**tensors, **more}, tmp_path / "source" / "model.safetensors", {"format": "pt"})
    report = retrofit(tmp_path / "source", tmp_path / "out")
    assert look(tmp_path / "source") == look(tmp_path / "out")
    assert "tool use" in AutoTokenizer.from_pretrained(tmp_path / "out").chat_template
    assert report.left_behind == ["generation_config.json"]
    assert sum("layers.61.mtp.weight" in warning for warning in report.warnings) == 1


def test_a_tokenizer_is_compared_with_the_sources_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: files that the package does not know, and so leaves behind."""
    save_checkpoint(tmp_path / "source")
    monkeypatch.setattr("resformer.convert.reading.SIDE_FILES", re.compile("tokenizer.json|generation_config.json"))
    with pytest.raises(VerificationError, match="another tokenizer than the source: "):
        retrofit(tmp_path / "source", tmp_path / "out")


def test_a_name_of_a_connection_in_a_plain_source_is_refused(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "source")
    weights = tmp_path / "source" / "model.safetensors"
    save_file({**load_file(weights), "x.weight": torch.ones(2)}, weights, {"format": "pt"})
    assert retrofit(tmp_path / "source", tmp_path / "out").exact
    taken = {"model.layers.1.value_residual.weight": torch.ones(2)}
    save_file({**load_file(weights), **taken}, weights, {"format": "pt"})
    with pytest.raises(CheckpointError, match="which are names of connections"):
        retrofit(tmp_path / "source", tmp_path / "more")
