"""Greedy and sampled evaluation of a run."""

import pytest
from run_files import metrics, start

TRAIN = {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
REWARDS = [{"name": "length", "target_tokens": 2}]


@pytest.mark.usefixtures("no_plots")
def test_both_at_once_leave_the_greedy_score_and_the_training_as_they_are(tmp_path):
    def run(name, **evaluation):
        changes = {"train": TRAIN, "rewards": REWARDS, "eval": {"every_episodes": 1, "num_prompts": 8, **evaluation}}
        return start(changes, tmp_path / name)

    greedy, sampled = run("greedy"), run("sampled", temperature=1.0)
    both = run("both", sampled_temperature=1.0)

    def without_second(folder):
        return [{k: v for k, v in line.items() if "eval/sampled" not in k} for line in metrics(folder)]

    assert without_second(both.run_folder) == metrics(greedy.run_folder)
    assert both.summary["eval_after"] == greedy.summary["eval_after"]
    last_lines = [line for line in both.metrics if "eval/score" in line]
    assert [line["eval/sampled/score"] for line in last_lines] == [
        line["eval/score"] for line in sampled.metrics if "eval/score" in line
    ]
    assert last_lines[-1]["eval/sampled/num_prompts"] == 8
