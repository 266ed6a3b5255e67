"""Runs that train through the shell agent, in this process and over Ray."""

import json

import pytest
from played import AGENT, run_file

from rlhf_containment.sandbox import missing
from rlhf_core import train

pytestmark = pytest.mark.skipif(missing("namespaces") is not None, reason=f"needs namespaces: {missing('namespaces')}")
SHELL = {"command": [str(AGENT), "{prompt}"], "score": ["true"], "timeout_seconds": 120.0}


# The gap of log-probs is measured for samples of the current weights only.
RAY = {"name": "ray", "max_staleness": 0}


@pytest.mark.parametrize(
    "transport", [pytest.param({"name": "local"}, id="local"), pytest.param(RAY, id="ray", marks=pytest.mark.slow)]
)
def test_a_run_trains_through_the_shell_agent(transport, tmp_path):
    result = train(run_file(tmp_path, SHELL, transport=transport), output=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.summary["status"] == "done" and len(lines) == 2
    assert max(line["rollout/logprob_gap_max"] for line in lines) < 1e-4
    assert all(line["environment/num_turns_mean"] == 1.0 and line["reward/environment"] == 1.0 for line in lines)
    assert all(line["environment/program_failed"] == 0.0 for line in lines)


@pytest.mark.slow
def test_isolated_episodes_are_the_same(tmp_path):
    for isolate in (False, True):
        folder = tmp_path / str(isolate)
        folder.mkdir()
        run = run_file(folder, {**SHELL, "isolate": isolate})
        run["train"]["episodes"] = 1
        train(run, output=folder / "run")
    first, second = (
        [json.loads(line)["turns"] for line in (tmp_path / each / "run" / "samples.jsonl").read_text().splitlines()]
        for each in ("False", "True")
    )
    assert first == second
