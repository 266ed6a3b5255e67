"""The journal of the service: sessions, models, requests and checkpoints in one SQLite file.

A request is stored before the client receives its id, and its result before the client can receive the result. Its id
is a function of the client's own numbers, so a request that is sent twice is found here and done once.
"""

from __future__ import annotations

import json
import sqlite3
import threading
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import UserInputError

_VERSION = 1
_TABLES = """
CREATE TABLE IF NOT EXISTS sessions(
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, created REAL NOT NULL, seen REAL NOT NULL, finished TEXT, about TEXT);
CREATE TABLE IF NOT EXISTS models(
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, about TEXT NOT NULL, created REAL NOT NULL,
  used REAL NOT NULL, state TEXT, applied INTEGER NOT NULL DEFAULT 0, steps INTEGER NOT NULL DEFAULT 0,
  unloaded INTEGER NOT NULL DEFAULT 0);
CREATE TABLE IF NOT EXISTS requests(
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, owner TEXT NOT NULL, seq INTEGER NOT NULL, kind TEXT NOT NULL,
  body BLOB, status TEXT NOT NULL, type TEXT, result BLOB, created REAL NOT NULL, finished REAL,
  attempts INTEGER NOT NULL DEFAULT 0);
CREATE INDEX IF NOT EXISTS by_owner ON requests(owner, seq);
CREATE TABLE IF NOT EXISTS samplers(
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, session TEXT NOT NULL, model_path TEXT, base TEXT NOT NULL,
  created REAL NOT NULL);
CREATE TABLE IF NOT EXISTS checkpoints(
  path TEXT PRIMARY KEY, tenant TEXT NOT NULL, model TEXT NOT NULL, kind TEXT NOT NULL, name TEXT NOT NULL,
  folder TEXT NOT NULL, bytes INTEGER NOT NULL, created REAL NOT NULL, expires REAL, about TEXT);
CREATE TABLE IF NOT EXISTS counters(name TEXT PRIMARY KEY, value INTEGER NOT NULL);
"""

Status = Literal["queued", "done", "failed"]
JSON_RESULT, PROTO_RESULT = "json", "proto"
_ROW_BYTES = 256
"""Bytes of a row without its longest columns."""


@dataclass(frozen=True, slots=True)
class StoredRequest:
    """A request without its body and result."""

    id: str
    tenant: str
    owner: str
    """Id of the model, sampling session or session whose order it is part of."""
    seq: int
    kind: str
    status: Status
    num_bytes: int


