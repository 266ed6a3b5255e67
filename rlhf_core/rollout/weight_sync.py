"""Weight sync inside one process: new weights for a module that an engine generates with.

A version arrives whole or not at all. It is swapped in between generations, so that none sees mixed weights, and the
engine is then told by `weights_updated`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from ..errors import SyncError
from ..protocols import RolloutEngine
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


def replace_weights(
    module: nn.Module, arrived: Mapping[str, Tensor], version: int, *, only: Callable[[str], bool] | None = None
) -> None:
    """Copy the weights of a version into the module in place, so that addresses stay.

    only: the part that is sent (an adapter, say): exactly those tensors must have arrived.
    Raises `SyncError` and keeps the old weights unless names and shapes match exactly.
    """
    import torch

    live = {n: t for n, t in named_weights(module).items() if only is None or only(n)}
    verify_weights(live, arrived, version)
    with torch.no_grad():
        for name, tensor in live.items():
            tensor.copy_(arrived[name])


def build_colocated_engine(
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
    own = copy().to(strategy.device).eval().requires_grad_(False)
    engine = build(own)

    def publish(version: int) -> None:
        arrived: dict[str, Tensor] = {}
        for shard in strategy.state_dict_shards(policy, SHARD_BYTES):
            # Cloned: a shard may lie in a buffer that the next one reuses.
            arrived |= {name: tensor.clone() for name, tensor in shard.items()}
        replace_weights(own, arrived, version)
        engine.weights_updated(version)

    return engine, publish
