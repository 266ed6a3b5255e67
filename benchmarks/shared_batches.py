"""Measure what tenants of `rlhf serve-training` could gain if their adapters shared forward passes.

Two tenants send requests of the same size. In turns, the server computes one after the other, with an exchange of the
adapters' weights and gradients. The bound for sharing is the time of all rows in one request of one adapter: adapters
that share a pass have the same products with the base model, and more products with their own factors.

    python benchmarks/shared_batches.py --base recipes/smollm2/model
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import numpy as np
import torch

from rlhf_serve_training.adapters import AdapterSpec
from rlhf_serve_training.options import WorkerOptions
from rlhf_serve_training.wire import Row
from rlhf_serve_training.worker import Worker

SIZES = ((1, 16), (1, 64), (1, 256), (4, 128), (16, 128), (64, 512))
"""Rows and tokens per row of a request."""


def make_rows(num_rows: int, num_tokens: int, vocabulary: int) -> list[Row]:
    """Return rows of random tokens."""
    rng = np.random.default_rng(0)
    rows = []
    for _ in range(num_rows):
        ids = rng.integers(0, vocabulary, num_tokens + 1)
        weights = np.full(num_tokens, 1.0 / num_tokens, np.float32)
        rows.append(Row(ids[:-1], {"target_tokens": ids[1:], "weights": weights}))
    return rows


def seconds_of(worker: Worker, requests: list[tuple[str, list[Row]]], repetitions: int) -> float:
    """Return the median seconds of `forward_backward` requests, each a model and its rows, one after the other."""
    found = []
    is_cpu = worker.strategy.device.type == "cpu"
    clock = time.process_time if is_cpu else time.perf_counter
    for _ in range(repetitions + 1):
        begun = clock()
        for name, rows in requests:
            worker.forward(name, rows, "cross_entropy", {}, True)
        if not is_cpu:
            torch.cuda.synchronize()
        found.append(clock() - begun)
    return median(found[1:])


def main() -> None:
    """Print a table: seconds of both tenants in turns, the bound for one shared pass, and their ratio."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", required=True, help="model folder")
    parser.add_argument("--rank", type=int, default=16, help="rank of the adapters")
    parser.add_argument("--repetitions", type=int, default=5, help="counted repetitions")
    parser.add_argument("--precision", default="fp32", help="precision of the strategy `single`")
    parser.add_argument("--max-tokens", type=int, default=2**16, help="larger requests are left out")
    options = parser.parse_args()
    strategy = {"precision": options.precision}
    worker = Worker(WorkerOptions(options.base, max_rank=options.rank, strategy_options=strategy))
    for name in ("one", "two"):
        worker.create(name, AdapterSpec(options.rank))
    print("| rows x tokens of a request | in turns s | shared, at best s | turns / shared |\n|---|---|---|---|")
    for num_rows, num_tokens in SIZES:
        if num_rows * num_tokens > options.max_tokens:
            continue
        rows = make_rows(2 * num_rows, num_tokens, worker.vocabulary_size)
        turns = [("one", rows[:num_rows]), ("two", rows[num_rows:])]
        in_turns = seconds_of(worker, turns, options.repetitions)
        shared = seconds_of(worker, [("one", rows)], options.repetitions)
        print(f"| {num_rows} x {num_tokens} | {in_turns:.3f} | {shared:.3f} | {in_turns / shared:.2f} |", flush=True)
    worker.close()


if __name__ == "__main__":
    main()
