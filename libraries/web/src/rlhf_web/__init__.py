"""What servers and clients share: limits, keys, sockets, and JSON that a model or a stranger wrote."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
