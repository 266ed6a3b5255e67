"""Images of vLLM."""

from . import inputs

__all__ = ["inputs"]
