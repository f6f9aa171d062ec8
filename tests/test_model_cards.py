"""Cards state what was measured and nothing else, in a form that the Hub and a reader's Markdown understand."""

import json
import re
import shutil
from collections.abc import Callable
from difflib import unified_diff
from pathlib import Path
from typing import Any

import pytest
from checkpoints import change_json, save_checkpoint
from conftest import COMBINATIONS, TINY, assert_said, assert_snapshot, cli
from huggingface_hub import ModelCard
from jinja2 import UndefinedError
from latex2mathml.converter import convert
from markdown_it import MarkdownIt
from transformers import AutoConfig, AutoModelForCausalLM

from resformer import METHODS, ResFormerConfig, connected_config, retrofit, revert
from resformer.errors import CheckpointError
from resformer.files import check_target
from resformer.model_cards import Metric, carried_metadata, harness_metrics, is_as_made, metrics_of, model_card
from resformer.record import weight_digests

DATA = Path(__file__).parent / "data"

STATED = """---
license: other
license_name: small-licence
license_link: https://example.org/LICENSE
language: [en, de]
datasets: [owner/corpus]
---
# A source
"""
#: What a training and the evaluation harness have written.
TRAINING, HARNESS = (json.loads((DATA / f"{name}.json").read_text(encoding="utf-8")) for name in ("metrics", "harness"))


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a source, and an exact and a lossy retrofit of it."""
    folder = tmp_path_factory.mktemp("cards")
    save_checkpoint(folder / "llama")
    (folder / "llama" / "README.md").write_text(STATED)
    retrofit(folder / "llama", folder / "exact", "resformer-denseformer", verify="logits")
    retrofit(folder / "llama", folder / "lossy", "svformer", lossy=True, verify="logits")
    return folder


@pytest.fixture
def copied(checkpoints: Path, tmp_path: Path) -> Callable[[str], Path]:
    """A checkpoint that a test may change."""
    return lambda name: Path(shutil.copytree(checkpoints / name, tmp_path / name))


def record_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "resformer_conversion.json").read_text())


@pytest.fixture(scope="module")
def cards(checkpoints: Path) -> dict[str, str]:
    """A card of each kind."""
    config, record = ResFormerConfig.from_pretrained(checkpoints / "lossy"), record_of(checkpoints / "exact")
    exact = ResFormerConfig.from_pretrained(checkpoints / "exact")
    on_hub = {**record, "source": "owner/llama", "revision": "0123abcd", "verified": "headers"}
    runs = [TRAINING["runs"][0], {**TRAINING["runs"][1], "name": "svformer"}]
    made = {
        "exact": ModelCard.load(checkpoints / "exact" / "README.md"),
        "lossy": ModelCard.load(checkpoints / "lossy" / "README.md"),
        "bundle of a source on the Hub": model_card(on_hub, "you/new", config=exact, bundle=True),
        "without a licence, of a named source": model_card(
            {**record, "source_card": {}}, "you/new", config=exact, base_model="owner/other"
        ),
        "fine-tuned": model_card(
            {**TRAINING, "runs": runs},
            "you/tuned",
            config=config,
            metrics=[*metrics_of(TRAINING), *harness_metrics(HARNESS)],
        ),
        "from scratch": model_card(
            {"parameters": 4321, "from_scratch": True}, "you/new", config=config, metrics=[METRIC]
        ),
    }
    plain = connected_config(AutoConfig.for_model("qwen3", **TINY), "transformer")
    made["plain"] = model_card({"parameters": 4321, "from_scratch": True}, "you/plain", config=plain)
    for name in ("kitchen-sink", "depth-sink"):
        made[name] = model_card({}, "you/new", config=ResFormerConfig(**TINY, **sink(name)))
    return {name: str(card) for name, card in made.items()}


def sink(name: str) -> dict[str, Any]:
    return {field: value for field, value in COMBINATIONS[name].items() if field not in TINY}


METRIC = Metric("loss", 3.25, "WikiText-2", "test", samples=77, of_samples=99)


def test_cards_are_those_that_were_read(cards: dict[str, str]) -> None:
    """The first card, and of each other one the lines that the most similar card before it has not, or has alone."""
    lines = {name: card.partition("\n<!-- Made by")[0].splitlines() for name, card in cards.items()}
    first, *others = cards
    read = f"=== {first}\n\n" + "\n".join(lines[first]) + "\n"
    for number, name in enumerate(others, 1):
        changes = {before: list(unified_diff(lines[before], lines[name], n=0))[2:] for before in [*cards][:number]}
        like = min(changes, key=lambda before: len(changes[before]))
        changed = [line for line in changes[like] if not line.startswith("@@") and len(line) > 1]
        read += f"\n=== {name}, beside {like}\n\n" + "\n".join(changed) + "\n"
    assert_snapshot("cards.md", read)


def test_front_matter_passes_the_hubs_parsing_and_goes_round(cards: dict[str, str]) -> None:
    for card in cards.values():
        assert str(ModelCard(card)) == card
        assert is_as_made(card)
        assert not is_as_made(card.replace("Licence", "License"))


@pytest.mark.parametrize(
    "text",
    [
        None,  # no card at all
        "---\nlicense: mit\n---\n" + "x" * 2**23,
        "no front matter",
        "---\n- a list\n---\n",
        "---\nlicense: 'mit\\n\\n# Buy this'\n---\n",
        "---\nlicense: {a: b}\nlanguage: yes\ndatasets: ['<script>']\n---\n",
        "---\nlicense_link: 'javascript:alert(1)'\nlicense_name: '](https://x.y)'\n---\n",
        "---\nlicense: !!python/object/apply:os.system [ls]\n---\n",
        "---\na: " + "[" * 1500 + "\n---\n",
    ],
)
def test_what_has_not_the_form_of_metadata_is_not_carried(text: str | None, tmp_path: Path) -> None:
    if text is not None:
        (tmp_path / "README.md").write_text(text)
    assert carried_metadata(tmp_path / "README.md") == {}


def test_several_licences_and_norwegian_are_carried(checkpoints: Path, tmp_path: Path) -> None:
    source, stated = tmp_path / "README.md", {"license": ["mit", "apache-2.0"], "language": ["no"]}
    source.write_text("---\nlicense: [mit, apache-2.0]\nlanguage: no  # false in YAML 1.1\n---\n")
    assert carried_metadata(source) == stated
    record, config = record_of(checkpoints / "exact"), ResFormerConfig.from_pretrained(checkpoints / "exact")
    made = model_card({**record, "source_card": stated}, "you/new", config=config)
    again = ModelCard(str(made)).data.to_dict()
    assert {name: again[name] for name in stated} == stated
    assert "\n`mit, apache-2.0`." in str(made)


ENTRY = {"name": "loss", "value": 2.5, "dataset": "WikiText-2", "split": "test"}


def test_what_does_not_say_what_it_is_is_refused_by_name(checkpoints: Path) -> None:
    assert metrics_of({"metrics": [ENTRY]}) == [Metric("loss", 2.5, "WikiText-2", "test")]
    said: dict[str, str] = {}

    def refused(case: str, make: Callable[..., object], *arguments: Any, **options: Any) -> None:
        with pytest.raises((ValueError, UndefinedError)) as caught:
            make(*arguments, **options)
        said[case] = str(caught.value)

    for name in ENTRY:
        refused(f"{name} is None", metrics_of, {"metrics": [{**ENTRY, name: None}]})
        lacking = {key: value for key, value in ENTRY.items() if key != name}
        refused(f"no {name}", metrics_of, {"metrics": [lacking]}, "m.json")
    for value in (float("nan"), float("inf"), True, "2.5"):
        refused(f"value {value!r}", metrics_of, {"metrics": [{**ENTRY, "value": value}]})
    refused("another field", metrics_of, {"metrics": [{**ENTRY, "colour": "c"}]})
    record, config = record_of(checkpoints / "exact"), ResFormerConfig.from_pretrained(checkpoints / "exact")
    del record["parameters"]
    refused("no parameters", model_card, record, "you/new", config=config)
    unsplit = {**HARNESS, "configs": {**HARNESS["configs"], "custom": {"dataset_path": "json"}}}
    refused("task without a split", harness_metrics, unsplit)
    refused("no results", harness_metrics, TRAINING)
    assert_said("cards", said)


def test_a_dataset_may_have_a_name_of_digits() -> None:
    numbered = {**HARNESS["configs"], "arc_easy": {**HARNESS["configs"]["arc_easy"], "dataset_name": 2016}}
    assert harness_metrics({**HARNESS, "configs": numbered})[0].config == "2016"  # as YAML reads it


def test_tables_and_equations_come_out_on_the_hub(cards: dict[str, str]) -> None:
    """The Hub typesets what is within `$$` or within `\\(` and `\\)`, before it reads Markdown."""
    markdown = MarkdownIt("commonmark").enable("table")
    of_methods = [str(model_card({}, "m", config=ResFormerConfig.for_method(each))) for each in METHODS]
    for card in (*cards.values(), *of_methods):
        body = card.partition("\n---\n")[2] or card
        equations = re.findall(r"\\\\\((.+?)\\\\\)", body)
        assert equations
        assert all(convert(equation) for equation in equations)
        body = re.sub(r"\\\\\((.+?)\\\\\)", "<math>", body)
        assert "$" not in body
        tokens = markdown.parse(body)
        kinds = [token.type for token in tokens]
        assert kinds.count("table_open") == body.count("|---|\n") >= 1
        assert kinds.count("tr_open") == sum(line.startswith("|") for line in body.splitlines()) - body.count("|---|\n")
        prose = [token.content for token in tokens if token.type == "inline"]
        assert not [text for text in prose if text.startswith("|") or "{%" in text or "Undefined" in text]
        assert "\n\n\n" not in card


def card(*arguments: object) -> tuple[int, str, str]:
    done = cli("card", *arguments)
    return done.exit_code, done.stdout, done.stderr


def test_command_makes_the_card_that_the_converter_made_or_prints_it(copied: Callable[[str], Path]) -> None:
    folder = copied("exact")
    built = (folder / "README.md").read_text()
    (folder / "README.md").unlink()
    before = sorted(folder.iterdir())
    assert card(folder, "--dry-run") == (0, f"{built}\n", "")
    assert sorted(folder.iterdir()) == before
    code, said, _ = card(folder)
    assert code == 0
    assert "origin: retrofitted" in said
    assert (folder / "README.md").read_text() == built


def test_a_card_that_was_made_anew_does_not_keep_force_from_replacing_the_folder(
    copied: Callable[[str], Path], tmp_path: Path
) -> None:
    folder = copied("exact")
    assert card(folder, "--repository", "you/x") == (
        0,
        f"card          {folder / 'README.md'}, origin: retrofitted\n",
        "",
    )
    check_target(folder, made_by="convert", force=True)
    retrofit(folder, tmp_path / "deeper", method="mudd")
    revert(tmp_path / "deeper", tmp_path / "again")  # without a card, as runs of nanochat are converted
    assert card(tmp_path / "again")[0] == 0
    check_target(tmp_path / "again", made_by="revert", force=True)
    card(folder, "--output", tmp_path / "card.md")  # in no listing
    with (folder / "README.md").open("a") as file:
        file.write("By hand.\n")
    with pytest.raises(CheckpointError, match=r"README\.md', which is not as `resformer convert` wrote it"):
        check_target(folder, made_by="convert", force=True)


@pytest.fixture
def unrecorded(copied: Callable[[str], Path]) -> Path:
    """A retrofit without its record."""
    folder = copied("exact")
    (folder / "resformer_conversion.json").unlink()
    return folder


def test_command_makes_the_card_of_a_training(unrecorded: Path, tmp_path: Path) -> None:
    metrics = json.dumps({**TRAINING, "seconds": 3.5}).replace('"name": "resformer"', '"name": "resformer-denseformer"')
    (tmp_path / "metrics.json").write_text(metrics)
    (tmp_path / "eval.json").write_text(json.dumps(HARNESS))
    results = ["--metrics", tmp_path / "metrics.json", "--eval", tmp_path / "eval.json"]
    assert "origin: fine-tuned\nresults       5\n" in card(unrecorded, *results, "--license", "mit")[1]
    built = ModelCard.load(unrecorded / "README.md")
    assert (built.data.base_model, built.data.license) == ("owner/llama", "mit")
    assert built.data.datasets == ["owner/corpus", "owner/minutes"]
    assert "| held-out perplexity after | 9.822 | 9.794 |" in built.text
    code, _, err = card(unrecorded, *results, *results[:2])  # a card without edits is replaced
    assert (code, err) == (0, "")
    assert ModelCard.load(unrecorded / "README.md").data.license == "mit"  # and the licence is kept


def test_from_scratch_is_what_a_training_says_it_is(unrecorded: Path) -> None:
    folder = unrecorded
    (folder / "README.md").unlink()
    for named, source, origin in (({"name": "llama"}, None, "fine-tuned"), (None, None, "from scratch")):
        change_json(folder / "config.json", base_model=named)
        (folder / "metrics.json").write_text(json.dumps({**TRAINING, "source": source, **weight_digests(folder)}))
        assert f"origin: {origin}\n" in card(folder)[1]
        assert ("trained from scratch on the collected minutes" in (folder / "README.md").read_text()) == (not named)
    silent = {name: value for name, value in TRAINING.items() if name != "source"}
    (folder / "metrics.json").write_text(json.dumps({**silent, **weight_digests(folder)}))
    assert "origin: unknown\n" in card(folder)[1]
    assert "from scratch" not in (folder / "README.md").read_text()


def test_command_leaves_a_card_that_a_person_wrote(copied: Callable[[str], Path]) -> None:
    folder = copied("exact")
    edited = (folder / "README.md").read_text().replace("## Limits", "## Limits\n\nIt cannot sing.")
    for content in (b"Caf\xe9", edited.encode()):
        (folder / "README.md").write_bytes(content)
        code, _, said = card(folder)
        assert code == 3
        assert "edited by hand" in said
        assert (folder / "README.md").read_bytes() == content
    assert card(folder, "--force")[0] == 0
    assert "It cannot sing." not in (folder / "README.md").read_text()


def test_command_repeats_no_claim_of_files_that_were_changed(copied: Callable[[str], Path]) -> None:
    """Edits of the configuration, weights that were renamed or touched behind their first bytes."""
    claims = ("identical to the source", "computes what its source does", "has not been trained", "was written, were")
    untouched = copied("exact")
    assert card(untouched)[0] == 0
    assert all(claim in (untouched / "README.md").read_text() for claim in claims)
    shutil.rmtree(untouched)

    def edited(folder: Path) -> str:
        change_json(folder / "config.json", rms_norm_eps=0.01)
        return "config.json"

    def renamed(folder: Path) -> str:
        weights = next(folder.glob("*00002.safetensors"))
        weights.rename(folder / "other.safetensors")
        index = folder / "model.safetensors.index.json"
        index.write_text(index.read_text().replace(weights.name, "other.safetensors"))
        return f"{weights.name}`, `other.safetensors"

    def touched(folder: Path) -> str:
        weights = folder / "model-00001-of-00002.safetensors"
        content = bytearray(weights.read_bytes())
        content[8 + int.from_bytes(content[:8], "little") + 30000] ^= 1  # of a tensor of 38,400 bytes
        weights.write_bytes(content)
        return weights.name

    for change in (edited, renamed, touched):
        folder = copied("exact")
        name = change(folder)
        code, _, said = card(folder)
        assert code == 0, said
        text = (folder / "README.md").read_text()
        assert f"Not verified since `{name}` w" in text
        assert not [claim for claim in claims if claim in text]
        assert "license: other" in text
        shutil.rmtree(folder)


def test_a_card_says_where_it_knows_first_bytes_alone(checkpoints: Path, tmp_path: Path) -> None:
    retrofit(checkpoints / "llama", tmp_path / "out", link=True)
    sentence = "Of `model-00001-of-00002.safetensors` the record has no SHA-256: a change behind the first 4 KiB"
    assert sentence in (tmp_path / "out" / "README.md").read_text()
    assert "4 KiB" not in (checkpoints / "exact" / "README.md").read_text()


def test_a_model_that_is_saved_elsewhere_keeps_its_origin_and_licence(checkpoints: Path, tmp_path: Path) -> None:
    folder = tmp_path / "saved"
    AutoModelForCausalLM.from_pretrained(checkpoints / "exact").save_pretrained(folder)
    origin = {"name": "llama", "revision": None, "license": "other", "license_name": "small-licence"}
    assert json.loads((folder / "config.json").read_text())["base_model"].items() >= origin.items()
    assert "origin: derived" in card(folder)[1]
    text = (folder / "README.md").read_text()
    assert "`llama` with cross-layer connections (method `resformer-denseformer`)." in text
    assert (
        "Whether it was trained, and on what, is not recorded here: `resformer card --metrics FILE` records it" in text
    )
    assert "license_name: small-licence" in text
    change_json(folder / "config.json", base_model={"name": "owner/llama", "revision": "0123abcd"})
    assert card(folder)[0] == 0
    assert ModelCard.load(folder / "README.md").data.base_model == "owner/llama"
    retrofit(folder, tmp_path / "more", "delta-attention-residuals")
    assert json.loads((tmp_path / "more" / "config.json").read_text())["base_model"]["name"] == "owner/llama"
    for wrong in (5, {}, {"name": 5}, {"name": "a\nb"}):
        change_json(folder / "config.json", base_model=wrong)
        (folder / "README.md").unlink()
        assert "origin: unknown" in card(folder)[1]
        assert "Its origin is unknown" in (folder / "README.md").read_text()


def test_figures_of_other_weights_are_left_out(unrecorded: Path) -> None:
    described = {**TRAINING, **weight_digests(unrecorded)}
    for metrics, stated, unstated in (
        (described, "9.794", "not compared"),
        ({**described, "config_sha256": "0" * 64}, "Not verified since `config.json` was changed", "9.794"),
        (TRAINING, "does not say of which files its figures are", "Not verified"),
    ):
        (unrecorded / "metrics.json").write_text(json.dumps(metrics))
        assert card(unrecorded)[0] == 0
        text = (unrecorded / "README.md").read_text()
        assert (stated in text, unstated in text) == (True, False)


def test_what_is_no_record_or_training_is_refused_by_the_name_of_the_field(copied: Callable[[str], Path]) -> None:
    folder = copied("exact")
    record = record_of(folder)
    wrong = {"runs": [5], "data": [{"source": 1}], "recipe": {"train": "all"}, "corpus": None, "evaluation_tokens": "9"}
    for name, value in wrong.items():
        (folder / "metrics.json").write_text(json.dumps({**TRAINING, name: value}))
        code, _, said = card(folder)
        assert (code, len(said.splitlines()), f"metrics.json: `{name}`" in said) == (3, 1, True), said
    (folder / "metrics.json").unlink()
    wrong = {"parameters": "many", "added": [1], "dtype": "int3", "files": 5, "logits": {}}
    for name, value in wrong.items():
        (folder / "resformer_conversion.json").write_text(json.dumps({**record, name: value}))
        code, _, said = card(folder)
        assert (code, len(said.splitlines())) == (3, 1)
        assert "resformer_conversion.json" in said
        assert f"`{name}`" in said
        (folder / "resformer_conversion.json").write_text(json.dumps({k: v for k, v in record.items() if k != name}))
        assert f"lacks `{name}`" in card(folder)[2]
