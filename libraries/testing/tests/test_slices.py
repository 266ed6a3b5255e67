"""The slow tests are dealt into slices: each is in exactly one, none is too long, a retry decides."""

from __future__ import annotations

import json
import tomllib

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
    collected = [str(line["test"]) for line in lines]
    assert slices.measured(lines, {"kept.py": 3.0, "a.py": 8.0}, collected) == {
        "a.py": 8.0,
        "kept.py": 3.0,
        "long.py": {"test[1]": 500.0, "test[2]": 300.0},
    }


def test_a_part_of_a_long_file_leaves_the_durations_of_its_other_tests() -> None:
    before = {"long.py": {"test[1]": 500.0, "test[2]": 300.0}}
    lines = [{"test": "long.py::test[2]", "outcome": "passed", "seconds": 30.0}]
    tests = ["long.py::test[1]", "long.py::test[2]", "long.py::test[3]"]
    assert slices.measured(lines, before, tests) == {"long.py": {"test[1]": 500.0, "test[2]": 30.0}}
    assert slices.measured(lines, before, tests[:2]) == {"long.py": 530.0}


def test_a_complete_run_of_a_file_forgets_its_removed_tests() -> None:
    before = {"long.py": {"test[gone]": 500.0, "test[2]": 300.0, "test[gpu]": 40.0}}
    lines = [
        {"test": "long.py::test[2]", "outcome": "passed", "seconds": 30.0},
        {"test": "long.py::test[gpu]", "outcome": "skipped", "seconds": 0.5},
    ]
    assert slices.measured(lines, before, ["long.py::test[2]", "long.py::test[gpu]"]) == {"long.py": 30.5}


def test_a_file_whose_tests_are_all_skipped_takes_no_time() -> None:
    lines = [{"test": "a.py::test_x", "outcome": "skipped", "seconds": 0.0}]
    assert slices.measured(lines, {}, ["a.py::test_x"]) == {"a.py": 0.0}


def test_a_file_bigger_than_a_slice_is_cut_into_parts() -> None:
    """From its measured durations to the slices that have its tests."""
    collected = [f"big.py::test[{number}]" for number in range(10)]
    lines = [{"test": test, "outcome": "passed", "seconds": 500.0} for test in collected]
    durations = slices.measured(lines, {}, collected)
    parts = [each.tests for each in slices.deal(slices.units(collected, durations))]
    tests = [[unit for unit in part if unit not in slices.TARGETS] for part in parts]
    assert [test for part in tests for test in part] == collected
    assert [len(part) for part in tests] == [3, 3, 3, 1]


@pytest.mark.parametrize("outcome", ["failed", "started", None])
@pytest.mark.parametrize(("seconds", "before", "after"), [(2.0, 90.0, 90.0), (100.0, 90.0, 100.0), (2.0, None, 120.0)])
def test_a_part_of_a_short_file_does_not_shrink_its_duration(
    outcome: str | None, seconds: float, before: float | None, after: float
) -> None:
    lines: list[dict[str, object]] = [{"test": "a.py::test_x", "outcome": "passed", "seconds": seconds}]
    if outcome is not None:
        lines.append({"test": "a.py::test_y", "outcome": outcome, "seconds": 1.0})
    known = {} if before is None else {"a.py": before}
    assert slices.measured(lines, known, ["a.py::test_x", "a.py::test_y"]) == {"a.py": after}
    assert slices.measured(lines[:1], known, ["a.py::test_x"]) == {"a.py": seconds}


def test_every_folder_of_tests_is_collected() -> None:
    """`collect` names no paths: slow tests of a folder that `testpaths` lacks would never run."""
    options = tomllib.loads((slices.ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    roots = [path for pattern in options["testpaths"] for path in slices.ROOT.glob(pattern)]
    files = [
        file
        for folder in ("tests", "libraries", "plugins", "cli", "rlhf_core", "examples", "recipes", "benchmarks")
        for file in (slices.ROOT / folder).rglob("test_*.py")
        if "pytest.mark.slow" in file.read_text()
    ]
    assert any(file.is_relative_to(slices.ROOT / "libraries") for file in files)
    assert [file for file in files if not any(file.is_relative_to(root) for root in roots)] == []


def test_recorded_files_exist() -> None:
    for file in json.loads(slices.DURATIONS.read_text()):
        assert (slices.ROOT / file).is_file(), f"{file} is gone: remove it from tests/durations.json, or run make soak"
