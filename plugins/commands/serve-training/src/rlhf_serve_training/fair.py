"""The queue of the service: turns of tenants in rotation, each of one batch of bounded size."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from .store import StoredRequest

TRAIN, SAMPLE = "train", "sample"


@dataclass(slots=True)
class _Lane:
    """Requests with the same owner: a model's in the order of their numbers, or samples of one adapter."""

    kind: str
    next_seq: int = 0
    waiting: dict[int, StoredRequest] = field(default_factory=dict)
    samples: deque[StoredRequest] = field(default_factory=deque)
    blocked_since: float | None = None
    """Time since which requests wait for a missing number."""

    @property
    def is_ready(self) -> bool:
        return self.next_seq in self.waiting if self.kind == TRAIN else bool(self.samples)


@dataclass(frozen=True, slots=True)
class Turn:
    """Requests to carry out together: one of a model, or samples of one adapter."""

    kind: str
    lane: str
    requests: tuple[StoredRequest, ...]


class FairQueue:
    """Turns of tenants in rotation. A tenant's models and adapters take turns within the tenant's.

    So a tenant waits for at most one turn of each other tenant. Used under the lock of its owner.
    """

    def __init__(self, size_of: Callable[[StoredRequest], int], *, max_batch: int) -> None:
        """Create an empty queue.

        Args:
            size_of: returns the number of sequences of a request for samples.
            max_batch: maximum number of sequences of a turn, unless one request has more.
        """
        self._tenants: OrderedDict[str, OrderedDict[str, _Lane]] = OrderedDict()
        self._size_of = size_of
        self._max_batch = max_batch
        self._count: dict[str, int] = {}
        self._bytes: dict[str, int] = {}

    def begin(self, tenant: str, lane: str, next_seq: int) -> None:
        """Open a model's lane.

        Args:
            tenant: its tenant.
            lane: id of the model.
            next_seq: number of the first request to carry out.
        """
        self._lanes(tenant).setdefault(lane, _Lane(TRAIN)).next_seq = next_seq

    def end(self, tenant: str, lane: str) -> list[StoredRequest]:
        """Close a lane, and return the requests that still waited in it."""
        closed = self._lanes(tenant).pop(lane, None)
        if closed is None:
            return []
        left = [*closed.waiting.values(), *closed.samples]
        for each in left:
            self._uncount(each)
        return left

    def add(self, request: StoredRequest, lane: str, kind: str) -> None:
        """Add a request.

        Args:
            request: the request.
            lane: id of the model, or key of the adapter to sample from.
            kind: `TRAIN` or `SAMPLE`.
        """
        found = self._lanes(request.tenant).setdefault(lane, _Lane(kind))
        if kind == TRAIN:
            found.waiting[request.seq] = request
        else:
            found.samples.append(request)
        self._count[request.tenant] = self._count.get(request.tenant, 0) + 1
        self._bytes[request.tenant] = self._bytes.get(request.tenant, 0) + request.num_bytes

    def remove(self, request_id: str) -> StoredRequest | None:
        """Remove a waiting sample by its id. Returns None if it is not waiting."""
        for lanes in self._tenants.values():
            for lane in lanes.values():
                if lane.kind != SAMPLE:
                    continue
                for each in lane.samples:
                    if each.id == request_id:
                        lane.samples.remove(each)
                        self._uncount(each)
                        return each
        return None

    def is_late(self, tenant: str, lane: str, seq: int) -> bool:
        """Whether a model's order has passed a number."""
        found = self._lanes(tenant).get(lane)
        return found is not None and found.kind == TRAIN and seq < found.next_seq

    def give_up(self, now: float, seconds: float) -> list[tuple[StoredRequest, int]]:
        """Remove requests that have waited for a missing number, and return them with that number.

        Args:
            now: the time.
            seconds: maximum wait.
        """
        given_up = []
        for lanes in self._tenants.values():
            for lane in lanes.values():
                if not (lane.next_seq and lane.waiting) or lane.is_ready:
                    lane.blocked_since = None
                elif lane.blocked_since is None:
                    lane.blocked_since = now
                elif now - lane.blocked_since > seconds:
                    given_up += [(each, lane.next_seq) for each in lane.waiting.values()]
                    lane.next_seq, lane.waiting, lane.blocked_since = max(lane.waiting) + 1, {}, None
        for each, _ in given_up:
            self._uncount(each)
        return given_up

    def load(self, tenant: str) -> tuple[int, int]:
        """Return the number and the bytes of a tenant's waiting requests."""
        return self._count.get(tenant, 0), self._bytes.get(tenant, 0)

    def has_room_for(self, lane_tenant: str, lane: str, seq: int) -> bool:
        """Whether a model's request is the next one, which is accepted even if the queue is full of later ones."""
        found = self._lanes(lane_tenant).get(lane)
        return found is not None and found.kind == TRAIN and found.next_seq == seq

    def take(self) -> Turn | None:
        """Return the next turn and move its tenant and lane to the end of their rotations. None if nothing is ready."""
        for tenant in list(self._tenants):
            lanes = self._tenants[tenant]
            for name in list(lanes):
                if lanes[name].is_ready:
                    self._tenants.move_to_end(tenant)
                    lanes.move_to_end(name)
                    requests = self._take_from(lanes[name])
                    for each in requests:
                        self._uncount(each)
                    kind = lanes[name].kind
                    if kind != TRAIN and not lanes[name].samples:
                        del lanes[name]
                    return Turn(kind, name, tuple(requests))
        return None

    def _take_from(self, lane: _Lane) -> Sequence[StoredRequest]:
        if lane.kind == TRAIN:
            request = lane.waiting.pop(lane.next_seq)
            lane.next_seq += 1
            return [request]
        taken, size = [lane.samples.popleft()], 0
        size = self._size_of(taken[0])
        while lane.samples and size + self._size_of(lane.samples[0]) <= self._max_batch:
            size += self._size_of(lane.samples[0])
            taken.append(lane.samples.popleft())
        return taken

    def _uncount(self, request: StoredRequest) -> None:
        self._count[request.tenant] -= 1
        self._bytes[request.tenant] -= request.num_bytes

    def _lanes(self, tenant: str) -> OrderedDict[str, _Lane]:
        return self._tenants.setdefault(tenant, OrderedDict())
