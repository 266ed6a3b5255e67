"""A reward model learns from preference pairs, and PPO learns from it, with the true score beside it. Minutes."""

from pathlib import Path
from statistics import fmean

import pytest
from digit_pairs import NUM_DIGITS, write_pairs

from rlhf_core import train

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800), pytest.mark.usefixtures("no_plots")]

TRUE_SCORE = f"{Path(__file__).with_name('digit_pairs.py')}:right_fraction"
NUMBERS = {"name": "sort-digits", "num_digits": NUM_DIGITS, "size": 5000, "max_prompt_tokens": 16}


def run(output, model, algorithm, prompts, train_section, **sections):
    quiet = {"logging": {"tensorboard": False}, "checkpoint": {"every_episodes": None}}
    start = {"model": {"path": str(model), "device": "cpu"}, "prompts": prompts, "algorithm": algorithm}
    return train(start | {"train": train_section} | quiet | sections, output=output)


@pytest.fixture(scope="module")
def start_model(tmp_path_factory, no_plots):
    """A policy that has seen the task."""
    folder = tmp_path_factory.mktemp("warm") / "run"
    size = {"episodes": 25, "prompts_per_episode": 128, "train_batch_size": 128}
    run(folder, "builtin:tiny-digits", "sft", NUMBERS, size, optimizer={"lr": 1e-3, "warmup_episodes": 3})
    return folder / "model"


@pytest.fixture(scope="module")
def reward_run(start_model, tmp_path_factory):
    """A reward model on the policy's weights."""
    folder = tmp_path_factory.mktemp("reward")
    write_pairs(folder / "pairs.jsonl", 25_000, seed=0)
    pairs = {"name": "jsonl", "path": str(folder / "pairs.jsonl"), "max_prompt_tokens": 16}
    size = {"episodes": 90, "prompts_per_episode": 256, "train_batch_size": 128}
    rate = {"lr": 1e-3, "warmup_episodes": 3, "schedule": "linear"}
    evaluation = {"num_prompts": 1000, "every_episodes": None}
    return run(folder / "run", start_model, "reward-model", pairs, size, optimizer=rate, eval=evaluation)


def test_a_reward_model_tells_held_out_pairs_apart(reward_run):
    accuracy = reward_run.metrics[-1]["eval/preference/accuracy"]
    print(f"held-out accuracy {accuracy:.3f}")
    assert accuracy >= 0.9


def test_ppo_raises_its_score_and_the_true_score_stands_beside_it(start_model, reward_run, tmp_path):
    learnt = {"name": "model", "path": str(reward_run.run_folder / "model"), "append_eos": True}
    result = run(
        tmp_path / "run",
        start_model,
        {"name": "ppo", "kl_coef": 0.05},
        NUMBERS,
        {"episodes": 40, "prompts_per_episode": 128, "train_batch_size": 128, "seed": 1},
        engine={"name": "hf", "max_new_tokens": NUM_DIGITS + 3},
        optimizer={"lr": 3e-4, "critic_lr": 1e-3, "warmup_episodes": 3},
        rewards=[learnt, {"name": TRUE_SCORE, "label": "true", "weight": 0}],
        eval={"num_prompts": 256, "batch_size": 256, "every_episodes": 10},
    )
    lines = result.metrics
    scores, true_scores = ([line[f"reward/{name}"] for line in lines] for name in ("model", "true"))
    assert [line["reward/mean"] for line in lines] == scores, "a weight of 0 only watches"
    before, after = fmean(scores[:5]), fmean(scores[-5:])
    held_out = [(line["eval/score"], line["eval/true"]) for line in lines if "eval/score" in line]
    print(f"score {before:.3f} -> {after:.3f}; true {fmean(true_scores[:5]):.3f} -> {fmean(true_scores[-5:]):.3f}")
    print(f"held out (score, true): {held_out}")
    assert len(true_scores) == len(lines) == 40
    assert after > before + 0.5
    assert result.summary["eval_after"] > result.summary["eval_before"]
