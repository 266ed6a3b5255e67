"""How the process that was started ends, and what it leaves behind: nothing that runs."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import yaml
from click.testing import CliRunner
from running import rlhf, wait_until

from rlhf_core import train
from rlhf_ray.commands import ray

pytestmark = pytest.mark.usefixtures("local_ray")
RunFile = Callable[..., dict[str, Any]]


class Driver:
    """`rlhf train` as a process of its own, with a Ray of its own."""

    def __init__(self, run: dict[str, Any], folder: Path, quick_ray: bool) -> None:
        self.output = folder / "ray"
        file = folder / "run.yaml"
        file.write_text(yaml.safe_dump(run))
        self.process = rlhf("train", file, "--trust", "--output", self.output, quick_ray=quick_ray)
        self.seen: dict[int, psutil.Process] = {}

    def wait_for_episodes(self, count: int) -> None:
        """Until the metrics of so many episodes are written."""
        metrics = self.output / "metrics.jsonl"

        def done() -> bool:
            self.look()
            self.process.assert_runs()
            lines = metrics.read_text().splitlines() if metrics.exists() else []
            return any(json.loads(line)["episode"] >= count - 1 for line in lines)

        wait_until(done, f"{count} episodes", every_seconds=0.2)

    def look(self) -> None:
        """Remember every process below the driver."""
        with suppress(psutil.NoSuchProcess):
            for child in psutil.Process(self.process.pid).children(recursive=True):
                self.seen.setdefault(child.pid, child)

    def left(self) -> list[str]:
        """What still runs of it."""
        return [" ".join(p.cmdline()) for p in self.seen.values() if p.is_running() and p.status() != "zombie"]

    def wait_until_nothing_is_left(self) -> None:
        wait_until(lambda: not self.left(), "the end of all that the driver started", every_seconds=0.2)

    def status(self) -> str:
        return CliRunner().invoke(ray, ["status", str(self.output)]).stdout


@pytest.fixture
def start(site: Path, tmp_path: Path) -> Iterator[Callable[..., Driver]]:
    drivers: list[Driver] = []

    def make(run: dict[str, Any], quick_ray: bool = True) -> Driver:
        drivers.append(Driver(run, tmp_path, quick_ray))
        return drivers[-1]

    yield make
    for driver in drivers:
        driver.process.end()


@pytest.mark.slow
def test_a_stopped_run_writes_a_checkpoint_leaves_no_process_and_can_be_resumed(
    start: Callable[..., Driver], run_file: RunFile, check_samples: Callable[[Path], None]
) -> None:
    """By Ctrl-C, which `rlhf ray stop` has the driver send itself."""
    run = run_file({"episodes": 400}, num_makers=1, max_staleness=2)
    run["checkpoint"]["every_episodes"] = None
    driver = start(run)
    driver.wait_for_episodes(1)
    names = [" ".join(process.cmdline()) for process in driver.seen.values() if process.is_running()]
    assert sum("ray_worker_stub" in name for name in names) >= 3  # a coordinator, a trainer and a maker

    # The file is written once a second.
    wait_until(lambda: "maker-0" in driver.status(), "a status with the maker", every_seconds=0.5)
    status = driver.status()
    assert "trainer-0" in status
    assert f"driver pid {driver.process.pid}" in status

    # To the whole process group, as a terminal does: the actors must not take it for theirs.
    os.killpg(driver.process.pid, signal.SIGINT)
    output = driver.process.finish()
    assert driver.process.returncode == 130, output
    summary = json.loads((driver.output / "summary.json").read_text())
    assert summary["status"] == "interrupted"
    driver.wait_until_nothing_is_left()
    assert not (driver.output / "ray.json").exists()

    episodes = 1 + json.loads((driver.output / "metrics.jsonl").read_text().splitlines()[-1])["episode"]
    run["train"]["episodes"] = episodes + 2
    assert train(run, output=driver.output, resume="auto") is not None
    check_samples(driver.output)


@pytest.mark.slow
def test_a_ray_whose_controller_is_killed_ends_the_run_by_name_and_a_resume_goes_on(
    start: Callable[..., Driver], run_file: RunFile, check_samples: Callable[[Path], None]
) -> None:
    """Ray's library would end the driver itself after a minute, with a summary that says `running` for ever."""
    run = run_file({"episodes": 400}, num_makers=1, max_staleness=2)
    run["checkpoint"]["every_episodes"] = 1
    driver = start(run)
    driver.wait_for_episodes(2)
    next(process for process in driver.seen.values() if "gcs_server" in process.name()).kill()
    output = driver.process.finish()
    assert driver.process.returncode == 1, output
    assert "error: ray: the process gcs_server of the local Ray exited" in output[1]
    assert json.loads((driver.output / "summary.json").read_text())["status"] == "failed"
    driver.wait_until_nothing_is_left()

    episodes = 1 + json.loads((driver.output / "metrics.jsonl").read_text().splitlines()[-1])["episode"]
    run["train"]["episodes"] = episodes + 1
    assert train(run, output=driver.output, resume="auto", restart=True) is not None
    check_samples(driver.output)


@pytest.mark.parametrize("turn", [1, 2, 3, 4, 5])
@pytest.mark.slow
def test_a_driver_that_is_killed_in_a_sync_takes_everything_with_it_and_a_resume_goes_on(
    turn: int,
    tmp_path: Path,
    start: Callable[..., Driver],
    run_file: RunFile,
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    run = run_file({"episodes": 4}, max_staleness=turn % 3, sync="chunked", max_shard_bytes=200_000)
    driver = start(run, quick_ray=turn == 3)  # in the soak, with workers as Ray itself starts them
    faults("driver-dies-in-sync-3").write_text(str(driver.process.pid))

    def is_killed() -> bool:
        driver.look()
        return driver.process.returncode is not None

    wait_until(is_killed, "the driver's end", every_seconds=0.2)
    assert len(driver.seen) > 3
    driver.wait_until_nothing_is_left()
    status = driver.status()
    assert f"Its driver (pid {driver.process.pid}) was killed" in status
    assert not (driver.output / "ray.json").exists()
    assert train(run, output=driver.output, resume="auto", restart=True) is not None
    check_samples(driver.output)
    if turn % 3 == 0:  # strictly on-policy: what was learnt is what a local run learns that nobody kills
        whole = train(run_file({"episodes": 4}), output=tmp_path / "whole")
        assert whole is not None
        lines = [json.loads(line) for line in (driver.output / "metrics.jsonl").read_text().splitlines()]
        assert len(lines) == len(whole.metrics)
        for line, other in zip(lines, whole.metrics, strict=True):
            for name in ("loss/policy", "loss/value", "reward/mean", "kl/mean", "policy/grad_norm"):
                assert line[name] == pytest.approx(other[name], abs=1e-6, rel=1e-6), name
