"""Detached RLHF on Ray: the transport `ray`, and the seed's classes for direct use.

`DetachedTrainer`, `ExperienceMakerHolder`, `DetachedReplayBuffer`, and `local_ray`, which starts a Ray for a script
that uses them, are imported when they are first asked for, so that listing plugins loads neither torch nor Ray.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .cluster import local_ray
    from .detached_trainer import DetachedTrainer
    from .experience_maker_holder import ExperienceMakerHolder
    from .replay_buffer import DetachedReplayBuffer

__all__ = ["DetachedReplayBuffer", "DetachedTrainer", "ExperienceMakerHolder", "local_ray"]

_MODULES = {
    "DetachedReplayBuffer": "replay_buffer",
    "DetachedTrainer": "detached_trainer",
    "ExperienceMakerHolder": "experience_maker_holder",
    "local_ray": "cluster",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f".{_MODULES[name]}", __name__), name)
