"""A slice in action: one deadline, a retry decides, what was not run is named, and no process is left."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
import pytest
import slices

SLOW_TESTS = "import os, subprocess, time\nimport pytest\npytestmark = pytest.mark.slow\n"


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Function that makes a project of one file of slow tests; returns the file."""
    monkeypatch.setattr(slices, "ROOT", tmp_path)
    monkeypatch.setattr(slices, "DURATIONS", tmp_path / "durations.json")
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # seconds sooner
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n gpu\naddopts = -p no:cacheprovider\n")

    def write(body: str, file: str = "test_it.py") -> list[str]:
        (tmp_path / file).write_text(SLOW_TESTS + body)
        return [file]

    return write


@pytest.mark.parametrize(
    ("body", "last_start", "outcomes"),
    [
        ("def test_a(): pass\ndef test_b(): assert False", None, {"test_a": "passed", "test_b": "failed"}),
        ("def test_a(): pass", -1.0, {}),
        ("def test_a(): pytest.skip('no such library')", 60.0, {"test_a": "skipped"}),
        ("def test_a(): pass\ndef test_b(): os._exit(3)", None, {"test_a": "passed", "test_b": "started"}),
    ],
)
def test_a_record_of_every_test(
    project: Callable[..., list[str]], body: str, last_start: float | None, outcomes: dict[str, str]
) -> None:
    status, lines = slices.run_tests(project(body), last_start=last_start)
    assert {str(line["test"]).partition("::")[2]: line["outcome"] for line in lines} == outcomes
    assert (status != 0) == bool({"failed", "started"} & set(outcomes.values()))


def test_a_failed_test_reserves_the_time_to_run_it_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import slow_record

    class Item:
        nodeid = "a.py::test_b"

    monkeypatch.setattr(slow_record, "_SECONDS", 900.0)
    monkeypatch.setattr(slow_record, "_STARTED", time.monotonic() - 500.0)
    monkeypatch.setattr(slow_record, "_outcomes", {"a.py::test_a": "failed", "a.py::test_c": "passed"})
    monkeypatch.setattr(slow_record, "_late", set())
    monkeypatch.setattr(slow_record, "_write", lambda test, outcome: None)
    seconds = {"a.py::test_a": 300.0, "a.py::test_c": 200.0}
    monkeypatch.setattr(slow_record, "_seconds", seconds)
    slow_record.pytest_runtest_setup(Item())  # 500 s of 600
    seconds["a.py::test_a"] = 420.0
    with pytest.raises(pytest.skip.Exception, match="420 s of them for retries"):
        slow_record.pytest_runtest_setup(Item())  # 500 s of 480


@pytest.mark.slow
def test_at_the_deadline_pytest_is_killed_with_all_that_it_started(
    project: Callable[..., list[str]], tmp_path: Path
) -> None:
    body = """
def test_a(): pass
def test_b():
    for own in (False, True):
        process = subprocess.Popen(["sleep", "600"], start_new_session=own)
        with open("pids", "a") as file:
            file.write(f"{process.pid}\\n")
    time.sleep(600)
"""
    started = time.monotonic()
    status, lines = slices.run_tests(project(body), seconds=10.0)
    assert time.monotonic() - started < 120.0
    assert status == slices.OUT_OF_TIME
    assert [line["outcome"] for line in lines] == ["passed", "started"]
    left = [int(pid) for pid in (tmp_path / "pids").read_text().split()]
    assert len(left) == 2
    for pid in left:
        assert not psutil.pid_exists(pid) or psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def test_a_terminated_slice_ends_its_tests(tmp_path: Path) -> None:
    """`timeout` of `.ci/run` ends the slice by SIGTERM, which pytest in its own process group does not get."""
    (tmp_path / "slow.py").write_text(
        "import os, time\nopen('pid.part', 'w').write(str(os.getpid()))\nos.rename('pid.part', 'pid')\ntime.sleep(600)"
    )
    code = f"""
import pathlib, sys, slices
slices.ROOT = pathlib.Path({str(tmp_path)!r})
slices.run_next = lambda: slices.run([sys.executable, "slow.py"], seconds=600.0)
sys.argv = ["slices.py", "next"]
slices.main()
"""
    environment = {**os.environ, "PYTHONPATH": str(Path(slices.__file__).parent)}
    process = subprocess.Popen([sys.executable, "-c", code], env=environment)
    try:
        deadline = time.monotonic() + 120.0
        while not (tmp_path / "pid").exists():
            assert time.monotonic() < deadline and process.poll() is None
            time.sleep(0.05)
        process.terminate()
        assert process.wait(60) == 128 + 15
    finally:
        process.kill()
    assert not psutil.pid_exists(int((tmp_path / "pid").read_text()))


