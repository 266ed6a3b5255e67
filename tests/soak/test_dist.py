"""What is released works where nothing of this repository lies: built, installed, and used as a newcomer would.

Each interpreter from Python 3.11 to 3.14 that is on PATH gets an empty environment with the wheels in it. The scripts
under `newcomer/` are what a reader of the pages types; they find `rlhf` on PATH and run in an empty folder.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OWN = f"{sys.version_info.major}.{sys.version_info.minor}"
SCRIPTS = sorted((Path(__file__).parent / "newcomer").glob("*.sh"))
INSTALL_SECONDS = 3000.0

pytestmark = [pytest.mark.slow, pytest.mark.timeout(2 * INSTALL_SECONDS)]


class Installed:
    """An environment with the wheels, and an empty folder to be in."""

    def __init__(self, folder: Path, desk: Path) -> None:
        self.bin = folder / "bin"
        self.desk = desk
        # pip's settings are the machine's own; a path to sources must not be there.
        inherited = {key: value for key, value in os.environ.items() if key not in {"PYTHONPATH", "VIRTUAL_ENV"}}
        self.environment = {
            **inherited,
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "PYTHONSAFEPATH": "1",
        }

    def run(self, *command: str | Path, seconds: float = PATIENCE_SECONDS, cwd: Path | None = None) -> str:
        """Its output; fails with all of it where the command does."""
        done = subprocess.run(
            [str(part) for part in command],
            cwd=cwd or self.desk,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=seconds,
            check=False,
        )
        assert done.returncode == 0, f"{' '.join(map(str, command))}: exit {done.returncode}\n{done.stdout}"
        return done.stdout


@pytest.fixture(scope="module")
def distributions(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("dist")
    build = [sys.executable, str(ROOT / "release" / "build.py"), str(target)]
    subprocess.run(build, check=True, timeout=PATIENCE_SECONDS)
    folders = [ROOT, *ROOT.glob("libraries/*/pyproject.toml"), *ROOT.glob("plugins/*/*/pyproject.toml"), ROOT / "start"]
    assert len([*target.glob("*.whl")]) == len([*target.glob("*.tar.gz")]) == len(folders)
    return target


def interpreter(version: str) -> str:
    """Where it is; skips, by name, where it is not."""
    found = sys.executable if version == OWN else shutil.which(f"python{version}")
    if found is None or subprocess.run([found, "-c", ""], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"python{version} is not on this machine")
    return found


@pytest.fixture(scope="module", params=PYTHONS)
def installed(
    request: pytest.FixtureRequest, distributions: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Installed]:
    python = interpreter(request.param)
    folder = tmp_path_factory.mktemp(f"python{request.param}-")
    subprocess.run([python, "-m", "venv", str(folder / "env")], check=True, timeout=PATIENCE_SECONDS)
    made = Installed(folder / "env", tmp_path_factory.mktemp("desk"))
    install(made, distributions)
    yield made
    shutil.rmtree(folder)  # some gigabytes each


def install(made: Installed, distributions: Path) -> None:
    """Every wheel, with what the tests use of it; ColossalAI as its plugin's README says."""
    wheels = [path for path in distributions.glob("*.whl") if not path.name.startswith("rlhf_core-")]
    (core,) = distributions.glob("rlhf_core-*.whl")
    pip = [made.bin / "python", "-m", "pip", "install", "-qq"]
    asked = [f"{core}[testing]", *wheels, "psutil"]
    manifest = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    locked = (ROOT / "requirements" / "lock.txt").read_text(encoding="utf-8")
    pins = [line.removesuffix(" \\") for line in locked.splitlines() if "==" in line]
    constraints = made.desk / "constraints.txt"
    constraints.write_text("\n".join([*pins, *manifest["tool"]["uv"]["constraint-dependencies"]]), encoding="utf-8")
    made.run(*pip, "-c", constraints, *asked, seconds=INSTALL_SECONDS)
    made.run(*pip, "--no-deps", *manifest["dependency-groups"]["dev-alone"], seconds=INSTALL_SECONDS)


def test_it_is_the_installed_one(installed: Installed) -> None:
    where = installed.run(installed.bin / "python", "-c", "import rlhf_core; print(rlhf_core.__file__)")
    assert Path(where.strip()).is_relative_to(installed.bin.parent)
    assert (ROOT / "VERSION").read_text().strip() in installed.run("rlhf", "version")


def test_every_plugin_works(installed: Installed) -> None:
    installed.run("rlhf", "plugins", "check")


def test_it_trains(installed: Installed) -> None:
    installed.run("rlhf", "train", "--output", "runs/first", "--set", "train.episodes=3")
    assert (installed.desk / "runs" / "first" / "report.html").exists()
    installed.run("rlhf", "generate", "--model", "runs/first/model", "--prompt", "31524987>")


def test_the_contract_suites_pass(installed: Installed, tmp_path: Path) -> None:
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
def test_a_newcomer_gets_through(installed: Installed, script: Path, tmp_path: Path) -> None:
    installed.run("bash", "-euo", "pipefail", script, cwd=tmp_path, seconds=3 * PATIENCE_SECONDS)
