"""Rollouts: who makes which prompt, the maker, and how samples and weights travel in one process."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