class Machine:
    """What `run_next` finds: commits, collected tests, and results of runs in place of real ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
        self.now = 1000.0
        self.commits = 0
        self.collected = ["a.py::test", "a.py::other"]
        self.results: list[tuple[int, dict[str, str]]] = []
        self.taken = 60.0
        self.ran = 30.0
        self.make_statuses: list[int] = []
        self.runs: list[list[str]] = []
        self.limits: list[tuple[float, float | None]] = []
        self.made: list[str] = []
        (tmp_path / "durations.json").write_text("{}")
        self.durations = tmp_path / "durations.json"
        monkeypatch.setattr(slices, "DURATIONS", self.durations)
        monkeypatch.setattr(slices, "TARGETS", ())
        monkeypatch.setattr(slices, "collect", lambda: self.collected)
        monkeypatch.setattr(slices, "number_of_commits", lambda: self.commits)
        monkeypatch.setattr(slices, "run_tests", self.run_tests)
        monkeypatch.setattr(slices, "make", self.make)
        monkeypatch.setattr(slices.time, "monotonic", lambda: self.now)

    def run_tests(
        self, tests: Sequence[str], *, seconds: float, last_start: float | None = None
    ) -> tuple[int, list[dict[str, object]]]:
        self.runs.append(list(tests))
        self.limits.append((seconds, last_start))
        self.now += self.taken
        status, outcomes = self.results.pop(0)
        at = self.now - self.ran
        return status, [{"test": test, "outcome": each, "seconds": 1.0, "at": at} for test, each in outcomes.items()]

    def make(self, target: str, seconds: float) -> int:
        self.made.append(target)
        self.now += self.taken
        return self.make_statuses.pop(0)


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    return Machine(monkeypatch, tmp_path)


FAILED = (1, {"a.py::test": "failed", "a.py::other": "passed"})


@pytest.mark.parametrize(("again", "status"), [("passed", 0), ("failed", 1)])
def test_a_failing_test_is_run_once_more_alone(machine: Machine, again: str, status: int) -> None:
    machine.results = [FAILED, (status, {"a.py::test": again})]
    assert slices.run_next() == status
    assert machine.runs == [["a.py"], ["a.py::test"]]
    limit = slices.LIMIT_SECONDS
    assert machine.limits == [(limit, limit - slices.LAST_START_SECONDS), (limit - 60.0, None)]


@pytest.mark.parametrize(("taken", "runs"), [(slices.LIMIT_SECONDS - 1.0, 2), (slices.LIMIT_SECONDS, 1)])
def test_a_failed_test_without_time_for_another_run_fails(machine: Machine, taken: float, runs: int) -> None:
    machine.taken = taken
    machine.results = [FAILED, (slices.OUT_OF_TIME, {"a.py::test": "started"})]
    assert slices.run_next() == 1
    assert len(machine.runs) == runs


@pytest.mark.parametrize("status", [2, 3, -9, slices.OUT_OF_TIME])
def test_a_crash_of_pytest_is_not_mended_by_a_retry(
    machine: Machine, capsys: pytest.CaptureFixture[str], status: int
) -> None:
    machine.results = [(status, {"a.py::test": "failed", "a.py::other": "started"})]
    assert slices.run_next() == status
    assert machine.runs == [["a.py"]]
    said = capsys.readouterr().out
    assert "a.py::other was running" in said and "a.py::test failed\n" in said


@pytest.mark.parametrize(
    ("ran", "other", "status"),
    [(340.0, "passed", 0), (340.0, "failed", slices.OUT_OF_TIME), (601.0, "passed", slices.OUT_OF_TIME)],
)
def test_a_test_that_is_cut_fails_if_it_ran_for_long(
    machine: Machine, capsys: pytest.CaptureFixture[str], ran: float, other: str, status: int
) -> None:
    machine.ran = ran
    machine.results = [(slices.OUT_OF_TIME, {"a.py::other": other, "a.py::test": "started"})]
    assert slices.run_next() == status
    assert f"a.py::test was running at the deadline, for {ran:.0f} s" in capsys.readouterr().out


def test_tests_that_were_not_run_are_named(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.collected += ["a.py::third", "b.py::test"]
    machine.results = [(0, {"a.py::test": "passed", "a.py::other": "skipped"})]
    assert slices.run_next() == 0
    said = capsys.readouterr().out
    assert "not run: out of time: a.py::third\nnot run: out of time: b.py::test\n" in said
    assert said.count("not run") == 2
    machine.results = [(0, dict.fromkeys(machine.collected, "passed"))]
    assert slices.run_next() == 0
    assert "not run" not in capsys.readouterr().out


def test_nothing_starts_if_targets_took_the_time(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slices, "TARGETS", ("soak-it",))
    machine.make_statuses, machine.taken = [0], slices.LIMIT_SECONDS - 10.0
    assert slices.run_next() == 0
    assert machine.runs == []
    assert "not run: out of time: a.py::test\nnot run: out of time: a.py::other\n" in capsys.readouterr().out


def test_each_commit_runs_the_next_slice(machine: Machine, capsys: pytest.CaptureFixture[str]) -> None:
    machine.durations.write_text(json.dumps({"a.py": 1500.0, "b.py": 1400.0, "long.py": {"test[1]": 1300.0}}))
    machine.collected = ["a.py::test", "b.py::test", "long.py::test[1]"]
    for machine.commits in range(30, 36):
        machine.results = [(0, {})]
        assert slices.run_next() == 0
    assert machine.runs == [["a.py"], ["b.py"], ["long.py::test[1]"]] * 2
    assert "slice 3 of 3, about 22 min" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("statuses", "status", "tests_run", "message"),
    [
        ([0], 0, True, "slice 1 of 1"),
        ([2, 0], 0, True, "slice 1 of 1"),
        ([2, 1], 1, False, "make soak-it failed twice"),
        ([slices.OUT_OF_TIME], slices.OUT_OF_TIME, False, "make soak-it was running at the deadline"),
    ],
)
def test_a_failing_target_is_run_once_more(
    machine: Machine,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    statuses: list[int],
    status: int,
    tests_run: bool,
    message: str,
) -> None:
    monkeypatch.setattr(slices, "TARGETS", ("soak-it",))
    machine.make_statuses = list(statuses)
    machine.results = [(0, {})]
    assert slices.run_next() == status
    assert machine.made == ["soak-it"] * len(statuses)
    assert machine.runs == ([["a.py"]] if tests_run else [])
    if tests_run:
        assert machine.limits[0][0] == slices.LIMIT_SECONDS - 60.0 * len(statuses)
    assert message in capsys.readouterr().out


def test_a_target_of_another_slice_is_not_run(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(slices, "TARGETS", ("soak-it",))
    machine.durations.write_text(json.dumps({"a.py": 1700.0}))
    machine.results = [(0, {})]
    assert slices.run_next() == 0
    assert (machine.made, machine.runs) == ([], [["a.py"]])
    machine.commits, machine.make_statuses = 1, [0]
    assert slices.run_next() == 0
    assert (machine.made, machine.runs) == (["soak-it"], [["a.py"]])


def test_a_target_does_not_start_or_start_again_late(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(slices, "TARGETS", ("soak-it",))
    assert slices.run_next(slices.LAST_START_SECONDS - 1.0) == 0
    assert (machine.made, machine.runs) == ([], [])
    assert "not run: out of time: make soak-it" in capsys.readouterr().out
    machine.make_statuses, machine.taken = [2], slices.LIMIT_SECONDS
    assert slices.run_next() == 2
    assert "make soak-it failed, and there is no time" in capsys.readouterr().out


@pytest.mark.parametrize(("left", "limit"), [(600.0, 600.0), (10_000.0, slices.LIMIT_SECONDS)])
def test_a_slice_ends_sooner_if_told_to(
    machine: Machine, monkeypatch: pytest.MonkeyPatch, left: float, limit: float
) -> None:
    monkeypatch.setattr(slices.time, "time", lambda: 5000.0)
    monkeypatch.setattr(slices.signal, "signal", lambda number, handler: None)
    monkeypatch.setattr(sys, "argv", ["slices.py", "next", str(5000 + int(left))])
    machine.results = [(0, {})]
    with pytest.raises(SystemExit) as ended:
        slices.main()
    assert ended.value.code == 0
    assert machine.limits == [(limit, limit - slices.LAST_START_SECONDS)]


TINY = {
    "test_a.py": "def test_passes(): pass\ndef test_skips(): pytest.skip('no such library')\n",
    "test_b.py": """
