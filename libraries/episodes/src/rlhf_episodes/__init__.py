"""Multi-turn episodes: the contract of environments, the player, and the rows of tokens they produce."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
