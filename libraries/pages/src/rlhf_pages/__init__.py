"""What pages about runs share: lines of a run folder, checked, and the card of a sample."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