from pathlib import Path
def test_flaky():
    tried = Path("tried")
    again, _ = tried.exists(), tried.touch()
    assert again
""",
    "test_c.py": "def test_fails(): assert False\n",
}


@pytest.mark.slow
def test_slices_of_a_tiny_project(
    project: Callable[..., list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Real commits, collection and runs: each commit has the next file, whatever happens in it."""
    monkeypatch.setattr(slices, "TARGETS", ())
    for file, body in TINY.items():
        project(body, file)
    slices.DURATIONS.write_text(json.dumps({file: 1700.0 - number for number, file in enumerate(TINY)}))
    said = []
    subprocess.run(["git", "init", "-q"], cwd=tmp_path, check=True)
    commit(tmp_path, 2)
    for status in (0, 0, 1):
        commit(tmp_path, 1)
        assert slices.run_next() == status
        said.append(capfd.readouterr().out)
    assert "slice 1 of 3" in said[0] and "1 passed, 1 skipped" in said[0] and "not run" not in said[0]
    assert "slice 2 of 3" in said[1] and "test_b.py::test_flaky failed, and passed when run again alone" in said[1]
    assert "slice 3 of 3" in said[2] and "test_c.py::test_fails failed twice" in said[2]


def commit(folder: Path, times: int) -> None:
    user = ["-c", "user.name=tests", "-c", "user.email=tests@example.org", "-c", "commit.gpgsign=false"]
    for _ in range(times):
        subprocess.run(["git", *user, "commit", "-q", "--allow-empty", "-m", "next"], cwd=folder, check=True)


@pytest.mark.slow
def test_all_takes_explicit_tests_and_writes_their_durations(project: Callable[..., list[str]]) -> None:
    slices.DURATIONS.write_text(json.dumps({"test_other.py": 300.0}))
    project("def test_a(): time.sleep(0.3)\ndef test_b(): pass\n")
    project("def test_c(): assert False\n", "test_other.py")
    assert slices.run_all(["test_it.py::test_a"]) == 0
    assert json.loads(slices.DURATIONS.read_text()) == {"test_it.py": 120.0, "test_other.py": 300.0}
    assert slices.run_all(["test_it.py"]) == 0
    durations = json.loads(slices.DURATIONS.read_text())
    assert 0.3 <= durations.pop("test_it.py") < 120.0
    assert durations == {"test_other.py": 300.0}
