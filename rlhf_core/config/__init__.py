"""The run file: its sections, how it is read and resolved, and its problems."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
