"""Detached RLHF on Ray: the transport `ray`, and the seed's classes for direct use.

`DetachedTrainer`, `ExperienceMakerHolder`, `DetachedReplayBuffer`, and `local_ray`, which starts a Ray for a script
that uses them, are imported on first access, so that listing plugins loads neither torch nor Ray.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
