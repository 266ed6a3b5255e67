"""An environment with branches under every strategy, algorithm with samples, engine, and LoRA: it trains.

That Ray and two processes train as one is held by `test_environments.py`.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from environment_runs import GAMES
from quick_ranks import quick_vllm
from run_files import metrics, samples, start

pytestmark = pytest.mark.usefixtures("no_plots")
STAND_IN = Path(__file__).with_name("stand_in")
"""Where a module `vllm` lies: the parts that the engine needs, over transformers."""
GAME = """
from rlhf_episodes import Outcome


def digits_of_turns(rollouts):
    turns = [[turn for turn in rollout.turns if turn.role == "policy"] for rollout in rollouts]
    return [{place: sum(map(str.isdigit, turn.text)) / 2 for place, turn in enumerate(own)} for own in turns]


class Scaled:
    def __init__(self, *, scale: float = 1.0, rewards_turns: bool = True):
        self.scale = scale
        self.rewards_turns = rewards_turns

    async def run(self, task, policy):
        first = await policy.turn(f"{task.seed % 100:02d}>")
        second = await policy.turn(">")
        digits = [self.scale * sum(char.isdigit() for char in reply.text) for reply in (first, second)]
        turn_rewards = dict(enumerate(digits)) if self.rewards_turns else {}
        return Outcome(reward=self.scale * (task.sample_seed % 3), turn_rewards=turn_rewards)
"""

RUNS = [
    ("fsdp", "rloo", "hf", None),
    ("low-level-zero", "reinforce++", "hf", {"r": 4}),
    pytest.param("gemini", "ppo", "hf", None, marks=pytest.mark.slow),
    ("single", "grpo", "vllm", {"r": 4}),
    pytest.param("single", "ppo", "vllm", None, marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("strategy", "algorithm", "engine", "lora"), RUNS)
@pytest.mark.slow_except("single-grpo-vllm-lora3")
def test_it_trains(
    strategy: str, algorithm: str, engine: str, lora: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(STAND_IN))
    changes = {
        "model": {"path": "builtin:tiny-digits", "lora": lora},
        "prompts": {"name": "tasks"},
        "strategy": {"name": strategy},
        "algorithm": {"name": algorithm},
        "environment": {"name": f"{GAMES}:Branches", "max_turns": 5},
        "engine": {"name": engine, "max_new_tokens": 4},
        "rewards": None,
        "train": {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4},
    }
    with quick_vllm():
        run = start(changes, tmp_path / "run").run_folder
    assert json.loads((run / "summary.json").read_text())["status"] == "done"
    for line in metrics(run):
        assert line["policy/grad_norm"] > 0
        assert line["reward/mean"] == line["reward/environment"] > 0
        assert line["rollout/logprob_gap_max"] < (0.2 if strategy == "gemini" else 1e-4)  # gemini rounds to 16 bits
    assert {line["branch"] for line in samples(run)} == {0, 1, 2}


@pytest.mark.slow
def test_the_weight_multiplies_the_outcome_and_the_turns_and_samples_are_raw(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)

    def trained(name: str, **options: float) -> Path:
        environment = {"name": f"{tmp_path}/game.py:Scaled", **options}
        changes = {"prompts": {"name": "tasks"}, "rewards": None, "environment": environment}
        return start(changes, tmp_path / name).run_folder

    by_weight, by_reward = trained("weight", weight=4.0), trained("scale", scale=4.0)
    for mine, other in zip(metrics(by_weight), metrics(by_reward), strict=True):
        raw = {"reward/environment": mine["reward/environment"] * 4}
        assert {**mine, **raw} == pytest.approx(other, rel=1e-6)
        assert mine["reward/mean"] == pytest.approx(other["reward/environment"])
    for mine, other in zip(samples(by_weight), samples(by_reward), strict=True):
        assert mine["completion"] == other["completion"] and mine["score"] == pytest.approx(other["score"])
        assert mine["rewards"]["environment"] * 4 == pytest.approx(other["rewards"]["environment"])
        assert mine["turns"][0]["reward"] * 4 == pytest.approx(other["turns"][0]["reward"])


def test_a_reward_credits_turns_as_the_environment_does(tmp_path: Path) -> None:
    """The same numbers, once from the environment and once, halved and with a weight of 2, from a reward."""
    (tmp_path / "game.py").write_text(GAME)

    def trained(name: str, rewards: Any, **options: Any) -> list[dict[str, Any]]:
        environment = {"name": f"{tmp_path}/game.py:Scaled", **options}
        changes = {"prompts": {"name": "tasks"}, "rewards": rewards, "environment": environment}
        return metrics(start(changes, tmp_path / name).run_folder)

    reward = {"name": f"{tmp_path}/game.py:digits_of_turns", "weight": 2.0}
    by_environment = trained("environment", None)
    for mine, other in zip(trained("reward", [reward], rewards_turns=False), by_environment, strict=True):
        assert mine["reward/digits_of_turns"] > 0
        for key in ("reward/mean", "returns/mean", "value/explained_variance", "loss/policy", "loss/value"):
            assert mine[key] == pytest.approx(other[key], rel=1e-5, abs=1e-7), key
