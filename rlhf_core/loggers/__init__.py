"""Hook plugins that record a run: TensorBoard, Weights & Biases, and the performance evaluator.

They use the public hooks only. `metrics.jsonl` is not among them: it is always written.
"""

from .performance import PerformanceEvaluator
from .tensorboard import TensorBoardLogger
from .wandb import WandbLogger

__all__ = ["PerformanceEvaluator", "TensorBoardLogger", "WandbLogger"]
