"""Builds the parts of a resolved run, in the same way for every transport and process."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
