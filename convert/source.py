"""Where a checkpoint comes from: a local folder, a GGUF file, or the Hub."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError
from transformers import AutoConfig, AutoTokenizer, PreTrainedConfig, PreTrainedTokenizerBase

from resformer.convert.errors import CheckpointError

__all__ = ["Source", "open_source"]

#: What a retrofit reads or carries over; never code, pickles or optimizer states.
_HUB_FILES = ["*.safetensors", "*.safetensors.index.json", "*.json", "*.jinja", "*.model", "*.txt", "LICENSE*"]
#: Side files that go along as they are. Everything else of the tokenizer is named by `tokenizer_config.json`'s readers.
_SIDE_FILES = (
    "tokenizer.json tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json vocab.txt merges.txt "
    "tokenizer.model spiece.model chat_template.jinja chat_template.json"
).split()


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk, and what it is called."""

    name: str  # as the user gave it
    folder: Path
    gguf_file: str | None = None
    revision: str | None = None  # the commit, if it came from the Hub

    @property
    def location(self) -> dict[str, Any]:
        """Arguments for any `from_pretrained`."""
        arguments: dict[str, Any] = {"pretrained_model_name_or_path": str(self.folder)}
        return arguments if self.gguf_file is None else {**arguments, "gguf_file": self.gguf_file}

    def config(self) -> PreTrainedConfig:
        """The configuration, with no code of the checkpoint run.

        Raises:
            CheckpointError: it cannot be read, or the weights are quantised.
        """
        try:
            config = AutoConfig.from_pretrained(**self.location)
        except ImportError:
            raise  # a missing `gguf` says itself what to install
        except Exception as error:  # Transformers raises nearly anything for a bad file
            raise CheckpointError(f"{self._config_file}: cannot be read as a configuration: {error}") from error
        if self.gguf_file is None and getattr(config, "quantization_config", None) is not None:
            raise CheckpointError(
                f"{self._config_file}: the checkpoint is quantised ({config.quantization_config}); dequantise it first."
            )
        return config

    @property
    def _config_file(self) -> Path:
        return self.folder / (self.gguf_file or "config.json")

    def save_tokenizer(self, output: Path) -> bool:
        """Puts the tokenizer and its chat templates into `output`, byte for byte where the source has files of them.

        Returns whether there was one.
        """
        if self.gguf_file is not None:
            try:
                tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(**self.location)
            except Exception:  # whatever Transformers makes of a vocabulary that it does not know
                return False
            tokenizer.save_pretrained(output)
            return True
        present = [name for name in _SIDE_FILES if (self.folder / name).is_file()]
        for name in present:
            (output / name).write_bytes((self.folder / name).read_bytes())
        for template in sorted(self.folder.glob("chat_templates/*.jinja")) + sorted(
            self.folder.glob("additional_chat_templates/*.jinja")
        ):
            target = output / template.parent.name / template.name
            target.parent.mkdir(exist_ok=True)
            target.write_bytes(template.read_bytes())
        return any(name in present for name in ("tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt"))


def open_source(source: str | Path, revision: str | None = None) -> Source:
    """Finds the checkpoint: a folder, a `.gguf` file, `owner/name` or `owner/name/file.gguf` on the Hub.

    Raises:
        CheckpointError: it is none of these, or the folder has no safetensors.
    """
    name = str(source)
    path = Path(source).expanduser()
    if path.is_file():
        if path.suffix != ".gguf":
            raise CheckpointError(f"{path}: expected a checkpoint folder, a .gguf file or a Hub id.")
        return Source(name, path.parent, gguf_file=path.name)
    if not path.is_dir():
        return _download(name, revision)
    if revision is not None:
        raise CheckpointError(f"{path}: --revision {revision} is for Hub ids, this is a local folder.")
    return _checked(Source(name, path))


def _checked(source: Source) -> Source:
    folder = source.folder
    if not (folder / "config.json").is_file():
        ggufs = sorted(file.name for file in folder.glob("*.gguf"))
        hint = f" It holds {', '.join(ggufs)}: name that file." if ggufs else ""
        raise CheckpointError(f"{folder}: has no config.json, so it is not a Transformers checkpoint.{hint}")
    if not list(folder.glob("*.safetensors")):
        pickles = sorted(file.name for file in folder.glob("*.bin"))
        hint = (
            f" {pickles[0]} would have to be unpickled, which can run code: save it as safetensors first."
            if pickles
            else ""
        )
        raise CheckpointError(f"{folder}: has no *.safetensors file.{hint}")
    return source


def _download(name: str, revision: str | None) -> Source:
    repo_id, gguf_file = name, None
    if name.endswith(".gguf") and name.count("/") >= 2:
        owner, repo, gguf_file = name.split("/", 2)
        repo_id = f"{owner}/{repo}"
    try:
        if gguf_file is not None:
            folder = Path(hf_hub_download(repo_id, gguf_file, revision=revision)).parent
            return Source(name, folder, gguf_file=Path(gguf_file).name, revision=revision)
        folder = Path(snapshot_download(repo_id, revision=revision, allow_patterns=_HUB_FILES))
    except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
        raise CheckpointError(
            f"{name}: is neither a local folder nor a .gguf file, and the Hub did not give it: {error}"
        ) from error
    return _checked(Source(name, folder, revision=folder.name))  # a snapshot's folder is named by its commit
