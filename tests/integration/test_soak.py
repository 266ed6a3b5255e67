"""Runs that are killed at any moment, and runs that are long (`make soak`; a few fast ones in `make test`)."""

import json
import os
import random
import subprocess
import time

import pytest
from run_files import metrics, samples, start, write_run
from running import ended, heap_bytes, rlhf, run_all, wait_until

TRAIN = {"episodes": 12, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {
    "train": TRAIN,
    "checkpoint": {"every_episodes": 1, "keep": 2},
    "eval": {"every_episodes": 3, "num_prompts": 4},
    "rewards": [{"name": "length", "target_tokens": 2}],
    "reward_scaling": {"normalise": True},
}
PLACEMENTS = {
    "local": {},
    "two-processes": {"strategy": {"name": "ddp"}},
    "ray": {"transport": {"name": "ray", "max_staleness": 0}},
}


def begin(tmp_path, placement, changes, *flags):
    """`rlhf train` in a process of its own, that can be killed with all that it started (Ray's own end with it)."""
    run = write_run(tmp_path, {**PLACEMENTS[placement], **changes})
    ranks = ["--num-processes", "2"] if placement == "two-processes" else []
    return rlhf("train", run, "--output", tmp_path / "run", "--quiet", *flags, *ranks)


def updates(folder):
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


def kill_after(process, folder, num_updates, wait_seconds):
    """kill -9 of all processes, some time after an update; False where the run was over before."""
    with ended(process):
        wait_until(
            lambda: process.returncode is not None or updates(folder) >= num_updates,
            f"update {num_updates}",
            every_seconds=0.005,
        )
        time.sleep(wait_seconds)
        assert process.returncode in (None, 0), process.output()
        return process.returncode is None


def resume_flags(folder):
    whole = [path for path in folder.glob("checkpoints/step-*") if path.is_dir()]
    return ["--resume", "auto"] if whole else []


def killed_and_resumed(tmp_path, placement, changes, moments):
    """Kill a run at each of the moments, resume it each time, and let it end."""
    folder = tmp_path / "run"
    for num_updates, wait_seconds in [*moments, (10**9, 0.0)]:
        flags = resume_flags(folder)
        if not flags and folder.exists():  # killed before its first checkpoint: begin anew
            subprocess.run(["rm", "-r", str(folder)], check=True)
        kill_after(begin(tmp_path, placement, changes, *flags), folder, num_updates, wait_seconds)
    assert json.loads((folder / "summary.json").read_text())["status"] == "done"
    return folder


def comparable(folder):
    """Metrics without times and waits."""
    waits = ("transport/", "sync/seconds")
    return [{key: value for key, value in line.items() if not key.startswith(waits)} for line in metrics(folder)]


def differences(found, expected):
    """(step, key, found, expected) of what is not the same: pytest cuts long lines where they begin to differ."""
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    return [
        (ours["step"], key, ours.get(key), theirs.get(key))
        for ours, theirs in zip(found, expected, strict=True)
        for key in sorted(ours.keys() | theirs.keys())
        if ours.get(key) != theirs.get(key)
    ]


def same_as_never_killed(tmp_path, placement, changes, moments):
    (tmp_path / "whole").mkdir()
    (tmp_path / "killed").mkdir()
    run_all(begin(tmp_path / "whole", placement, changes))
    folder = killed_and_resumed(tmp_path / "killed", placement, changes, moments)
    assert differences(comparable(folder), comparable(tmp_path / "whole" / "run")) == []
    assert samples(folder) == samples(tmp_path / "whole" / "run")
    model = "model/model.safetensors"
    assert (folder / model).read_bytes() == (tmp_path / "whole" / "run" / model).read_bytes()


def moments(seed, count, num_updates):
    """Times at which to kill: in generation, reward, update, evaluation or while a checkpoint is written."""
    chosen = random.Random(seed)
    return sorted((chosen.randint(1, num_updates - 2), chosen.random() * 0.3) for _ in range(count))


@pytest.mark.parametrize(
    "placement", ["local", *(pytest.param(name, marks=pytest.mark.slow) for name in ("two-processes", "ray"))]
)
def test_a_run_killed_once_ends_as_if_it_had_not_been(tmp_path, placement):
    same_as_never_killed(tmp_path, placement, {**BASE, "train": {**TRAIN, "episodes": 6}}, [(5, 0.02)])


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_a_run_killed_ten_times_ends_as_if_it_had_not_been(tmp_path, placement):
    same_as_never_killed(tmp_path, placement, BASE, moments(len(placement), 10, 24))


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_detached_run_killed_ten_times_loses_and_doubles_nothing(tmp_path):
    """With samples under way that later episodes may train on."""
    changes = {**BASE, "transport": {"name": "ray", "max_staleness": 2, "num_makers": 2}}
    folder = killed_and_resumed(tmp_path, "ray", changes, moments(3, 10, 24))
    expected = TRAIN["episodes"] * TRAIN["prompts_per_episode"] * TRAIN["samples_per_prompt"]
    assert sorted(sample["sample_id"] for sample in samples(folder)) == list(range(expected))
    assert [line["step"] for line in metrics(folder)] == list(range(1, 25))
    assert all(line["staleness/max"] <= 2 for line in metrics(folder))


class Watch:
    """Memory, open files and processor time, episode by episode."""

    def __init__(self):
        self.rows = []

    def rlhf_episode_start(self):
        self.began = time.process_time()

    def rlhf_episode_end(self):
        self.rows.append((heap_bytes(), len(os.listdir("/proc/self/fd")), time.process_time() - self.began))


def median(values):
    return sorted(values)[len(values) // 2]


def check_flat(rows, first):
    """From episode `first` to the end: memory within 5%, open files the same."""
    part = (len(rows) - first) // 4
    early, late = rows[first : first + part], rows[-part:]
    assert median([row[0] for row in late]) < 1.05 * median([row[0] for row in early])
    assert max(row[1] for row in late) <= max(row[1] for row in early)
    return early, late


@pytest.mark.usefixtures("no_plots")
@pytest.mark.slow
def test_memory_and_files_stay_flat_over_forty_episodes(tmp_path):
    watch = Watch()
    changes = {"train": {**TRAIN, "episodes": 40}, "checkpoint": {"every_episodes": 5, "keep": 2}}
    start({**changes, "model": {"path": "builtin:tiny-digits", "device": "cpu"}}, tmp_path / "run", hooks=[watch])
    check_flat(watch.rows, 20)


@pytest.mark.slow
@pytest.mark.usefixtures("no_plots")
def test_memory_files_and_work_stay_flat_over_two_thousand_episodes(tmp_path):
    watch = Watch()
    changes = {"train": {**TRAIN, "episodes": 2000}, "checkpoint": {"every_episodes": 50, "keep": 2}}
    start({**changes, "eval": {"every_episodes": 100, "num_prompts": 8}}, tmp_path / "run", hooks=[watch])
    early, late = check_flat(watch.rows, 100)
    # The processor's time, which the rest of the machine hardly changes: a leak shows as steps that grow.
    assert median([row[2] for row in late]) < 1.5 * median([row[2] for row in early])
