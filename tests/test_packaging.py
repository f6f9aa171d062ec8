"""What an installation holds: the packages' files, from the checkout and from an sdist; and what a release needs."""

import ast
import os
import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from configparser import ConfigParser
from email.parser import Parser
from pathlib import Path

import command_server
import pytest
import yaml
from checkpoints import save_checkpoint
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from transformers.utils.import_utils import is_serve_available

import resformer

ROOT = Path(__file__).resolve().parents[1]


def folder_of(package: str) -> str:
    """Where a package's files are, by its own line in `package_dir` or its parent's."""
    parent, _, name = package.rpartition(".")
    return MAPPED.get(package) or (f"{folder_of(parent)}/{name}" if parent else f"src/{package}")


CONFIG = ConfigParser()
CONFIG.read(ROOT / "setup.cfg", encoding="utf-8")
PACKAGES = CONFIG["options"]["packages"].split()
#: Package -> its folder, relative to the root.
MAPPED = dict(re.findall(r"(\S+) = (\S+)", CONFIG["options"]["package_dir"]))
FOLDERS = {name: folder_of(name) for name in PACKAGES}
DIST_INFO = f"resformer-{resformer.__version__}.dist-info"


def sources() -> list[str]:
    """The project's files relative to the root: as git sees them, new ones included, or all where there is no git."""
    if not (ROOT / ".git").exists():
        found = [path.relative_to(ROOT) for path in ROOT.rglob("*") if not path.is_dir() or path.is_symlink()]
        hidden = re.compile(r"(^|/)(\..*|__pycache__|build|dist|.*\.egg-info)(/|$)")
        return [path.as_posix() for path in found if not hidden.search(path.as_posix())]
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout.split("\0")
    return [name for name in dict.fromkeys(listed) if name and os.path.lexists(ROOT / name)]


def packaged() -> dict[str, str]:
    """Path in a wheel -> path in the project, of each file that belongs to a package."""
    return {
        f"{package.replace('.', '/')}/{name.removeprefix(folder + '/')}": name
        for package, folder in FOLDERS.items()
        for name in sources()
        if name.startswith(folder + "/")
        and (package in MAPPED or name.count("/") == folder.count("/") + 1)
        and not is_link(name)
    }


def is_link(name: str) -> bool:
    """Whether this is one of the links in src/resformer, which git writes as text where a system has no links."""
    return name.removeprefix("src/resformer/") in MAPPED.values()


def build(project: Path, output: Path, *what: str) -> Path:
    """Builds with the installed setuptools, so without a network, and returns what `output` then holds."""
    command_server.python("-m", "build", "--no-isolation", *what, "--outdir", output, project, cwd=output.parent)
    return output


def wheel_in(folder: Path) -> dict[str, bytes]:
    """The files of the wheel in this folder."""
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def copy_project(target: Path) -> Path:
    """A copy that builds may litter."""
    for name in sources():
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


