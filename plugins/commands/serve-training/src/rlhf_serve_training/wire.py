"""Protobuf messages of the API, read into rows of arrays and written from them. Nothing is unpickled."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from google.protobuf.message import DecodeError
from numpy.typing import NDArray
from tinker.proto import tinker_public_pb2 as pb

Array = NDArray[np.generic]

_TYPES: Mapping[int, type[np.generic]] = {pb.DTYPE_FLOAT32: np.float32, pb.DTYPE_INT64: np.int64}
_MAX_CELLS = 2**26
"""Maximum number of values of all tensors of a request after sparse ones are expanded."""


class InvalidRequest(ValueError):
    """A request cannot be carried out. The message is for the client."""


@dataclass(frozen=True, slots=True)
class Row:
    """A sequence to train on, and the tensors that a loss reads."""

    token_ids: NDArray[np.int64]
    """[N]"""
    fields: Mapping[str, Array]
    """Name -> [N], or [N, K] for several targets per position. Integers for `target_tokens`, float32 otherwise."""

    @property
    def num_tokens(self) -> int:
        """Number of tokens of the sequence, the price of its forward pass."""
        return len(self.token_ids)

    @property
    def num_targets(self) -> int:
        """Targets per position: K, or 0 if the targets have one dimension."""
        targets = self.fields["target_tokens"]
        return targets.shape[1] if targets.ndim == 2 else 0


@dataclass(frozen=True, slots=True)
class ForwardRequest:
    """A decoded request for `forward` or `forward_backward`."""

    rows: tuple[Row, ...]
    loss: str
    config: Mapping[str, float | str]
    forward_only: bool


def parse_forward(body: bytes) -> pb.ForwardBackwardRequest:
    """Parse the message. Raises `InvalidRequest`."""
    message = pb.ForwardBackwardRequest()
    try:
        message.ParseFromString(body)
    except DecodeError:
        raise InvalidRequest("the body is not a ForwardBackwardRequest") from None
    return message


def forward_request(message: pb.ForwardBackwardRequest) -> ForwardRequest:
    """Read the rows and options of a message. Raises `InvalidRequest`, naming the datum."""
    config: dict[str, float | str] = dict(message.loss_fn_config)
    for name, value in message.loss_fn_config_v2.items():
        config[name] = value.text if value.WhichOneof("value") == "text" else value.number
    rows, num_cells = [], 0
    for index, datum in enumerate(message.data):
        try:
            num_cells += sum(map(_num_cells, datum.loss_fn_inputs.values()))
            if num_cells > _MAX_CELLS:
                raise InvalidRequest(
                    f"there are more than {_MAX_CELLS} values in all tensors together, send fewer data"
                )
            rows.append(_row(datum))
        except ValueError as error:
            raise InvalidRequest(f"datum {index}: {error}") from None
    if not rows:
        raise InvalidRequest("the request has no data")
    return ForwardRequest(tuple(rows), message.loss_fn, config, message.forward_only)


def _num_cells(message: pb.Tensor) -> int:
    if any(size < 0 for size in message.shape):
        raise InvalidRequest(f"a tensor has the shape {tuple(message.shape)}")
    return math.prod(message.shape)  # an integer of any size, so that it does not overflow


def _row(datum: pb.Datum) -> Row:
    chunks = []
    for chunk in datum.model_input:
        kind = chunk.WhichOneof("chunk")
        if kind != "encoded_text":
            raise InvalidRequest(f"a chunk of the kind {kind} is not supported, only encoded text")
        chunks.append(np.frombuffer(chunk.encoded_text.tokens, dtype=np.int32))
    token_ids = np.concatenate(chunks).astype(np.int64) if chunks else np.zeros(0, np.int64)
    if not len(token_ids):
        raise InvalidRequest("model_input has no tokens")
    fields = {name: _tensor(name, value) for name, value in datum.loss_fn_inputs.items()}
    if "target_tokens" not in fields:
        raise InvalidRequest("loss_fn_inputs lacks target_tokens")
    targets = fields["target_tokens"]
    if targets.ndim not in (1, 2) or not targets.size:
        raise InvalidRequest(f"target_tokens has the shape {targets.shape}, not [N] or [N, K]")
    for name, values in fields.items():
        if values.shape != fields["target_tokens"].shape or len(values) != len(token_ids):
            shapes = f"{values.shape}, target_tokens has {fields['target_tokens'].shape}, and {len(token_ids)} tokens"
            raise InvalidRequest(f"{name} has the shape {shapes} were sent")
    fields["target_tokens"] = fields["target_tokens"].astype(np.int64)
    return Row(token_ids, fields)


def _tensor(name: str, message: pb.Tensor) -> Array:
    dtype = _TYPES.get(message.dtype)
    if dtype is None or (name == "target_tokens") != (dtype is np.int64):
        raise InvalidRequest(f"{name} has the wrong type")
    shape = tuple(message.shape)
    if message.HasField("sparse_csr"):
        return _expanded(name, message, dtype, shape)
    values = np.frombuffer(message.dense, dtype=dtype)
    return _finite(name, values.reshape(shape if shape else (len(values),)))


def _expanded(name: str, message: pb.Tensor, dtype: type[np.generic], shape: tuple[int, ...]) -> Array:
    if len(shape) != 2:
        raise InvalidRequest(f"{name} is sparse and has {len(shape)} dimensions, not 2")
    csr = message.sparse_csr
    values = np.frombuffer(csr.values, dtype=dtype)
    ends, columns = (np.frombuffer(each, dtype=np.int64) for each in (csr.crow_indices, csr.col_indices))
    counts = np.diff(ends)
    if len(ends) != shape[0] + 1 or (counts < 0).any() or len(columns) != len(values) or counts.sum() != len(values):
        raise InvalidRequest(f"{name} has inconsistent sparse indices")
    if len(columns) and not 0 <= columns.min() <= columns.max() < shape[1]:
        raise InvalidRequest(f"{name} has a column outside of its shape")
    dense = np.zeros(shape, dtype=dtype)
    dense[np.repeat(np.arange(shape[0]), counts), columns] = values
    return _finite(name, dense)


def _finite(name: str, values: Array) -> Array:
    if not np.isfinite(values).all():
        raise InvalidRequest(f"{name} has a value that is not finite")
    return values


def forward_output(rows: Sequence[Mapping[str, Array]], metrics: Mapping[str, float]) -> bytes:
    """Serialize a `ForwardBackwardOutput`.

    Args:
        rows: for each datum, name -> [N] or [N, K] float32. All data have the same names.
        metrics: metric -> value. A name ends with its reduction over chunks, such as `loss:sum`.
    """
    message = pb.ForwardBackwardOutput(loss_fn_output_type="ArrayRecord")
    for name, value in metrics.items():
        message.metrics[name] = value
    start = 0
    while start < len(rows):  # data with the same trailing shape form a record
        shapes = {name: values.shape[1:] for name, values in rows[start].items()}
        end = start
        while end < len(rows) and {name: values.shape[1:] for name, values in rows[end].items()} == shapes:
            end += 1
        record = message.loss_fn_outputs.add(num_datums=end - start)
        for name, trailing in shapes.items():
            parts = [np.ascontiguousarray(row[name], dtype=np.float32).tobytes() for row in rows[start:end]]
            batch = record.fields[name]
            batch.data = b"".join(parts)
            batch.offsets = np.cumsum([0, *map(len, parts)], dtype=np.int64).tobytes()
            batch.dtype = pb.DTYPE_FLOAT32
            batch.trailing_shape.extend(trailing)
        start = end
    return bytes(message.SerializeToString())


@dataclass(frozen=True, slots=True)
class Sampled:
    """One sampled sequence."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    stopped: bool
    """Whether it ended at EOS or a stop sequence, instead of its limit."""
    top: Sequence[Mapping[int, float]] = ()
    """For each token, the most likely tokens at its position with their log-probs. Empty if not requested."""


