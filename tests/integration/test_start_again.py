"""Going on by `--resume`: with the folder's own config, from its first moment, with all that the checkpoint counts."""

import json
import shutil

import pytest
import yaml
from run_files import lines, metrics, samples, start, tree, write_run

from rlhf_cli.main import run as rlhf
from rlhf_core.errors import CheckpointError, RlhfError, UserInputError
from rlhf_start.stages import run_quickstart
from rlhf_testing.models import save_tiny_model
from rlhf_testing.runs import tiny_run

pytestmark = pytest.mark.usefixtures("no_plots", "own_logger")
TRAIN = {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
EACH = {"train": TRAIN, "checkpoint": {"every_episodes": 1, "keep": 10}}


class Fail:
    """Ends the run as a kill would: nothing of its own is written after `episode` has begun."""

    def __init__(self, episode=0):
        self.episode = episode

    def rlhf_episode_start(self, episode):
        if episode == self.episode:
            raise RlhfError("stopped by the test")


def stopped(changes, output, episode):
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(changes, output, hooks=[Fail(episode)])


def unlocked(files):
    """A run folder's files without `.lock`, which names the process that has last opened it."""
    return {name: content for name, content in files.items() if name != ".lock"}


def status(folder):
    return json.loads((folder / "summary.json").read_text())["status"]


def command(capsys, *arguments, code=0):
    assert rlhf(["train", *map(str, arguments), "--quiet"]) == code
    return capsys.readouterr().err


# The folder's own config


@pytest.mark.parametrize("is_named", [True, False])
@pytest.mark.slow
def test_a_resume_without_a_run_file_takes_the_folders_own(tmp_path, capsys, monkeypatch, is_named):
    monkeypatch.chdir(tmp_path)
    run = write_run(tmp_path, EACH)
    output = tmp_path / "runs" / "mine"
    command(capsys, run, "--output", output)
    before = (output / "config.yaml").read_text()
    command(capsys, *(("--output", output) if is_named else ()), "--resume", "auto", "--set", "train.episodes=3")
    assert not (output / "warm-start").exists()
    assert {path.name for path in (tmp_path / "runs").iterdir()} == {"mine"}
    assert metrics(output) == metrics(start({**EACH, "train": {**TRAIN, "episodes": 3}}, tmp_path / "whole").run_folder)
    expected = yaml.safe_load(before)
    expected["train"]["episodes"] = 3
    assert yaml.safe_load((output / "config.yaml").read_text()) == expected
    (event,) = json.loads((output / "manifest.json").read_text())["events"]
    assert [change["key"] for change in event["changes"]] == ["train.episodes"]


def test_a_dry_run_of_a_resume_says_what_changes_and_writes_nothing(tmp_path, capsys):
    output = tmp_path / "run"
    start(EACH, output)
    before = (output / "config.yaml").read_bytes()
    assert rlhf(["train", "--output", str(output), "--resume", "auto", "--dry-run", "--set", "optimizer.lr=5e-4"]) == 0
    assert "optimizer.lr: 0.001 -> 0.0005" in capsys.readouterr().err
    assert (output / "config.yaml").read_bytes() == before
    again = ["train", "--output", str(output), "--resume", "auto", "--dry-run"]
    assert rlhf([*again, "--algorithm", "grpo"]) == 2
    assert "algorithm.name" in capsys.readouterr().err


@pytest.mark.parametrize("count", ["two", None, [2], 0, True])
def test_a_wrong_number_of_processes_in_a_manifest_is_told(tmp_path, capsys, count):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "manifest.json").write_text(json.dumps({"num_processes": count}))
    (tmp_path / "run" / "config.yaml").write_bytes(write_run(tmp_path, EACH).read_bytes())
    err = command(capsys, "--output", tmp_path / "run", "--resume", "auto", code=2)
    assert f"num_processes is {count!r}" in err and "--num-processes" in err


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"algorithm": {"name": "grpo"}}, "algorithm.name"),
        ({"model": {"lora": {"r": 2}}}, "model.lora"),
        ({"prompts": {"num_digits": 4}}, "prompts.num_digits"),
        ({"prompts": {"max_prompt_tokens": 8}}, "prompts.max_prompt_tokens"),
    ],
)
@pytest.mark.slow_except("changes0-algorithm.name", "changes2-prompts.num_digits")
def test_model_algorithm_and_prompts_cannot_change(tmp_path, changes, key):
    start(EACH, tmp_path / "run")
    before = {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*")}
    with pytest.raises(UserInputError, match=f"{key}(.|\n)*start a new run"):
        start({**EACH, **changes}, tmp_path / "run", resume="auto")
    assert {path: path.read_bytes() for path in (tmp_path / "run").glob("*.*") if path.name != ".lock"} == {
        path: content for path, content in before.items() if path.name != ".lock"
    }
    assert status(tmp_path / "run") == "done"


@pytest.mark.slow
def test_another_model_and_other_records_under_the_same_name_are_refused(tmp_path):
    model = save_tiny_model(tmp_path / "model")
    data = tmp_path / "prompts.jsonl"
    data.write_text('{"prompt": "12>"}\n' * 8)
    run = {**EACH, "prompts": {"name": "jsonl", "path": str(data)}, "rewards": ["length"]}
    start(run, tmp_path / "run")
    with pytest.raises(UserInputError, match=r"model\.path"):
        start({**run, "model": {"path": str(model)}}, tmp_path / "run", resume="auto")
    moved = data.with_name("moved.jsonl")
    moved.write_bytes(data.read_bytes())
    start({**run, "prompts": {"name": "jsonl", "path": str(moved)}}, tmp_path / "run", resume="auto")
    moved.write_text('{"prompt": "21>"}\n' * 8)
    with pytest.raises(UserInputError, match="the records differ from those"):
        start({**run, "prompts": {"name": "jsonl", "path": str(moved)}}, tmp_path / "run", resume="auto")


@pytest.mark.slow
def test_the_quickstarts_folder_may_be_moved(tmp_path, capsys):
    warm = tiny_run({"algorithm": {"name": "sft"}, "rewards": None, "train": {"samples_per_prompt": 1}})
    run_quickstart(warm, tiny_run(EACH), output=tmp_path / "run")
    (tmp_path / "run").rename(tmp_path / "moved")
    command(capsys, "--output", tmp_path / "moved", "--resume", "auto", "--set", "train.episodes=3")
    assert len(lines(tmp_path / "moved/metrics.jsonl")) == 6


# Ended before the first checkpoint


@pytest.mark.slow
def test_a_run_that_ended_before_its_first_checkpoint_starts_again(tmp_path, capsys):
    stopped({**EACH, "checkpoint": {"every_episodes": None}}, tmp_path / "run", 1)
    (tmp_path / "run/checkpoints/.partial-step-2").mkdir(parents=True)
    assert len(lines(tmp_path / "run/metrics.jsonl")) == 2
    again = ("--output", tmp_path / "run", "--resume", "auto", "--set", "logging.tensorboard=true")
    before = tree(tmp_path / "run")
    err = command(capsys, *again, code=2)
    assert "metrics.jsonl has the updates of a run" in err and "--restart" in err and "--from" in err
    assert unlocked(tree(tmp_path / "run")) == unlocked(before)
    err = command(capsys, *again, "--restart")
    assert err == ""
    whole = start({**EACH, "checkpoint": {"every_episodes": None}}, tmp_path / "whole")
    assert metrics(tmp_path / "run") == metrics(whole.run_folder)
    assert samples(tmp_path / "run") == samples(whole.run_folder)
    assert not list((tmp_path / "run/checkpoints").glob(".partial*"))
    (event,) = json.loads((tmp_path / "run/manifest.json").read_text())["events"]
    assert (event["kind"], event["checkpoint"]) == ("resume", None)


@pytest.mark.parametrize("flags", [[], ["--restart"]])
def test_a_run_whose_checkpoints_are_lost_is_left_as_it_is(tmp_path, capsys, flags):
    folder = tmp_path / "run"
    start(EACH, folder)
    for path in folder.glob("checkpoints/step-*"):
        shutil.rmtree(path)
    before = tree(folder)
    err = command(capsys, "--output", folder, "--resume", "auto", *flags, code=2)
    assert "checkpoints/step-4 is missing" in err and f"rlhf train --from {folder} --output DIR" in err
    assert unlocked(tree(folder)) == unlocked(before)


def test_restart_alone_is_refused(capsys):
    assert "--restart needs --resume auto" in command(capsys, "--restart", code=2)


def test_a_resume_of_a_folder_that_does_not_exist_yet_starts_the_run(tmp_path, capsys):
    """So that a job in a queue has one command, for its first start and for those after."""
    folder = tmp_path / "run"
    err = command(capsys, "--output", folder, "--resume", "auto", code=2)
    assert "no run to continue" in err and "also pass the run file" in err and not folder.exists()
    again = (write_run(tmp_path, EACH), "--output", folder, "--resume", "auto")
    command(capsys, *again, "--dry-run")
    assert not folder.exists()
    command(capsys, *again)
    assert status(folder) == "done"
    assert json.loads((folder / "manifest.json").read_text())["events"] == []
    command(capsys, *again, "--set", "train.episodes=3")
    assert len(lines(folder / "metrics.jsonl")) == 6


def test_a_quickstart_resumed_before_its_folder_exists_starts(tmp_path):
    warm = tiny_run({"algorithm": {"name": "sft"}, "rewards": None, "train": {"samples_per_prompt": 1}})
    run_quickstart(warm, tiny_run(), output=tmp_path / "run", resume="auto")
    assert status(tmp_path / "run") == status(tmp_path / "run/warm-start") == "done"


def test_a_folder_that_was_only_locked_can_be_started_again_with_its_run_file(tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".lock").write_text("1")
    err = command(capsys, "--output", tmp_path / "run", "--resume", "auto", code=2)
    assert "also pass the run file" in err
    command(capsys, write_run(tmp_path, EACH), "--output", tmp_path / "run", "--resume", "auto")
    assert status(tmp_path / "run") == "done"


@pytest.mark.slow
def test_a_quickstart_killed_in_its_warm_start_can_be_started_again(tmp_path):
    warm = tiny_run({"algorithm": {"name": "sft"}, "rewards": None, "train": {"samples_per_prompt": 1}})
    with pytest.raises(RlhfError, match="stopped by the test"):
        run_quickstart(warm, tiny_run(), output=tmp_path / "run", hooks=[Fail()])
    assert status(tmp_path / "run") == "failed"
    assert run_quickstart(warm, tiny_run(), output=tmp_path / "run", resume="auto").summary["status"] == "done"


def test_a_run_none_of_whose_checkpoints_is_whole_does_not_start_again(tmp_path):
    start(EACH, tmp_path / "run")
    for listing in (tmp_path / "run").glob("checkpoints/*/files.json"):
        listing.unlink()
    with pytest.raises(UserInputError, match="no checkpoint"):
        start(EACH, tmp_path / "run", resume="auto")
    assert len(lines(tmp_path / "run/metrics.jsonl")) == 4


def test_a_run_that_ended_in_its_first_moment_has_no_config_whose_code_would_not_be_run(tmp_path, monkeypatch):
    def stop(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr("rlhf_core.entry.run_record.collect_manifest", stop)
    with pytest.raises(KeyboardInterrupt):
        start(EACH, tmp_path / "run")
    assert not (tmp_path / "run/config.yaml").exists()
    monkeypatch.undo()
    assert start(EACH, tmp_path / "run", resume="auto").summary["status"] == "done"


# What the checkpoint counts


@pytest.mark.parametrize("left", [None, 0, 5])
@pytest.mark.slow_except("5")
def test_samples_that_were_removed_are_noticed(tmp_path, left):
    folder = tmp_path / "run"
    stopped({**EACH, "train": {**TRAIN, "episodes": 3}}, folder, 2)
    path = folder / "samples.jsonl"
    kept = path.read_text().splitlines(keepends=True)
    path.unlink()
    if left is not None:
        path.write_text("".join(kept[:left] + kept[left + 1 :]))
    with pytest.raises(CheckpointError, match=r"samples.jsonl: contains \d+ lines.*counts 16(.|\n)*logging.samples"):
        start({**EACH, "train": {**TRAIN, "episodes": 3}}, folder, resume="auto")
    assert status(folder) == "failed"
    start({**EACH, "train": {**TRAIN, "episodes": 3}, "logging": {"samples": "none"}}, folder, resume="auto")


def test_a_line_missing_amid_the_metrics_is_noticed(tmp_path):
    stopped(EACH, tmp_path / "run", 1)
    path = tmp_path / "run/metrics.jsonl"
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(CheckpointError, match=r"metrics.jsonl"):
        start(EACH, tmp_path / "run", resume="auto")


@pytest.mark.slow
def test_the_best_follows_a_fall_back(tmp_path):
    """The checkpoint fallen back to knows a best one that has made room for the damaged one."""
    reward = tmp_path / "reward.py"
    reward.write_text(
        "def by_episode(rollouts):\n    return [(1.0, 0.5, 0.5, 2.0)[rollouts[0].policy_version]] * len(rollouts)\n"
    )
    changes = {
        "rewards": [{"name": f"{reward}:by_episode"}],
        "train": {**TRAIN, "episodes": 4},
        "checkpoint": {"every_episodes": 1, "keep": 2, "best": "reward/mean"},
    }
    start(changes, tmp_path / "run")
    checkpoints = tmp_path / "run/checkpoints"
    assert (checkpoints / "best").read_text().strip() == "step-8"
    assert not (checkpoints / "step-2").exists()
    (checkpoints / "step-8/policy/model.safetensors").write_bytes(b"torn")
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(changes, tmp_path / "run", resume="auto", hooks=[Fail(3)])
    assert not (checkpoints / "best").exists()
    start(changes, tmp_path / "run", resume="auto")
    assert (checkpoints / "best").read_text().strip() == "step-8"


def test_what_a_kill_left_half_written_is_gone_after_the_next_start(tmp_path):
    half = tmp_path / "run/checkpoints/.partial-step-2"
    beside = [tmp_path / "run" / name for name in (".manifest.json.tmp", "checkpoints/.last.tmp")]
    start(EACH, tmp_path / "run")
    half.mkdir()
    for path in beside:
        path.write_text("{")
    stopped_again = {**EACH, "train": {**TRAIN, "episodes": 3}}
    with pytest.raises(RlhfError, match="stopped by the test"):
        start(stopped_again, tmp_path / "run", resume="auto", hooks=[Fail(2)])
    assert not [path for path in (half, *beside) if path.exists()]
