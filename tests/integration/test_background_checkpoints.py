"""`checkpoint.background`: the files, and the guarantees, of checkpoints that are written at once."""

from __future__ import annotations

import errno
import json
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from background_runs import BACKGROUND, make_pairs, run_of, train_held
from run_files import samples
from running import PATIENCE_SECONDS, Forked, ended, forked_ranks, ranks, run_all, wait_until
from strategy_runs import REWARD

from rlhf_core import train
from rlhf_core.errors import CheckpointError, ConfigError, InterruptedRun
from rlhf_core.hookspecs import Action, Moment
from rlhf_core.runfolder import find_complete_checkpoint
from rlhf_strategies import DeferredFiles

pytestmark = pytest.mark.usefixtures("no_plots")
PROCESSES = ["torch-ddp", "fsdp", "gemini"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("background")
    run_all(Forked(make_pairs, out, ["single"]), *(Forked(make_pairs, out, PROCESSES, env=each) for each in ranks(2)))
    return out


def untimed(run: Path) -> list[dict[str, Any]]:
    timed = ("time/", "tokens_per_second/", "memory/", "reward_calls/")
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in line.items() if not key.startswith(timed)} for line in lines]


def steps(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


def tensors(checkpoint: Path) -> dict[str, bytes]:
    return {str(path.relative_to(checkpoint)): path.read_bytes() for path in checkpoint.rglob("*.safetensors")}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["single", *PROCESSES])
def test_checkpoints_have_the_same_content(runs: Path, name: str) -> None:
    at_once, background = runs / f"{name}-False", runs / f"{name}-True"
    assert untimed(background) == untimed(at_once)
    assert steps(background) == steps(at_once)
    for step in [each for each in steps(at_once) if each.startswith("step-")]:
        ours, theirs = (run / "checkpoints" / step for run in (background, at_once))
        assert find_complete_checkpoint(ours) == ours
        assert tensors(ours) == tensors(theirs)
        states = [json.loads((folder / "state.json").read_text()) for folder in (ours, theirs)]
        assert all(state.pop("wall_s") > 0 for state in states)
        assert states[0] == states[1]


@pytest.mark.slow
def test_a_resume_repeats_the_run(runs: Path, tmp_path: Path) -> None:
    first = min(steps(runs / "single-True")[1:], key=lambda name: int(name.removeprefix("step-")))
    shutil.copytree(runs / "single-True", tmp_path / "run")
    train(run_of("single", background=True), output=tmp_path / "run", resume=str(tmp_path / "run/checkpoints" / first))
    assert untimed(tmp_path / "run") == untimed(runs / "single-True")
    assert samples(tmp_path / "run") == samples(runs / "single-True")


@pytest.mark.slow
@pytest.mark.parametrize("hold_at", [1, 2])
def test_a_kill_in_the_middle_leaves_the_one_before(runs: Path, tmp_path: Path, hold_at: int) -> None:
    run, held = tmp_path / "run", tmp_path / "held"
    process = Forked(train_held, run, held, hold_at)
    with ended(process):
        wait_until(lambda: held.exists() or process.returncode is not None, "the second checkpoint")
        process.assert_runs()
        process.send_signal(signal.SIGKILL)
        process.finish()
    complete = [name for name in steps(runs / "single-True") if name.startswith("step-")][: hold_at - 1]
    assert [name for name in steps(run) if name.startswith("step-")] == complete
    assert [name for name in steps(run) if name.startswith(".partial-")]
    newest = find_complete_checkpoint(run)
    assert (newest.name if newest else None) == (complete[-1] if complete else None)
    train(run_of("single", background=True), output=run, resume="auto", restart=not complete)
    assert steps(run) == steps(runs / "single-True")
    assert untimed(run) == untimed(runs / "single-True")
    assert samples(run) == samples(runs / "single-True")


def with_episodes(episodes: int, every: int) -> dict[str, Any]:
    run = run_of("single", background=True)
    checkpoint = {**run["checkpoint"], "every_episodes": every}
    return {**run, "train": {**run["train"], "episodes": episodes}, "checkpoint": checkpoint}


@pytest.mark.parametrize(
    ("every", "text"),
    [
        (3, "step-9: the disk is full. The model after update 12 is written"),
        (4, "step-12: the disk is full. The model is written"),
    ],
    ids=["at the next episode", "at the end"],
)
@pytest.mark.slow
def test_a_full_disk_fails_the_run_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, every: int, text: str
) -> None:
    """At the end of the next episode, not at the next checkpoint, and at the end of the run."""

    def full(files: DeferredFiles) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DeferredFiles, "run", full)
    run = with_episodes(4 if every == 4 else 9, every)
    with pytest.raises(CheckpointError, match=text):
        train(run, output=tmp_path / "run")
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert (summary["status"], summary["model"]) == ("failed", "model")
    assert len(untimed(tmp_path / "run")) == 12
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()
    assert steps(tmp_path / "run") == []


