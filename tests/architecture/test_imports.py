"""Looking at things is quick: no heavy library is loaded for help, listing and checking."""

import json
import subprocess
import sys

import pytest
from running import PATIENCE_SECONDS

from rlhf_core.plugins.discovery import GROUPS, discover

HEAVY = {"torch", "ray", "transformers", "peft", "numpy", "safetensors", "colossalai", "vllm"}
COMMANDS = [
    "version",
    "--help",
    "train --help",
    "plugins list",
    "plugins list --json",
    "plugins show algorithm/ppo",
    "config check",
    "config show",
    "config schema",
]
ALGORITHMS = {
    "ppo": "ppo",
    "gspo": "{name: grpo, policy_loss: {name: gspo, clip_eps: 0.1}}",
    "leave-one-out": "{name: reinforce++, advantage: leave-one-out}",
}
CHECKS = [f"config check {name}.yaml" for name in ALGORITHMS]
COMPONENTS = [f"plugins show {kind}/{name}" for kind in GROUPS for name in discover(kind)]
SCRIPT = """
import json, sys
from rlhf_cli.main import run
before, found = set(), {}
for command in json.load(sys.stdin):
    code = run(command.split())
    loaded = {name.partition(".")[0] for name in sys.modules}
    found[command] = code, sorted(loaded - before)
    before |= loaded
print("\\n" + json.dumps(found))
"""


@pytest.fixture(scope="module")
def loaded_by(tmp_path_factory):
    """Command -> exit code and the libraries that it loads first, of those that one process runs in turn."""
    folder = tmp_path_factory.mktemp("run-files")
    for name, algorithm in ALGORITHMS.items():
        text = f"model: {{path: m}}\nprompts: sort-digits\nalgorithm: {algorithm}\n"
        (folder / f"{name}.yaml").write_text(text)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        input=json.dumps([*COMMANDS, *CHECKS, *COMPONENTS]),
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=True,
        cwd=folder,
    )
    return json.loads(done.stdout.rstrip().rpartition("\n")[2]), done.stderr


@pytest.mark.parametrize("command", [*COMMANDS, *CHECKS])
def test_nothing_heavy_is_loaded(loaded_by, command):
    found, said = loaded_by
    code, loaded = found[command]
    assert not HEAVY & set(loaded)
    assert code == 0, said


def test_no_component_loads_anything_heavy(loaded_by):
    found, _ = loaded_by
    assert len(COMPONENTS) > 60
    heavy = {command: sorted(HEAVY.intersection(found[command][1])) for command in COMPONENTS}
    assert not any(heavy.values()), {command: loaded for command, loaded in heavy.items() if loaded}
    assert not (failed := [command for command in COMPONENTS if found[command][0]]), failed


def test_core_itself_is_light():
    listed = "import rlhf_core, rlhf_core.config.resolve, json, sys; print(json.dumps(sorted(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", listed], capture_output=True, text=True, timeout=PATIENCE_SECONDS, check=True
    )
    assert not (HEAVY | {"click", "rich"}) & {name.partition(".")[0] for name in json.loads(done.stdout)}
