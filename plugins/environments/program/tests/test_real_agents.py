"""Agents as others publish them, ten times each, with the masks of a slow reference (`make soak-clients`).

`mini` comes with `mini-swe-agent`, and `opencode` with the npm package `opencode-ai`.
"""

import json
import os
import shutil
import sys
from pathlib import Path

import pytest
from played import Recorded, metrics, play, run_file
from slow_masks import check_masks

from rlhf_containment.sandbox import missing
from rlhf_core import train

ROOT = Path(__file__).parents[4]
PLACES = [Path(sys.executable).parent, ROOT / ".venv-clients" / "bin", ROOT / ".venv-clients" / "node_modules" / ".bin"]
SEARCHED = os.pathsep.join([*map(str, PLACES), os.environ.get("PATH", "")])
HAS_GREETING = ["grep", "-qx", "hello", "greeting"]
NUM_TIMES = 10
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(missing("namespaces") is not None, reason=f"needs namespaces: {missing('namespaces')}"),
]


def call(**arguments):
    return f"<tool_call>\n{json.dumps({'name': 'bash', 'arguments': arguments})}\n</tool_call>"


OPENCODE = {
    "model": "rlhf/policy",
    "small_model": "rlhf/policy",
    "share": "disabled",
    "permission": "allow",
    "agent": {"title": {"disable": True}},
    "provider": {
        "rlhf": {
            "npm": "@ai-sdk/openai-compatible",
            "name": "rlhf",
            "options": {"baseURL": "{base_url}", "apiKey": "{api_key}"},
            "models": {"policy": {"name": "policy", "tool_call": True, "limit": {"context": 32000, "output": 1000}}},
        }
    },
}
AGENTS = {
    "mini": {
        "arguments": ["--yolo", "--exit-immediately", "-m", "openai/{model}", "-t", "{prompt}", "-l", "0"],
        "variables": {
            "MSWEA_CONFIGURED": "true",
            "LITELLM_LOCAL_MODEL_COST_MAP": "True",
            "MSWEA_COST_TRACKING": "ignore_errors",
            "MSWEA_MODEL_RETRY_STOP_AFTER_ATTEMPT": "1",
        },
        "texts": (
            call(command="echo hello > greeting"),
            call(command="echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"),
        ),
    },
    "opencode": {
        "arguments": ["run", "{prompt}"],
        "variables": {
            "OPENCODE_DISABLE_AUTOUPDATE": "1",
            "OPENCODE_DISABLE_DEFAULT_PLUGINS": "1",
            "OPENCODE_DISABLE_LSP_DOWNLOAD": "1",
            "OPENCODE_DISABLE_MODELS_FETCH": "1",
            "OPENCODE_CONFIG_CONTENT": json.dumps(OPENCODE),
        },
        "texts": (call(command="echo hello > greeting", description="Write hello"), "Done."),
    },
}


def section(name):
    """The options of an agent, or a skipped test if it is not installed."""
    found = shutil.which(name, path=SEARCHED)
    if found is None:
        pytest.skip(f"needs {name}: make env-clients")
    agent = AGENTS[name]
    return {
        "command": [found, *agent["arguments"]],
        "read": [str(Path(found).parents[1])],
        "variables": agent["variables"],
        "score": HAS_GREETING,
        "timeout_seconds": 300.0,
        "concurrency": 2,
    }


@pytest.mark.parametrize("name", AGENTS)
def test_an_agent_solves_its_task_with_exact_masks(name):
    engine = Recorded(AGENTS[name]["texts"])
    episodes = play(engine=engine, samples=NUM_TIMES, max_new_tokens=300, **section(name))
    for episode in episodes:
        check_masks(episode, engine)
        assert [[turn.role for turn in row.turns] for row in episode.rows] == [["policy", "environment", "policy"]]
        assert (episode.reward, metrics(episode)["own/program_failed"]) == (1.0, 0.0)


@pytest.mark.parametrize("name", AGENTS)
def test_a_run_trains_through_an_agent(name, tmp_path):
    """Ten iterations of a model that knows nothing. Trainer and engine agree on each token that counts."""
    run = run_file(tmp_path, section(name))
    config = tmp_path / "model" / "config.json"  # the agents begin with long instructions
    config.write_text(json.dumps({**json.loads(config.read_text()), "max_position_embeddings": 65_536}))
    run["prompts"]["max_prompt_tokens"] = 65_000
    run["train"]["episodes"] = NUM_TIMES
    result = train(run, output=tmp_path / "run")
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert result.summary["status"] == "done" and len(lines) == NUM_TIMES
    assert max(line["rollout/logprob_gap_max"] for line in lines) < 1e-4
    assert all(line["environment/num_turns_mean"] >= 1 for line in lines)
