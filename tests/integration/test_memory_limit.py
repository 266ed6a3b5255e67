"""A run that reaches a limit of its memory (`ulimit -v`) ends with an error, and does not hang."""

import json
import subprocess
import sys

import pytest
from run_files import RLHF, write_run

LIMIT = """
import resource

class Limit:
    '''From the first episode on, little more memory than the process has then.'''

    def __init__(self, *, kib: int = 0):
        self.left, self.is_set = kib * 1024, False

    def rlhf_episode_start(self):
        if not self.is_set:
            with open("/proc/self/statm") as file:
                limit = int(file.read().split()[0]) * resource.getpagesize() + self.left
            resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
            self.is_set = True
"""
STACK_KIB = 8192
"""Of a thread; a little more than this is left in the second run."""
DEADLINE_SECONDS = 400


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize("kib", [0, STACK_KIB + 100])
def test_a_run_that_reaches_the_limit_ends_with_an_error(tmp_path, kib):
    hook = tmp_path / "limits.py"
    hook.write_text(LIMIT)
    file = write_run(tmp_path, {"hooks": {f"{hook}:Limit": {"kib": kib}}})
    arguments = ["train", str(file), "--output", str(tmp_path / "run"), "--quiet"]
    done = subprocess.run([RLHF, *arguments], capture_output=True, text=True, timeout=DEADLINE_SECONDS)
    assert (done.returncode, "error: " in done.stderr) == (1, True), done.stderr
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["status"] == "failed"
