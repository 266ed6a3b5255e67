"""Rollouts: assignment of prompts, the experience maker, and transfer of samples and weights in one process."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
