"""The prompt source `hf-dataset`."""

import json
from pathlib import Path

import pytest
from huggingface_hub import constants

from rlhf_core.components import TaskContext
from rlhf_core.errors import DataError
from rlhf_core.plugins.selected import load
from rlhf_testing.contracts import PromptsContract

pytest.importorskip("datasets", reason="needs rlhf-data[hub]")
# datasets before 5.2 leaves a CSV file to the garbage collector.
leaves_csv_open = pytest.mark.filterwarnings("ignore:Exception ignored in:pytest.PytestUnraisableExceptionWarning")
COLUMNS = {"prompt": "question", "answer": "solution"}


@pytest.fixture(autouse=True, scope="module")
def own_cache(tmp_path_factory):
    import datasets

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
        yield


class TestHfDataset(PromptsContract):
    plugin = "hf-dataset"

    @classmethod
    def make_options(cls, folder):
        lines = [{"prompt": f"{number} + 1 = ", "answer": str(number + 1)} for number in range(3)]
        (folder / "lines.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
        return {"path": "lines.jsonl"}


def build(name, folder=Path(), **options):
    selected = load("prompts", name)
    config = selected.component.config.model_validate(options)
    return selected.build(config, TaskContext(seed=0, base_folder=folder))


def write_parquet(path, *rows):
    import pyarrow
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(list(rows)), path)


def test_parquet_with_renamed_columns(tmp_path):
    write_parquet(tmp_path / "d.parquet", {"question": "a", "solution": "1", "level": 3})
    source = build("hf-dataset", tmp_path, path="d.parquet", columns=COLUMNS)
    assert [source[0]] == [{"prompt": "a", "answer": "1", "level": 3}]
    assert source.describe(0) == "d.parquet, row 1"


def test_chat_messages_in_parquet(tmp_path):
    messages = [{"role": "user", "content": "hello"}]
    write_parquet(tmp_path / "d.parquet", {"prompt": messages})
    assert build("hf-dataset", tmp_path, path="d.parquet")[0] == {"prompt": messages}


def test_a_renamed_column_replaces_one_of_that_name(tmp_path):
    write_parquet(tmp_path / "d.parquet", {"question": "a", "prompt": "b"})
    assert build("hf-dataset", tmp_path, path="d.parquet", columns={"prompt": "question"})[0] == {"prompt": "a"}


@leaves_csv_open
def test_csv_values_stay_text(tmp_path):
    (tmp_path / "d.csv").write_text('prompt,answer\n"a, b",007\n')
    assert build("hf-dataset", tmp_path, path="d.csv")[0] == {"prompt": "a, b", "answer": "007"}


@leaves_csv_open
def test_a_ragged_csv_row_is_named(tmp_path):
    (tmp_path / "d.csv").write_text("prompt,answer\nx,y\na,b,c\n")
    with pytest.raises(DataError, match="Expected 2 fields in line 3, saw 3") as caught:
        build("hf-dataset", tmp_path, path="d.csv")
    assert caught.value.where == f"{tmp_path / 'd.csv'}"


def test_a_csv_row_that_is_too_short_is_named(tmp_path):
    (tmp_path / "d.csv").write_text("prompt,answer\nx,y\n\na\n")
    with pytest.raises(DataError, match="fewer values than the 2 columns") as caught:
        build("hf-dataset", tmp_path, path="d.csv")
    assert caught.value.where == f"{tmp_path / 'd.csv'}:4"


def test_a_text_that_looks_like_a_date_stays_one(tmp_path):
    (tmp_path / "d.jsonl").write_text('{"prompt": "when?", "answer": "2024-01-01"}\n')
    assert build("hf-dataset", tmp_path, path="d.jsonl")[0] == {"prompt": "when?", "answer": "2024-01-01"}


def test_a_folder_of_files_by_split(tmp_path):
    for name in ("train-0", "train-1", "test-0"):
        write_parquet(tmp_path / f"{name}.parquet", {"prompt": name})
    source = build("hf-dataset", tmp_path, path=".")
    assert [source[index]["prompt"] for index in range(len(source))] == ["train-0", "train-1"]
    assert build("hf-dataset", tmp_path, path=".", split="test")[0]["prompt"] == "test-0"
    with pytest.raises(DataError, match='Unknown split "dev"'):
        build("hf-dataset", tmp_path, path=".", split="dev")


def test_a_folder_without_split_names_is_taken_whole(tmp_path):
    for number in "12":
        (tmp_path / f"{number}.jsonl").write_text(json.dumps({"prompt": number}) + "\n")
    source = build("hf-dataset", tmp_path, path=".")
    assert [source[index]["prompt"] for index in range(len(source))] == ["1", "2"]


def test_what_is_wrong_is_said(tmp_path):
    write_parquet(tmp_path / "d.parquet", {"question": "a"})
    with pytest.raises(DataError, match='did you mean "question"'):
        build("hf-dataset", tmp_path, path="d.parquet", columns={"prompt": "qestion"})
    (tmp_path / "bad.parquet").write_text("no parquet")
    with pytest.raises(DataError, match="cannot be read as a dataset: Parquet"):
        build("hf-dataset", tmp_path, path="bad.parquet")
    (tmp_path / "d.xlsx").write_text("")
    with pytest.raises(DataError, match="must be one of"):
        build("hf-dataset", tmp_path, path="d.xlsx")
    with pytest.raises(DataError, match="does not exist"):
        build("hf-dataset", tmp_path, path="./missing.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DataError, match="doesn't contain any data files"):
        build("hf-dataset", tmp_path, path="empty")


def test_a_saved_dataset(tmp_path):
    datasets = pytest.importorskip("datasets")
    rows = datasets.Dataset.from_list([{"question": "a", "solution": "1"}])
    rows.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": rows, "test": rows}).save_to_disk(str(tmp_path / "many"))
    for name in ("one", "many"):
        source = build("hf-dataset", tmp_path, path=name, columns=COLUMNS)
        assert source[0] == {"prompt": "a", "answer": "1"}
    with pytest.raises(DataError, match="splits: train, test"):
        build("hf-dataset", tmp_path, path="many", split="dev")


def test_a_streamed_hub_dataset_is_read_as_it_is_drawn(tmp_path, monkeypatch):
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


def test_a_hub_name_that_cannot_be_reached(tmp_path, monkeypatch):
    datasets = pytest.importorskip("datasets")
    asked = {}

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def offline(path, name, *, split, revision, streaming):
        asked.update(path=path, name=name, split=split, revision=revision)
        assert not streaming
        raise ConnectionError("no route to the hub\nand more")

    monkeypatch.setattr(datasets, "load_dataset", offline)
    with pytest.raises(DataError, match="on the hub: no route to the hub") as caught:
        build("hf-dataset", tmp_path, path="owner/name", subset="main", split="test", revision="v1")
    assert asked == {"path": "owner/name", "name": "main", "split": "test", "revision": "v1"}
    assert "prompts.subset" in caught.value.hint
