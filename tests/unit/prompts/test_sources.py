"""The prompt sources `jsonl`, `hf-dataset` and `sort-digits`."""

import json
from pathlib import Path
from typing import ClassVar

import pytest
from huggingface_hub import constants
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.components import PromptsContext
from rlhf_core.errors import DataError
from rlhf_core.plugins.discovery import load, resolve_build
from rlhf_core.prompts.records import IndexedRecords


def build(name, folder=Path(), **options):
    selected = load("prompts", name)
    config = selected.component.config.model_validate(options)
    return resolve_build(selected)(config, PromptsContext(seed=0, base_folder=folder))


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
            (b'{"prompt": "b", "level": NaN}\n', "not JSON: NaN is no number; write null"),
            (b'{"prompt": "b", "level": -Infinity}\n', "not JSON: -Infinity is no number"),
            (b'{"prompt": \xff"b"}\n', "not UTF-8"),
            (b'["b"]\n', "a JSON list, not an object"),
            (b"[" * 200_000 + b"\n", "not JSON"),
        ],
    )
    def test_a_wrong_line_is_named(self, tmp_path, line, message):
        write(tmp_path / "p.jsonl", '{"prompt": "a"}', line, '{"prompt": "c"}')
        source = build("jsonl", tmp_path, path="p.jsonl")
        for read in (lambda: source[1], lambda: IndexedRecords(source, seed=0)):
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


class TestSortDigits:
    def test_problems_differ_and_answers_are_sorted(self):
        source = build("sort-digits", size=3000, num_digits=6)
        records = [source[index] for index in range(len(source))]
        assert len({record["prompt"] for record in records}) == 3000
        for record in records:
            assert len(record["prompt"]) == 7 and record["prompt"].endswith(">")
            assert record["answer"] == record["completion"] == "".join(sorted(record["prompt"][:-1]))

    @pytest.mark.parametrize("num_digits", [1, 6])
    def test_a_near_miss_differs_in_one_digit(self, num_digits):
        source = build("sort-digits", size=10, num_digits=num_digits)
        for record in (source[index] for index in range(10)):
            assert record["chosen"] == record["answer"]
            assert len(record["rejected"]) == num_digits and record["rejected"].isdigit()
            assert sum(a != b for a, b in zip(record["chosen"], record["rejected"], strict=True)) == 1

    @pytest.mark.parametrize("num_digits", [1, 2, 3])
    @pytest.mark.parametrize("seed", [0, 1, 7])
    def test_all_numbers_of_a_width_can_be_had(self, num_digits, seed):
        source = build("sort-digits", size=10**num_digits, num_digits=num_digits, problem_seed=seed)
        assert len({source[index]["prompt"] for index in range(len(source))}) == 10**num_digits

    def test_leading_digits_are_spread(self):
        source = build("sort-digits", size=200)
        leading = [source[index]["prompt"][0] for index in range(200)]
        assert min(leading.count(str(digit)) for digit in range(10)) >= 8

    def test_seed_decides_and_size_is_bounded(self):
        assert build("sort-digits")[5] == build("sort-digits")[5] != build("sort-digits", problem_seed=1)[5]
        with pytest.raises(ValueError, match="only 10 numbers"):
            build("sort-digits", size=11, num_digits=1)
        with pytest.raises(IndexError):
            build("sort-digits", size=10)[10]


