"""A run folder is enough to make the run again, and says what was changed on the way."""

import json

import pytest
from run_files import command, metrics, samples, start, write_run

TRAIN = {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {"train": TRAIN, "checkpoint": {"every_episodes": 1}}


def events(folder):
    return json.loads((folder / "manifest.json").read_text())["events"]


def test_from_a_run_folder_comes_the_same_run(tmp_path):
    first = command("train", write_run(tmp_path, BASE), "--output", tmp_path / "first", "--quiet")
    assert first.returncode == 0, first.stderr
    again = command("train", "--from", tmp_path / "first", "--output", tmp_path / "again", "--quiet")
    assert again.returncode == 0, again.stderr
    assert metrics(tmp_path / "again") == metrics(tmp_path / "first")
    assert samples(tmp_path / "again") == samples(tmp_path / "first")
    (event,) = events(tmp_path / "again")
    assert event["kind"] == "recreate"
    assert event["differences"] == []


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
def test_what_differs_from_the_run_is_said(tmp_path, caplog):
    first = start(BASE, tmp_path / "first")
    manifest = json.loads((first.run_folder / "manifest.json").read_text())
    manifest["libraries"]["torch"] = "0.0"
    (first.run_folder / "manifest.json").write_text(json.dumps(manifest))
    start({**BASE, "optimizer": {"lr": 2e-3}}, tmp_path / "again", origin=first.run_folder)
    (event,) = events(tmp_path / "again")
    assert "optimizer.lr: 0.001 -> 0.002" in event["differences"]
    assert any(line.startswith("libraries.torch: '0.0' -> ") for line in event["differences"])
    assert len(event["differences"]) == 2
    assert "differs from" in caplog.text


def test_a_run_file_beside_it_is_refused(tmp_path):
    (tmp_path / "run").mkdir()
    done = command("train", write_run(tmp_path), "--from", tmp_path / "run")
    assert done.returncode == 2
    assert "specify only one of them" in done.stderr
    empty = command("train", "--from", tmp_path / "run")
    assert empty.returncode == 2
    assert "this folder does not contain a run" in empty.stderr


@pytest.mark.usefixtures("no_plots")
def test_a_resume_with_a_changed_config_says_what_that_means(tmp_path, caplog):
    start(BASE, tmp_path / "run")
    changed = {**BASE, "train": {**TRAIN, "episodes": 3}, "optimizer": {"lr": 5e-4}}
    resumed = start(changed, tmp_path / "run", resume="auto")
    (event,) = events(tmp_path / "run")
    assert (event["kind"], event["checkpoint"]) == ("resume", "step-4")
    assert {change["key"] for change in event["changes"]} == {"optimizer.lr", "train.episodes"}
    assert "resumed with a changed config: optimizer.lr: 0.001 -> 0.0005" in caplog.text
    assert [line["policy/lr"] for line in resumed.metrics] == [1e-3] * 4 + [5e-4] * 2
    again = start(changed, tmp_path / "run", resume="auto")
    assert events(again.run_folder)[-1]["changes"] == []
