"""Run folders as training leaves them, small."""

import json

from rlhf_core.runfolder import RunFolder

KEY = "a-key-of-tests"
HOST = "127.0.0.1:8123"


def make_run(path, *, status="running", episodes=2):
    """Metrics and samples of some episodes, and a summary."""
    with RunFolder.take(path) as folder:
        folder.write_config(
            {
                "model": {"path": "builtin:tiny-digits"},
                "algorithm": {"name": "grpo"},
                "rewards": [{"api_key": "s3cret"}],
            }
        )
        folder.write_manifest({"seed": 3})
        folder.add_event("rollback", {"guard": "kl", "reason": "kl/mean is 9, above 1", "from_step": 2, "to_step": 1})
        folder.write_summary({"status": status, "eval_before": 0.25, "eval_after": None, "wall_s": 61.0})
        folder.log.write_text(
            "2026-11-23 05:36:43,300 INFO rlhf: a word\n"
            "2026-11-23 05:36:44,300 WARNING rlhf: guard entropy, update 3: policy/entropy is 0.01, below 0.1\n"
        )
    for episode in range(episodes):
        add_episode(path, episode)
    return path


def add_episode(path, episode, completion="012", prompt="210>"):
    """What a run appends after an episode."""
    line = {"step": episode + 1, "episode": episode, "reward/mean": 0.1 * episode, "kl/mean": 0.0, "policy/lr": 1e-3}
    sample = {
        "sample_id": episode,
        "episode": episode,
        "policy_version": episode,
        "prompt": prompt,
        "completion": completion,
        "rewards": {"exact-match": 1.0},
        "score": 1.0,
        "finish_reason": "stop",
        "num_tokens": 4,
    }
    for name, record in (("metrics", line), ("samples", sample)):
        with (path / f"{name}.jsonl").open("a") as file:
            file.write(json.dumps(record) + "\n")
