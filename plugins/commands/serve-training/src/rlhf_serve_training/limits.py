"""Limits of the service, for each tenant."""

from __future__ import annotations

from dataclasses import dataclass

GIB, MIB = 2**30, 2**20


@dataclass(frozen=True, slots=True)
class Limits:
    """Bounds on memory, disk and work. A request beyond a bound is refused by name."""

    queued_requests: int = 4096
    """Requests that wait. Further ones get status 429, which the SDK retries."""
    queued_bytes: int = 256 * MIB
    """Bytes of the bodies that wait."""
    disk_bytes: int = 20 * GIB
    """Bytes of checkpoints. A request is refused if checkpoints and the journal use more than twice as much, and a new
    session, which a client needs to delete checkpoints, if they use more than three times as much."""
    models: int = 64
    """Models that are not unloaded. Memory holds fewer (--max-adapters), and the others are restored from disk."""
    samples_per_request: int = 256
    """Maximum `num_samples`."""
    request_tokens: int = 2**19
    """Tokens of the data of one request, or of its samples together. Other tenants wait for them."""
    rows_per_turn: int = 64
    """Sequences that are sampled in one turn."""
    data_per_request: int = 256
    """Maximum number of sequences of one request, by which the SDK splits them into chunks."""
    chunk_bytes: int = 4_000_000
    """Bytes of one chunk of `forward_backward`, as the SDK splits them."""
    body_bytes: int = 32 * MIB
    """Size of one request."""
    top_logprobs: int = 32
    """Maximum number of top tokens per position."""
    order_seconds: float = 600.0
    """Time for which a model's requests wait for one with a lower number. Then they fail, and the model continues."""
    state_seconds: float = 60.0
    """Work of a model after which its state is written. At most this much is computed again after a restart."""
    state_bytes: int = 64 * MIB
    """Bytes of a model's requests after which its state is written."""
    result_seconds: float = 3600.0
    """Time for which results are kept."""
    session_seconds: float = 7 * 86400.0
    """Time without a heartbeat after which a session is finished, and its models are unloaded. A finished session
    without checkpoints is forgotten after the same time."""
    ended_models: int = 256
    """Run folders of unloaded models that are kept, the newest of all tenants."""
    temporary_samplers: int = 8
    """Unnamed adapters for sampling that are kept for each model."""
