from __future__ import annotations

import errno
import json
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import DataError
from rlhf_core.util.jsonl import LineFile, read_lines, truncate_lines, write_json

text = st.text(st.characters(codec=None), max_size=8)
records = st.lists(st.dictionaries(text, st.one_of(st.integers(), text, st.none()), max_size=3), max_size=8)


@given(records=records, cut=st.integers(min_value=0), keep=st.integers(0, 9))
def test_whatever_was_torn_off_what_is_left_is_a_prefix(tmp_path_factory, records, cut, keep):
    path: Path = tmp_path_factory.mktemp("jsonl") / "lines.jsonl"
    numbered = [{**record, "step": step} for step, record in enumerate(records)]
    with LineFile(path) as file:
        file.append(numbered)
    os.truncate(path, cut % (path.stat().st_size + 1))
    left = list(read_lines(path))
    assert left == numbered[: len(left)]

    kept = left[:keep]
    assert truncate_lines(path, "step", keep - 1) == len(kept)
    with LineFile(path) as file:  # and what is appended then is read back
        file.append([{"step": keep}])
    assert list(read_lines(path)) == [*kept, {"step": keep}]


def test_a_broken_line_before_the_last_is_an_error_with_its_number(tmp_path: Path):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n[2]\n{"step": 3}\n')
    with pytest.raises(DataError, match=r"lines\.jsonl:2"):
        list(read_lines(path))


@pytest.mark.parametrize("torn", ['{"step": 3, "lo{"step": 4}', "{}", '{"step": null}'])
def test_a_torn_line_after_what_is_kept_is_cut_and_one_before_it_is_named(tmp_path: Path, torn):
    path = tmp_path / "lines.jsonl"
    path.write_text('{"step": 1}\n{"step": 2}\n' + torn + '\n{"step": 5}\n')
    with pytest.raises(DataError, match=r"(?s)lines\.jsonl:3.*checkpoint"):
        truncate_lines(path, "step", 5)
    assert truncate_lines(path, "step", 2) == 2
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_what_the_disk_takes_in_pieces_is_written_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "lines.jsonl"
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, data: write(handle, bytes(data[:3])))
    with LineFile(path) as file:
        file.append([{"step": 1}, {"step": 2}])
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2}]


def test_a_disk_that_is_full_for_a_moment_leaves_no_part_of_a_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    path = tmp_path / "lines.jsonl"
    write, room = os.write, [12, 3, 0]

    def narrow(handle, data):
        if not room:
            return write(handle, data)
        free = room.pop(0)
        if not free:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(handle, bytes(data[:free]))

    monkeypatch.setattr(os, "write", narrow)
    with LineFile(path) as file:
        file.append([{"step": 1}])
        with pytest.raises(OSError, match="No space left"):
            file.append([{"step": 2}])
        file.append([{"step": 2}])
    assert list(read_lines(path)) == [{"step": 1}, {"step": 2}]


def test_no_file_is_no_line(tmp_path: Path):
    assert list(read_lines(tmp_path / "none")) == []
    assert truncate_lines(tmp_path / "none", "step", 9) == 0
    assert not (tmp_path / "none").exists()


def test_lines_are_json_without_nan(tmp_path: Path):
    with LineFile(tmp_path / "lines.jsonl") as file, pytest.raises(ValueError):
        file.append([{"loss": float("nan")}])


def test_write_json_replaces_whole_files_and_leaves_nothing_beside(tmp_path: Path):
    path = tmp_path / "summary.json"
    write_json(path, {"status": "done"})
    with pytest.raises(TypeError):
        write_json(path, {"status": object()})
    assert json.loads(path.read_text()) == {"status": "done"}
    assert [entry.name for entry in tmp_path.iterdir()] == ["summary.json"]
