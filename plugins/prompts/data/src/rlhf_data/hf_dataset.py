"""Hugging Face datasets. Parquet needs pyarrow; a folder of `save_to_disk` and the hub need `datasets`."""

from __future__ import annotations

import csv
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.components import TaskContext
from rlhf_core.errors import DataError, PluginError, first_line
from rlhf_core.models import check_answer
from rlhf_core.plugins import load
from rlhf_core.prompts import PromptStream, RecordRules
from rlhf_core.protocols import PromptSource
from rlhf_core.util import suggestion

from .config import HfDatasetConfig
from .streamed import StreamedRecords

if TYPE_CHECKING:
    import pyarrow

_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_SPLITS = ("train", "validation", "valid", "dev", "test")
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")


class _Renamed:
    """Rows with columns renamed to what core reads."""

    def __init__(self, columns: Mapping[str, str], name: str) -> None:
        """`columns` maps our key to theirs."""
        self._ours = {theirs: ours for ours, theirs in columns.items()}
        self._name = name

    def _renamed(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """A row with our keys; a column is dropped if another was renamed to its name."""
        changed = {self._ours[key]: value for key, value in row.items() if key in self._ours}
        return {key: value for key, value in row.items() if key not in self._ours} | changed

    def describe(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"


class MappedRows(_Renamed):
    """The rows of a dataset."""

    def __init__(self, rows: PromptSource, columns: Mapping[str, str], name: str) -> None:
        """Raises `DataError` for a missing column or an empty dataset."""
        super().__init__(columns, name)
        if len(rows) == 0:
            raise DataError("the dataset has no rows", where=name)
        present = list(rows[0])
        for ours, theirs in columns.items():
            if theirs not in present:
                raise DataError(
                    f'no column "{theirs}" for {ours}{suggestion(theirs, present)} (columns: {", ".join(present)})',
                    where=f"{name}, prompts.columns",
                )
        self._rows = rows

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return self._renamed(self._rows[index])


class StreamedRows(_Renamed):
    """The rows of a dataset of unknown length."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], name: str) -> None:
        super().__init__(columns, name)
        self._rows = rows

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self._renamed, self._rows)

    def make_stream(self, rules: RecordRules, *, seed: int, held_out: int) -> PromptStream:
        """Return the rows in their own order. Raises `DataError` on wrong ones."""
        return StreamedRecords(self, rules, held_out=held_out)


class TableRows:
    """Rows of an Arrow table as Python values."""

    def __init__(self, table: pyarrow.Table) -> None:
        self._table = table

    def __len__(self) -> int:
        return int(self._table.num_rows)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        return dict(self._table.slice(index, 1).to_pylist()[0])


def build(config: HfDatasetConfig, context: TaskContext) -> PromptSource | StreamedRows:
    """Build the prompt source `hf-dataset`."""
    if config.streaming:
        return StreamedRows(_load_hub(config), config.columns, config.path)
    path = context.base_folder / Path(config.path).expanduser()
    if path.is_file():
        rows = _read_file(path)
    elif path.is_dir() and any((path / name).is_file() for name in _SAVED):
        rows = _load_saved(path, config.split)
    elif path.is_dir():
        from torch.utils.data import ConcatDataset

        rows = ConcatDataset([_read_file(file) for file in _files(path, config.split)])  # type: ignore[misc]  # any rows
    elif _HUB_NAME.match(config.path) and Path(config.path).suffix not in _READERS:
        rows = _load_hub(config)
    else:
        raise DataError("there is no such file or folder", where=str(path), hint="check prompts.path")
    return MappedRows(rows, config.columns, config.path)


def _read_jsonl(path: Path) -> PromptSource:
    jsonl = load("prompts", "jsonl")
    built: PromptSource = jsonl.build(jsonl.component.config(path=str(path)), TaskContext(0, Path.cwd()))
    return built


def _read_parquet(path: Path) -> TableRows:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError:
        raise PluginError(
            "Parquet needs pyarrow, not installed here", where=str(path), hint="pip install 'rlhf-data[parquet]'"
        ) from None
    try:
        return TableRows(parquet.read_table(path))
    except ArrowException as error:
        raise DataError(f"cannot be read as Parquet: {error}", where=str(path)) from error


def _read_csv(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV file; values stay text, so that an answer such as 007 is not changed."""
    rows: list[dict[str, Any]] = []
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, strict=True)
            for row in reader:
                if None in row or None in row.values():
                    raise DataError(
                        f"the row has not the {len(reader.fieldnames or ())} values of the header",
                        where=f"{path}:{reader.line_num}",
                    )
                rows.append(row)
    except (csv.Error, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read as CSV: {error}", where=str(path)) from error
    return rows


_READERS: dict[str, Callable[[Path], PromptSource]] = {
    ".parquet": _read_parquet,
    ".jsonl": _read_jsonl,
    ".json": _read_jsonl,
    ".csv": _read_csv,
}


def _read_file(path: Path) -> PromptSource:
    reader = _READERS.get(path.suffix)
    if reader is None:
        raise DataError(f'"{path.suffix}" is none of {", ".join(_READERS)}', where=str(path))
    return reader(path)


def _files(folder: Path, split: str) -> list[Path]:
    """The data files of a split: those named after it, or all where none is named after a split."""
    suffixes = set(_READERS) - {".json"}  # a folder's .json files are rarely data
    files = sorted(path for path in folder.rglob("*") if path.suffix in suffixes and path.is_file())
    if not files:
        raise DataError(f"no {', '.join(sorted(suffixes))} file in the folder", where=str(folder))
    named = {path: re.split(r"[-_.]", path.name)[0] for path in files}
    if not any(name in _SPLITS for name in named.values()):
        return files
    chosen = [path for path, name in named.items() if name == split]
    if not chosen:
        found = ", ".join(sorted(set(named.values())))
        raise DataError(f'no file of the split "{split}" (there are: {found})', where=str(folder))
    return chosen


def _load_saved(path: Path, split: str) -> PromptSource:
    datasets = _datasets(str(path))
    try:
        loaded = datasets.load_from_disk(str(path))
        for part in loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]:
            if len(part):
                part[0]
    except Exception as error:  # the class depends on which library reads the broken file
        raise DataError(
            f"cannot be read as a saved dataset: {first_line(error)}",
            where=str(path),
            hint="write it again with save_to_disk(...)",
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded  # type: ignore[no-any-return]
    if split not in loaded:
        raise DataError(
            f'no split "{split}" (there are: {", ".join(loaded)})', where=str(path), hint="set prompts.split"
        )
    return loaded[split]  # type: ignore[no-any-return]


def _load_hub(config: HfDatasetConfig) -> Any:
    datasets = _datasets(config.path)
    *owner, name = config.path.split("/")
    cached = "___".join([*owner, datasets.naming.camelcase_to_snakecase(name)])
    if not (Path(config.path).exists() or Path(datasets.config.HF_DATASETS_CACHE, cached).exists()):
        check_answer(config.path, where="prompts.path")
    options = {"split": config.split, "revision": config.revision, "streaming": config.streaming}
    try:
        return datasets.load_dataset(config.path, config.subset, **options)
    except (OSError, ValueError) as error:  # raised for names, splits and connections
        raise DataError(
            f"neither a file or folder here nor to be had from the hub: {first_line(error)}",
            where=config.path,
            hint="check prompts.path, prompts.subset and prompts.split",
        ) from error


def _datasets(where: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise PluginError(
            "this needs the datasets library, not installed here", where=where, hint="pip install 'rlhf-data[hub]'"
        ) from None
    return datasets
