"""Test strategies in real processes, for authors of strategy plugins.

`run_strategies(cases, num_processes, folder)` starts the processes once, runs the same small training in each case, and
returns the results. A plugin's tests compare them with `train_alone(...)`, plain AdamW in this process. Losses are sums
over 8 samples divided by all their tokens, independent of the split, so the results must agree for every strategy,
number of processes and micro-batch size.
"""

from __future__ import annotations

import itertools
import math
import os
import socket
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rlhf_core.components import StrategyContext
from rlhf_core.errors import DivergenceError
from rlhf_core.place import resolve_device
from rlhf_core.plugins.selected import load
from rlhf_core.strategy import Strategy
from rlhf_core.util.tensor_files import load_tree, save_tree

from .tiny_training import SHARD_BYTES, TINY_RATE, Training

_START_SECONDS = 600.0


@dataclass(frozen=True)
class StrategyCase:
    """An installed strategy with its options."""

    name: str
    """Name of the case in the results."""
    plugin: str
    """Name of the strategy plugin."""
    options: Mapping[str, Any] = field(default_factory=dict)
    device: str = "cpu"
    optimizers: Sequence[str] = ()
    """Names of installed optimizers, other than AdamW, with which `optimizer_updates` is observed."""

    def make(self) -> Strategy:
        """Build the strategy in this process."""
        selected = load("strategies", self.plugin)
        config = selected.component.config.model_validate(dict(self.options))
        strategy = selected.build(config, StrategyContext(str(resolve_device(self.device))))
        assert isinstance(strategy, Strategy)
        return strategy


def observe(strategy: Strategy, folder: Path) -> dict[str, Any]:
    """Run all observations on a strategy. Collective.

    Args:
        strategy: Strategy after `setup()`.
        folder: Empty folder for saved models.

    Returns:
        Results by name of the observation, the same on every rank. Those of a training are its losses, gradient norms
        and weights.
    """
    import torch

    seen: dict[str, Any] = {}
    seen["whole"] = _updates(Training(strategy), [{"micro_batch": 4}] * 3)
    training = Training(strategy)
    with torch.no_grad():  # log-probs are computed before the first update
        training.trained.model(input_ids=torch.zeros(1, 3, dtype=torch.long, device=strategy.device))
    seen["accumulated"] = _updates(training, [{"micro_batch": 2}] * 3)
    if strategy.world_size == 2:
        seen["ragged"] = _updates(Training(strategy), [{"shares": [6, 2]}, {"shares": [0, 8]}, {"shares": [3, 5]}])
    seen["two_forwards"] = _updates(Training(strategy), [{"num_forwards": 2}] * 3)
    seen["checkpointing"] = _updates(
        Training(strategy, checkpointing=True), [{"micro_batch": 4, "num_forwards": 2}] * 3
    )
    seen["unclipped"] = _updates(Training(strategy, max_grad_norm=None), [{"micro_batch": 4}] * 2)
    seen["lora"] = _updates(Training(strategy, lora=True), [{"micro_batch": 2}] * 2)
    seen["shards"] = _shards(strategy)
    seen["resumed"] = _resume(strategy, folder)
    seen["diverged"] = _diverge(strategy)
    seen["dropped"] = _drop(strategy)
    seen["sixteen_bits"] = _sixteen_bits(strategy, folder / "sixteen-bits")
    return seen


def optimizer_updates(strategy: Strategy, optimizer: str) -> dict[str, Any]:
    """Make 50 updates with an optimizer, on a model large enough for 8-bit state. Collective.

    Args:
        strategy: Strategy after `setup()`.
        optimizer: Name of an installed optimizer.

    Returns:
        Losses, gradient norms and weights, the same on every rank.
    """
    training = Training(strategy, optimizer_name=optimizer, hidden_size=128)
    return _updates(training, [{"micro_batch": 4}] * 50)


def optimizer_updates_alone(optimizer: str) -> dict[str, Any]:
    """Make the updates of `optimizer_updates` in this process, with the strategy `single`.

    Args:
        optimizer: Name of an installed optimizer.

    Returns:
        The result of `optimizer_updates`.
    """
    strategy = StrategyCase("single", "single").make()
    strategy.setup()
    try:
        return optimizer_updates(strategy, optimizer)
    finally:
        strategy.teardown()


