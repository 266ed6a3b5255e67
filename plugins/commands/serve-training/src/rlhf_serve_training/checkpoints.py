"""The checkpoints that clients save, each in its own folder."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from .limits import GIB, Limits
from .ranks import Ranks
from .store import Store, StoredRequest, encoded
from .wire import InvalidRequest

_METADATA_BYTES = 64 * 1024
SEGMENTS = {"training": "weights", "sampler": "sampler_weights", "external": "external_weights"}
"""Kind of checkpoint -> the part of its path."""


class Checkpoints:
    """Writes and finds checkpoints."""

    def __init__(self, store: Store, ranks: Ranks, limits: Limits, output: Path) -> None:
        """Create the object.

        Args:
            store: the journal.
            ranks: the ranks.
            limits: limits of the service.
            output: the output folder.
        """
        self._store, self._ranks, self._limits, self._output = store, ranks, limits, output

    def save(self, request: StoredRequest, kind: str, name: str, message: Any, *, overwrite: bool) -> str:
        """Write a checkpoint of a model and return its path. Raises `InvalidRequest`.

        Args:
            request: the request, of the model.
            kind: `training`, `sampler` or `external`.
            name: name of the checkpoint.
            message: the request's message, with `ttl_seconds` and `user_metadata` if it has them.
            overwrite: whether to replace a checkpoint with this name.
        """
        about = getattr(message, "user_metadata", None)
        if about is not None and len(encoded(about)) > _METADATA_BYTES:
            raise InvalidRequest(f"user_metadata has at most {_METADATA_BYTES} bytes")
        path = f"tinker://{request.owner}/{SEGMENTS[kind]}/{name}"
        old = self._store.row("SELECT folder FROM checkpoints WHERE path=?", path)
        folder = self._output / "checkpoints" / folder_name(request.owner) / SEGMENTS[kind] / f"{name}-{request.seq}"
        if old is not None and not overwrite and old["folder"] != str(folder):
            raise InvalidRequest(f"{path} exists")
        shutil.rmtree(folder, ignore_errors=True)  # of a killed server
        try:
            self._ranks.call("save", name=request.owner, folder=str(folder), with_optimizer=kind == "training")
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        size = sum(each.stat().st_size for each in folder.iterdir())
        if self._store.used_bytes(request.tenant) + size > self._limits.disk_bytes:
            shutil.rmtree(folder, ignore_errors=True)
            raise InvalidRequest(
                f"the disk limit of {self._limits.disk_bytes / GIB:.1f} GiB is reached: delete checkpoints first"
            )
        ttl = getattr(message, "ttl_seconds", None)
        self._store.change(
            "INSERT OR REPLACE INTO checkpoints VALUES(?,?,?,?,?,?,?,?,?,?)",
            *(path, request.tenant, request.owner, kind, name, str(folder), size, time.time()),
            *(None if ttl is None else time.time() + ttl, None if about is None else encoded(about).decode()),
        )
        self._store.rows("PRAGMA wal_checkpoint(FULL)")
        if old is not None and old["folder"] != str(folder):
            shutil.rmtree(old["folder"], ignore_errors=True)
        return path

    def drop_unnamed(self, model_id: str) -> None:
        """Delete all but the newest unnamed adapters of a model."""
        query = "SELECT path, folder FROM checkpoints WHERE model=? AND kind='sampler' AND name LIKE 'unnamed-%' "
        rows = self._store.rows(query + "ORDER BY created DESC", model_id)
        for row in rows[self._limits.temporary_samplers :]:
            self._store.change("DELETE FROM checkpoints WHERE path=?", row["path"])
            shutil.rmtree(row["folder"], ignore_errors=True)

    def folder(self, tenant: str, path: str) -> Path:
        """Return the folder of a tenant's checkpoint. Raises `InvalidRequest` for those of others, and unknown ones."""
        row = self._store.row("SELECT folder, expires FROM checkpoints WHERE path=? AND tenant=?", path, tenant)
        if row is None or (row["expires"] is not None and row["expires"] < time.time()):
            raise InvalidRequest(f"the checkpoint {path} does not exist")
        return Path(row["folder"])


def folder_name(model_id: str) -> str:
    """Return the name of a model's folders."""
    return model_id.replace(":", "-")
