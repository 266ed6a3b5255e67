"""Trainers that are killed, really, in a run that may restart them: it ends as if nobody had died."""

from __future__ import annotations

import json
import os
import re
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.errors import DeadlineError, InterruptedRun, RlhfError
from rlhf_core.runfolder import RunFolder
from rlhf_core.training import RunRequest
from rlhf_ray import actors
from rlhf_ray.calls import ActorLostError, TrainerLostError
from rlhf_ray.trainer_restarts import RESTART, TrainerRestarts

RunFile = Callable[..., dict[str, Any]]
LOST = TrainerLostError("its process exited", where="trainer-0", hint="continue with --resume auto")


def restarts_of(folder: Path) -> list[dict[str, Any]]:
    return RunFolder(folder).events(RESTART)


class Spans:
    """An object hook: what it sees of the trainer's spans in this process."""

    def __init__(self) -> None:
        self.seen: list[str] = []

    def rlhf_fit_start(self) -> None:
        self.seen.append("fit")

    def rlhf_episode_start(self, episode: int) -> None:
        self.seen.append(f"episode {episode}")

    def rlhf_episode_end(self, episode: int, error: BaseException | None) -> None:
        self.seen.append(f"end of {episode}" + (f": {type(error).__name__}" if error else ""))

    def rlhf_fit_end(self, error: BaseException | None) -> None:
        self.seen.append("end" + (f": {type(error).__name__}" if error else ""))


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_a_run_that_loses_its_trainer_once_ends_like_the_local_run(
    tmp_path: Path, run_file: RunFile, faults: Callable[[str], Path], check_samples: Callable[[Path], None]
) -> None:
    """It dies in the second episode, after its samples are written and before its checkpoint is."""
    local = train(run_file(), output=tmp_path / "local")
    faults("trainer-syncs-2")
    spans = Spans()
    run = run_file(max_staleness=0, trainer_restarts=1)
    result = train(run, output=tmp_path / "ray", hooks=[spans])
    assert result is not None and local is not None
    check_samples(tmp_path / "ray")
    assert (result.summary["status"], result.summary["trainer_restarts"]) == ("done", 1)
    assert result.summary["eval_before"] == pytest.approx(local.summary["eval_before"])
    assert len(result.metrics) == len(local.metrics)
    for ours, theirs in zip(result.metrics, local.metrics, strict=True):
        for name in ("step", "episode", "loss/policy", "loss/value", "reward/mean", "kl/mean"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
    assert [line.get("transport/trainer_restarts") for line in result.metrics] == [None, None, 1, 1, 1, 1]
    (event,) = restarts_of(tmp_path / "ray")
    assert (event["actor"], event["checkpoint"]) == ("trainer-0", "step-2")
    assert "Restart 1 of 1, from step-2" in (tmp_path / "ray" / "run.log").read_text()
    lost = ["episode 1", "end of 1: TrainerLostError", "end: TrainerLostError"]
    again = ["fit", "episode 1", "end of 1", "episode 2", "end of 2", "end"]
    assert spans.seen == ["fit", "episode 0", "end of 0", *lost, *again]


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_without_restarts_it_fails_as_ever(tmp_path: Path, run_file: RunFile, faults: Callable[[str], Path]) -> None:
    faults("trainer-syncs-2")
    with pytest.raises(RlhfError, match=r"trainer-0: its process exited"):
        train(run_file(max_staleness=0), output=tmp_path / "ray")
    summary = json.loads((tmp_path / "ray" / "summary.json").read_text())
    assert summary["status"] == "failed" and "trainer_restarts" not in summary
    assert not restarts_of(tmp_path / "ray")


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_before_the_first_checkpoint_it_begins_again_and_after_the_last_restart_it_fails(
    tmp_path: Path, run_file: RunFile, faults: Callable[[str], Path], check_samples: Callable[[Path], None]
) -> None:
    faults("trainer-syncs-1")
    faults("trainer-syncs-3")
    run = run_file(max_staleness=1, trainer_restarts=1)
    with pytest.raises(RlhfError, match=r"trainer-0: its process exited"):
        train(run, output=tmp_path / "ray")
    assert [event["checkpoint"] for event in restarts_of(tmp_path / "ray")] == [None]
    assert "no restart: the 1 of transport.trainer_restarts are used" in (tmp_path / "ray" / "run.log").read_text()
    summary = json.loads((tmp_path / "ray" / "summary.json").read_text())
    assert (summary["status"], summary["trainer_restarts"]) == ("failed", 1)
    again = train(run, output=tmp_path / "ray", resume="auto")
    assert again is not None
    assert (again.summary["status"], again.summary["trainer_restarts"]) == ("done", 1)
    check_samples(tmp_path / "ray")


class KillTrainer:
    """An object hook that kills a trainer, once, after the first episode."""

    def __init__(self, name: str, number: int) -> None:
        self._name, self._number = name, number
        self._folder = Path()
        self.is_done = False

    def rlhf_run_start(self, run_folder: Path) -> None:
        self._folder = run_folder

    def rlhf_episode_end(self) -> None:
        status = self._folder / "ray.json"
        if self.is_done or not status.exists():
            return
        rows = json.loads(status.read_text())["trainers"]
        self.is_done = True
        os.kill(next(row["pid"] for row in rows if row["name"] == self._name), self._number)


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize(("name", "number"), [("trainer-1", signal.SIGKILL), ("trainer-0", signal.SIGSTOP)])
def test_one_of_two_ranks_that_is_lost_or_silent_restarts_both(
    name: str,
    number: int,
    ways: dict[str, Any],
    tmp_path: Path,
    run_file: RunFile,
    check_samples: Callable[[Path], None],
) -> None:
    kill = KillTrainer(name, number)
    options = {"num_makers": 2, "num_trainers": 2, "heartbeat_seconds": 8, "trainer_restarts": 2, **ways}
    run = run_file({"episodes": 12}, **options)
    run["strategy"] = "ddp"
    result = train(run, output=tmp_path / "ray", hooks=[kill])
    assert result is not None and kill.is_done
    check_samples(tmp_path / "ray")
    assert (result.summary["status"], result.summary["trainer_restarts"]) == ("done", 1)
    assert restarts_of(tmp_path / "ray")[0]["actor"] == name


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
def test_a_lost_coordinator_restarts_the_run_too(
    tmp_path: Path, run_file: RunFile, check_samples: Callable[[Path], None]
) -> None:
    import ray

    class KillCoordinator:
        is_done = False

        def rlhf_episode_end(self) -> None:
            if not self.is_done:
                self.is_done = True
                found = [each for each in ray.util.list_named_actors(True) if each["name"] == "coordinator"]
                ray.kill(ray.get_actor(**found[0]))

    result = train(run_file(max_staleness=1, trainer_restarts=1), output=tmp_path / "ray", hooks=[KillCoordinator()])
    assert result is not None
    check_samples(tmp_path / "ray")
    assert (result.summary["status"], result.summary["trainer_restarts"]) == ("done", 1)
    assert restarts_of(tmp_path / "ray")[0]["actor"] == "coordinator"


@pytest.mark.slow
@pytest.mark.usefixtures("local_ray")
@pytest.mark.parametrize("who", ["trainer", "maker"])
def test_an_error_that_is_raised_is_not_tried_again(
    who: str, tmp_path: Path, run_file: RunFile, faults: Callable[[str], Path]
) -> None:
    run = run_file(max_staleness=0, trainer_restarts=3)
    if who == "trainer":
        faults("trainer-raises")
    else:
        (tmp_path / "broken.py").write_text("def broken(rollouts):\n    raise KeyError('asked for by the test')\n")
        run["rewards"] = [f"{tmp_path / 'broken.py'}:broken"]
    with pytest.raises(RlhfError, match="asked for by the test"):
        train(run, output=tmp_path / "ray")
    assert not restarts_of(tmp_path / "ray")
    assert json.loads((tmp_path / "ray" / "summary.json").read_text())["trainer_restarts"] == 0


@pytest.mark.usefixtures("local_ray")
def test_a_run_that_waits_for_room_says_so_and_stops_when_asked(
    tmp_path: Path,
    run_file: RunFile,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    warn = actors.logger.warning

    def warning(text: str, *values: object) -> None:
        warn(text, *values)
        if text.startswith("waiting for"):
            signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(actors, "_TELL_SECONDS", 0.0)
    monkeypatch.setattr(actors.logger, "warning", warning)
    with pytest.raises(InterruptedRun, match="stopped while its actors started"):
        train(run_file(maker_cpus=900), output=tmp_path / "ray")
    assert json.loads((tmp_path / "ray" / "summary.json").read_text())["status"] == "interrupted"
    assert re.search(
        r"waiting for maker-0.* to start: they reserve 900 CPU", (tmp_path / "ray" / "run.log").read_text()
    )


# From which checkpoint, without Ray.


@pytest.fixture
def folder(tmp_path: Path) -> RunFolder:
    made = RunFolder(tmp_path / "run")
    made.path.mkdir()
    made.write_manifest({})
    made.write_summary({"status": "running"})
    return made


def checkpoint(folder: RunFolder, step: int, *, is_whole: bool = True) -> Path:
    path = folder.checkpoints / f"step-{step}"
    path.mkdir(parents=True)
    (path / "state.json").write_text("{}")
    digest = "44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a"  # of {}
    (path / "files.json").write_text(json.dumps({"state.json": [2 if is_whole else 3, digest]}))
    (folder.checkpoints / "last").write_text(f"step-{step}\n")
    return path


def restarts(
    folder: RunFolder, resume: Path | None = None, *, at_most: int = 9, stops: bool = False
) -> TrainerRestarts:
    unused: Any = None
    request = RunRequest(
        resolved=unused, folder=folder, hooks=unused, inputs=unused, resume=resume, interrupted=lambda: stops
    )
    return TrainerRestarts(request, at_most)


def test_it_continues_from_the_newest_whole_checkpoint_since_the_start(folder: RunFolder) -> None:
    counted = restarts(folder)
    assert counted.next_request(LOST).resume is None
    first = checkpoint(folder, 2)
    assert counted.next_request(LOST).resume == first
    checkpoint(folder, 4, is_whole=False)
    assert counted.next_request(LOST).resume == first
    newest = checkpoint(folder, 6)
    assert counted.next_request(LOST).resume == newest
    assert counted.total == 4 and folder.read_json(folder.summary)["trainer_restarts"] == 4
    assert [event["checkpoint"] for event in folder.events(RESTART)] == [None, "step-2", "step-2", "step-6"]


def test_a_resume_from_an_earlier_checkpoint_that_was_not_loaded_yet_is_repeated(folder: RunFolder) -> None:
    earlier, later = checkpoint(folder, 2), checkpoint(folder, 4)
    counted = restarts(folder, resume=earlier)
    assert counted.next_request(LOST).resume == earlier
    for path in (later / "state.json", later / "files.json"):
        path.unlink()
    later.rmdir()  # as its load does
    assert counted.next_request(LOST).resume == earlier
    assert counted.next_request(LOST).resume == earlier
    again = checkpoint(folder, 4)
    assert counted.next_request(LOST).resume == again


def test_a_run_whose_checkpoints_are_lost_does_not_begin_again(folder: RunFolder) -> None:
    counted = restarts(folder)
    checkpoint(folder, 2, is_whole=False)
    with pytest.raises(TrainerLostError, match=r"its process exited\. No restart: step-2, which the run had"):
        counted.next_request(LOST)
    assert not folder.events(RESTART)


def test_only_a_lost_process_is_a_reason_to_restart(folder: RunFolder) -> None:
    counted = restarts(folder, at_most=1)
    assert counted.allows(LOST)
    assert counted.allows(ActorLostError("its process exited", where="coordinator"))
    assert not counted.allows(ActorLostError("already restarted 3 times", where="maker-0"))
    assert not counted.allows(DeadlineError("a rank is stuck"))
    assert not counted.allows(InterruptedRun("Ctrl-C"))
    counted.next_request(LOST)
    assert not counted.allows(LOST)
    assert not restarts(folder, at_most=0).allows(LOST)
    assert not restarts(folder, stops=True).allows(LOST)


def test_the_summary_says_how_many_of_the_whole_run(folder: RunFolder) -> None:
    restarts(folder, at_most=0)
    assert "trainer_restarts" not in folder.read_json(folder.summary)
    counted = restarts(folder, at_most=2)
    assert folder.read_json(folder.summary)["trainer_restarts"] == 0
    counted.next_request(LOST)
    folder.write_summary({"status": "running"})  # a resume by a person
    assert restarts(folder, at_most=0).total == 1
    assert folder.read_json(folder.summary) == {"status": "running", "trainer_restarts": 1}
