"""What algorithms that learn from sampled answers share: named advantages, a named policy loss, KL, off-policy weights."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
