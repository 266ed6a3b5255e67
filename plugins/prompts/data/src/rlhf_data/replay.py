"""Replay of a run: its recorded tokens, with the log-probs of the policy that sampled them, instead of new answers."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlhf_core.errors import DataError
from rlhf_core.rollout import Played, Player, PlayerContext, Row
from rlhf_core.types import Completion, FinishReason, Prompt

MAX_NATS = 1e9
"""Bound on the size of a log-prob, which is also finite."""


@dataclass(frozen=True, slots=True)
class RecordedAnswer:
    """One answer of `samples.jsonl`."""

    prompt_ids: tuple[int, ...]
    completion: str
    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    """One per token of `token_ids`, in nats."""
    finish_reason: FinishReason
    policy_version: int
    policy_versions: tuple[int, ...]


class RecordedSamples:
    """The lines of a run's `samples.jsonl`, found by sample id and read one at a time."""

    def __init__(self, path: Path) -> None:
        """Find all lines.

        Args:
            path: The file.

        Raises:
            DataError: The file is missing, or a line is torn, is not a sample with tokens, or repeats a sample id.
        """
        self.path = path
        self._places: dict[int, tuple[int, int]] = {}
        """Sample id -> line number, and offset in the file."""
        digest, offset = sha256(), 0
        try:
            with path.open("rb") as file:
                self._state = _state_of(file.fileno())
                for number, line in enumerate(file, start=1):
                    self._add(number, offset, line)
                    digest.update(line)
                    offset += len(line)
        except OSError as error:
            reason = error.strerror or str(error)
            raise DataError(f"cannot be read: {reason}", where=str(path), hint="check player.replay") from error
        self.digest = digest.hexdigest()
        """SHA-256 of the file."""

    def _add(self, number: int, offset: int, line: bytes) -> None:
        if not line.endswith(b"\n"):
            problem = "is torn, because the run ended while it was written"
            raise DataError(problem, where=self._where(number), hint="resume that run, or delete the line")
        sample_id = _object(line, self._where(number)).get("sample_id")
        if not isinstance(sample_id, int) or sample_id in self._places:
            problem = f"repeats sample {sample_id}" if sample_id in self._places else "has no sample_id"
            raise DataError(problem, where=self._where(number), hint="replay an unchanged run")
        self._places[sample_id] = number, offset

    def check_complete(self, num_samples: int) -> None:
        """Raise `DataError` unless all samples with ids below `num_samples` are recorded."""
        missing = [each for each in range(num_samples) if each not in self._places]
        if missing:
            raise self._missing(missing[0], f"{len(missing)} of the {num_samples} samples of this run are")

    def answer(self, sample_id: int) -> RecordedAnswer:
        """Read the answer to a sample. Raises `DataError` if it is missing, invalid, or has changed."""
        if sample_id not in self._places:
            raise self._missing(sample_id, "that sample is")
        number, offset = self._places[sample_id]
        try:
            with self.path.open("rb") as file:
                is_unchanged = _state_of(file.fileno()) == self._state
                file.seek(offset)
                line = file.readline()
        except OSError as error:
            raise DataError(f"cannot be read: {error.strerror or error}", where=str(self.path)) from error
        if not is_unchanged:
            problem = "has changed while it was replayed"
            raise DataError(problem, where=str(self.path), hint="replay a run that has ended")
        return _answer(_object(line, self._where(number)), self._where(number))

    def _where(self, number: int) -> str:
        return f"{self.path}:{number}"

    def _missing(self, sample_id: int, subject: str) -> DataError:
        return DataError(
            f"lacks sample {sample_id}: {subject} not recorded",
            where=str(self.path),
            hint="use that run's train.prompts_per_episode and samples_per_prompt and at most its episodes, or set "
            "player.episodes. That run needs logging.samples: all, without prompts that were refused or dropped",
        )


