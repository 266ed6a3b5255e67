"""Runs whose environments show images: the game of the page, rewards, samples, isolation, and a resume."""

import json
import re
from pathlib import Path

import pytest

from rlhf_core import train
from rlhf_core.errors import EpisodeError
from rlhf_images import find_markers
from rlhf_pages import picture_names

PAGE = Path(__file__).resolve().parents[4] / "docs" / "images.md"
TRAIN = {"episodes": 2, "prompts_per_episode": 3, "samples_per_prompt": 2, "train_batch_size": 6, "seed": 3}
RUN = {
    "model": {"path": "builtin:tiny-vision"},
    "algorithm": {"name": "grpo", "kl_coef": 0.05},
    "engine": {"name": "hf", "max_new_tokens": 3},
    "optimizer": {"lr": 1e-3},
    "train": TRAIN,
    "logging": {"tensorboard": False},
}
REWARD = """
from rlhf_images import open_images

def num_images(rollouts):
    return [len({image.tobytes() for image in open_images(rollout)}) for rollout in rollouts]
"""


def game(folder):
    (block,) = re.findall(r"```python\n(# lamp\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (folder / "lamp.py").write_text(block)
    return {"name": f"{folder}/lamp.py:Lamp", "max_turns": 3}


def lines(folder, name):
    return [json.loads(line) for line in (folder / name).read_text().splitlines()]


def metrics_of(folder):
    skipped = ("time/", "tokens_per_second/", "memory/", "reward_calls/")
    found = lines(folder, "metrics.jsonl")
    return [{key: value for key, value in line.items() if not key.startswith(skipped)} for line in found]


def play(folder, **options):
    (folder / "reward.py").write_text(REWARD)
    rewards = [{"name": f"{folder}/reward.py:num_images"}]
    train({**RUN, "environment": {**game(folder), **options}, "rewards": rewards}, output=folder / "run", trust=True)
    return folder / "run"


@pytest.fixture(scope="module")
def played(tmp_path_factory):
    return play(tmp_path_factory.mktemp("game"))


@pytest.mark.slow
def test_the_game_of_the_page_trains_on_what_the_policy_saw(played):
    for line in metrics_of(played):
        assert line["rollout/logprob_gap_max"] < 1e-4
        assert line["environment/num_turns_mean"] == 3 and 1 < line["reward/num_images"] <= 3
    samples = lines(played, "samples.jsonl")
    for sample in samples:
        shown = [turn["text"] for turn in sample["turns"] if turn["role"] == "environment"]
        assert [len(find_markers(text)) for text in (sample["prompt"], *shown)] == [1, 1, 1]
    names = {path.stem for path in (played / "images").iterdir()}
    assert names == set(picture_names(samples)) and len(names) == 4


@pytest.mark.slow
def test_an_isolated_environment_shows_the_same_images(played, tmp_path):
    isolated = play(tmp_path, isolate=True)
    for ours, theirs in zip(metrics_of(isolated), metrics_of(played), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-5, abs=1e-6)
    ids = [sorted(each["completion"] for each in lines(folder, "samples.jsonl")) for folder in (isolated, played)]
    assert ids[0] == ids[1]


def test_a_game_may_add_an_image_to_a_prompt_with_one(tmp_path):
    options = {**RUN, "prompts": {"name": "drawn-digits", "size": 12}, "environment": game(tmp_path), "rewards": []}
    train(options, output=tmp_path / "run", trust=True)
    assert all(line["rollout/logprob_gap_max"] < 1e-4 for line in metrics_of(tmp_path / "run"))
    assert all(len(find_markers(sample["prompt"])) == 2 for sample in lines(tmp_path / "run", "samples.jsonl"))


def test_a_model_that_does_not_see_refuses_an_image_by_name(tmp_path):
    options = {**RUN, "model": {"path": "builtin:tiny-digits"}, "environment": game(tmp_path), "rewards": []}
    with pytest.raises(EpisodeError, match="a message has an image, but the model does not see"):
        train(options, output=tmp_path / "run", trust=True)


@pytest.mark.slow
def test_a_resumed_run_has_the_same_metrics(tmp_path):
    environment = game(tmp_path)
    options = {**RUN, "environment": environment, "rewards": [], "checkpoint": {"every_episodes": 1}}
    train(options, output=tmp_path / "whole", trust=True)
    train({**options, "train": {**TRAIN, "episodes": 1}}, output=tmp_path / "part", trust=True)
    train(options, output=tmp_path / "part", resume="auto", trust=True)
    assert metrics_of(tmp_path / "part")[-1] == pytest.approx(metrics_of(tmp_path / "whole")[-1], abs=1e-6)
