"""Hugging Face datasets: local files and folders, and the hub, read with the library `datasets`."""

from __future__ import annotations

import csv
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.components import TaskContext
from rlhf_core.errors import DataError, PluginError, first_line
from rlhf_core.plugins import load
from rlhf_core.prompts import PromptStream, RecordRules
from rlhf_core.protocols import PromptSource
from rlhf_core.util import suggestion
from rlhf_models import check_hub_reachable

from .config import HfDatasetConfig
from .streamed import StreamedRecords

_HUB_NAME = re.compile(r"^[\w.-]+(/[\w.-]+)?$")
_SAVED = ("dataset_dict.json", "dataset_info.json", "state.json")
_BUILDERS = {".parquet": "parquet", ".json": "json", ".csv": "csv"}
"""Name of the loader in `datasets` by file suffix."""


class _Renamed:
    """Rows with columns renamed to core's keys."""

    def __init__(self, columns: Mapping[str, str], name: str) -> None:
        """Create the renaming from `columns`, which maps our keys to the dataset's columns."""
        self._ours = {theirs: ours for ours, theirs in columns.items()}
        self._name = name

    def _rename(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """Rename the keys of a row. A column is dropped if another was renamed to its name."""
        renamed = {self._ours[key]: value for key, value in row.items() if key in self._ours}
        return {key: value for key, value in row.items() if key not in self._ours} | renamed

    def describe(self, index: int) -> str:
        return f"{self._name}, row {index + 1}"


class MappedRows(_Renamed):
    """Rows of a dataset of known length."""

    def __init__(self, rows: PromptSource, columns: Mapping[str, str], name: str) -> None:
        """Check the rows. Raise `DataError` if a column is missing or the dataset is empty."""
        super().__init__(columns, name)
        if len(rows) == 0:
            raise DataError("the dataset is empty", where=name)
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
        return self._rename(self._rows[index])


class StreamedRows(_Renamed):
    """Rows of a dataset of unknown length."""

    def __init__(self, rows: Iterable[Mapping[str, Any]], columns: Mapping[str, str], name: str) -> None:
        super().__init__(columns, name)
        self._rows = rows

    def __iter__(self) -> Iterator[Mapping[str, Any]]:
        return map(self._rename, self._rows)

    def make_stream(self, rules: RecordRules, *, seed: int, held_out: int) -> PromptStream:
        """Return the rows in their own order. Raise `DataError` if one is wrong."""
        return StreamedRecords(self, rules, held_out=held_out)


def build(config: HfDatasetConfig, context: TaskContext) -> PromptSource | StreamedRows:
    """Build the prompt source `hf-dataset`."""
    if config.streaming:
        return StreamedRows(_without_decoding(_load_hub(config)), config.columns, config.path)
    path = context.base_folder / Path(config.path).expanduser()
    if path.is_file() and path.suffix == ".jsonl":  # `datasets` would convert texts that look like dates
        jsonl = load("prompts", "jsonl")
        rows = jsonl.build(jsonl.component.config(path=str(path)), context)
    elif path.exists():
        rows = _without_decoding(_load_local(path, config.split))
    elif _HUB_NAME.match(config.path) and Path(config.path).suffix not in (".jsonl", *_BUILDERS):
        rows = _without_decoding(_load_hub(config))
    else:
        raise DataError("the file or folder does not exist", where=str(path), hint="check prompts.path")
    return MappedRows(rows, config.columns, config.path)


def _without_decoding(rows: Any) -> Any:
    """Return rows whose images are mappings with `bytes` and `path`.

    `datasets` would decode images of any size and format, open files in any folder, and download addresses.
    """
    for name, feature in (getattr(rows, "features", None) or {}).items():
        if (changed := _undecoded(feature)) != feature:
            rows = rows.cast_column(name, changed)
    return rows


def _undecoded(feature: Any) -> Any:
    """Return a feature of `datasets` with its images not decoded, nested ones included."""
    if type(feature).__name__ == "Image" and hasattr(feature, "decode"):
        return replace(feature, decode=False)
    if isinstance(feature, dict):
        return {name: _undecoded(each) for name, each in feature.items()}
    if isinstance(feature, list):
        return [_undecoded(each) for each in feature]
    return replace(feature, feature=_undecoded(feature.feature)) if hasattr(feature, "feature") else feature


def _load_local(path: Path, split: str) -> Any:
    """Load a file, a folder of data files, or a folder written by `save_to_disk`."""
    datasets = _datasets(str(path))
    if path.is_file() and path.suffix not in _BUILDERS:
        raise DataError(f'"{path.suffix}" must be one of .jsonl, {", ".join(_BUILDERS)}', where=str(path))
    try:
        if path.is_file():
            options = _csv_options(datasets, path) if path.suffix == ".csv" else {}
            return datasets.load_dataset(_BUILDERS[path.suffix], data_files=str(path), split="train", **options)
        if not any((path / name).is_file() for name in _SAVED):
            return datasets.load_dataset(str(path), split=split)
        loaded = datasets.load_from_disk(str(path))
        for part in loaded.values() if isinstance(loaded, datasets.DatasetDict) else [loaded]:
            if len(part):
                part[0]
    except DataError:
        raise
    except Exception as error:  # the class depends on the library that reads the broken file
        raise DataError(
            f"cannot be read as a dataset: {first_line(error.__cause__ or error)}",
            where=str(path),
            hint="check prompts.path and prompts.split, or write a saved dataset again with save_to_disk(...)",
        ) from error
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if split not in loaded:
        raise DataError(
            f'split "{split}" does not exist (splits: {", ".join(loaded)})', where=str(path), hint="set prompts.split"
        )
    return loaded[split]


def _csv_options(datasets: Any, path: Path) -> dict[str, Any]:
    """Read all values as text, so that an answer such as 007 is not changed."""
    with path.open(newline="", encoding="utf-8-sig") as file:
        rows = csv.reader(file)
        names = next(rows, [])
        if any(row and len(row) < len(names) for row in rows):  # `datasets` fills short rows, but rejects longer ones
            raise DataError(f"the row has fewer values than the {len(names)} columns", where=f"{path}:{rows.line_num}")
    features = datasets.Features({name: datasets.Value("string") for name in names})
    return {"features": features, "keep_default_na": False}


def _load_hub(config: HfDatasetConfig) -> Any:
    datasets = _datasets(config.path)
    *owner, name = config.path.split("/")
    cached = "___".join([*owner, datasets.naming.camelcase_to_snakecase(name)])
    if not (Path(config.path).exists() or Path(datasets.config.HF_DATASETS_CACHE, cached).exists()):
        check_hub_reachable(config.path, where="prompts.path")
    options = {"split": config.split, "revision": config.revision, "streaming": config.streaming}
    try:
        return datasets.load_dataset(config.path, config.subset, **options)
    except (OSError, ValueError) as error:  # raised for names, splits and connections
        raise DataError(
            f"neither a local file or folder nor available on the hub: {first_line(error)}",
            where=config.path,
            hint="check prompts.path, prompts.subset and prompts.split",
        ) from error


def _datasets(where: str) -> Any:
    try:
        import datasets
    except ImportError:
        raise PluginError(
            "requires the datasets library, which is not installed", where=where, hint="pip install 'rlhf-data[hub]'"
        ) from None
    datasets.disable_progress_bars()
    return datasets