class TestHfDataset:
    COLUMNS: ClassVar = {"prompt": "question", "answer": "solution"}

    def write_parquet(self, path, *rows):
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)

    def test_parquet_with_renamed_columns(self, tmp_path):
        self.write_parquet(tmp_path / "d.parquet", {"question": "a", "solution": "1", "level": 3})
        source = build("hf-dataset", tmp_path, path="d.parquet", columns=self.COLUMNS)
        assert [source[0]] == [{"prompt": "a", "answer": "1", "level": 3}]
        assert source.describe(0) == "d.parquet, row 1"

    def test_chat_messages_in_parquet(self, tmp_path):
        messages = [{"role": "user", "content": "hello"}]
        self.write_parquet(tmp_path / "d.parquet", {"prompt": messages})
        assert build("hf-dataset", tmp_path, path="d.parquet")[0] == {"prompt": messages}

    def test_a_renamed_column_replaces_one_of_that_name(self, tmp_path):
        self.write_parquet(tmp_path / "d.parquet", {"question": "a", "prompt": "b"})
        assert build("hf-dataset", tmp_path, path="d.parquet", columns={"prompt": "question"})[0] == {"prompt": "a"}

    def test_csv_values_stay_text(self, tmp_path):
        (tmp_path / "d.csv").write_text('prompt,answer\n"a, b",007\n')
        assert build("hf-dataset", tmp_path, path="d.csv")[0] == {"prompt": "a, b", "answer": "007"}

    @pytest.mark.parametrize("row", ["a", "a,b,c"])
    def test_a_ragged_csv_row_is_named(self, tmp_path, row):
        (tmp_path / "d.csv").write_text(f"prompt,answer\nx,y\n{row}\n")
        with pytest.raises(DataError, match="2 values of the header") as caught:
            build("hf-dataset", tmp_path, path="d.csv")
        assert caught.value.where == f"{tmp_path / 'd.csv'}:3"

    def test_a_folder_of_files_by_split(self, tmp_path):
        for name in ("train-0", "train-1", "test-0"):
            self.write_parquet(tmp_path / f"{name}.parquet", {"prompt": name})
        source = build("hf-dataset", tmp_path, path=".")
        assert [source[index]["prompt"] for index in range(len(source))] == ["train-0", "train-1"]
        assert build("hf-dataset", tmp_path, path=".", split="test")[0]["prompt"] == "test-0"
        with pytest.raises(DataError, match='no file of the split "dev"'):
            build("hf-dataset", tmp_path, path=".", split="dev")

    def test_a_folder_without_split_names_is_taken_whole(self, tmp_path):
        write(tmp_path / "a.jsonl", '{"prompt": "1"}')
        (tmp_path / "b.csv").write_text("prompt\n2\n")
        source = build("hf-dataset", tmp_path, path=".")
        assert [source[index]["prompt"] for index in range(len(source))] == ["1", "2"]

    def test_what_is_wrong_is_said(self, tmp_path):
        self.write_parquet(tmp_path / "d.parquet", {"question": "a"})
        with pytest.raises(DataError, match='did you mean "question"'):
            build("hf-dataset", tmp_path, path="d.parquet", columns={"prompt": "qestion"})
        (tmp_path / "bad.parquet").write_text("no parquet")
        with pytest.raises(DataError, match="cannot be read as Parquet"):
            build("hf-dataset", tmp_path, path="bad.parquet")
        (tmp_path / "d.xlsx").write_text("")
        with pytest.raises(DataError, match="none of"):
            build("hf-dataset", tmp_path, path="d.xlsx")
        with pytest.raises(DataError, match="no such file"):
            build("hf-dataset", tmp_path, path="./missing.parquet")
        (tmp_path / "empty").mkdir()
        with pytest.raises(DataError, match="in the folder"):
            build("hf-dataset", tmp_path, path="empty")

    def test_a_saved_dataset(self, tmp_path):
        datasets = pytest.importorskip("datasets")
        rows = datasets.Dataset.from_list([{"question": "a", "solution": "1"}])
        rows.save_to_disk(str(tmp_path / "one"))
        datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "many"))
        for name in ("one", "many"):
            source = build("hf-dataset", tmp_path, path=name, columns=self.COLUMNS)
            assert source[0] == {"prompt": "a", "answer": "1"}
        with pytest.raises(DataError, match="there are: train, test"):
            build("hf-dataset", tmp_path, path="many", split="dev")

    def test_a_streamed_hub_dataset_is_read_as_it_is_drawn(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        asked = {}

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)  # the hub is not asked whether it answers

        def load(path, name, *, split, revision, streaming):
            asked.update(path=path, streaming=streaming)
            return ({"question": str(index)} for index in range(3))

        monkeypatch.setattr(datasets, "load_dataset", load)
        source = build("hf-dataset", tmp_path, path="o/n", streaming=True, columns={"prompt": "question"})
        assert list(source) == [{"prompt": "0"}, {"prompt": "1"}, {"prompt": "2"}]
        assert asked == {"path": "o/n", "streaming": True} and source.describe(2) == "o/n, row 3"

    def test_a_hub_name_that_cannot_be_reached(self, tmp_path, monkeypatch):
        datasets = pytest.importorskip("datasets")
        asked = {}

        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

        def offline(path, name, *, split, revision, streaming):
            asked.update(path=path, name=name, split=split, revision=revision)
            assert not streaming
            raise ConnectionError("no route to the hub\nand more")

        monkeypatch.setattr(datasets, "load_dataset", offline)
        with pytest.raises(DataError, match="from the hub: no route to the hub") as caught:
            build("hf-dataset", tmp_path, path="owner/name", subset="main", split="test", revision="v1")
        assert asked == {"path": "owner/name", "name": "main", "split": "test", "revision": "v1"}
        assert "prompts.subset" in caught.value.hint
