"""`samples.jsonl`: one line per training sample."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from ..errors import RlhfError
from ..types import FinishReason, Rollout, Turn
from ..util.jsonl import LineFile, dump_line, truncate_lines

T = TypeVar("T")
Keep = Literal["all", "none"] | int
"""Samples of an episode to write: all, none, or at most this many, spread over the episode."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SampleRecord:
    """One line."""

    sample_id: int
    episode: int
    policy_version: int
    prompt: str
    completion: str
    rewards: Mapping[str, float]
    """Raw score by reward name."""
    score: float | None
    """Combined score."""
    finish_reason: FinishReason
    num_tokens: int
    """Response tokens that the policy sampled, EOS included."""
    branch: int = 0
    turns: Sequence[Mapping[str, Any]] | None = None
    """Turns of an environment's episode; None for a single answer."""
    policy_versions: Sequence[int] | None = None
    """One for each token of the response, -1 for given ones; None where all are `policy_version`."""
    prompt_ids: Sequence[int] | None = None
    """None, like the next two, unless `logging.sample_tokens` is set."""
    completion_ids: Sequence[int] | None = None
    """The whole response: sampled tokens, and the observations between them."""
    action_mask: Sequence[bool] | None = None
    """One for each of `completion_ids`: whether the policy chose the token and it counts."""

    @classmethod
    def of(
        cls,
        rollout: Rollout,
        *,
        episode: int,
        rewards: Mapping[str, float],
        score: float | None,
        plays: bool = False,
        tokens: bool = False,
    ) -> SampleRecord:
        """plays: whether the sample is an environment's episode, whose turns are written. tokens: write ids, too."""
        mask = rollout.action_mask or (True,) * len(rollout.completion_ids)
        return cls(
            sample_id=rollout.sample_id,
            episode=episode,
            policy_version=rollout.policy_version,
            prompt=rollout.prompt,
            completion=rollout.completion,
            rewards=dict(rewards),
            score=score if score is None or math.isfinite(score) else None,
            finish_reason=rollout.finish_reason,
            num_tokens=len(rollout.sampled_ids),
            branch=rollout.branch,
            turns=[_turn(turn) for turn in rollout.turns] if plays else None,
            policy_versions=rollout.policy_versions or None,
            prompt_ids=rollout.prompt_ids if tokens else None,
            completion_ids=rollout.completion_ids if tokens else None,
            action_mask=mask if tokens else None,
        )

    def to_json(self) -> dict[str, Any]:
        """The line, fields in order (`dataclasses.asdict` copies deeply, which costs as much as writing)."""
        played = () if self.turns is None else _PLAYED
        mixed = () if self.policy_versions is None else _MIXED
        tokens = () if self.completion_ids is None else _TOKENS
        return {name: getattr(self, name) for name in (*_FIELDS, *played, *mixed, *tokens)}


_PLAYED = ("branch", "turns")
_MIXED = ("policy_versions",)
_TOKENS = ("prompt_ids", "completion_ids", "action_mask")
_FIELDS = tuple(field.name for field in fields(SampleRecord) if field.name not in (*_PLAYED, *_MIXED, *_TOKENS))


def _turn(turn: Turn) -> dict[str, Any]:
    line: dict[str, Any] = {"role": turn.role, "text": turn.text}
    if turn.role == "policy":
        line["reward"] = turn.reward
    if turn.tool_calls:
        line["tool_calls"] = [
            {"name": call.name, "arguments": dict(call.arguments), **({"error": call.error} if call.error else {})}
            for call in turn.tool_calls
        ]
    return line


class SampleWriter:
    """Appends to `samples.jsonl`: all kept samples of an episode, or none of them if the disk is full.

    `flush` at the end of an episode makes it safe to write a checkpoint.
    """

    def __init__(self, path: Path, *, keep: Keep = "all") -> None:
        self._path = path
        self._keep = keep
        self._file = LineFile(path)

    @classmethod
    def resume(cls, path: Path, *, episode: int, keep: Keep = "all") -> SampleWriter:
        """Remove samples after `episode` (the checkpoint's last; -1: none) and continue.

        Raises DataError, naming the line, where one of those before is torn.
        """
        truncate_lines(path, "episode", episode)
        return cls(path, keep=keep)

    def write(self, records: Sequence[SampleRecord]) -> None:
        """Write the samples of an episode, in `sample_id` order."""
        if chosen := choose(records, self._keep):
            with self._errors_explained():
                self._file.append(b"".join(dump_line(record.to_json()) for record in chosen))

    def flush(self) -> None:
        """Wait until everything written so far is on disk."""
        with self._errors_explained():
            self._file.sync()

    def close(self) -> None:
        """Close the file. A second call does nothing."""
        self._file.close()

    def __enter__(self) -> SampleWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    @contextmanager
    def _errors_explained(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            raise RlhfError(
                f"samples cannot be written: {str(error) or type(error).__name__}",
                where=str(self._path),
                hint="free disk space, or set logging.samples to none",
            ) from error


def choose(records: Sequence[T], keep: Keep) -> Sequence[T]:
    """The samples of an episode to keep; a number selects that many, evenly spread and deterministic."""
    if keep == "none":
        return ()
    if keep == "all" or keep >= len(records):
        return records
    return [records[index * len(records) // keep] for index in range(keep)]