def _updates(training: Training, updates: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    pairs = [training.update(**update) for update in updates]
    return {"losses": [loss for loss, _ in pairs], "norms": [norm for _, norm in pairs], "weights": training.weights()}


def _shards(strategy: Strategy) -> dict[str, Any]:
    training = Training(strategy)
    sizes: list[tuple[int, int]] = []
    names: list[str] = []
    only: list[str] = []
    for shard in strategy.state_dict_shards(training.trained.model, SHARD_BYTES):
        sizes.append((len(shard), sum(tensor.numel() * tensor.element_size() for tensor in shard.values())))
        names.extend(shard)
    for shard in strategy.state_dict_shards(training.trained.model, SHARD_BYTES, lambda name: "norm" in name):
        only.extend(shard)
    state_names = list(strategy.unwrap(training.trained.model).state_dict())
    return {"sizes": sizes, "names": names, "only": only, "state_dict": state_names, "weights": training.weights()}


def _resume(strategy: Strategy, folder: Path) -> dict[str, Any]:
    first = Training(strategy)
    first.update()
    first.update()
    first.save(folder)
    saved = first.weights()
    uninterrupted = _updates(first, [{}, {}])
    second = Training(strategy, seed=7)
    second.load(folder, done=2)
    loaded = second.weights()
    return {"saved": saved, "loaded": loaded, "uninterrupted": uninterrupted, "resumed": _updates(second, [{}, {}])}


def _drop(strategy: Strategy) -> dict[str, Any]:
    """Make three updates, and drop gradients once after the first."""
    training = Training(strategy)
    training.update()
    before = training.weights()
    training.leave_gradients()
    strategy.drop_gradients(training.trained)
    after = training.weights()
    return {"before": before, "after": after, **_updates(training, [{}, {}])}


def _sixteen_bits(strategy: Strategy, folder: Path) -> dict[str, Any]:
    """Make tiny steps on weights loaded in bfloat16, with a resume in between.

    "finest" contains the most precise weights: master weights from the optimizer's file if it has any.
    """
    first = Training(strategy, dtype="bfloat16", lr=TINY_RATE)
    started = _updates(first, [{"micro_batch": 8}] * 3)
    first.save(folder)
    state = load_tree(folder / "optimizer.safetensors")["state"]
    finest = {**started["weights"], **{name: values["master"] for name, values in state.items() if "master" in values}}
    uninterrupted = _updates(first, [{}, {}])
    second = Training(strategy, seed=7, dtype="bfloat16", lr=TINY_RATE)
    second.load(folder, done=3)
    second.save(folder / "again")
    again = load_tree(folder / "again" / "optimizer.safetensors")["state"]
    return {
        **started,
        "finest": finest,
        "state": state,
        "state_again": again,
        "uninterrupted": uninterrupted,
        "resumed": _updates(second, [{}, {}]),
    }


def _diverge(strategy: Strategy) -> dict[str, Any]:
    training = Training(strategy)
    training.update()
    before = training.weights()
    training.leave_gradients(math.nan if strategy.is_main else 1.0)  # all ranks must reject the step
    message = ""
    try:
        strategy.step(training.trained)
    except DivergenceError as error:
        message = str(error)
    after = training.weights()
    refused = strategy.all_gather_objects(bool(message))
    return {"refused": refused, "before": before, "after": after, "next_loss": training.update()[0]}


def run_strategies(
    cases: Sequence[StrategyCase], num_processes: int, folder: Path, *, load_chain: Sequence[str] = ()
) -> dict[str, dict[str, Any]]:
    """Observe every case in `num_processes` processes, which are started once.

    Args:
        cases: Strategies to observe.
        num_processes: Number of ranks.
        folder: Empty folder for results and saved models.
        load_chain: Names of cases, each of which then loads the model saved by the previous one ("chain" in its
            result).

    Returns:
        Results of rank 0 by case name (see `observe`).
    """
    from torch.multiprocessing.spawn import start_processes

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    arguments = (num_processes, port, list(cases), folder, list(load_chain))
    # With `multiprocessing.set_forkserver_preload`, a test run imports torch and transformers only once.
    running = start_processes(_worker, arguments, nprocs=num_processes, join=False, start_method="forkserver")
    try:
        while not running.join():
            pass
    finally:  # also if a test's timeout interrupts the wait
        for process in running.processes:
            process.kill()
    return {case.name: load_tree(folder / f"{case.name}.safetensors") for case in cases}


def _worker(
    rank: int, num_processes: int, port: int, cases: list[StrategyCase], folder: Path, load_chain: list[str]
) -> None:
    import datetime

    import torch
    import torch.distributed as dist

    warnings.simplefilter("error")
    torch.set_num_threads(1)
    environment = {"RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in environment.items()}, MASTER_ADDR="127.0.0.1")
    # One group for all cases: strategies use an existing group. Joining by themselves is tested separately.
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=_START_SECONDS))
    results: dict[str, dict[str, Any]] = {}
    for case in cases:
        strategy = case.make()
        strategy.setup()
        results[case.name] = observe(strategy, folder / case.name)
        results[case.name]["optimizers"] = {name: optimizer_updates(strategy, name) for name in case.optimizers}
        strategy.teardown()
    for source, name in itertools.pairwise(load_chain):
        results[name]["chain"] = _load_from(next(case for case in cases if case.name == name), source, folder)
    if rank == 0:
        for name, seen in results.items():
            save_tree(folder / f"{name}.safetensors", seen)
    dist.destroy_process_group()


def _load_from(case: StrategyCase, source: str, folder: Path) -> dict[str, Any]:
    strategy = case.make()
    strategy.setup()
    training = Training(strategy, seed=7)
    training.load(folder / source, done=2)
    loaded = training.weights()
    training.save(folder / case.name)
    seen = {"loaded": loaded, "next_losses": [training.update()[0] for _ in range(2)]}
    strategy.teardown()
    return seen
