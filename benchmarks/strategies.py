"""Memory and step time of each strategy compared with `ddp`: a model of 100M parameters on two processes.

    python benchmarks/strategies.py [--num-processes 2] [--parameters-m 100] [--rounds 3] [--only ddp,fsdp]
    python benchmarks/strategies.py --device cuda --num-processes 1 --rows 8 --columns 1024 --only single,liger

Expected sizes of weights, gradients and optimizer state are those declared by the strategies (`Strategy.state_bytes`,
which `rlhf plan` uses). Other columns: Adam's moments, summed over tensors (8 bytes per parameter, sharded by all but
`ddp`), and the process's high-water mark (GPU: the allocator's) above its memory before building the model, while the
model is built and wrapped, and during the updates, which add activations, buckets and gathered parts. Strategies take
turns, `--rounds` times. Figures are medians over the rounds, of the worse process. Ratios are to the first case.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import os
import socket
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from rlhf_core.strategy import Strategy
from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_testing.strategy_suite import StrategyCase
from rlhf_testing.tiny_training import Training

WARM_UP_STEPS, TIMED_STEPS = 1, 3


CASES = {
    case.name: case
    for case in (
        StrategyCase("ddp", "ddp", {"precision": "fp32"}),
        StrategyCase("low-level-zero 1", "low-level-zero", {"precision": "fp32"}),
        StrategyCase("low-level-zero 2", "low-level-zero", {"precision": "fp32", "stage": 2}),
        StrategyCase("fsdp", "fsdp", {"precision": "fp32"}),
        StrategyCase("gemini", "gemini"),
        StrategyCase("single", "single"),
        StrategyCase("liger", "single", {"liger": True}),
    )
}
ALONE = ("single", "liger")
"""Cases of one process, measured only if `--only` names them."""


def build_model(parameters_m: float) -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    width, vocabulary = 768, 8192
    layer = 4 * width * width + 3 * width * 2048
    layers = max(1, round((parameters_m * 1e6 - vocabulary * width) / layer))
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2048,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=12,
        tie_word_embeddings=True,
        use_cache=False,
    )
    return LlamaForCausalLM(config)


class PeakMemory:
    """Peak bytes above the memory at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        self._start = 0
        self._start = self.restart()

    def restart(self) -> int:
        """Reset the peak. Return the current bytes."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark
        return self.read()

    def read(self) -> int:
        """Peak since the last restart."""
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024 - self._start


def moment_bytes(optimizer: Any) -> int:
    from torch.distributed.tensor import DTensor

    total = 0
    for state in getattr(optimizer, "optim", optimizer).state.values():
        for value in state.values():
            if isinstance(value, torch.Tensor) and value.dim() > 0:
                local = value.to_local() if isinstance(value, DTensor) else value
                total += local.numel() * local.element_size()
    return total


def step(strategy: Strategy, trained: Any, ids: torch.Tensor) -> float:
    start = time.perf_counter()
    with strategy.accumulate(trained.model, is_last=True):
        with strategy.autocast():
            loss = trained.model(input_ids=ids, labels=ids).loss
        strategy.backward(loss, trained.optimizer)
    strategy.step(trained)
    strategy.all_gather_objects(None)
    if ids.is_cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start


def measure(
    rank: int, num_processes: int, port: int, case: StrategyCase, work: argparse.Namespace, result: Path
) -> None:
    if case.device == "cpu":
        torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    strategy = case.make()
    strategy.setup()
    Training(strategy).update()  # imports and thread pools are not part of the model
    torch.manual_seed(0)
    memory = PeakMemory(strategy.device)
    model = build_model(work.parameters_m)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=1e-5), max_grad_norm=1.0)
    del model
    built = memory.read()
    memory.restart()
    ids = torch.randint(0, 8192, (work.rows, work.columns), generator=torch.Generator().manual_seed(rank)).to(
        strategy.device
    )
    for _ in range(WARM_UP_STEPS):
        step(strategy, trained, ids)
    seconds = statistics.median(step(strategy, trained, ids) for _ in range(TIMED_STEPS))
    own = {
        "built": built,
        "peak": memory.read(),
        "moments": moment_bytes(trained.optimizer),
        "seconds": seconds,
        "expected": num_parameters * sum(strategy.state_bytes(num_processes, torch.float32)[:3]),
        "expected_moments": num_parameters * 8 / (1 if case.name in ("ddp", *ALONE) else num_processes),
    }
    everyone = strategy.all_gather_objects(own)
    strategy.teardown()
    if rank == 0:
        worst = {key: max(each[key] for each in everyone) for key in own}
        save_tree(result, worst)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--parameters-m", type=float, default=100.0, help="model size in million parameters")
    parser.add_argument("--rows", type=int, default=2, help="samples of a process per step")
    parser.add_argument("--columns", type=int, default=64, help="tokens of a sample")
    parser.add_argument("--only", help="names, separated by commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark-strategies"))
    args = parser.parse_args()
    names = args.only.split(",") if args.only else [name for name in CASES if name not in ALONE]
    rounds: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for _ in range(args.rounds):
        for name in names:
            case = dataclasses.replace(CASES[name], device=args.device)
            rounds[name].append(measured(case, args.num_processes, args, args.output))
    report({name: medians(seen) for name, seen in rounds.items()})


def measured(case: StrategyCase, num_processes: int, work: argparse.Namespace, output: Path) -> dict[str, Any]:
    """Measure one strategy in separate processes."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    result = output / f"{case.name}.safetensors"
    spawn(measure, (num_processes, port, case, work, result), nprocs=num_processes)
    return load_tree(result)


def medians(rounds: list[dict[str, Any]]) -> dict[str, float]:
    return {key: statistics.median(seen[key] for seen in rounds) for key in rounds[0]}


def report(seen: dict[str, dict[str, float]]) -> None:
    base = next(iter(seen.values()))
    first = next(iter(seen))
    print(f"| strategy | state expected, MB | peak of updates, MB | of {first} | peak of building, MB | moments, MB | expected | update, s | of {first} |")  # fmt: skip  # noqa: E501
    print("|---|---|---|---|---|---|---|---|---|")
    for name, each in seen.items():
        mb = {key: f"{value / 1e6:.0f}" for key, value in each.items()}
        of_peak, of_time = (f"{each[key] / base[key]:.2f}" for key in ("peak", "seconds"))
        print(
            f"| {name} | {mb['expected']} | {mb['peak']} | {of_peak} | {mb['built']} | {mb['moments']} "
            f"| {mb['expected_moments']} | {each['seconds']:.3f} | {of_time} |"
        )


if __name__ == "__main__":
    main()
