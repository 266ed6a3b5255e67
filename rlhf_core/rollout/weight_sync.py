"""Weight sync inside one process: the receiver that every engine uses, and the in-process publishers.

A version arrives whole or not at all. Arriving chunks are only referenced, beside the live weights; `commit` verifies
names and shapes and then copies them in place, so addresses stay. Call it between generations, so that none sees mixed
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ..errors import SyncError
from ..protocols import RolloutEngine, WeightReceiver, WeightSync
from ..strategy import Strategy
from ..util.tensor_files import untied_names

if TYPE_CHECKING:
    from torch import Tensor, nn

SHARD_BYTES = 512 * 1024**2
"""Largest shard that is gathered inside a trainer's process."""


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers by state-dict name; tied tensors appear once."""
    owners = untied_names(module)
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if owners[name] == name}


class ModuleReceiver:
    """Receives versions for a module of this process (see `WeightReceiver`).

    `only` names the part that is sent (an adapter, say): exactly those tensors must arrive.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        on_commit: Callable[[int], None],
        only: Callable[[str], bool] | None = None,
    ) -> None:
        self._module = module
        self._on_commit = on_commit
        self._only = only
        self._version: int | None = None
        self._staged: dict[str, Tensor] = {}

    def begin(self, version: int) -> None:
        """Open `version`; chunks staged for another one are dropped."""
        self._version = version
        self._staged = {}

    def stage(self, version: int, chunk: Mapping[str, Tensor]) -> None:
        if version != self._version:
            raise SyncError(f"a chunk of version {version} arrived while {self._version} is open", where="weight sync")
        self._staged.update(chunk)

    def commit(self, version: int) -> None:
        """Verify everything, then swap. Raises `SyncError` and keeps the old weights on any mismatch."""
        import torch

        if version != self._version:
            raise SyncError(f"version {version} was committed but {self._version} is open", where="weight sync")
        staged, self._staged, self._version = self._staged, {}, None
        live = {n: t for n, t in named_weights(self._module).items() if self._only is None or self._only(n)}
        verify_weights(live, staged, version)
        with torch.no_grad():
            for name, tensor in live.items():
                tensor.copy_(staged[name])
        self._on_commit(version)


def verify_weights(live: Mapping[str, Tensor], arrived: Mapping[str, Tensor], version: int) -> None:
    """Raise `SyncError` unless names and shapes match exactly, since a partial load would hide a failed sync."""
    missing = sorted(live.keys() - arrived.keys())
    unexpected = sorted(arrived.keys() - live.keys())
    shapes = [
        f"{name}: {tuple(arrived[name].shape)} for {tuple(live[name].shape)}"
        for name in live.keys() & arrived.keys()
        if arrived[name].shape != live[name].shape
    ]
    problems = [
        f"{what} {', '.join(names[:5])}{' …' if len(names) > 5 else ''}"
        for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", sorted(shapes)))
        if names
    ]
    if problems:
        raise SyncError(
            f"version {version} was refused: {'; '.join(problems)}",
            where="weight sync",
            hint="trainer and maker must load the same model with the same lora options",
        )


class SharedWeights:
    """Mode "shared": engine and trainer use one module; a publish only notifies the engine."""

    def __init__(self, engine: RolloutEngine) -> None:
        self._engine = engine

    def publish(self, version: int) -> None:
        self._engine.weights_updated(version)


class CopiedWeights:
    """The engine of this process has its own copy: every shard is staged, then all are swapped in."""

    def __init__(self, receiver: WeightReceiver, shards: Callable[[], Iterable[Mapping[str, Tensor]]]) -> None:
        """`shards`: returns the sender's current weights, full and named."""
        self._receiver = receiver
        self._shards = shards

    def publish(self, version: int) -> None:
        import torch

        self._receiver.begin(version)
        for shard in self._shards():
            # A shard may live in a buffer that the next one reuses, and on another device than the engine.
            self._receiver.stage(version, {name: torch.clone(tensor) for name, tensor in shard.items()})
        self._receiver.commit(version)


class NoReceiver:
    """Weight sync of a run without generation (an offline algorithm without evaluation by generation)."""

    def publish(self, version: int) -> None:
        """Do nothing."""


def build_engine_beside(
    strategy: Strategy,
    policy: nn.Module,
    *,
    build: Callable[[nn.Module], RolloutEngine],
    copy: Callable[[], nn.Module],
) -> tuple[RolloutEngine, WeightSync]:
    """An engine in a trainer's process: over `policy` itself if it is unsharded, else over a synced copy.

    copy: makes a model of the same architecture; its weights are replaced at the first publish.
    """
    if not strategy.shards_parameters:
        engine = build(strategy.unwrap(policy))
        return engine, SharedWeights(engine)
    engine = build(copy().to(strategy.device).eval().requires_grad_(False))
    return engine, CopiedWeights(engine.receiver(), lambda: strategy.state_dict_shards(policy, SHARD_BYTES))
