"""A run that `ray job submit` started, and its figures on Ray's metrics endpoint. Needs what `ray[default]` brings."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml
from running import PATIENCE_SECONDS, wait_until

pytestmark = pytest.mark.slow
RunFile = Callable[..., dict[str, Any]]


class Head:
    """A Ray with its dashboard's job server, on this machine only."""

    def __init__(self, folder: Path) -> None:
        ports = free_ports(3)
        self.dashboard, self.metrics = (f"http://127.0.0.1:{port}" for port in ports[1:])
        options = {
            "node-ip-address": "127.0.0.1",
            "port": ports[0],
            "dashboard-port": ports[1],
            "metrics-export-port": ports[2],
            "num-cpus": 2,
            "temp-dir": folder / "r",
        }
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", "--disable-usage-stats"]
        flags = [f"--{name}={value}" for name, value in options.items()]
        with (folder / "head.log").open("w") as log:
            self.process = subprocess.Popen([*command, *flags], stdout=log, stderr=log, start_new_session=True)

    def get(self, url: str) -> str:
        with suppress(OSError), urllib.request.urlopen(url, timeout=PATIENCE_SECONDS) as answer:
            return str(answer.read().decode())
        return ""


def free_ports(count: int) -> list[int]:
    """Below those that Ray gives to its workers."""
    import socket

    found: list[int] = []
    for port in range(7000 + os.getpid() % 2000, 9998):
        with suppress(OSError), socket.socket() as probe:
            probe.bind(("127.0.0.1", port))
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError("no free ports")


@pytest.fixture
def head(site: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Iterator[Head]:
    for module in ("aiohttp", "opencensus", "opentelemetry.exporter.prometheus", "prometheus_client"):
        pytest.importorskip(module, reason='pip install "ray[default]"')
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    made = Head(tmp_path_factory.mktemp("h"))
    try:
        wait_until(lambda: made.get(f"{made.dashboard}/api/version"), "the job server", every_seconds=0.5)
        yield made
    finally:
        made.process.terminate()
        made.process.wait(PATIENCE_SECONDS)


def test_a_submitted_run_trains_on_the_jobs_cluster_and_its_figures_are_on_rays_endpoint(
    head: Head, tmp_path: Path, run_file: RunFile, check_samples: Callable[[Path], None], faults: Callable[[str], Path]
) -> None:
    from ray.job_submission import JobSubmissionClient

    held = faults("trainer-waits")  # until its figures were seen
    (tmp_path / "job").mkdir()
    (tmp_path / "job" / "run.yaml").write_text(yaml.safe_dump(run_file(max_staleness=1)))
    jobs = JobSubmissionClient(head.dashboard)
    out = tmp_path / "out"
    command = f"{sys.executable} -m rlhf_cli train run.yaml --trust --output {out}"
    job = jobs.submit_job(entrypoint=command, runtime_env={"working_dir": str(tmp_path / "job")})

    def figures() -> dict[str, float]:
        lines = re.findall(r"^ray_(rlhf_\w+)\{([^}]*)\} (\S+)$", head.get(f"{head.metrics}/metrics"), re.MULTILINE)
        return {f"{name} {''.join(re.findall(r'actor=.(.*?).,|$', tags))}".strip(): float(v) for name, tags, v in lines}

    try:
        wait_until(lambda: figures().get("rlhf_maker_groups maker-0", 0) >= 8, "figures", every_seconds=0.5)
        seen = figures()
        assert (seen["rlhf_makers"], seen["rlhf_makers_wanted"]) == (1, 1)
        assert 0 < seen["rlhf_actor_busy maker-0"] <= 1
    finally:
        held.unlink()
    wait_until(lambda: jobs.get_job_status(job).is_terminal(), "the job's end", every_seconds=0.5)
    assert jobs.get_job_status(job).value == "SUCCEEDED", jobs.get_job_logs(job)
    check_samples(out)
    assert json.loads((out / "summary.json").read_text())["status"] == "done"
