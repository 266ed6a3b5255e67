"""The scripts of `examples/seed` run as they stand."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from quick_ray import quick_workers
from running import run_to_end

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "seed"


def run_script(script: str) -> None:
    """As the interpreter would, but for where a Ray that it starts has its workers from."""
    with quick_workers():
        runpy.run_path(script, run_name="__main__")


@pytest.mark.usefixtures("ray_worker_source")
@pytest.mark.timeout(900)  # they start Ray and up to four actors; on a machine with other work that takes long
@pytest.mark.slow
@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_it_runs(script: Path, tmp_path: Path) -> None:
    done = run_to_end(run_script, str(script), cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout, "it says nothing of what it did"
