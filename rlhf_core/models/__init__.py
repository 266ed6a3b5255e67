"""Models: their kinds, the cost of a forward pass, and passes over finished groups."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
