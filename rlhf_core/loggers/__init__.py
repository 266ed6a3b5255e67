"""Where the numbers of a run go: loggers (plugins of the kind `loggers`), and the performance evaluator.

They use the public hooks only. `metrics.jsonl` is not among them: it is always written.
"""

from .performance import PerformanceEvaluator, known_peak
from .relay import open_logger

__all__ = ["PerformanceEvaluator", "known_peak", "open_logger"]
