"""Processes that train together: process group, launch environment, signals, and parent watch."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
