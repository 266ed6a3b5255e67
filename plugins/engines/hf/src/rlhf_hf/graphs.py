"""Decoding passes of a few fixed shapes, each compiled, or captured once a generation as a CUDA graph and replayed.

A small model's decoding step is bound by starting its hundreds of kernels; a graph starts them all at once, and a
compiler makes fewer of them. The rows are rounded up to a power of two and the keys to the cache's capacity, so that
there are few shapes. Rows that only round up write into slots behind the used ones, which a prefill overwrites.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from rlhf_core.errors import ConfigError

from .cache import SlotCache

Step = Callable[[Tensor, Tensor], Tensor]
"""(token ids [n], positions [n]) -> logits [n, V], over the cache as `begin_step` left it."""
Replay = Callable[[], Tensor]
"""Replays the captured step on the current contents of its inputs."""


class FixedShapes:
    """Runs `step` with rows rounded up, over the whole capacity of `cache`; used for one generation's weights."""

    def __init__(
        self, step: Step, cache: SlotCache, num_slots: int, device: torch.device, capture: Callable[[Replay], Replay]
    ) -> None:
        self._step = step
        self._cache = cache
        self._num_slots = num_slots
        self._device = device
        self._capture = capture
        self._capacity = 0
        self._shapes: dict[int, tuple[Tensor, Tensor, Replay]] = {}
        """By number of rows: token ids, positions, and the replay that reads them."""

    def forget(self) -> None:
        """Capture every shape anew."""
        self._shapes.clear()

    def decode(self, token_ids: Sequence[int], lengths: Sequence[int]) -> Tensor:
        """Logits [n, V]; they are overwritten by the next call."""
        self._cache.reserve(max(lengths) + 1)
        if self._cache.capacity != self._capacity:
            self._capacity = self._cache.capacity
            self._shapes.clear()  # the cache was reallocated: captured graphs write to the old memory
        count = len(token_ids)
        rows = min(self._num_slots, 1 << (count - 1).bit_length())
        if rows not in self._shapes:
            self._shapes[rows] = self._prepared(rows)
        ids, positions, replay = self._shapes[rows]
        spare = [0] * (rows - count)
        ids.copy_(torch.tensor([*token_ids, *spare]))
        positions.copy_(torch.tensor([*lengths, *spare]))
        return replay()[:count]

    def _prepared(self, rows: int) -> tuple[Tensor, Tensor, Replay]:
        ids = torch.zeros(rows, dtype=torch.int64, device=self._device)
        positions = torch.zeros_like(ids)

        def run() -> Tensor:
            self._cache.begin_step(positions, self._capacity)
            return self._step(ids, positions)

        return ids, positions, _at_first_use(run, self._capture)


def _at_first_use(run: Replay, capture: Callable[[Replay], Replay]) -> Replay:
    """Capture at the first call, when the inputs hold real rows, since capturing runs the step."""
    captured: list[Replay] = []

    def replay() -> Tensor:
        if not captured:
            captured.append(capture(run))
        return captured[0]()

    return replay


MOST_COMPILED_SHAPES = 256
"""torch stops compiling after 8 shapes of one function; these are all powers of two at all lengths of the cache."""


def compile_step(run: Replay) -> Replay:
    """`run` through `torch.compile`; the code compiled for a shape is reused in later generations of the process."""
    compiled = torch.compile(run, dynamic=False)

    def replay() -> Tensor:
        from torch._dynamo import config
        from torch._dynamo.exc import TorchDynamoException

        try:
            with config.patch(recompile_limit=MOST_COMPILED_SHAPES):
                return compiled()
        except TorchDynamoException as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(
                f"torch cannot compile a decoding step of this model ({reason})",
                where="engine.compile",
                hint="remove engine.compile, or start with --set engine.compile=false",
            ) from error

    return replay


def capture_graph(run: Replay) -> Replay:
    """A CUDA graph of `run`, whose tensors must keep their addresses."""
    current, side = torch.cuda.current_stream(), torch.cuda.Stream()
    side.wait_stream(current)
    with torch.cuda.stream(side):
        run()  # warm-up: libraries initialise outside the graph
    current.wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        logits = run()

    def replay() -> Tensor:
        graph.replay()
        return logits

    return replay
