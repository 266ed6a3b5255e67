"""Weight sync inside one process: replaces the weights of a module that an engine generates with.

A version is applied completely or not at all, between generations, so that no generation uses mixed weights. The engine
is then notified by `weights_updated`.
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
"""Maximum size of a shard that a trainer process gathers."""


def named_weights(module: nn.Module) -> dict[str, Tensor]:
    """Return parameters and persistent buffers by state-dict name. Tied tensors appear once.

    Args:
        module: An unwrapped, unsharded model.

    Example:
        >>> import torch
        >>> list(named_weights(torch.nn.Linear(2, 1)))
        ['weight', 'bias']
    """
    owners = untied_names(module)
    return {name: tensor for name, tensor in module.state_dict(keep_vars=True).items() if owners[name] == name}


def verify_weights(live: Mapping[str, Tensor], arrived: Mapping[str, Tensor], version: int) -> None:
    """Check that names and shapes match exactly, since a partial load would hide a failed sync.

    Args:
        live: Name -> tensor of the module that will be changed.
        arrived: Name -> received tensor.
        version: Policy version, for the error.

    Raises:
        SyncError: A name is missing or unexpected, or a shape differs.

    Example:
        >>> import torch
        >>> verify_weights({"weight": torch.zeros(2)}, {"weight": torch.zeros(3)}, version=4)
        Traceback (most recent call last):
        rlhf_core.errors.SyncError: weight sync: version 4 was refused: wrong shape weight: (3,) for (2,)
        ...
    """
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
            f"version {version} was refused: {', '.join(problems)}",
            where="weight sync",
            hint="trainer and maker must load the same model with the same lora options",
        )


def replace_weights(
    module: nn.Module, arrived: Mapping[str, Tensor], version: int, *, only: Callable[[str], bool] | None = None
) -> None:
    """Copy the weights of a version into the module in place, so that their addresses do not change.

    Args:
        module: The module whose weights are replaced.
        arrived: Name -> received tensor, exactly those of the module or of `only`.
        version: Policy version, for errors.
        only: Selects the names of the part that is sent, such as an adapter. None selects all weights.

    Raises:
        SyncError: Names or shapes differ. All old weights are kept.
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
    """Build an engine in a trainer's process.

    An unsharded policy is used by the engine directly, and publishing only notifies the engine. Otherwise the engine
    uses a copy, and publishing gathers the weights.

    Args:
        strategy: The strategy that prepared the policy.
        policy: The prepared policy.
        build: Module -> engine over it.
        copy: Builds a model of the same architecture, whose weights are replaced at the first publish.

    Returns:
        The engine, and a function that publishes the policy to it as a version. Collective if the policy is sharded.
    """
    if not strategy.shards_parameters:
        engine = build(strategy.unwrap(policy))
        return engine, engine.weights_updated
    own = copy().to(strategy.device).eval().requires_grad_(False)
    engine = build(own)

    def publish(version: int) -> None:
        arrived: dict[str, Tensor] = {}
        for shard in strategy.state_dict_shards(policy, SHARD_BYTES):
            # Cloned, since the next shard may reuse the buffer.
            arrived |= {name: tensor.clone() for name, tensor in shard.items()}
        replace_weights(own, arrived, version)
        engine.weights_updated(version)

    return engine, publish
