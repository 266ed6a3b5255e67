"""The prompt source `images`: reads the images of another source's records."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from rlhf_core.components import TaskContext
from rlhf_core.distributed import read_launch_env
from rlhf_core.errors import DataError
from rlhf_core.plugins import load
from rlhf_core.protocols import PromptSource
from rlhf_images import KEY, ImageReader, read_images

from .config import ImagesConfig

_DOWNLOADS = 8
"""Number of records whose images are downloaded at once."""


class ImageRecords:
    """The records of a source with references to their images.

    Its digest covers the content of all images, since core computes it from the records, whose references contain the
    hash of each image.
    """

    def __init__(self, source: PromptSource, reader: ImageReader, *, require_images: bool, num_threads: int) -> None:
        self._source = source
        self._reader = reader
        self._require_images = require_images
        self._num_threads = num_threads

    def __len__(self) -> int:
        return len(self._source)

    def __getitem__(self, index: int, /) -> Mapping[str, Any]:
        return self._read(self._source[index])

    def describe(self, index: int) -> str:
        describe = getattr(self._source, "describe", None)
        return str(describe(index)) if callable(describe) else f"record {index + 1}"

    def scan(self) -> Iterator[Mapping[str, Any] | DataError]:
        """Yield every record, or its error."""
        scan = getattr(self._source, "scan", None)
        records = scan() if scan is not None else self._each()
        if self._num_threads == 1:
            yield from map(self._read_or_error, records)
            return
        with ThreadPoolExecutor(self._num_threads) as threads:
            ahead: deque[Future[Mapping[str, Any] | DataError]] = deque()
            for record in records:
                ahead.append(threads.submit(self._read_or_error, record))
                if len(ahead) > self._num_threads:
                    yield ahead.popleft().result()
            yield from (each.result() for each in ahead)

    def _read_or_error(self, record: Mapping[str, Any] | DataError) -> Mapping[str, Any] | DataError:
        try:
            return record if isinstance(record, DataError) else self._read(record)
        except DataError as error:
            return error

    def _read(self, record: Mapping[str, Any]) -> Mapping[str, Any]:
        read = read_images(record, self._reader)
        if self._require_images and not read[KEY]:
            raise DataError(
                "its prompt lacks an image, which this run requires in each (several processes train, or "
                "prompts.require_images is set)",
                hint="remove the prompts without an image, or train in one process",
            )
        return read

    def _each(self) -> Iterator[Mapping[str, Any] | DataError]:
        for index in range(len(self._source)):
            try:
                yield self._source[index]
            except DataError as error:
                yield error


def build(config: ImagesConfig, context: TaskContext) -> PromptSource:
    """Build the prompt source `images`."""
    selected = load("prompts", str(config.of.get("name")))
    model = selected.component.config
    options = {name: value for name, value in config.of.items() if name in model.model_fields and name != "name"}
    source: Any = selected.build(model.model_validate(options), context)
    if not isinstance(source, PromptSource) or hasattr(source, "make_stream"):
        raise DataError(
            f"{selected.label} has its own order or no length, so its images cannot be read",
            where="prompts.of",
            hint="put `images` into the sources of the mixture instead, or set streaming: false",
        )
    require_images = config.require_images or read_launch_env().world_size > 1
    fetch = config.downloads()
    reader = ImageReader(config.limits, _folder(config, context), fetch)
    return ImageRecords(source, reader, require_images=require_images, num_threads=_DOWNLOADS if fetch else 1)


def _folder(config: ImagesConfig, context: TaskContext) -> Path:
    base = context.base_folder
    if config.folder is not None:
        return base / Path(config.folder).expanduser()
    if not isinstance(path := config.of.get("path"), str):
        return base
    path = base / Path(path).expanduser()
    return path.parent if path.is_file() else path if path.is_dir() else base
