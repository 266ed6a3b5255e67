"""The scripts of `examples/seed` run as they stand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "seed"


@pytest.mark.timeout(900)  # they start Ray and up to four actors; on a machine with other work that takes long
@pytest.mark.parametrize("script", sorted(FOLDER.glob("*.py")), ids=lambda path: path.stem)
def test_it_runs(script: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=840,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout, "it says nothing of what it did"
