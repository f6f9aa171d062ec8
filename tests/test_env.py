"""`resformer env` says what a bug report needs, and nothing that is secret."""

import json
from importlib import metadata

import pytest
from conftest import cli

from resformer.environment import describe_environment


def test_env_tells_the_versions_that_are_installed() -> None:
    done = cli("env", "--json")
    assert done.exit_code == 0, done.output
    environment_report = json.loads(done.stdout)
    for package in ("resformer", "torch", "transformers", "safetensors", "huggingface_hub", "lm-eval"):
        assert environment_report["packages"][package] == metadata.version(package)
    assert environment_report["cores"] >= 1
    assert environment_report["memory"] > 2**28
    assert isinstance(environment_report["bf16_on_cpu"], bool)
    text = cli("env").stdout
    assert f"transformers  {metadata.version('transformers')}" in text


def test_variables_are_shown_without_secrets(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = {"HF_TOKEN": "hf_abcdefgh", "HUGGING_FACE_HUB_TOKEN": "anything", "TRANSFORMERS_NOTE": "hf_abcdefgh"}
    hidden |= {"HF_HOME": "/home/someone/hf", "HF_ENDPOINT": "https://me:word@example.org/x?sig=abc&who=me"}
    shown = {"HF_HUB_DISABLE_IMPLICIT_TOKEN": "1", "OMP_NUM_THREADS": "3", "CUDA_VISIBLE_DEVICES": "0,1"}
    for name, value in {**hidden, **shown, "MY_DATABASE": "x"}.items():
        monkeypatch.setenv(name, value)
    told = describe_environment()["variables"]
    assert told.items() >= {**dict.fromkeys(hidden, "***"), **shown}.items()
    assert "MY_DATABASE" not in told
