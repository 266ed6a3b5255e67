"""`logging.sample_tokens`: token ids and mask of each sample, of single answers and of environments' episodes."""

from __future__ import annotations

import pytest
from environment_runs import run_file
from run_files import samples, start

from rlhf_core import train

pytestmark = pytest.mark.usefixtures("no_plots")
KEYS = {"prompt_ids", "completion_ids", "logprobs", "action_mask"}


def test_the_ids_of_an_answer_are_written_if_wanted(tmp_path):
    start({"train": {"episodes": 1}, "logging": {"sample_tokens": True}}, tmp_path / "with")
    start({"train": {"episodes": 1}}, tmp_path / "without")
    for line, plain in zip(samples(tmp_path / "with"), samples(tmp_path / "without"), strict=True):
        assert all(line["action_mask"]) and len(line["completion_ids"]) == line["num_tokens"]
        assert len(line["logprobs"]) == line["num_tokens"] and max(line["logprobs"]) < 0
        assert len(line["prompt_ids"]) == len(line["prompt"])  # a token for each character
        assert {key: value for key, value in line.items() if key not in KEYS} == plain


def test_the_mask_tells_observations_from_actions(tmp_path):
    changed = run_file("grpo", logging={"tensorboard": False, "sample_tokens": True})
    train({**changed, "train": {**changed["train"], "episodes": 1}}, output=tmp_path / "run")
    found = samples(tmp_path / "run")
    assert all(len(line["action_mask"]) == len(line["completion_ids"]) for line in found)
    assert all(sum(line["action_mask"]) == line["num_tokens"] for line in found)
    assert any(not all(line["action_mask"]) for line in found), "observations are not the policy's"
