"""The slow tests are dealt into slices: each is in exactly one, none is too long, a retry decides."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import slices
from hypothesis import given
from hypothesis import strategies as st

SECONDS = st.floats(0.1, 2000.0)


@given(st.dictionaries(st.text("abc", min_size=1, max_size=6), SECONDS, min_size=1))
def test_every_unit_is_in_one_slice_that_is_not_too_long(expected: dict[str, float]) -> None:
    dealt = slices.deal(expected, slice_seconds=1800.0)
    assert sorted(unit for each in dealt for unit in each.tests) == sorted(expected)
    for each in dealt:
        assert each.seconds == pytest.approx(sum(expected[unit] for unit in each.tests))
        assert each.seconds <= 1800.0 or len(each.tests) == 1
    assert slices.deal(dict(reversed(expected.items())), slice_seconds=1800.0) == dealt


def test_files_are_dealt_whole_unless_they_are_long() -> None:
    collected = ["a.py::test_x", "a.py::test_y", "long.py::test[1]", "long.py::test[2]", "long.py::new", "b.py::test"]
    durations = {"a.py": 30.0, "long.py": {"test[1]": 400.0, "test[2]": 500.0}}
    assert slices.units(collected, durations) == {
        "a.py": 30.0,
        "long.py::test[1]": 400.0,
        "long.py::test[2]": 500.0,
        "long.py::new": 450.0,
        "b.py": slices.UNKNOWN_FILE_SECONDS,
        **dict.fromkeys(slices.TARGETS, slices.TARGET_SECONDS),
    }


def test_durations_of_files_that_were_not_run_stay() -> None:
    lines = [
        {"test": "a.py::test_x", "outcome": "passed", "seconds": 1.0},
        {"test": "a.py::test_y", "outcome": "failed", "seconds": 900.0},
        {"test": "long.py::test[1]", "outcome": "passed", "seconds": 500.0},
        {"test": "long.py::test[2]", "outcome": "passed", "seconds": 300.0},
    ]
    assert slices.measured(lines, {"kept.py": 3.0, "a.py": 8.0}) == {
        "a.py": 1.0,
        "kept.py": 3.0,
        "long.py": {"test[1]": 500.0, "test[2]": 300.0},
    }


def test_a_part_of_a_long_file_leaves_the_durations_of_its_other_tests() -> None:
    before = {"long.py": {"test[1]": 500.0, "test[2]": 300.0}}
    lines = [{"test": "long.py::test[2]", "outcome": "passed", "seconds": 330.0}]
    assert slices.measured(lines, before) == {"long.py": {"test[1]": 500.0, "test[2]": 330.0}}


def test_recorded_files_exist() -> None:
    for file in json.loads(slices.DURATIONS.read_text()):
        assert (slices.ROOT / file).is_file(), f"{file} is gone: remove it from tests/durations.json, or run make soak"


@pytest.mark.parametrize(
    ("body", "seconds", "outcomes"),
    [
        ("def test_a(): pass\ndef test_b(): assert False", None, {"test_a": "passed", "test_b": "failed"}),
        ("def test_a(): pass", -1.0, {"test_a": "skipped"}),
    ],
)
def test_a_record_of_every_test(
    tmp_path: Path, body: str, seconds: float | None, outcomes: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "test_it.py").write_text("import pytest\npytestmark = pytest.mark.slow\n" + body)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = slow\n gpu\n")
    monkeypatch.setattr(slices, "ROOT", tmp_path)
    status, lines = slices.run_tests(["-p", "no:cacheprovider", "-q"], seconds=seconds)
    assert {str(line["test"]).partition("::")[2]: line["outcome"] for line in lines} == outcomes
    assert (status != 0) == ("failed" in outcomes.values())


@pytest.mark.parametrize(("fails_again", "status"), [(False, 0), (True, 1)])
def test_a_failing_test_is_run_once_more_alone(monkeypatch: pytest.MonkeyPatch, fails_again: bool, status: int) -> None:
    runs: list[list[str]] = []

    def run_tests(tests: list[str], *, seconds: float | None = None) -> tuple[int, list[dict[str, object]]]:
        runs.append(tests)
        failed = len(runs) == 1 or fails_again
        return int(failed), [{"test": "a.py::test", "outcome": "failed" if failed else "passed", "seconds": 1.0}]

    monkeypatch.setattr(slices, "run_tests", run_tests)
    monkeypatch.setattr(slices, "TARGETS", ())
    monkeypatch.setattr(slices, "collect", lambda: ["a.py::test", "a.py::other"])
    monkeypatch.setattr(slices, "DURATIONS", Path("/nowhere"))
    assert slices.run_next() == status
    assert runs == [["a.py"], ["a.py::test"]]
