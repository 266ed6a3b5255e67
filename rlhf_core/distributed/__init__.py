"""Processes that train together: their group, how they were launched, signals, and the watch over a parent."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
