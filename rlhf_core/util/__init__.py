"""Small utilities of core, independent of training: files, text, random numbers, memory."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
