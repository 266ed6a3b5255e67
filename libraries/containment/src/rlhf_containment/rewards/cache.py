"""The caller `cache`: scores are kept on disk, so that an expensive reward scores each answer only once.

The key is a hash of the reward (plugin, version, source, options) and of its input, without `sample_id`, `group_id`,
`policy_version` and `logprobs`, which differ each time a text is sampled: enable the cache only for rewards that read
none of these, and that score each answer independently.
"""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlhf_core.errors import ConfigError, RewardError
from rlhf_core.rewards.calling import Outcome, RewardCaller, RewardSpec, Start
from rlhf_core.rewards.values import TurnScores
from rlhf_core.types import Rollout

CACHE_FILE = "rewards.sqlite"

_BUSY_SECONDS = 30.0


def reward_identity(name: str, plugin: str, options: Mapping[str, Any]) -> str | None:
    """A hash of the reward and its options; None if these are not JSON: then nothing is cached."""
    return _digest([name, plugin, dict(options)])


def cache_key(identity: str, rollout: Rollout) -> str | None:
    """A hash of the reward and of its view of a sample; None if that is not JSON."""
    return _digest(
        [
            identity,
            rollout.prompt,
            rollout.messages,
            rollout.prompt_ids,
            rollout.completion,
            rollout.completion_ids,
            rollout.answer,
            rollout.metadata,
            rollout.finish_reason,
            rollout.action_mask,
            [{**turn.to_mapping(), "logprobs": None} for turn in rollout.turns],
        ]
    )


def _digest(value: object) -> str | None:
    try:
        text = json.dumps(value, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    except (TypeError, ValueError):  # e.g. a user-defined object in the metadata
        return None
    return sha256(text.encode("ascii")).hexdigest()


class CachedCalls(RewardCaller):
    """Asks about no answer whose score is known. Of samples with equal keys only the first is scored."""

    def __init__(self, spec: RewardSpec, folder: Path | None) -> None:
        """Raises `ConfigError` without a folder, and `RewardError` if the file cannot be used."""
        if folder is None:
            raise ConfigError(f"{spec.name!r} asks for a cache, but this run keeps no folder for one", where="rewards")
        self._identity = reward_identity(spec.name, f"{spec.plugin} {spec.source}", spec.options)
        self._num_hits = 0
        self._cache = ScoreCache(folder / CACHE_FILE)

    def start(self, rollouts: Sequence[Rollout], score: Start) -> Callable[[], list[Outcome]]:
        identity = self._identity
        keys = [None if identity is None else cache_key(identity, rollout) for rollout in rollouts]
        known = self._cache.get(key for key in keys if key is not None)
        self._num_hits += sum(key in known for key in keys)
        first: dict[str | int, int] = {}
        for index, key in enumerate(keys):
            if key not in known:
                first.setdefault(index if key is None else key, index)
        waiting = score([rollouts[index] for index in first.values()])

        def collect() -> list[Outcome]:
            by_key: dict[str | int, Outcome] = dict(zip(first, waiting(), strict=True))
            fresh = {key: each for key, each in by_key.items() if isinstance(key, str) and isinstance(each, float)}
            self._cache.put(fresh)
            by_key.update(known)
            return [by_key[index if key is None else key] for index, key in enumerate(keys)]

        return collect

    def take_counts(self) -> Mapping[str, float]:
        taken, self._num_hits = self._num_hits, 0
        return {"cache_hits": float(taken)}

    def close(self) -> None:
        self._cache.close()


class ScoreCache:
    """A SQLite file of key -> score; safe across threads and processes. A stored score never changes.

    One that was earned in certain turns is kept as text, JSON pairs of turn and number.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._lock = threading.Lock()
        path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained(), ExitStack() as undo:
            # isolation_level None: every statement is its own transaction, so no lock outlives it.
            self._connection = sqlite3.connect(
                path, timeout=_BUSY_SECONDS, isolation_level=None, check_same_thread=False
            )
            undo.callback(self._connection.close)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score REAL NOT NULL)")
            undo.pop_all()

    def get(self, keys: Iterable[str]) -> dict[str, float]:
        """The cached scores, by key."""
        query = "SELECT key, score FROM scores WHERE key IN (SELECT value FROM json_each(?))"
        with self._lock, self._explained():
            return {key: _score(kept) for key, kept in self._connection.execute(query, [json.dumps(list(keys))])}

    def put(self, scores: Mapping[str, float]) -> None:
        """Store scores; an existing key keeps its score."""
        rows = [(key, _kept(score)) for key, score in scores.items()]
        with self._lock, self._explained(), self._connection:  # which commits, or rolls back
            self._connection.execute("BEGIN IMMEDIATE")
            self._connection.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?)", rows)

    def close(self) -> None:
        with self._lock:
            self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RewardError(
                f"the reward cache {self._path.name} cannot be used: {error}",
                where="rewards",
                hint=f"delete {self._path}, or set cache: false",
            ) from error


def _kept(score: float) -> float | str:
    return json.dumps(list(score.turns.items())) if isinstance(score, TurnScores) else score


def _score(kept: float | str) -> float:
    return TurnScores(dict(json.loads(kept))) if isinstance(kept, str) else kept