class Store:
    """The tables, with one connection that threads share."""

    def __init__(self, folder: Path) -> None:
        """Open or create the file in a folder. Raises `UserInputError` if it has another format.

        Args:
            folder: the output folder, which exists.
        """
        path = folder / "service.sqlite"
        self._lock = threading.RLock()
        self._db = sqlite3.connect(path, check_same_thread=False, isolation_level=None)
        self._db.row_factory = sqlite3.Row
        self._db.execute("PRAGMA journal_mode=WAL")
        self._db.execute("PRAGMA synchronous=NORMAL")
        found = self._db.execute("PRAGMA user_version").fetchone()[0]
        if found not in (0, _VERSION):
            raise UserInputError(
                f"its format {found} is not {_VERSION}", where=str(path), hint="choose another --output"
            )
        self._db.executescript(_TABLES)
        self._db.execute(f"PRAGMA user_version={_VERSION}")

    @contextmanager
    def transaction(self) -> Iterator[None]:
        """Context whose changes are stored together, or not at all."""
        with self._lock:
            if self._db.in_transaction:
                yield
                return
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield
            except BaseException:
                self._db.execute("ROLLBACK")
                raise
            self._db.execute("COMMIT")

    def rows(self, query: str, *values: Any) -> list[sqlite3.Row]:
        """Return the rows of a query."""
        with self._lock:
            return self._db.execute(query, values).fetchall()

    def row(self, query: str, *values: Any) -> sqlite3.Row | None:
        """Return the first row of a query, or None."""
        found = self.rows(query, *values)
        return found[0] if found else None

    def change(self, query: str, *values: Any) -> int:
        """Run a statement and return the number of changed rows."""
        with self._lock:
            return self._db.execute(query, values).rowcount

    def add_request(self, request: StoredRequest, body: bytes) -> bool:
        """Store a request. Returns False if its id exists, which leaves the first one as it is."""
        now = time.time()
        return bool(
            self.change(
                "INSERT OR IGNORE INTO requests(id, tenant, owner, seq, kind, body, status, created) "
                "VALUES(?,?,?,?,?,?,?,?)",
                *(request.id, request.tenant, request.owner, request.seq, request.kind, body, request.status, now),
            )
        )

    def requests(self, where: str, *values: Any) -> list[StoredRequest]:
        """Return requests in the order of their owners' numbers. `where`: a condition in SQL."""
        query = (
            "SELECT id, tenant, owner, seq, kind, status, coalesce(length(body), 0) AS num_bytes FROM requests "
            f"WHERE {where} ORDER BY owner, seq"
        )
        return [StoredRequest(**dict(row)) for row in self.rows(query, *values)]

    def body(self, request_id: str) -> bytes | None:
        """Return the body of a request, or None if it is not stored any more."""
        row = self.row("SELECT body FROM requests WHERE id=?", request_id)
        return None if row is None else row["body"]

    def attempts(self, request_id: str) -> int:
        """Return how often a request was begun."""
        row = self.row("SELECT attempts FROM requests WHERE id=?", request_id)
        return 0 if row is None else int(row["attempts"])

    def begin(self, request_id: str) -> int:
        """Note that a request is begun, and return how often it was."""
        self.change("UPDATE requests SET attempts=attempts+1 WHERE id=?", request_id)
        return self.attempts(request_id)

    def finish(
        self, request_id: str, result: bytes, kind: str, *, failed: bool = False, keep_body: bool = False
    ) -> None:
        """Store the result of a queued request.

        Args:
            request_id: id of the request.
            result: JSON or protobuf.
            kind: `JSON_RESULT` or `PROTO_RESULT`.
            failed: whether the result is an error.
            keep_body: whether the request is carried out again when its model is restored.
        """
        self.change(
            "UPDATE requests SET status=?, result=?, type=?, finished=?, body=CASE WHEN ? THEN body END "
            "WHERE id=? AND status='queued'",
            *("failed" if failed else "done", result, kind, time.time(), keep_body, request_id),
        )

    def drop_bodies(self, owner: str, seq: int) -> None:
        """Drop the bodies of finished requests up to `seq`, which are not needed after a restart."""
        self.change("UPDATE requests SET body=NULL WHERE owner=? AND seq<=? AND status!='queued'", owner, seq)

    def drop_results(self, before: float) -> None:
        """Drop the results of requests that finished before a time, and samples and requests of unloaded models.

        The ids of other requests stay, so that they are not done again.
        """
        self.change("UPDATE requests SET result=NULL WHERE finished<? AND result IS NOT NULL", before)
        unloaded = "SELECT id FROM models WHERE unloaded=1"
        self.change(f"DELETE FROM requests WHERE finished<? AND (kind='asample' OR owner IN ({unloaded}))", before)

    def count(self, name: str) -> int:
        """Return the next number of a counter, from 1, which is never returned again."""
        query = "INSERT INTO counters VALUES(?, 1) ON CONFLICT(name) DO UPDATE SET value=value+1 RETURNING value"
        row = self.row(query, name)
        assert row is not None
        return int(row["value"])

    def drop_sessions(self, before: float) -> None:
        """Drop finished sessions without a sign of life since a time, unless checkpoints of their models are left.

        Args:
            before: the time.
        """
        has_checkpoint = "SELECT session FROM models WHERE unloaded=0 OR id IN (SELECT model FROM checkpoints)"
        with self.transaction():
            self.change(
                f"DELETE FROM sessions WHERE finished IS NOT NULL AND seen<? AND id NOT IN ({has_checkpoint})", before
            )
            for table in ("models", "samplers"):
                self.change(f"DELETE FROM {table} WHERE session NOT IN (SELECT id FROM sessions)")
            owners = " UNION ".join(f"SELECT id FROM {table}" for table in ("sessions", "models", "samplers"))
            self.change(f"DELETE FROM requests WHERE finished<? AND owner NOT IN ({owners})", before)

    def used_bytes(self, tenant: str) -> int:
        """Return the bytes of a tenant's checkpoints, and of its rows in the other tables."""
        sizes = {
            "checkpoints": "bytes",
            "requests": f"{_ROW_BYTES} + coalesce(length(body), 0) + coalesce(length(result), 0)",
            "sessions": f"{_ROW_BYTES} + coalesce(length(about), 0)",
            "models": f"{_ROW_BYTES} + length(about)",
            "samplers": f"{_ROW_BYTES}",
        }
        used = 0
        for table, size in sizes.items():
            row = self.row(f"SELECT coalesce(sum({size}), 0) AS n FROM {table} WHERE tenant=?", tenant)
            used += int(row["n"]) if row else 0
        return used

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._db.close()


def encoded(value: Mapping[str, Any]) -> bytes:
    """Return a JSON result."""
    return json.dumps(value).encode()


def failure(message: str, category: Literal["user", "server"]) -> bytes:
    """Return the result of a failed request, in the form of the API's `RequestFailedResponse`.

    Args:
        message: reason for the client.
        category: whether the client's request or the server is the cause.
    """
    return encoded({"error": message, "category": category})


def one_of(values: Sequence[Any]) -> str:
    """Return placeholders for a list in SQL."""
    return ",".join("?" * len(values))


def as_dict(text: str | None) -> dict[str, Any]:
    """Return a stored JSON object, empty for None."""
    found: dict[str, Any] = json.loads(text) if text else {}
    return found


def ids_of(rows: Iterable[sqlite3.Row]) -> list[str]:
    """Return the ids of rows."""
    return [row["id"] for row in rows]
