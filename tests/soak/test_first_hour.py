"""docs/first-hour.md is followed from top to bottom, with only what its lines install.

The page's files are saved and its lines typed, unchanged, in an empty environment. Its second run must learn.
"""

from __future__ import annotations

import json
import os
import pty
import select
import shutil
import signal
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import pytest
from page_steps import Commands, File, page_steps
from released import INSTALL_SECONDS, ROOT, Environment, build_distributions, write_constraints
from running import PATIENCE_SECONDS, wait_until

PAGE = ROOT / "docs" / "first-hour.md"
LINE_SECONDS = 3 * PATIENCE_SECONDS
MINIMUM_GAIN = 0.1
SERVERS = {"rlhf dashboard": "open http"}
"""Line of the page that serves until Ctrl-C -> what it prints when it is ready."""

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3 * INSTALL_SECONDS)]


@pytest.fixture
def environment(tmp_path: Path) -> Iterator[Environment]:
    """An empty environment whose pip finds the wheels of this repository and the tested versions of all others."""
    distributions = build_distributions(tmp_path / "dist")
    (tmp_path / "desk").mkdir()
    made = Environment(tmp_path / "env", tmp_path / "desk")
    made.environment["PIP_FIND_LINKS"] = f"{os.environ.get('PIP_FIND_LINKS', '')} {distributions}".strip()
    made.environment["PIP_CONSTRAINT"] = str(write_constraints(tmp_path / "constraints.txt"))
    yield made
    for folder in ("env", "dist"):
        shutil.rmtree(tmp_path / folder)  # gigabytes


def test_every_line_works_and_the_second_run_learns(environment: Environment) -> None:
    follow(page_steps(PAGE.read_text(encoding="utf-8")), environment)
    first = json.loads((environment.desk / "runs/first/summary.json").read_text(encoding="utf-8"))
    assert first["eval_after"] >= 0.9
    assert (environment.desk / "runs/first/report.html").exists() and (environment.desk / "comparison.html").exists()
    lines = (environment.desk / "runs/second/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    metrics = [json.loads(line) for line in lines]
    for name in ("reward/mean", "eval/in_place"):
        values = [line[name] for line in metrics if name in line]
        if name == "eval/in_place":
            before = (environment.desk / "runs/second/evaluation-before.json").read_text(encoding="utf-8")
            values.insert(0, json.loads(before)[name])
        assert values[-1] >= values[0] + MINIMUM_GAIN, f"{name} of the page's own run: {values[0]} to {values[-1]}"


def follow(steps: list[File | Commands], environment: Environment) -> None:
    """Save the files and type the lines, the last one before another terminal in the background."""
    for step, following in pairwise([*steps, None]):
        if isinstance(step, File):
            (environment.desk / step.name).write_text(step.text, encoding="utf-8")
        elif isinstance(following, Commands) and following.in_another_terminal:
            type_lines(step.lines[:-1], environment)
            type_while_running(step.lines[-1], following.lines, environment)
        elif isinstance(step, Commands) and not step.in_another_terminal:
            type_lines(step.lines, environment)


def type_lines(lines: tuple[str, ...], environment: Environment) -> None:
    for line in lines:
        if line in SERVERS:
            serve(line, environment)
        else:
            environment.run("bash", "-c", line, seconds=INSTALL_SECONDS if line.startswith("pip ") else LINE_SECONDS)


def type_while_running(line: str, others: tuple[str, ...], environment: Environment) -> None:
    """Run a training, and the other lines as soon as it has made an update."""
    said = environment.desk.parent / "first.txt"
    metrics = environment.desk / line.rpartition("--output ")[2] / "metrics.jsonl"
    with said.open("w+", encoding="utf-8") as output:
        run = environment.start("bash", "-c", line, output=output)
        try:
            wait_until(lambda: run.poll() is not None or (metrics.exists() and metrics.stat().st_size), f"`{line}`")
            assert run.poll() is None, f"{line}: exit {run.returncode}\n{said.read_text()}"
            type_lines(others, environment)
            assert run.wait(LINE_SECONDS) == 0, f"{line}: exit {run.returncode}\n{said.read_text()}"
        finally:
            run.kill()
    assert said.read_text(encoding="utf-8").startswith("the quickstart takes about ")


def serve(line: str, environment: Environment) -> None:
    """Start a server in a terminal, which it prints its key to, and end it with Ctrl-C when it is ready."""
    controller, terminal = pty.openpty()
    said = ""

    def is_ready() -> bool:
        nonlocal said
        while select.select([controller], [], [], 0)[0]:
            said += os.read(controller, 4096).decode()
        return SERVERS[line] in said or server.poll() is not None

    with open(controller, "rb"), open(terminal, "w") as output:
        server = environment.start("bash", "-c", f"exec {line}", output=output)
        try:
            wait_until(is_ready, f"`{line}` to be ready")
            server.send_signal(signal.SIGINT)
            server.wait(PATIENCE_SECONDS)
            is_ready()
        finally:
            server.kill()
    assert "stopped" in said, f"{line}: exit {server.returncode}\n{said}"