@pytest.fixture(scope="session")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Holds an sdist, and the wheel built from it."""
    folder = tmp_path_factory.mktemp("packaging")
    return build(copy_project(folder / "project"), folder / "dist")


@pytest.fixture(scope="session")
def wheel(built: Path) -> dict[str, bytes]:
    return wheel_in(built)


def test_every_folder_of_code_is_a_listed_package() -> None:
    outside = {"tests", "docs", "benchmarks"}
    with_code = {
        Path(name).parent.as_posix()
        for name in sources()
        if Path(name).name == "__init__.py" and Path(name).parts[0] not in outside
    }
    assert with_code == set(FOLDERS.values())
    assert sorted(PACKAGES) == PACKAGES


def test_sdist_wheel_holds_every_file_of_the_packages_and_nothing_else(wheel: dict[str, bytes]) -> None:
    expected = {inside: (ROOT / name).read_bytes() for inside, name in packaged().items()}
    found = {name: data for name, data in wheel.items() if not name.startswith(DIST_INFO)}
    assert sorted(found) == sorted(expected)
    assert found == expected


def test_wheel_says_what_it_is_and_has_its_commands(wheel: dict[str, bytes]) -> None:
    metadata = Parser().parsestr(wheel[f"{DIST_INFO}/METADATA"].decode())
    assert (metadata["Name"], metadata["Version"]) == ("resformer", resformer.__version__)
    assert metadata["License-Expression"] == "Apache-2.0"
    assert wheel[f"{DIST_INFO}/licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert metadata.get_payload().strip() == (ROOT / "README.md").read_text(encoding="utf-8").strip() != ""
    assert {name.partition("/")[0] for name in wheel} == {"resformer", DIST_INFO}
    commands = wheel[f"{DIST_INFO}/entry_points.txt"].decode()
    for line in ("resformer = resformer.cli:main", "hf-resformer = resformer.cli:main"):
        assert f"\n{line}\n" in commands
    assert "[vllm.general_plugins]\nresformer = resformer.vllm:register\n" in commands


def test_sdist_holds_the_project(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert {member.name.partition("/")[0] for member in members} == {f"resformer-{resformer.__version__}"}
    assert [member.name for member in members if not (member.isfile() or member.isdir())] == [], "no links"
    found = {member.name.partition("/")[2] for member in members if member.isfile()}
    assert sdist.stat().st_size < 2**20
    expected = {
        name for name in sources() if not name.startswith((".git", "benchmarks/results/")) and not is_link(name)
    }
    generated = re.compile(r"PKG-INFO|src/resformer\.egg-info/.*")
    assert {name for name in found if not generated.fullmatch(name)} == expected


def requirements() -> list[Requirement]:
    blocks = [CONFIG["options"]["install_requires"], *CONFIG["options.extras_require"].values()]
    return [Requirement(line) for block in blocks for line in block.split("\n") if line]


def test_every_import_is_a_requirement() -> None:
    imported = set()
    for name in packaged().values():
        if name.endswith(".py"):
            for node in ast.walk(ast.parse((ROOT / name).read_text(encoding="utf-8"))):
                if isinstance(node, ast.Import):
                    imported |= {alias.name.partition(".")[0] for alias in node.names}
                elif isinstance(node, ast.ImportFrom):
                    assert node.level == 0, f"{name}: imports are absolute"
                    imported.add((node.module or "").partition(".")[0])
    asked_for = {canonicalize_name(requirement.name) for requirement in requirements()}
    third_party = {
        canonicalize_name({"yaml": "PyYAML"}.get(name, name))
        for name in imported - set(sys.stdlib_module_names) - {"resformer"}
    }
    assert third_party - {"vllm"} <= asked_for  # vLLM is there when it calls us


def run(*command: str, cwd: Path, **added: str) -> str:
    environment = {key: value for key, value in os.environ.items() if not key.startswith("PYTHON")} | added
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.slow
def test_installed_wheel_works_from_any_folder(built: Path, tmp_path: Path) -> None:
    target = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps", "--target", str(target)]
    run(*pip, *map(str, built.glob("*.whl")), cwd=tmp_path)
    code = "import importlib, sys; print([importlib.import_module(name).__file__ for name in sys.argv[1:]])"
    files = run(sys.executable, "-c", code, *PACKAGES, cwd=tmp_path, PYTHONPATH=str(target))
    assert files.strip() == str([str(target / package.replace(".", "/") / "__init__.py") for package in PACKAGES])
    for name in ("resformer", "hf-resformer"):
        command = str(target / "bin" / name)
        assert run(command, "--version", cwd=tmp_path, PYTHONPATH=str(target)).strip() == resformer.__version__
    assert "svformer: " in run(command, "methods", cwd=tmp_path, PYTHONPATH=str(target))


#: Script -> its arguments, in an order in which each finds what those before it have written.
EXAMPLES = {
    "own_connection": [],
    "more_connections": [],
    "retrofit": ["llama"],
    "finetune": ["notes.txt"],
    "from_scratch": ["notes.txt", "--block", "64", "--tokens", "4k"],
    "serve": ["finetuned"],
}


@pytest.mark.slow
def test_the_examples_run_one_after_the_other(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "llama")
    (tmp_path / "notes.txt").write_text("".join(f"Values reach layer {n}.\n" for n in range(400)))
    assert {path.stem for path in (ROOT / "examples").iterdir()} - {"__pycache__"} == {*EXAMPLES, "demo"}
    for name, arguments in EXAMPLES.items():
        script = ROOT / "examples" / f"{name}.py"
        text = script.read_text(encoding="utf-8")
        assert len(text.splitlines()) <= 40 * max(1, text.count("\nclass "))
        if name != "serve" or is_serve_available():
            code = f"import runpy; runpy.run_path({str(script)!r}, run_name='__main__')"
            done = command_server.run("-c", code, *arguments, cwd=tmp_path)
            assert (done.returncode, bool(done.stdout.strip())) == (0, True), name + done.stderr


def test_a_release_has_absolute_links_and_the_projects_addresses(tmp_path: Path) -> None:
    (tmp_path / "src" / "resformer").mkdir(parents=True)
    for name in ("README.md", "setup.cfg", "src/resformer/version.py", "CITATION.cff", "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path / name)
    with (tmp_path / "README.md").open("a", encoding="utf-8") as readme:
        readme.write("![curves](benchmarks/curves.png)\n")
    command = [sys.executable, ROOT / ".ci" / "prepare_release.py"]
    wrong = subprocess.run([*command, "v0.0.0", "https://a.b/c"], cwd=tmp_path, capture_output=True, text=True)
    assert (wrong.returncode, resformer.__version__ in wrong.stderr) == (1, True)
    right = [*command, f"v{resformer.__version__}", "https://a.b/c"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").partition("\n## ")[0]
    (tmp_path / "CHANGELOG.md").write_text(changelog, encoding="utf-8")
    undescribed = subprocess.run(right, cwd=tmp_path, capture_output=True, text=True)
    assert (undescribed.returncode, "CHANGELOG.md has no section" in undescribed.stderr) == (1, True)
    (tmp_path / "CHANGELOG.md").write_text(f"{changelog}\n## [{resformer.__version__}]\n", encoding="utf-8")
    subprocess.run(right, cwd=tmp_path, check=True)
    text = (tmp_path / "README.md").read_text(encoding="utf-8")
    links = re.findall(r"\]\(([^)]+)\)", text)
    assert {re.match(r"https://a\.b/c/(?:blob|raw)/v[\d.]+/\w|https://", link) is not None for link in links} == {True}
    assert f"](https://a.b/c/raw/v{resformer.__version__}/benchmarks/" in text
    config = ConfigParser()
    config.read(tmp_path / "setup.cfg", encoding="utf-8")
    assert "Source = https://a.b/c\n" in config["metadata"]["project_urls"]
    citation = yaml.safe_load((tmp_path / "CITATION.cff").read_text(encoding="utf-8"))
    assert (citation["repository-code"], citation["version"]) == ("https://a.b/c", resformer.__version__)
