"""The quickstart's second stage, made small, as a run."""

import json

from rlhf_core import train
from rlhf_core.config.load import load_run
from rlhf_core.plugins import load
from rlhf_core.util import read_lines
from rlhf_start.quickstart import environment_runs

SMALL = (
    "train.episodes=1",
    "train.prompts_per_episode=5",
    "train.samples_per_prompt=2",
    "train.train_batch_size=10",
    "eval.num_prompts=10",
    "logging.samples=all",
    "logging.tensorboard=false",
)


def test_games_are_played_and_written_down(tmp_path):
    _, run = environment_runs(load("environments", "guess-number"))
    train(load_run(run, SMALL), output=tmp_path / "run")
    samples = [json.loads(line) for line in (tmp_path / "run" / "samples.jsonl").read_text().splitlines()]
    assert len(samples) == 10
    for sample in samples:
        told = [turn["text"] for turn in sample["turns"] if turn["role"] == "environment"]
        assert set(told) <= {">", ",", ">,"}
        said = [turn["text"] for turn in sample["turns"] if turn["role"] == "policy"]
        assert 1 <= len(said) <= 4
        assert sample["prompt"] == ">,"
        number = sample["sample_id"] // 2 % 10
        assert sample["rewards"]["environment"] == float(said[-1] == str(number))
    *_, last = read_lines(tmp_path / "run" / "metrics.jsonl")
    assert 1 <= last["environment/num_turns_mean"] <= 4
