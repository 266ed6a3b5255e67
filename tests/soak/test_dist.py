"""What is released works where nothing of this repository lies: built, installed, and used as a newcomer would.

Each interpreter from Python 3.11 to 3.14 that is on PATH gets an empty environment with the wheels in it. The scripts
under `newcomer/` are what a reader of the pages types; they find `rlhf` on PATH and run in an empty folder.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from released import INSTALL_SECONDS, ROOT, Environment, build_distributions, write_constraints
from running import PATIENCE_SECONDS

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
SCRIPTS = sorted((Path(__file__).parent / "newcomer").glob("*.sh"))

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * INSTALL_SECONDS)]


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_distributions(tmp_path_factory.mktemp("dist"))


def interpreter(version: str) -> str:
    """Where it is; skips, by name, where it is not."""
    found = sys.executable if version == OWN else shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"python{version} is not on this machine")
    return found


@pytest.fixture(scope="module", params=PYTHONS)
def installed(
    request: pytest.FixtureRequest, distributions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Environment]:
    python = interpreter(request.param)
    folder = tmp_path_factory.mktemp(f"python{request.param}-")
    made = Environment(folder / "env", tmp_path_factory.mktemp("desk"), python)
    install(made, distributions)
    yield made
    shutil.rmtree(folder)  # some gigabytes each


def install(made: Environment, distributions: Path) -> None:
    """Every wheel, with what the tests use of it; ColossalAI as its plugin's README says."""
    wheels = [path for path in distributions.glob("*.whl") if not path.name.startswith("rlhf_core-")]
    (core,) = distributions.glob("rlhf_core-*.whl")
    pip = [made.bin / "python", "-m", "pip", "install", "-qq"]
    asked = [f"{core}[testing]", *wheels, "psutil"]
    manifest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    constraints = write_constraints(made.desk / "constraints.txt")
    made.run(*pip, "-c", constraints, *asked, seconds=INSTALL_SECONDS)
    made.run(*pip, "--no-deps", *manifest["dependency-groups"]["dev-alone"], seconds=INSTALL_SECONDS)


def test_it_is_the_installed_one(installed: Environment) -> None:
    where = installed.run(installed.bin / "python", "-c", "import rlhf_core; print(rlhf_core.__file__)")
    assert Path(where.strip()).is_relative_to(installed.bin.parent)
    assert (ROOT / "VERSION").read_text().strip() in installed.run("rlhf", "version")


def test_every_plugin_works(installed: Environment) -> None:
    installed.run("rlhf", "plugins", "check")


def test_it_trains(installed: Environment) -> None:
    installed.run("rlhf", "train", "--output", "runs/first", "--set", "train.episodes=3")
    assert (installed.desk / "runs" / "first" / "report.html").exists()
    installed.run("rlhf", "generate", "--model", "runs/first/model", "--prompt", "31524987>")


def test_the_contract_suites_pass(installed: Environment, tmp_path: Path) -> None:
    shutil.copytree(ROOT / "tests" / "contracts", tmp_path / "contracts")
    shutil.copytree(ROOT / "tests" / "support", tmp_path / "support")
    settings = "[pytest]\npythonpath = support\nmarkers =\n    slow: minutes\n    gpu: a CUDA device\n"
    (tmp_path / "pytest.ini").write_text(settings)
    said = installed.run(
        installed.bin / "python", "-m", "pytest", "-q", "-m", "not slow and not gpu", "contracts", cwd=tmp_path
    )
    assert " passed" in said


@pytest.mark.parametrize("installed", [OWN], indirect=True)
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_newcomer_gets_through(installed: Environment, script: Path, tmp_path: Path) -> None:
    installed.run("bash", "-euo", "pipefail", script, cwd=tmp_path, seconds=3 * PATIENCE_SECONDS)
