"""Scoring of answers: calls rewards within a deadline, and combines their scores."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
