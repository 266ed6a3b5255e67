"""Prompts: the endless stream of a run, and core's prompt sources."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