FULL = """

import errno

from rlhf_strategies import DeferredFiles


def full(files):
    raise OSError(errno.ENOSPC, "No space left on device")


DeferredFiles.run = full
"""


@pytest.mark.slow
def test_ranks_fail_together_with_the_error_of_the_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(DeferredFiles, "run", DeferredFiles.run)  # restored, since this process loads the reward too
    reward = tmp_path / REWARD.name
    reward.write_text(REWARD.read_text() + FULL)
    run = {**run_of("torch-ddp", background=True), "rewards": [{"name": f"{reward}:sorted_fraction"}]}
    run["train"] |= {"episodes": 9}
    full = pytest.raises(CheckpointError, match="step-3: the disk is full. The model after update 6 is written")
    with full, forked_ranks():
        train(run, output=tmp_path / "run", num_processes=2, trust=True)
    assert (tmp_path / "run" / "model" / "model.safetensors").is_file()


WRITER = """
import sys
from pathlib import Path
import torch
from rlhf_cli.main import main
from rlhf_core.place import LocalPlace
from rlhf_core.runfolder import CheckpointStore
from rlhf_strategies import BackgroundStore, DeferredFiles
from safetensors.torch import save_file

weights = {str(i): torch.zeros(2 * 10**6) for i in range(8)}

def run(files):
    while True:
        save_file(weights, folder / "weights")

DeferredFiles.run = run
place = LocalPlace(torch.device("cpu"), torch.float32)
store = BackgroundStore(CheckpointStore(Path(sys.argv[1])), timeout_seconds=60)
with store.writing(1, place) as folder:
    pass
main(["version"])
"""


@pytest.mark.slow
def test_a_process_ends_with_its_code_while_one_is_written(tmp_path: Path) -> None:
    """The second Ctrl-C does not wait for it, and does not abort the interpreter."""
    command = [sys.executable, "-c", WRITER, str(tmp_path)]
    process = subprocess.run(command, capture_output=True, text=True, timeout=2 * PATIENCE_SECONDS, check=False)
    assert process.returncode == 0, process.stderr
    assert "rlhf-core" in process.stdout


class Interrupt:
    def rlhf_decide(self, moment: Moment) -> Action | None:
        return Action(kind="interrupt", by="mine", reason="asked for by the test") if moment.at == "episode" else None


def test_an_interrupted_run_has_its_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = DeferredFiles.run
    monkeypatch.setattr(DeferredFiles, "run", lambda files: (time.sleep(0.5), run(files)))
    with pytest.raises(InterruptedRun, match="A checkpoint and the model are written"):
        train(run_of("single", background=True), output=tmp_path / "run", hooks=[Interrupt()])
    assert find_complete_checkpoint(tmp_path / "run") == tmp_path / "run/checkpoints/step-3"


class RollBackOnce:
    may_roll_back = True
    step = 6

    def rlhf_decide(self, moment: Moment) -> Action | None:
        if moment.at != "update" or moment.step != self.step:
            return None
        self.step = -1
        return Action(kind="rollback", by="mine", reason="asked for by the test", lr_factor=1.0)


def slow(files: DeferredFiles, run: Callable[[DeferredFiles], None] = DeferredFiles.run) -> None:
    time.sleep(1.0)
    run(files)


@pytest.mark.slow
def test_a_rollback_waits_for_the_checkpoint_that_it_returns_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for background in BACKGROUND:
        run = run_of("single", background=background)
        run["checkpoint"] |= {"every_episodes": 1, "keep": 3}
        if background:
            monkeypatch.setattr(DeferredFiles, "run", slow)
        results.append(train(run, output=tmp_path / str(background), hooks=[RollBackOnce()]))
    at_once, in_background = (tmp_path / str(background) for background in BACKGROUND)
    assert [result and result.summary["rollbacks"] for result in results] == [1, 1]
    assert untimed(in_background) == untimed(at_once)
    assert samples(in_background) == samples(at_once)
    assert steps(in_background) == steps(at_once)


@pytest.mark.parametrize(("value", "active"), [("true", True), ("{}", True), ("false", False), ("null", False)])
def test_the_key_is_a_switch_or_has_options(value: str, active: bool) -> None:
    from rlhf_core.config import resolve

    resolved = resolve(run_file_with(value))
    assert ("checkpoint.background" in resolved.sections) is active


def run_file_with(value: str) -> dict[str, Any]:
    import yaml

    run = run_of("single", background=False)
    return {**run, "checkpoint": {**run["checkpoint"], "background": yaml.safe_load(value)}}


def test_another_value_is_refused() -> None:
    from rlhf_core.config import resolve

    with pytest.raises(
        ConfigError, match=r"checkpoint.background: should be a mapping of options, or true \(given 3\)"
    ):
        resolve(run_file_with("3"))
