"""The installed command in a process of its own: pipes and exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS

RLHF = str(Path(sys.executable).parent / "rlhf")


def rlhf(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [RLHF, *arguments], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False, cwd=cwd
    )


def test_help_and_a_typo():
    assert "rlhf train" in rlhf("--help").stdout
    wrong = rlhf("plugin", "list")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert 'did you mean "plugins"?' in wrong.stderr


def test_a_pipe_gets_json_and_no_colour():
    listed = rlhf("plugins", "list", "--json")
    assert listed.returncode == 0, listed.stderr
    assert {"rlhf-core"} <= {row["distribution"] for row in json.loads(listed.stdout)}
    assert "\x1b" not in rlhf("plugins", "list").stdout


def test_a_reader_that_leaves_early_is_no_traceback():
    pipe = subprocess.run(
        f"{RLHF} config schema | head -n 1", shell=True, capture_output=True, text=True, timeout=PATIENCE_SECONDS
    )
    assert pipe.stdout == "{\n"
    assert "Traceback" not in pipe.stderr
    assert "BrokenPipe" not in pipe.stderr


@pytest.mark.parametrize("text", ["model: [", "model: {path: x}\nmodel: {}\n", "modle: {}\n"])
def test_a_wrong_run_file_is_exit_2(tmp_path, text):
    (tmp_path / "run.yaml").write_text(text)
    checked = rlhf("config", "check", "run.yaml", cwd=tmp_path)
    assert checked.returncode == 2
    assert checked.stderr.startswith("error: run.yaml")
    assert "Traceback" not in checked.stderr


def test_another_system_is_refused_before_anything_is_imported_from_linux():
    code = (
        "import sys; sys.platform = 'darwin'; sys.modules['fcntl'] = None; sys.argv = ['rlhf', 'train']\n"
        "from rlhf_cli.main import main; main()"
    )
    refused = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=False
    )
    assert (refused.returncode, refused.stdout) == (2, "")
    assert refused.stderr.startswith("error: rlhf runs on Linux only (this is darwin)\n  -> ")
