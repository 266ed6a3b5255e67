"""Adapters of vLLM."""

from . import request

__all__ = ["request"]
