"""A run whose environment's agent drives itself by the real client."""

import json

import pytest
from calling_agents import run_file

from rlhf_core import train


def lines(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.slow
def test_what_an_agent_does_is_trained_on(tmp_path, tool_model):
    result = train(run_file(tool_model), output=tmp_path / "run")
    metrics, samples = lines(tmp_path / "run/metrics.jsonl"), lines(tmp_path / "run/samples.jsonl")
    assert result.summary["status"] == "done" and len(metrics) == 2
    assert max(line["rollout/logprob_gap_max"] for line in metrics) < 1e-4
    assert metrics[0]["environment/tool_calls"] > 0.5
    assert metrics[0]["environment/num_turns_mean"] == 2.5
    places = [(line["sample_id"], line["branch"]) for line in samples]
    assert sorted(places) == [
        (0, 0),
        (1, 0),
        (1, 1),
        (2, 0),
        (3, 0),
        (3, 1),
        (4, 0),
        (5, 0),
        (5, 1),
        (6, 0),
        (7, 0),
        (7, 1),
    ]
    for line in samples:
        roles = [turn["role"] for turn in line["turns"]]
        assert roles == (["policy"] if line["branch"] else ["policy", "environment", "policy"])
    called = next(line for line in samples if line["turns"][0]["tool_calls"])
    assert called["turns"][0]["tool_calls"][0]["name"] == "add" and called["turns"][1]["text"] == "3"
