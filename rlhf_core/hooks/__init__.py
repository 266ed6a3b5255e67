"""Calls hook plugins: the relay, installed plugins, and the hook that feeds loggers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
