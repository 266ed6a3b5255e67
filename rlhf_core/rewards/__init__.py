"""Scoring answers: calling rewards within a deadline, in threads or processes, caching and combining them."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
