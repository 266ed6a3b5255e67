"""Runs the tests of a plugin in a separate process."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from running import PATIENCE_SECONDS


def run_pytest(folder: Path, *paths: str, select: str = "test") -> str:
    """Run pytest for `folder` with `paths` on the import path, and return its output."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1"}
    arguments = ["-q", "--tb=line", "-rA", "-p", "no:cacheprovider", "--strict-markers", "-k", select]
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *arguments, str(folder)],
        cwd=folder,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    return done.stdout
