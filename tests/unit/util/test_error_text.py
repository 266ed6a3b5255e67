"""The line that an error of someone else's code is told with."""

import json

import pytest

from rlhf_core.errors import DataError
from rlhf_core.plugins.functions import run_file
from rlhf_core.util.error_text import error_text
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_tokenizer

FILE = """
import json

def level(record):
    return inner(record)

def inner(record):
    return json.loads(record["level"])
"""


def test_the_line_is_the_last_one_of_the_file_that_core_called(tmp_path, monkeypatch):
    """Not that of the library which it calls."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine.py").write_text(FILE)
    with pytest.raises(DataError, match=r"prompts.filter failed: JSONDecodeError: .* \(mine.py, line 8\)"):
        keep = run_file(tmp_path / "mine.py", "a filter").level
        prompt_stream([{"prompt": "1>", "level": "{"}], tiny_tokenizer(), seed=0, keep=keep)


def test_the_line_is_told_where_the_current_folder_is_gone(tmp_path, monkeypatch):
    (tmp_path / "mine.py").write_text(FILE)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    keep = run_file(tmp_path / "mine.py", "a filter").level
    (tmp_path / "gone").rmdir()
    with pytest.raises(DataError, match="mine.py, line 8"):
        prompt_stream([{"prompt": "1>", "level": "{"}], tiny_tokenizer(), seed=0, keep=keep)


def test_an_error_without_a_file_of_others_has_no_line():
    assert error_text(json.JSONDecodeError("no", "", 0)) == "JSONDecodeError: no: line 1 column 1 (char 0)"
