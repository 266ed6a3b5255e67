"""Shared code of servers and clients: limits, keys, sockets, and reading of untrusted JSON."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
