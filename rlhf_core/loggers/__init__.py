"""Where the numbers of a run go: loggers (plugins of the kind `loggers`).

They use the public hooks only. `metrics.jsonl` is not among them: it is always written.
"""

from .relay import open_logger

__all__ = ["open_logger"]
