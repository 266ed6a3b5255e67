"""PPO for the rlhf framework: the algorithm, its value model and ColossalChat's trainer classes.

`DetachedPPOTrainer`, and `DetachedPPOTrainerBase` to subclass, need the extra: pip install 'rlhf-ppo[ray]'. Classes are
imported on first use, so that listing plugins loads neither torch nor Ray.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
