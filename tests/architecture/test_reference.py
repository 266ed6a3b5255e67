"""The pages under docs/reference are what the code says."""

import subprocess
import sys
from pathlib import Path

from running import PATIENCE_SECONDS


def test_the_reference_is_up_to_date(root: Path) -> None:
    script = root / "docs" / "generate_reference.py"
    done = subprocess.run(
        [sys.executable, str(script), "--check"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert done.returncode == 0, f"run: make docs\n{done.stdout}{done.stderr}"
