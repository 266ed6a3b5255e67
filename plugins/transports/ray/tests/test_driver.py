"""How the process that was started ends, and what it leaves behind: nothing that runs."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml

RunFile = Callable[..., dict[str, Any]]
DEADLINE_SECONDS = 120.0
RLHF = [sys.executable, "-c", "from rlhf_cli.main import main; main()"]


class Driver:
    """`rlhf train` as a process of its own, with a Ray of its own."""

    def __init__(self, run: dict[str, Any], folder: Path, *arguments: str) -> None:
        self.output = folder / "ray"
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        command = [*RLHF, "train", str(file), "--output", str(self.output), *arguments]
        self.process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self.seen: dict[int, psutil.Process] = {}

    def wait_for_episodes(self, count: int) -> None:
        """Until the metrics of so many episodes are written."""
        metrics = self.output / "metrics.jsonl"

        def done() -> bool:
            self.look()
            assert self.process.poll() is None, self.process.communicate()[0]
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            return any(json.loads(line)["episode"] >= count - 1 for line in lines)

        wait_until(done, f"{count} episodes")

    def look(self) -> None:
        """Remember every process below the driver."""
        for child in psutil.Process(self.process.pid).children(recursive=True):
            self.seen.setdefault(child.pid, child)

    def end(self) -> tuple[int, str]:
        output, _ = self.process.communicate(timeout=DEADLINE_SECONDS)
        return self.process.returncode, output

    def left(self) -> list[str]:
        """What still runs of it."""
        return [" ".join(p.cmdline()) for p in self.seen.values() if p.is_running() and p.status() != "zombie"]

    def stop(self) -> None:
        self.process.kill()
        for process in self.seen.values():
            if process.is_running():
                process.kill()


def wait_until(done: Callable[[], bool], what: str) -> None:
    deadline = time.monotonic() + DEADLINE_SECONDS
    while not done():
        assert time.monotonic() < deadline, f"waited {DEADLINE_SECONDS:g} s for {what}"
        time.sleep(0.2)


@pytest.fixture
def start(site: Path, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def make(run: dict[str, Any], *arguments: str) -> Driver:
        drivers.append(Driver(run, tmp_path, *arguments))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.stop()


def _status(driver: Driver) -> subprocess.CompletedProcess[str]:
    command = [*RLHF, "ray", "status", str(driver.output)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)


def test_a_stopped_run_writes_a_checkpoint_leaves_no_process_and_can_be_resumed(
    start: Callable[..., Driver], run_file: RunFile, check_samples: Callable[[Path], None]
) -> None:
    """`rlhf ray stop` sends what Ctrl-C sends."""
    run = run_file({"episodes": 400}, num_makers=1, max_staleness=2)
    run["checkpoint"]["every_episodes"] = None
    driver = start(run)
    driver.wait_for_episodes(1)
    names = [" ".join(process.cmdline()) for process in driver.seen.values() if process.is_running()]
    assert any(name.startswith("ray::ExperienceMakerHolder") for name in names)

    status = _status(driver)
    deadline = time.monotonic() + 60
    while "maker-0" not in status.stdout and time.monotonic() < deadline:
        status = _status(driver)  # the file is written once a second
    assert "maker-0" in status.stdout
    assert "trainer-0" in status.stdout
    assert f"driver pid {driver.process.pid}" in status.stdout

    # To the whole process group, as a terminal does: the actors must not take it for theirs.
    os.killpg(driver.process.pid, signal.SIGINT)
    code, output = driver.end()
    assert code == 130, output
    summary = json.loads((driver.output / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    wait_until(lambda: not driver.left(), f"the end of {driver.left()}")
    assert not (driver.output / "ray.json").exists()

    episodes = 1 + json.loads((driver.output / "metrics.jsonl").read_text().splitlines()[-1])["episode"]
    resumed = start(run, "--resume", "auto", "--set", f"train.episodes={episodes + 2}")
    code, output = resumed.end()
    assert code == 0, output
    check_samples(driver.output)


@pytest.mark.parametrize("turn", [1, *(pytest.param(turn, marks=pytest.mark.slow) for turn in (2, 3, 4, 5))])
def test_a_driver_that_is_killed_in_a_sync_takes_everything_with_it_and_a_resume_goes_on(
    turn: int,
    start: Callable[..., Driver],
    run_file: RunFile,
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    run = run_file({"episodes": 4}, max_staleness=turn % 3, sync="chunked", max_shard_bytes=200_000)
    driver = start(run)
    faults("driver-dies-in-sync-3").write_text(str(driver.process.pid))

    def is_killed() -> bool:
        driver.look()
        return driver.process.poll() is not None

    wait_until(is_killed, "the driver's end")
    driver.end()
    assert len(driver.seen) > 3
    wait_until(lambda: not driver.left(), f"the end of {driver.left()}")
    status = _status(driver)
    assert f"its driver (pid {driver.process.pid}) was killed" in status.stdout
    assert not (driver.output / "ray.json").exists()
    resumed = start(run, "--resume", "auto")
    code, output = resumed.end()
    assert code == 0, output
    check_samples(driver.output)
