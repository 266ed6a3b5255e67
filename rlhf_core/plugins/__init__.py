"""Finds plugins by metadata, imports the selected one, and adapts plain functions as plugins."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
