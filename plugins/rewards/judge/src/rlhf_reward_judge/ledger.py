"""Known replies of the judge and the spent budget, in the run folder, shared by all processes of a machine."""

from __future__ import annotations

import sqlite3
import threading
from pathlib import Path

_WAIT_SECONDS = 30.0
_SCHEMA = (
    "CREATE TABLE IF NOT EXISTS replies (key TEXT PRIMARY KEY, text TEXT NOT NULL)",
    "CREATE TABLE IF NOT EXISTS spent (id INTEGER PRIMARY KEY CHECK (id = 0), calls INTEGER, tokens INTEGER)",
    "INSERT OR IGNORE INTO spent VALUES (0, 0, 0)",
)


class BudgetSpent(Exception):
    """The calls would exceed the budget."""


class Ledger:
    """Stores replies and counts calls and tokens. Thread-safe. In a run folder, the counts survive a resume."""

    def __init__(self, path: Path | None, *, max_calls: int | None, max_tokens: int | None) -> None:
        """Open or create the database.

        Args:
            path: its file. None keeps everything in memory.
            max_calls: maximum number of calls, None for unlimited.
            max_tokens: maximum number of tokens, None for unlimited.
        """
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        self._max_calls = max_calls
        self._max_tokens = max_tokens
        self._lock = threading.Lock()
        self._database = sqlite3.connect(
            ":memory:" if path is None else path, timeout=_WAIT_SECONDS, check_same_thread=False, isolation_level=None
        )
        for statement in _SCHEMA:
            self._database.execute(statement)

    def reply(self, key: str) -> str | None:
        """Return the stored reply to a question, None if unknown."""
        with self._lock:
            row = self._database.execute("SELECT text FROM replies WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def remember(self, key: str, text: str) -> None:
        """Store a reply whose verdict could be read."""
        with self._lock:
            self._database.execute("INSERT OR REPLACE INTO replies VALUES (?, ?)", (key, text))

    def begin_calls(self, number: int) -> None:
        """Count calls before they are made. Raises `BudgetSpent`, without counting, if they exceed the budget."""
        with self._lock:
            self._database.execute("BEGIN IMMEDIATE")
            try:
                calls, tokens = self._database.execute("SELECT calls, tokens FROM spent").fetchone()
                if self._max_calls is not None and calls + number > self._max_calls:
                    raise BudgetSpent(f"{calls:,} of max_calls {self._max_calls:,} are made, {number:,} more needed")
                if self._max_tokens is not None and tokens >= self._max_tokens:
                    raise BudgetSpent(f"{tokens:,} tokens are spent, max_tokens is {self._max_tokens:,}")
                self._database.execute("UPDATE spent SET calls = calls + ?", (number,))
            finally:
                self._database.execute("COMMIT")

    def add_tokens(self, number: int) -> None:
        """Count the tokens of finished calls."""
        with self._lock:
            self._database.execute("UPDATE spent SET tokens = tokens + ?", (number,))

    def close(self) -> None:
        with self._lock:
            self._database.close()
