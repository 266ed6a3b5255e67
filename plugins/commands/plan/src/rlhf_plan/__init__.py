"""`rlhf plan`, which estimates the memory of a run before weights are loaded, and the hook that measures a run."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
