"""Time that a checkpoint stops training: written at once, and in the background (`checkpoint.background`).

    python benchmarks/checkpoints.py [--parameters-m 100] [--folder DIR] [--rounds 3]

Prints seconds of the foreground, seconds until the checkpoint is complete, and the longest pause of another Python
thread meanwhile. The file system of DIR counts, so choose the one that runs are written to.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import threading
import time
from pathlib import Path

import torch
from torch import nn

from rlhf_core.components import StrategyContext
from rlhf_core.config import StrategyConfig
from rlhf_core.runfolder import CheckpointStore
from rlhf_core.strategy import TrainedModel
from rlhf_strategies import BackgroundStore, StrategyBase

WIDTH = 2048
TIMEOUT_SECONDS = 1800.0
_TICK_SECONDS = 0.005


def trained_model(strategy: StrategyBase, num_parameters: int) -> TrainedModel:
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(max(1, num_parameters // WIDTH**2))))
    trained = strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=1e-4))
    trained.model(torch.randn(1, WIDTH)).sum().backward()
    strategy.step(trained)
    return trained


def longest_pause(stop: threading.Event, found: list[float]) -> None:
    last = time.perf_counter()
    while not stop.wait(_TICK_SECONDS):
        now = time.perf_counter()
        found.append(now - last)
        last = now


def measure(strategy: StrategyBase, trained: TrainedModel, store: CheckpointStore) -> tuple[float, float, float]:
    """Return the seconds of the foreground, of everything, and of the longest pause after the foreground."""
    stop, pauses = threading.Event(), [0.0]
    ticking = threading.Thread(target=longest_pause, args=(stop, pauses))
    started = time.perf_counter()
    with store.finishing(strategy):
        with store.writing(1, strategy) as folder:
            strategy.save_model(trained.model, folder / "policy")
            strategy.save_optimizer(trained.optimizer, folder / "policy-optimizer")
        foreground = time.perf_counter() - started
        ticking.start()
    total = time.perf_counter() - started
    stop.set()
    ticking.join()
    return foreground, total, max(pauses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parameters-m", type=int, default=100)
    parser.add_argument("--folder", type=Path, default=None)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    strategy = StrategyBase(StrategyConfig(), StrategyContext("cpu"))
    trained = trained_model(strategy, options.parameters_m * 10**6)
    print("| checkpoint | foreground, s | complete after, s | longest pause, s |")
    print("|---|---|---|---|")
    for name in ("at once", "background"):
        rounds = []
        for _ in range(options.rounds):
            with tempfile.TemporaryDirectory(dir=options.folder) as folder:
                store = CheckpointStore(Path(folder))
                if name == "background":
                    store = BackgroundStore(store, timeout_seconds=TIMEOUT_SECONDS)
                rounds.append(measure(strategy, trained, store))
        medians = (f"{statistics.median(each):.2f}" for each in zip(*rounds, strict=True))
        print(f"| {name} | {' | '.join(medians)} |")


if __name__ == "__main__":
    main()
