"""Shared code of pages about runs: validated lines of a run folder, and the card that displays a sample."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
