"""The pages make a site without a warning: no link, anchor or image leads nowhere, every page is in the menu."""

import subprocess
import sys
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS


@pytest.mark.slow
def test_the_site_is_built_without_a_warning(root: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(root / "docs" / "build_site.py"), "--check"],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", ""), f"make site\n{done.stdout}{done.stderr}"
