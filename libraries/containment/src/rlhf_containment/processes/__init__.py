"""Processes that can be killed: started, watched, asked and ended in one way, whatever runs in them."""

from __future__ import annotations

from .asked import AskedProcess, ProcessFault, TooSlow, answer_requests
from .child import ChildProcess
from .parent_watch import end_with_parent

__all__ = ["AskedProcess", "ChildProcess", "ProcessFault", "TooSlow", "answer_requests", "end_with_parent"]
