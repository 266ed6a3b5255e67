"""Shared parts of algorithms with a named policy loss: advantages, KL, entropy, long and off-policy answers."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
