"""What hangs, what is full, and who is asked in vain: every wait ends, and says what it waited for."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from running import wait_until

from rlhf_core import train
from rlhf_core.errors import RewardError, RlhfError

pytestmark = pytest.mark.usefixtures("local_ray")

RunFile = Callable[..., dict[str, Any]]


def actors(kind: str) -> list[psutil.Process]:
    """Processes of this Ray that are actors of a class."""
    found = []
    for process in psutil.Process().children(recursive=True):
        try:
            if process.status() != "zombie" and process.cmdline()[0].startswith(f"ray::{kind}"):
                found.append(process)
        except (psutil.NoSuchProcess, IndexError):
            continue
    return found


@pytest.mark.slow  # one that raises ends it the same way, in test_runs.py
def test_a_reward_that_hangs_ends_the_run(tmp_path: Path, run_file: RunFile) -> None:
    reward = tmp_path / "slow.py"
    reward.write_text("import time\n\ndef hangs(rollouts):\n    time.sleep(3600)\n")
    run = run_file(max_staleness=0)
    run["rewards"] = [{"name": f"{reward}:hangs", "timeout_seconds": 1}]
    with pytest.raises(RewardError, match=r"(?s)maker-0.*hangs.*1 s"):
        train(run, output=tmp_path / "ray")


@pytest.mark.slow
def test_a_trainer_that_is_stopped_ends_the_run(
    tmp_path: Path, run_file: RunFile, faults: Callable[[str], Path]
) -> None:
    """Stopped by a signal, it is there and does nothing; afterwards it is gone."""
    faults("trainer-stops")
    with pytest.raises(RlhfError, match=r"trainer-0: sent no heartbeat for"):
        train(run_file(max_staleness=0, heartbeat_seconds=5), output=tmp_path / "ray")
    wait_until(lambda: not actors("Trainer"), "the end of the trainer")


class KillCoordinator:
    def __init__(self, episode: int) -> None:
        self.episode = episode

    def rlhf_episode_end(self, episode: int) -> None:
        if episode == self.episode:
            (coordinator,) = actors("Coordinator")
            coordinator.kill()


@pytest.mark.parametrize("turn", range(5))
@pytest.mark.slow
def test_a_coordinator_that_is_killed_ends_the_run_and_a_resume_goes_on(
    turn: int, tmp_path: Path, run_file: RunFile, check_samples: Callable[[Path], None]
) -> None:
    run = run_file({"episodes": 4}, num_makers=1 + turn % 2, max_staleness=turn % 3)
    with pytest.raises(RlhfError, match="coordinator: its process exited"):
        train(run, output=tmp_path / "ray", hooks=[KillCoordinator(1)])
    wait_until(lambda: not actors("Trainer") and not actors("ExperienceMakerHolder"), "the end of the actors")
    assert train(run, output=tmp_path / "ray", resume="auto") is not None
    check_samples(tmp_path / "ray")


@pytest.mark.slow
def test_makers_wait_for_a_slow_trainer_and_nothing_is_dropped(
    tmp_path: Path, run_file: RunFile, faults: Callable[[str], Path], check_samples: Callable[[Path], None]
) -> None:
    """Back-pressure: what may be made ahead is made, and no more, until the trainer goes on."""
    waits = faults("trainer-waits")
    status = tmp_path / "ray" / "ray.json"
    made: list[int] = []

    class Count:
        def rlhf_make_experience_end(self, groups: Any) -> None:
            made.append(len(groups))

    def both_makers_wait() -> bool:
        makers = json.loads(status.read_text())["makers"] if status.exists() else []
        return (
            len(makers) == 2
            and sum(made) > 8
            and all(m["doing"].startswith("waits") and m["for_s"] > 1 for m in makers)
        )

    made_ahead: list[int] = []

    def let_the_trainer_go_on() -> None:
        try:
            wait_until(both_makers_wait, "makers that wait")
            made_ahead.append(sum(made))
        finally:
            waits.unlink()

    helper = threading.Thread(target=let_the_trainer_go_on)
    helper.start()
    result = train(run_file({"episodes": 4}, num_makers=2, max_staleness=1), output=tmp_path / "ray", hooks=[Count()])
    helper.join()
    assert result is not None
    assert made_ahead == [2 * 8]
    assert sum(made) == 4 * 8
    check_samples(tmp_path / "ray")
