"""Memory and step time of each strategy against `ddp`: a model of 100M parameters on two processes.

    python benchmarks/strategies.py [--num-processes 2] [--parameters-m 100] [--only ddp,fsdp] [--device cpu]

Expected bytes per parameter and process, on N processes, activations not counted:

| strategy | weights | gradients | fp32 copy + Adam | sum for N = 2 |
|---|---|---|---|---|
| ddp fp32 | 4 | 4 | 8 | 16 |
| low-level-zero stage 1 fp32 | 4 | 4 | 12/N | 14 |
| low-level-zero stage 2 fp32 | 4 | 4/N | 12/N | 12 |
| fsdp fp32 | 4/N | 4/N | 8/N | 8 |
| gemini bf16 | 2/N | 2/N | 12/N | 8 |

Peak memory is the process's own high-water mark (GPU: the allocator's) above what it held before the model was
built, so it also has activations, buckets and gathered parts in it; optimizer state is counted tensor by tensor.
"""

from __future__ import annotations

import argparse
import gc
import os
import socket
import time
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import spawn

from rlhf_core.strategy import Strategy
from rlhf_core.tensor_files import load_tree, save_tree
from rlhf_core.testing.strategy_suite import StrategyCase

TOKENS = (2, 64)
WARM_UP_STEPS, TIMED_STEPS = 2, 3


def colossalai(name: str, module: str, config: str, **options: Any) -> StrategyCase:
    return StrategyCase(name, f"rlhf_colossalai.{module}:build", f"rlhf_colossalai.config:{config}", options)


CASES = {
    case.name: case
    for case in (
        colossalai("ddp", "ddp", "DdpConfig", precision="fp32"),
        colossalai("low-level-zero 1", "low_level_zero", "LowLevelZeroConfig", precision="fp32"),
        colossalai("low-level-zero 2", "low_level_zero", "LowLevelZeroConfig", precision="fp32", stage=2),
        StrategyCase("fsdp", "rlhf_torch.fsdp:build", "rlhf_torch.config:FsdpConfig", {"precision": "fp32"}),
        colossalai("gemini", "gemini", "GeminiConfig"),
    )
}


def expected_bytes(name: str, num_processes: int) -> tuple[float, float]:
    """Bytes per parameter: of everything, and of the optimizer's state alone (moments, not the fp32 weights)."""
    n = num_processes
    return {
        "ddp": (16.0, 8.0),
        "low-level-zero 1": (8 + 12 / n, 8 / n),
        "low-level-zero 2": (4 + 16 / n, 8 / n),
        "fsdp": (16 / n, 8 / n),
        "gemini": (16 / n, 8 / n),
    }[name]


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
    """Bytes above what was held at the start."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._start = torch.cuda.memory_allocated(device)
        else:
            Path("/proc/self/clear_refs").write_text("5")  # lowers the kernel's high-water mark to now
            self._start = self._high_water()

    def read(self) -> int:
        if self._device.type == "cuda":
            return torch.cuda.max_memory_allocated(self._device) - self._start
        return self._high_water() - self._start

    @staticmethod
    def _high_water() -> int:
        status = Path("/proc/self/status").read_text()
        return int(status.split("VmHWM:")[1].split()[0]) * 1024


def optimizer_bytes(optimizer: Any) -> int:
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
    strategy.barrier()
    return time.perf_counter() - start


def measure(rank: int, num_processes: int, port: int, case: StrategyCase, parameters_m: float, result: Path) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": num_processes, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    strategy = case.make()
    strategy.setup()
    torch.manual_seed(0)
    memory = PeakMemory(strategy.device)
    model = build_model(parameters_m)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    trained = strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=1e-5), max_grad_norm=1.0)
    del model
    ids = torch.randint(0, 8192, TOKENS, generator=torch.Generator().manual_seed(rank)).to(strategy.device)
    for _ in range(WARM_UP_STEPS):
        step(strategy, trained, ids)
    seconds = min(step(strategy, trained, ids) for _ in range(TIMED_STEPS))
    own = {"peak": memory.read(), "optimizer": optimizer_bytes(trained.optimizer), "seconds": seconds}
    everyone = strategy.all_gather_objects(own)
    strategy.teardown()
    if rank == 0:
        worst = {key: max(each[key] for each in everyone) for key in own}
        save_tree(result, {**worst, "parameters": num_parameters})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--num-processes", type=int, default=2)
    parser.add_argument("--parameters-m", type=float, default=100.0, help="model size in million parameters")
    parser.add_argument("--only", help="names, with commas")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--output", type=Path, default=Path("runs/benchmark-strategies"))
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(CASES)
    measured: dict[str, dict[str, Any]] = {}
    for name in names:
        case = CASES[name]
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        result = args.output / f"{name}.safetensors"
        case = StrategyCase(case.name, case.build, case.config, case.options, args.device)
        spawn(measure, (args.num_processes, port, case, args.parameters_m, result), nprocs=args.num_processes)
        measured[name] = load_tree(result)
    report(measured, args.num_processes)


def report(measured: dict[str, dict[str, Any]], num_processes: int) -> None:
    base = measured.get("ddp")
    print("| strategy | expected state MB | peak MB | of ddp | Adam state MB | expected | step s | of ddp |")
    print("|---|---|---|---|---|---|---|---|")
    for name, seen in measured.items():
        whole, adam = (per * seen["parameters"] / 1e6 for per in expected_bytes(name, num_processes))
        peak, seconds = seen["peak"] / 1e6, seen["seconds"]
        of_peak = f"{seen['peak'] / base['peak']:.2f}" if base else "-"
        of_time = f"{seconds / base['seconds']:.2f}" if base else "-"
        print(
            f"| {name} | {whole:.0f} | {peak:.0f} | {of_peak} | {seen['optimizer'] / 1e6:.0f} | {adam:.0f} "
            f"| {seconds:.2f} | {of_time} |"
        )


if __name__ == "__main__":
    main()