class ReplayPlayer(Player):
    """Answers each prompt with the recorded tokens of the sample with the same id."""

    def __init__(self, context: PlayerContext, samples: RecordedSamples, limit: int | None) -> None:
        """Create the player.

        Args:
            context: The player that samples, and the run's tokenizer.
            samples: The recorded samples.
            limit: Position of the first prompt that is sampled instead. None replays all.
        """
        self._default = context.default
        self._tokenizer = context.tokenizer
        self._engine = context.engine
        self._samples = samples
        self._limit = limit

    def play(self, samples: Sequence[tuple[Prompt, int]]) -> Iterator[Played]:
        is_new = [self._limit is not None and prompt.position >= self._limit for prompt, _ in samples]
        for (prompt, sample_id), sampled in zip(samples, is_new, strict=True):
            if not sampled:
                yield self._recorded(prompt, sample_id)
        if new := [sample for sample, sampled in zip(samples, is_new, strict=True) if sampled]:
            yield from self._default.play(new)

    def _recorded(self, prompt: Prompt, sample_id: int) -> Played:
        answer, where = self._samples.answer(sample_id), f"{self._samples.path}, sample {sample_id}"
        if answer.prompt_ids != prompt.prompt_ids:
            raise DataError(
                "its prompt is not the one of this run",
                where=where,
                hint="use the prompts, train.seed, train.samples_per_prompt and model of that run",
            )
        text = self._tokenizer.decode(list(answer.token_ids), skip_special_tokens=True)
        if max(answer.token_ids) >= len(self._tokenizer) or text != answer.completion:
            problem = "its tokens are not those of its text, because the tokenizer differs or the file was changed"
            raise DataError(problem, where=where, hint="use that run's model.path, or replay an unchanged run")
        newest = self._engine.policy_version  # a sample is never newer than the trained weights
        completion = Completion(
            sample_id=sample_id,
            token_ids=answer.token_ids,
            logprobs=answer.logprobs,
            finish_reason=answer.finish_reason,
            policy_version=min(answer.policy_version, newest),
            policy_versions=tuple(min(version, newest) for version in answer.policy_versions),
        )
        row = Row(text=prompt.text, prompt_ids=prompt.prompt_ids, messages=prompt.messages)
        row.sample(completion, text)
        return Played(prompt, sample_id, (row,))

    def state_dict(self) -> dict[str, Any]:
        return {"digest": self._samples.digest}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Raise `DataError` if the file has changed since the checkpoint."""
        if state["digest"] != self._samples.digest:
            problem = "has changed since the checkpoint of this run"
            raise DataError(problem, where=str(self._samples.path), hint="start again with another --output")


def _state_of(descriptor: int) -> tuple[int, int]:
    """Size, and time of the last change in nanoseconds."""
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


def _object(line: bytes, where: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict):
        raise DataError("is not a JSON object", where=where, hint="replay an unchanged run")
    return record


def _answer(record: Mapping[str, Any], where: str) -> RecordedAnswer:
    """Check and convert one line."""
    keys = ("prompt_ids", "completion_ids", "logprobs", "action_mask")
    if absent := [key for key in keys if key not in record]:
        hint = "make that run again with --set logging.sample_tokens=true"
        raise DataError(f"lacks {absent[0]}", where=where, hint=hint)
    versions = record.get("policy_versions", [])
    ids, logprobs, sampled = record["completion_ids"], record["logprobs"], record["action_mask"]
    is_valid = (
        all(_is_list_of(values, int) for values in (record["prompt_ids"], ids, versions))
        and _is_list_of(logprobs, (int, float))
        and all(abs(value) < MAX_NATS for value in logprobs)
        and min([*ids, *record["prompt_ids"]], default=-1) >= 0
        and _is_list_of(sampled, bool)
        and 0 < len(ids) == len(logprobs) == len(sampled)
        and len(versions) in (0, len(ids))
        and all(sampled)
        and record.get("finish_reason") in ("stop", "length")
        and isinstance(record.get("policy_version"), int)
        and isinstance(record.get("completion"), str)
    )
    if not is_valid:
        raise DataError("is not a sample of a single answer with tokens", where=where, hint="replay an unchanged run")
    return RecordedAnswer(
        prompt_ids=tuple(record["prompt_ids"]),
        completion=record["completion"],
        token_ids=tuple(ids),
        logprobs=tuple(map(float, logprobs)),
        finish_reason=record["finish_reason"],
        policy_version=record["policy_version"],
        policy_versions=tuple(versions),
    )


def _is_list_of(values: Any, kind: Any) -> bool:
    return isinstance(values, list) and all(
        isinstance(each, kind) and (kind is bool or not isinstance(each, bool)) for each in values
    )
