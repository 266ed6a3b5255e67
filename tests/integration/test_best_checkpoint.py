"""The best checkpoint by a metric is saved when it is found, and kept."""

import pytest
from run_files import metrics, start

from rlhf_core.errors import ConfigError, RlhfError

TRAIN = {"episodes": 6, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {
    "train": TRAIN,
    "rewards": [{"name": "length", "target_tokens": 2}],
    "eval": {"every_episodes": 1, "num_prompts": 4, "temperature": 1.0},
    "checkpoint": {"every_episodes": None, "keep": 1, "best": "reward/mean"},
}
pytestmark = pytest.mark.usefixtures("no_plots")


def best_step(lines, better=max):
    last_lines = lines[1::2]
    best = better(line["reward/mean"] for line in last_lines)
    return next(line["step"] for line in last_lines if line["reward/mean"] == best)


@pytest.mark.parametrize(("kind", "better"), [("highest", max), ("lowest", min)])
@pytest.mark.slow_except("highest-max")
def test_the_best_stands_beside_the_newest(tmp_path, kind, better):
    changes = {**BASE, "checkpoint": {**BASE["checkpoint"], "best_is": kind}}
    result = start(changes, tmp_path / "run")
    step = best_step(result.metrics, better)
    folder = tmp_path / "run" / "checkpoints"
    assert (folder / "best").read_text().strip() == f"step-{step}"
    assert {path.name for path in folder.glob("step-*")} == {f"step-{step}", "step-12"}


@pytest.mark.slow
def test_a_resumed_run_keeps_the_same_best(tmp_path):
    whole = start(BASE, tmp_path / "whole")
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(BASE, tmp_path / "stopped", hooks=[StopAfter(3)])
    resumed = start(BASE, tmp_path / "stopped", resume="auto")
    assert metrics(resumed.run_folder) == metrics(whole.run_folder)
    for folder in (whole.run_folder, resumed.run_folder):
        assert (folder / "checkpoints/best").read_text().strip() == f"step-{best_step(whole.metrics)}"


class StopAfter:
    def __init__(self, episode):
        self.episode = episode

    def rlhf_episode_end(self, episode):
        if episode == self.episode:
            raise RlhfError("stopped by the test")


def test_a_held_out_score_without_eval_is_refused(tmp_path):
    with pytest.raises(ConfigError, match="there is no eval section to measure it"):
        start({"checkpoint": {"best": "eval/score"}}, tmp_path / "run")
