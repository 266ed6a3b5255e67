"""Completions and rows as JSON values. Lists of numbers are base64, a third of the size of their digits."""

from __future__ import annotations

import hashlib
import json
from array import array
from base64 import b64decode, b64encode
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict
from typing import Any, Literal

from rlhf_core.columns import Column, Columns
from rlhf_core.rollout.row import Row
from rlhf_core.types import Completion, GenerationRequest, SamplingParams, Turn

Record = dict[str, Any]
_IDS: Literal["i"] = "i"
_FLOATS: Literal["d"] = "d"


def packed(values: Iterable[float], kind: Literal["i", "d"]) -> str:
    """Return integers of 32 bits (`i`) or floats of 64 bits (`d`) as base64.

    Example:
        >>> unpacked(packed([1, 2], "i"), "i")
        (1, 2)
    """
    numbers = array(kind, values) if kind == _FLOATS else array(kind, map(int, values))
    return b64encode(numbers.tobytes()).decode()


def unpacked(text: str, kind: Literal["i", "d"]) -> tuple[Any, ...]:
    """Return the numbers of `packed`. Raises `ValueError` if the text is not base64 of whole numbers."""
    numbers = array(kind)
    numbers.frombytes(b64decode(text, validate=True))
    return tuple(numbers)


class RequestKeys:
    """Digests of what determines an answer, besides the weights and the noise of its sample."""

    def __init__(self, sampling: SamplingParams) -> None:
        """Prepare the keys of a call to the engine.

        Args:
            sampling: Sampling parameters of the call.
        """
        self._sampling = hashlib.blake2b(_json(asdict(sampling)), digest_size=12)

    def of(self, request: GenerationRequest) -> str:
        """Return the key of a request.

        Args:
            request: The request.
        """
        digest = self._sampling.copy()
        digest.update(array(_IDS, request.prompt_ids).tobytes())
        for name, value in sorted(request.inputs.items()):
            digest.update(f"{name} {tensor_digest(value)}".encode())
        digest.update(_json([request.branch, request.offset, request.max_new_tokens, request.options]))
        return digest.hexdigest()


def tensor_digest(value: Any) -> str:
    """Return a digest of a tensor's values, shape and dtype.

    Example:
        >>> import torch
        >>> tensor_digest(torch.zeros(2)) == tensor_digest(torch.zeros(2, 1))
        False
    """
    plain = value.detach().cpu().contiguous().numpy()
    head = f"{plain.dtype} {plain.shape} ".encode()
    return hashlib.blake2b(head + plain.tobytes(), digest_size=16).hexdigest()


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True, default=str).encode("utf-8", "surrogatepass")


def reply_key(token_ids: tuple[int, ...]) -> str:
    """Return a digest of a turn's tokens."""
    return hashlib.blake2b(array(_IDS, token_ids).tobytes(), digest_size=8).hexdigest()


def completion_record(completion: Completion) -> Record:
    """Return a completion as JSON values, without its sample and version.

    Raises `TypeError` for a column that is neither JSON values nor a tensor or array.
    """
    support = completion.support_ids
    record: Record = {
        "ids": packed(completion.token_ids, _IDS),
        "logprobs": packed(completion.logprobs, _FLOATS),
        "finish": completion.finish_reason,
        "branch": completion.branch,
    }
    if support is not None:
        record["support"] = [packed(ids, _IDS) for ids in support]
    if completion.columns:
        record["columns"] = json.loads(json.dumps(dict(completion.columns), default=_to_list))
    return record


def completion_of(record: Record, sample_id: int, version: int) -> Completion:
    """Return the completion of a record. Raises `KeyError`, `TypeError` or `ValueError` if it is damaged."""
    support = record.get("support")
    return Completion(
        sample_id=sample_id,
        branch=record["branch"],
        token_ids=unpacked(record["ids"], _IDS),
        logprobs=unpacked(record["logprobs"], _FLOATS),
        finish_reason=record["finish"],
        policy_version=version,
        support_ids=None if support is None else [unpacked(ids, _IDS) for ids in support],
        columns=record.get("columns", {}),
    )


def row_record(row: Row, key_of: Callable[[Completion], str]) -> Record:
    """Return a row as JSON values, with a key in place of each completion.

    Raises `TypeError` or `ValueError` for values that JSON cannot represent, and for images in observations.

    Args:
        row: A row of a finished episode.
        key_of: Returns the key of a recorded completion.
    """
    if row.columns.model_inputs:
        raise TypeError("inputs of the model are not recorded, so a resume plays the episode with its recorded turns")
    turns = []
    for place, turn in enumerate(row.turns):
        values = {**turn.to_mapping(), "token_ids": packed(turn.token_ids, _IDS), "logprobs": None}
        if place in row.sampled:
            number, completion = row.sampled[place]
            values |= {"token_ids": None, "number": number, "key": key_of(completion)}
        turns.append(values)
    columns = {name: value if isinstance(value, dict) else value.tolist() for name, value in row.columns.items()}
    record = {
        "branch": row.branch,
        "text": row.text,
        "prompt_ids": packed(row.prompt_ids, _IDS),
        "messages": None if row.messages is None else [dict(each) for each in row.messages],
        "turns": turns,
        "num_shared_turns": row.num_shared_turns,
        "finish_reason": row.finish_reason,
        "columns": columns,
    }
    return dict(json.loads(json.dumps(record, allow_nan=False)))


def row_of(record: Record, completion_of_key: Callable[[str], Completion], kinds: Mapping[str, Column]) -> Row:
    """Return the row of a record. Raises `KeyError`, `TypeError` or `ValueError` if it is damaged.

    Args:
        record: Result of `row_record`.
        completion_of_key: Returns the completion of a key.
        kinds: Declarations of the row's columns.
    """
    sampled: dict[int, tuple[int, Completion]] = {}
    turns = []
    for place, each in enumerate(record["turns"]):
        values = dict(each)
        if (key := values.pop("key", None)) is not None:
            sampled[place] = values.pop("number"), completion_of_key(key)
            values |= {"token_ids": sampled[place][1].token_ids, "logprobs": sampled[place][1].logprobs}
        else:
            values["token_ids"] = unpacked(values["token_ids"], _IDS)
            values["logprobs"] = (0.0,) * len(values["token_ids"])
        turns.append(Turn.from_mapping(values))
    messages = record["messages"]
    return Row(
        branch=record["branch"],
        text=record["text"],
        prompt_ids=unpacked(record["prompt_ids"], _IDS),
        messages=None if messages is None else tuple(messages),
        turns=turns,
        sampled=sampled,
        num_shared_turns=record["num_shared_turns"],
        finish_reason=record["finish_reason"],
        columns=Columns(record["columns"], kinds),
    )


def _to_list(value: Any) -> Any:
    if not hasattr(value, "tolist"):
        raise TypeError(f"{type(value).__name__} is not a JSON value")
    return value.tolist()
