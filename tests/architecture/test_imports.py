"""Looking at things is quick: no heavy library is loaded for help, listing and checking."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from running import PATIENCE_SECONDS

HEAVY = {"torch", "ray", "transformers", "peft", "numpy", "safetensors", "colossalai", "vllm"}
SCRIPT = """
import json, sys
from rlhf_cli.main import run
code = run(sys.argv[1:])
print("\\n" + json.dumps({"code": code, "loaded": sorted({name.partition(".")[0] for name in sys.modules})}))
"""


def loaded_by(*arguments: str, cwd: Path | None = None) -> tuple[int, set[str], str]:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, *arguments],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
        cwd=cwd,
    )
    last = json.loads(done.stdout.rstrip().rpartition("\n")[2])
    return last["code"], set(last["loaded"]), done.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["train", "--help"],
        ["plugins", "list"],
        ["plugins", "list", "--json"],
        ["plugins", "show", "algorithm/ppo"],
        ["config", "check"],
        ["config", "show"],
        ["config", "schema"],
        ["version"],
    ],
    ids=" ".join,
)
def test_nothing_heavy_is_loaded(arguments):
    code, loaded, said = loaded_by(*arguments)
    assert not HEAVY & loaded
    assert code == 0, said


@pytest.mark.parametrize(
    "algorithm",
    ["ppo", "{name: grpo, policy_loss: {name: gspo, clip_eps: 0.1}}", "{name: reinforce++, advantage: leave-one-out}"],
)
def test_checking_a_run_file_loads_nothing_heavy(tmp_path, algorithm):
    (tmp_path / "run.yaml").write_text(f"model: {{path: m}}\nprompts: sort-digits\nalgorithm: {algorithm}\n")
    code, loaded, said = loaded_by("config", "check", "run.yaml", cwd=tmp_path)
    assert not HEAVY & loaded
    assert code == 0, said


def test_core_itself_is_light():
    listed = "import rlhf_core, rlhf_core.config.resolve, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert not (HEAVY | {"click", "rich"}) & {name.partition(".")[0] for name in json.loads(done.stdout)}
