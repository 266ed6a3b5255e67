"""Greedy and sampled evaluation of a run."""

import json

import pytest
from run_files import metrics, start

from rlhf_core.errors import ConfigError

TRAIN = {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
REWARDS = [{"name": "length", "target_tokens": 2}]


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
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


@pytest.mark.usefixtures("no_plots")
def test_sets_and_several_answers_beside_the_greedy_one(tmp_path):
    shared = {"name": "sort-digits", "num_digits": 2, "size": 50}
    sets = {
        "easy": {"prompts": shared, "num_prompts": 3},
        "other": {"prompts": shared, "num_prompts": 5, "rewards": ["exact-match"], "samples_per_prompt": 0},
    }
    evaluation = {"every_episodes": 1, "num_prompts": 4, "samples_per_prompt": 3, "passing_score": 0.1, "sets": sets}
    changes = {"train": TRAIN, "rewards": REWARDS, "eval": evaluation}
    result = start(changes, tmp_path / "run")
    plain = start({**changes, "eval": {"every_episodes": 1, "num_prompts": 4}}, tmp_path / "plain")
    last = result.metrics[-1]
    assert [last[f"eval/{name}num_prompts"] for name in ("", "easy/", "other/")] == [4, 3, 5]
    assert {"eval/avg@3", "eval/maj@3", "eval/pass@1", "eval/pass@2", "eval/pass@3"} <= set(last)
    assert 0 <= last["eval/easy/pass@2_low"] <= last["eval/easy/pass@2"] <= last["eval/easy/pass@2_high"] <= 1
    assert last["eval/avg@3"] == pytest.approx(last["eval/sampled/score"])
    assert "eval/other/exact-match" in last and "eval/other/length" not in last
    assert not [key for key in last if key.startswith("eval/other/avg")]
    assert (result.summary["eval_before"], result.summary["eval_after"]) == (
        plain.summary["eval_before"],
        plain.summary["eval_after"],
    )
    before = json.loads((result.run_folder / "evaluation-before.json").read_text())
    assert before["eval/score"] == result.summary["eval_before"] and "eval/easy/maj@3" in before


@pytest.mark.usefixtures("no_plots")
def test_sets_alone_hold_nothing_out_and_the_first_is_the_score(tmp_path):
    sets = {name: {"prompts": {"name": "sort-digits", "size": 9}, "num_prompts": n} for name, n in [("a", 2), ("b", 3)]}
    result = start({"train": TRAIN, "rewards": REWARDS, "eval": {"every_episodes": 1, "sets": sets}}, tmp_path / "run")
    assert result.summary["eval_after"] == result.metrics[-1]["eval/a/score"] == result.metrics[-1]["eval/score"]
    assert "eval/num_prompts" not in result.metrics[-1]


@pytest.mark.parametrize(
    ("sets", "told"),
    [
        ({"a": {}}, "eval.sets.a.prompts.name: is required"),
        ({"a": {"prompts": "sort-digits", "sampels_per_prompt": 2}}, 'did you mean "samples_per_prompt"?'),
        ({"sampled": {"prompts": "sort-digits"}}, "cannot be sampled or loss"),
        ({"a": {"prompts": "sort-digits", "score": "lenth"}}, 'eval.sets.a.score: no reward "lenth"'),
        ({"a": {"prompts": "sort-digits", "rewards": ["exact-mach"]}}, "eval.sets.a.rewards.0"),
        (["a"], "should be an object"),
    ],
)
def test_what_is_wrong_with_a_set_is_said(tmp_path, sets, told):
    with pytest.raises(ConfigError) as caught:
        start({"train": TRAIN, "rewards": REWARDS, "eval": {"sets": sets}}, tmp_path / "run")
    assert told in str(caught.value)


@pytest.mark.usefixtures("no_plots")
def test_filters_of_a_run_are_counted_in_its_manifest(tmp_path):
    (tmp_path / "mine.py").write_text("def even(record):\n    return int(record['answer'][-1]) % 2 == 0\n")
    lines = [{"prompt": f"{number}>", "answer": str(number)} for number in [*range(10), 2, 4]]
    (tmp_path / "p.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    limits = {"duplicates": "skip", "filter": f"{tmp_path / 'mine.py'}:even"}
    result = start({"prompts": {"name": "jsonl", "path": str(tmp_path / "p.jsonl"), **limits}}, tmp_path / "run")
    manifest = json.loads((result.run_folder / "manifest.json").read_text())
    assert manifest["data_counts"] == {"records": 12, "too_long": 0, "duplicates": 2, "filtered": 5}
    trained = {json.loads(line)["prompt"] for line in (result.run_folder / "samples.jsonl").read_text().splitlines()}
    assert trained <= {"0>", "2>", "4>", "6>", "8>"}
