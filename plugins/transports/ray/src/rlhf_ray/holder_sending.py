"""Sending samples to the trainers in turn, one batch ahead of the one that is being made."""

from __future__ import annotations

from collections.abc import Sequence

from rlhf_core.types import BufferItem

from .calls import Call, NamedActors, collect


def deal(items: Sequence[BufferItem], num_targets: int, first: int) -> tuple[list[list[BufferItem]], int]:
    """Items dealt in turn, the first one to target `first`; and who is next."""
    dealt: list[list[BufferItem]] = [[] for _ in range(num_targets)]
    for place, item in enumerate(items):
        dealt[(first + place) % num_targets].append(item)
    return dealt, (first + len(items)) % num_targets


class TrainerSender:
    """Sends to the trainers' buffers. Full buffers hold the maker up, since it waits for the batch before the last."""

    def __init__(self, trainers: NamedActors, *, timeout_seconds: float) -> None:
        """`timeout_seconds`: longest wait for a trainer to take what it was sent."""
        self._trainers = trainers
        self._timeout_seconds = timeout_seconds
        self._next = 0
        self._under_way: list[Call] = []

    def announce(self, maker: str, temperature: float) -> None:
        """Find the trainers, and tell them that a loop starts."""
        self._trainers.look_up_again()
        calls = self._trainers.call("maker_started", maker, temperature)
        collect(calls, timeout_seconds=self._timeout_seconds, doing="to hear that a maker starts")

    def send(self, items: Sequence[BufferItem]) -> None:
        """Send, once what was sent before has been taken; its errors are raised here."""
        self.flush()
        dealt, self._next = deal(items, len(self._trainers.names), self._next)
        self._under_way = [
            (name, self._trainers.handle(name).buffer_extend.remote(part))
            for name, part in zip(self._trainers.names, dealt, strict=True)
            if part
        ]

    def flush(self) -> None:
        """Wait until everything was taken."""
        calls, self._under_way = self._under_way, []
        collect(calls, timeout_seconds=self._timeout_seconds, doing="to take samples (is its buffer full?)")

    def say_done(self, maker: str, error: str | None) -> None:
        """Tell all trainers that the loop is over."""
        calls = self._trainers.call("maker_done", maker, error)
        collect(calls, timeout_seconds=self._timeout_seconds, doing="to hear that a maker is done")
