"""A run folder as a training run leaves it, made up; for the tests of the report."""

from __future__ import annotations

import json
import math
import random
from pathlib import Path

from rlhf_core.runfolder.folder import RunFolder


def make_run(path: Path, *, episodes: int = 60, seed: int = 0, completion: str | None = None) -> Path:
    """Write a folder with every key that a report plots."""
    noise = random.Random(seed)
    with RunFolder.take(path) as folder:
        folder.write_config(
            {
                "model": {"path": "runs/ppo/warm-start/model", "dtype": "auto"},
                "algorithm": {"name": "ppo", "clip_eps": 0.2},
                "strategy": {"name": "single"},
                "transport": {"name": "local"},
                "rewards": [{"name": "http", "api_key": "hidden-value"}],
            }
        )
        folder.write_manifest({"seed": seed, "command": ["rlhf", "train"], "libraries": {"torch": "2.13.0"}})
        lines, samples = [], []
        for episode in range(episodes):
            reward = 0.95 - 0.6 * math.exp(-episode / 25) + noise.gauss(0, 0.02)
            lines += [_line(2 * episode + update, episode, reward, noise) for update in (1, 2)]
            lines[-1] |= _episode_end(noise, evaluate=episode % 10 == 9)
            samples += [_sample(episode, index, reward, noise, completion) for index in range(4)]
        folder.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
        folder.samples.write_text("".join(json.dumps(sample) + "\n" for sample in samples))
        folder.write_summary({"status": "done", "eval_before": 0.455, "eval_after": 0.923, "wall_s": 131.2})
    return path


def _line(step: int, episode: int, reward: float, noise: random.Random) -> dict[str, float]:
    return {
        "step": step,
        "episode": episode,
        "policy_version": episode,
        "reward/mean": reward,
        "reward/exact-match": reward,
        "reward/brevity": 0.3 + 0.2 * reward,
        "kl/mean": 0.02 * math.log1p(episode) + noise.random() * 0.004,
        "response/length_mean": 9 + noise.random(),
        "response/truncated_fraction": 0.05 * math.exp(-episode / 10),
        "staleness/mean": 0.0,
        "staleness/max": 0,
        "rollout/logprob_gap_max": 1e-6 * (1 + noise.random()),
        "loss/policy": -0.02 + noise.gauss(0, 0.01),
        "loss/value": 0.1 * math.exp(-episode / 20) + noise.random() * 0.01,
        "policy/clip_fraction": 0.1 + noise.random() * 0.05,
        "policy/entropy": 0.4 * math.exp(-episode / 40) + 0.05,
        "value/explained_variance": 0.8 - 0.7 * math.exp(-episode / 12),
        "policy/grad_norm": 0.3 + noise.random(),
        "policy/approx_kl": 0.001 * noise.random(),
        "policy/lr": 3e-4 * min(1.0, (episode + 1) / 10),
    }


def _episode_end(noise: random.Random, *, evaluate: bool) -> dict[str, float]:
    ends = {
        "time/rollout_s": 0.3 + noise.random() * 0.05,
        "time/reward_s": 0.01,
        "time/train_s": 0.35 + noise.random() * 0.05,
        "time/sync_s": 0.003,
        "tokens_per_second/rollout": 11000 + 900 * noise.random(),
        "tokens_per_second/train": 30000 + 900 * noise.random(),
        "memory/peak_bytes": 812_000_000,
        "reward_calls/exact-match/calls": 2.0,
        "reward_calls/exact-match/seconds": 0.002,
        "reward_calls/remote <b>/calls": 3.0,
        "reward_calls/remote <b>/seconds": 0.6,
        "reward_calls/remote <b>/failures": 1.0,
        "reward_calls/remote <b>/retries": 1.0,
    }
    return ends | ({"eval/score": 0.5 + noise.random() * 0.4} if evaluate else {})


def _sample(episode: int, index: int, reward: float, noise: random.Random, completion: str | None) -> dict[str, object]:
    digits = [str(noise.randrange(10)) for _ in range(8)]
    right = noise.random() < reward
    answer = sorted(digits) if right else sorted(digits[:-1]) + digits[-1:]
    return {
        "sample_id": 4 * episode + index,
        "episode": episode,
        "policy_version": episode,
        "prompt": f"sort {' '.join(digits)} =",
        "completion": completion if completion is not None else " ".join(answer),
        "rewards": {"exact-match": float(right), "brevity": 0.5},
        "score": float(right) + 0.05,
        "finish_reason": "stop",
        "num_tokens": 17,
    }
