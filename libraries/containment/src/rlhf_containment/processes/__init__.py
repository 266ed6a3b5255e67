"""Processes that can be killed: start them, send them requests, watch their memory and deadlines, end them."""

from __future__ import annotations

from .asked import ProcessFault, ProcessTimeout, RequestProcess, serve_requests
from .child import ChildProcess
from .parent_watch import end_with_parent

__all__ = ["ChildProcess", "ProcessFault", "ProcessTimeout", "RequestProcess", "end_with_parent", "serve_requests"]