def sample_output(
    sequences: Sequence[Sampled],
    prompt_logprobs: Sequence[float] | None = None,
    prompt_top: Sequence[Mapping[int, float]] | None = None,
) -> bytes:
    """Serialize a `SampleResponse`.

    Args:
        sequences: the samples.
        prompt_logprobs: one per prompt token, NaN for tokens without one. None if not requested.
        prompt_top: as `Sampled.top`, for the prompt. An empty mapping for tokens without one.
    """
    message = pb.SampleResponse()
    for each in sequences:
        sequence = message.sequences.add(stop_reason=pb.STOP_REASON_STOP if each.stopped else pb.STOP_REASON_LENGTH)
        sequence.tokens = np.asarray(each.token_ids, dtype=np.int32).tobytes()
        sequence.logprobs = np.asarray(each.logprobs, dtype=np.float32).tobytes()
        if each.top:
            _fill_top(sequence.topk_sampled_logprobs, each.top)
    if prompt_logprobs is not None:
        message.prompt_logprobs = np.asarray(prompt_logprobs, dtype=np.float32).tobytes()
    if prompt_top:
        _fill_top(message.topk_prompt_logprobs, prompt_top)
    return bytes(message.SerializeToString())


def _fill_top(message: pb.TopkLogprobs, top: Sequence[Mapping[int, float]]) -> None:
    k = max(map(len, top))
    ids = np.zeros((len(top), k), dtype=np.int32)
    logprobs = np.full((len(top), k), _ABSENT, dtype=np.float32)
    for row, values in enumerate(top):
        ids[row, : len(values)] = list(values)
        logprobs[row, : len(values)] = list(values.values())
    message.token_ids, message.logprobs, message.k, message.length = ids.tobytes(), logprobs.tobytes(), k, len(top)


_ABSENT = -99999.0
"""Log-prob in a cell of a table without a value."""
