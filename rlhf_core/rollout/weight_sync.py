"""Weight sync inside one process: the receiver that every engine uses, and the in-process publishers.

A version arrives whole or not at all. Arriving chunks are only referenced, beside the live weights; `commit` verifies
names and shapes and then copies them in place, so addresses stay. Call it between generations, so that none sees mixed
weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import TYPE_CHECKING

from ..errors import SyncError
from ..protocols import RolloutEngine, WeightReceiver
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


def send_weights(receiver: WeightReceiver, shards: Iterable[Mapping[str, Tensor]], version: int) -> None:
    """Stage every shard of full, named weights at an engine of this process, then have it swap them all in."""
    import torch

    receiver.begin(version)
    for shard in shards:
        # A shard may live in a buffer that the next one reuses, and on another device than the engine.
        receiver.stage(version, {name: torch.clone(tensor) for name, tensor in shard.items()})
    receiver.commit(version)


def build_engine_beside(
    strategy: Strategy,
    policy: nn.Module,
    *,
    build: Callable[[nn.Module], RolloutEngine],
    copy: Callable[[], nn.Module],
) -> tuple[RolloutEngine, Callable[[int], None]]:
    """An engine in a trainer's process, and what publishes the policy to it as a version.

    It is over `policy` itself if that is unsharded, so that the engine is only told, else over a copy.
    copy: makes a model of the same architecture; its weights are replaced at the first publish.
    """
    if not strategy.shards_parameters:
        engine = build(strategy.unwrap(policy))
        return engine, engine.weights_updated
    engine = build(copy().to(strategy.device).eval().requires_grad_(False))
    receiver = engine.receiver()
    return engine, lambda version: send_weights(receiver, strategy.state_dict_shards(policy, SHARD_BYTES), version)
