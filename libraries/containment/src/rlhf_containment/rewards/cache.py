"""The caller `cache`: scores are kept on disk, so that an expensive reward scores each answer only once.

The key is a hash of the reward (plugin, version, source, options) and of its input, without `sample_id`, `group_id`,
`policy_version` and `logprobs`, which differ each time a text is sampled: enable the cache only for rewards that read
none of these, and that score each answer independently.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlhf_core.errors import RewardError
from rlhf_core.rewards.calling import Call, RewardCaller, RewardSpec
from rlhf_core.rewards.values import Outcome, TurnScores
from rlhf_core.types import Rollout

CACHE_FILE = "rewards.sqlite"

_BUSY_SECONDS = 30.0


def cache_key(spec: RewardSpec, rollout: Rollout) -> str | None:
    """A hash of the reward and of its view of a sample; None if that is not JSON."""
    seen = [
        [spec.name, spec.plugin, spec.source, dict(spec.options)],
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
    try:
        text = json.dumps(seen, sort_keys=True, ensure_ascii=True, separators=(",", ":"))
    except (TypeError, ValueError):  # e.g. a user-defined object in the metadata
        return None
    return sha256(text.encode("ascii")).hexdigest()


class CachedCalls(RewardCaller):
    """Asks about no answer whose score is known. Of samples with equal keys only the first is scored."""

    def __init__(self, spec: RewardSpec, folder: Path | None) -> None:
        """Without a folder the scores are kept in memory. Raises `RewardError` if the file cannot be used."""
        self._spec = spec
        self._num_hits = 0
        self._cache = ScoreCache(None if folder is None else folder / CACHE_FILE)

    async def call(self, rollouts: Sequence[Rollout], timeout_seconds: float, call: Call) -> Sequence[Outcome]:
        keys = [cache_key(self._spec, rollout) or place for place, rollout in enumerate(rollouts)]
        scores: Mapping[Any, float] = self._cache.get(key for key in keys if isinstance(key, str))
        found: dict[str | int, Outcome] = {**scores}
        self._num_hits += sum(key in found for key in keys)
        asked: dict[str | int, Rollout] = {}
        for key, rollout in zip(keys, rollouts, strict=True):
            if key not in found:
                asked.setdefault(key, rollout)
        if asked:
            fresh = dict(zip(asked, await call(list(asked.values()), timeout_seconds), strict=True))
            known = {key: each for key, each in fresh.items() if isinstance(key, str) and isinstance(each, float)}
            self._cache.put(known)
            found |= fresh
        return [found[key] for key in keys]

    def take_counts(self) -> Mapping[str, float]:
        taken, self._num_hits = self._num_hits, 0
        return {"cache_hits": float(taken)}

    def close(self) -> None:
        self._cache.close()


class ScoreCache:
    """A SQLite file of key -> score, which several processes may share. A stored score never changes.

    One that was earned in certain turns is kept as text, JSON pairs of turn and number.
    """

    def __init__(self, path: Path | None) -> None:
        """path: None keeps the scores in memory."""
        self._path = path
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._explained(), ExitStack() as undo:
            self._connection = sqlite3.connect(path or ":memory:", timeout=_BUSY_SECONDS, check_same_thread=False)
            undo.callback(self._connection.close)
            self._connection.execute("PRAGMA journal_mode=WAL")
            self._connection.execute("PRAGMA synchronous=NORMAL")
            self._connection.execute("CREATE TABLE IF NOT EXISTS scores (key TEXT PRIMARY KEY, score REAL NOT NULL)")
            undo.pop_all()

    def get(self, keys: Iterable[str]) -> dict[str, float]:
        """The cached scores, by key."""
        query = "SELECT key, score FROM scores WHERE key IN (SELECT value FROM json_each(?))"
        with self._explained():
            return {key: _score(kept) for key, kept in self._connection.execute(query, [json.dumps(list(keys))])}

    def put(self, scores: Mapping[str, float]) -> None:
        """Store scores; an existing key keeps its score."""
        rows = [(key, _kept(score)) for key, score in scores.items()]
        with self._explained(), self._connection:  # which commits, or rolls back
            self._connection.executemany("INSERT OR IGNORE INTO scores VALUES (?, ?)", rows)

    def close(self) -> None:
        self._connection.close()

    @contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise RewardError(
                f"the reward cache {CACHE_FILE} cannot be used: {error}",
                where="rewards",
                hint=f"delete {self._path}, or set cache: false",
            ) from error


def _kept(score: float) -> float | str:
    return json.dumps(list(score.turns.items())) if isinstance(score, TurnScores) else score


def _score(kept: float | str) -> float:
    return TurnScores(dict(json.loads(kept))) if isinstance(kept, str) else kept
