"""What the architecture tests look at: the files of this repository."""

import subprocess
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def root() -> Path:
    return ROOT


@pytest.fixture(scope="session")
def files() -> list[Path]:
    """Every file git tracks or would add."""
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
        timeout=PATIENCE_SECONDS,
    )
    found = [path for line in listed.stdout.splitlines() if (path := ROOT / line).is_file()]
    assert found, "git lists no files"
    return found


@pytest.fixture(scope="session")
def python_files(files: list[Path]) -> list[Path]:
    return [path for path in files if path.suffix == ".py"]


@pytest.fixture(scope="session")
def library_files(python_files: list[Path]) -> list[Path]:
    """The Python files that are shipped: no tests, benchmarks or examples."""
    return [
        path
        for path in python_files
        if path.is_relative_to(ROOT / "rlhf_core") or path.is_relative_to(ROOT / "cli") or "src" in path.parts
    ]


@pytest.fixture(scope="session")
def manifests(files: list[Path]) -> list[Path]:
    """Every distribution's pyproject.toml, the root's first."""
    return sorted((path for path in files if path.name == "pyproject.toml"), key=lambda path: len(path.parts))
