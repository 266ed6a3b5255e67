"""Processes that can be killed: started, watched, asked and ended in one way, whatever runs in them."""

from __future__ import annotations

from .asked import ProcessFault, ProcessTimeout, RequestProcess, serve_requests
from .child import ChildProcess
from .parent_watch import end_with_parent

__all__ = ["ChildProcess", "ProcessFault", "ProcessTimeout", "RequestProcess", "end_with_parent", "serve_requests"]
