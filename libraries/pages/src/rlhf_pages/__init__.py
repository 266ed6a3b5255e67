"""Shared code of pages and lists of runs: finds run folders, reads their facts and lines, and displays a sample."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
