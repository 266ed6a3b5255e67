"""The same seed gives the same run; the lines of the run folder carry what the contract says."""

import json

import pytest
from run_files import lines, metrics, samples, start

from rlhf_core import train

ON_EVERY_LINE = {
    "step",
    "episode",
    "policy_version",
    "reward/mean",
    "reward/exact-match",
    "kl/mean",
    "loss/policy",
    "loss/value",
    "policy/clip_fraction",
    "policy/entropy",
    "value/explained_variance",
    "response/length_mean",
    "response/truncated_fraction",
    "rollout/logprob_gap_max",
    "staleness/mean",
    "staleness/max",
}
ON_LAST_LINES = {
    "time/rollout_s",
    "time/reward_s",
    "time/train_s",
    "time/sync_s",
    "tokens_per_second/rollout",
    "tokens_per_second/train",
    "memory/peak_bytes",
}
CHANGES = {"train": {"episodes": 3, "epochs_per_episode": 2}, "eval": {"every_episodes": 2, "num_prompts": 5}}


@pytest.fixture(scope="module")
def first(tmp_path_factory, with_plots):
    with with_plots():
        return start({**CHANGES, "train": TRAIN}, tmp_path_factory.mktemp("runs") / "first")


TRAIN = {
    "episodes": 3,
    "prompts_per_episode": 4,
    "samples_per_prompt": 2,
    "train_batch_size": 4,
    "epochs_per_episode": 2,
}


@pytest.mark.usefixtures("no_plots")
def test_the_same_seed_gives_the_same_lines(first, tmp_path):
    second = start({**CHANGES, "train": TRAIN}, tmp_path / "second")
    assert metrics(first.run_folder) == metrics(second.run_folder)
    assert samples(first.run_folder) == samples(second.run_folder)
    other = start({**CHANGES, "train": {**TRAIN, "seed": 1}}, tmp_path / "other")
    assert samples(other.run_folder) != samples(first.run_folder)


def test_one_line_per_update_with_the_keys_of_the_contract(first):
    found = lines(first.run_folder / "metrics.jsonl")
    assert [line["step"] for line in found] == list(range(1, 13))
    assert [line["episode"] for line in found] == [e for e in range(3) for _ in range(4)]
    assert [line["policy_version"] for line in found] == [line["episode"] for line in found]
    for line in found:
        assert line.keys() >= ON_EVERY_LINE - {"value/explained_variance"}
        is_last = line["step"] % 4 == 0
        assert bool(ON_LAST_LINES & line.keys()) == is_last
        assert (line.keys() >= ON_LAST_LINES) == is_last
        assert ("eval/score" in line) == (line["step"] in (8, 12))
    assert any("value/explained_variance" in line for line in found)


def test_values_of_an_episode_are_the_same_on_its_lines(first):
    prefixes = ("reward/", "kl/", "response/", "staleness/", "rollout/")
    for episode in range(3):
        values = [
            {key: value for key, value in line.items() if key.startswith(prefixes)}
            for line in lines(first.run_folder / "metrics.jsonl")
            if line["episode"] == episode
        ]
        assert all(each == values[0] for each in values)


def test_trainer_and_engine_agree_on_log_probs(first):
    gaps = [line["rollout/logprob_gap_max"] for line in lines(first.run_folder / "metrics.jsonl")]
    assert max(gaps) < 1e-4


def test_one_line_per_sample(first):
    found = samples(first.run_folder)
    assert [line["sample_id"] for line in found] == list(range(24))
    assert [line["episode"] for line in found] == [e for e in range(3) for _ in range(8)]
    assert all(set(line["rewards"]) == {"exact-match"} for line in found)
    assert len({line["prompt"] for line in found}) == 12


def test_the_summary_and_the_rest_of_the_folder(first):
    folder = first.run_folder
    summary = json.loads((folder / "summary.json").read_text())
    assert summary == first.summary
    assert summary["status"] == "done"
    last = lines(folder / "metrics.jsonl")[-1]
    assert summary["eval_after"] == last["eval/score"]
    assert summary["eval_before"] is not None
    assert summary["wall_s"] > 0
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["data_digest"].startswith("sha256:")
    assert manifest["seed"] == 0
    for name in ("config.yaml", "report.html", "model/config.json", "model/tokenizer.json", "checkpoints/last"):
        assert (folder / name).is_file(), name
    assert not list(folder.glob("**/*partial*"))


@pytest.mark.usefixtures("no_plots")
@pytest.mark.parametrize("micro_batch_tokens", [16, 40])
@pytest.mark.slow_except("16")
def test_micro_batches_change_nothing_but_rounding(tmp_path, micro_batch_tokens):
    # Rewards that differ: with equal ones the whitened advantages are nothing but rounding.
    one = {**TRAIN, "episodes": 1}
    rewards = [{"name": "length", "shape": "shorter", "target_tokens": 4}]
    whole = metrics(start({"rewards": rewards, "train": one}, tmp_path / "whole").run_folder)[0]
    cut = {**one, "micro_batch_tokens": micro_batch_tokens}
    part = metrics(start({"rewards": rewards, "train": cut}, tmp_path / "split").run_folder)[0]
    assert whole["policy/grad_norm"] > 0.1
    for key in ("loss/policy", "loss/value", "policy/grad_norm", "critic/grad_norm", "policy/entropy"):
        assert part[key] == pytest.approx(whole[key], rel=1e-5, abs=1e-7), key


@pytest.mark.usefixtures("no_plots")
def test_the_written_config_is_a_run_file_of_the_same_run(first, tmp_path):
    again = train(first.run_folder / "config.yaml", output=tmp_path / "again")
    assert metrics(again.run_folder) == metrics(first.run_folder)
    assert (tmp_path / "again/config.yaml").read_text() == (first.run_folder / "config.yaml").read_text()
    odd = {"stop": ["1e-6", "on", "~"], "max_new_tokens": 2}
    folder = start({"engine": odd, "train": {**TRAIN, "episodes": 1}}, tmp_path / "odd").run_folder
    start_again = train(folder / "config.yaml", output=tmp_path / "odd-again")
    assert samples(start_again.run_folder) == samples(folder)


@pytest.mark.usefixtures("no_plots")
def test_without_eval_there_are_no_scores(tmp_path):
    result = start({"train": {**TRAIN, "episodes": 1}}, tmp_path / "run")
    assert result.summary["eval_before"] is None
    assert result.summary["eval_after"] is None
    assert not any(key.startswith("eval/") for line in result.metrics for key in line)
