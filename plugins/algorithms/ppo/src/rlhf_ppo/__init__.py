"""PPO for the rlhf framework: the algorithm, its value model and the seed's trainer classes.

`DetachedPPOTrainer`, and `DetachedPPOTrainerBase` to subclass, need the extra: pip install 'rlhf-ppo[ray]'.
"""

from __future__ import annotations

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .critic import Critic
    from .seed_trainer.base import OLTrainer
    from .seed_trainer.detached import DetachedPPOTrainer, DetachedPPOTrainerBase
    from .seed_trainer.trainer import PPOTrainer

__all__ = ["Critic", "DetachedPPOTrainer", "DetachedPPOTrainerBase", "OLTrainer", "PPOTrainer"]

_HOMES = {
    "Critic": "critic",
    "DetachedPPOTrainer": "seed_trainer.detached",
    "DetachedPPOTrainerBase": "seed_trainer.detached",
    "OLTrainer": "seed_trainer.base",
    "PPOTrainer": "seed_trainer.trainer",
}


def __getattr__(name: str) -> Any:
    """Import a class at first access, so that listing plugins loads neither torch nor ray."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if _HOMES[name].endswith("detached") and (find_spec("rlhf_ray") is None or find_spec("ray") is None):
        raise ImportError(f"{name} needs rlhf-ray, which is not installed: pip install 'rlhf-ppo[ray]'")
    return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
