"""The prompt source `jsonl`."""

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.components import TaskContext
from rlhf_core.errors import DataError
from rlhf_core.plugins.selected import load
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_tokenizer


def build(name, folder=Path(), **options):
    selected = load("prompts", name)
    config = selected.component.config.model_validate(options)
    return selected.build(config, TaskContext(seed=0, base_folder=folder))


def write(path, *lines):
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))


class TestJsonl:
    def test_records_in_order_with_file_and_line(self, tmp_path):
        records = [{"prompt": "1+1=", "answer": "2"}, {"prompt": [{"role": "user", "content": "ü\u2028"}], "level": 3}]
        write(tmp_path / "p.jsonl", *(json.dumps(record, ensure_ascii=False) for record in records))
        source = build("jsonl", tmp_path, path="p.jsonl")
        assert [source[index] for index in range(len(source))] == records
        assert source.describe(1) == f"{tmp_path / 'p.jsonl'}:2"

    @given(st.lists(st.dictionaries(st.text(), st.text() | st.integers()), min_size=1, max_size=8), st.booleans())
    def test_every_record_comes_back(self, tmp_path_factory, records, ends_with_newline):
        path = tmp_path_factory.mktemp("jsonl") / "p.jsonl"
        text = "\n".join(json.dumps(record) for record in records) + "\n" * ends_with_newline
        path.write_text(text)
        source = build("jsonl", path=str(path))
        assert [source[index] for index in reversed(range(len(source)))] == records[::-1]

    def test_byte_order_mark_and_windows_line_ends(self, tmp_path):
        write(tmp_path / "p.jsonl", b'\xef\xbb\xbf{"prompt": "a"}\r\n', b'{"prompt": "b"}\r\n')
        source = build("jsonl", tmp_path, path="p.jsonl")
        assert [source[index]["prompt"] for index in range(2)] == ["a", "b"]

    @pytest.mark.parametrize(
        ("line", "message"),
        [
            (b"\n", "the line is empty"),
            (b"  \n", "the line is empty"),
            (b'{"prompt": "b"\n', "not JSON"),
            (b'{"prompt": "b", "level": NaN}\n', "not JSON: NaN is not a number, use null"),
            (b'{"prompt": "b", "level": -Infinity}\n', "not JSON: -Infinity is not a number"),
            (b'{"prompt": \xff"b"}\n', "not UTF-8"),
            (b'["b"]\n', "a JSON list, not an object"),
            (b"[" * 200_000 + b"\n", "not JSON"),
        ],
    )
    def test_a_wrong_line_is_named(self, tmp_path, line, message):
        write(tmp_path / "p.jsonl", '{"prompt": "a"}', line, '{"prompt": "c"}')
        source = build("jsonl", tmp_path, path="p.jsonl")
        for read in (lambda: source[1], lambda: prompt_stream(source, tiny_tokenizer("0123456789"))):
            with pytest.raises(DataError, match=message) as caught:
                read()
            assert caught.value.where == f"{tmp_path / 'p.jsonl'}:2"

    def test_no_file_a_folder_and_an_empty_file(self, tmp_path):
        with pytest.raises(DataError, match="no such file"):
            build("jsonl", tmp_path, path="missing.jsonl")
        with pytest.raises(DataError, match="is a folder"):
            build("jsonl", tmp_path, path=".")
        write(tmp_path / "empty.jsonl")
        with pytest.raises(DataError, match="is empty"):
            build("jsonl", tmp_path, path="empty.jsonl")
