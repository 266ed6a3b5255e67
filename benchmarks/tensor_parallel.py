"""Memory of each process that trains a model together with others, by the layout of the processes.

    python benchmarks/tensor_parallel.py [--parameters-m 300] [--layouts fsdp:2 fsdp:4 tensor:4 sequence:4]

A Llama is generated and saved. In each layout every process reads its part of that folder, makes some updates on the
same rows, and saves the whole model. The process's own high-water mark (VmHWM of Linux, reset for each of the three
phases) is printed with the bytes of its weights and moments, with the estimate of `rlhf plan` without activations and
libraries, and relative to the bytes of the whole model: weights, gradients and moments in float32. The ratio is that of
weights and moments to the first layout. `tensor` is `fsdp` with `tensor_parallel: 2`, and `sequence` the same with
`sequence_parallel`. The number after the colon is the number of processes.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import socket
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import spawn
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

from rlhf_core.components import StrategyContext
from rlhf_core.config.sections import ModelConfig
from rlhf_models import load_policy
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.tiny_training import token_loss
from rlhf_torch.config import FsdpConfig
from rlhf_torch.fsdp import FsdpStrategy

LAYERS, ROWS, TOKENS = 16, 4, 32
OPTIONS: dict[str, dict[str, Any]] = {
    "fsdp": {},
    "tensor": {"tensor_parallel": 2},
    "sequence": {"tensor_parallel": 2, "sequence_parallel": True},
}


def save_model(folder: Path, parameters_m: float, vocabulary: int) -> None:
    """Save a model of about this many million parameters with tied embeddings: 11 hidden² per layer."""
    hidden = 64
    while LAYERS * 11 * hidden**2 + vocabulary * hidden < parameters_m * 1e6:
        hidden += 64
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=hidden * 7 // 3 // 32 * 32,
        num_hidden_layers=LAYERS,
        num_attention_heads=hidden // 32,
        num_key_value_heads=hidden // 32,
        tie_word_embeddings=True,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    tiny_tokenizer("0123456789>,").save_pretrained(folder)


class PeakMemory:
    """Peak memory of this process in bytes."""

    def restart(self) -> None:
        Path("/proc/self/clear_refs").write_text("5")  # resets the kernel's high-water mark

    def read(self) -> int:
        return int(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0]) * 1024


def held_bytes(tensors: Iterable[torch.Tensor]) -> int:
    local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
    return sum(each.numel() * each.element_size() for each in local)


def work(rank: int, processes: int, port: int, options: dict[str, Any], updates: int, folder: str, out: str) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "WORLD_SIZE": processes, "LOCAL_RANK": rank, "MASTER_PORT": port}
    os.environ.update({key: str(value) for key, value in place.items()}, MASTER_ADDR="127.0.0.1")
    strategy = FsdpStrategy(FsdpConfig(**options), StrategyContext("cpu"))
    strategy.setup()
    memory = PeakMemory()
    libraries = memory.read()
    with strategy.model_init_context():
        model = load_policy(ModelConfig(path=folder), dtype=torch.float32, seed=0)
    num_parameters, vocabulary = model.num_parameters(), model.config.vocab_size
    state = strategy.state_bytes(processes, torch.float32)
    planned = num_parameters * (state.weights + state.gradients + state.optimizer) + strategy.gathered_bytes(model)
    trained = strategy.prepare(model, strategy.make_optimizer(model.parameters(), lr=1e-4))
    del model
    built = memory.read()
    memory.restart()
    losses = []
    for update in range(updates):
        rows = torch.randint(0, vocabulary, (ROWS, TOKENS), generator=torch.Generator().manual_seed(update))
        own = rows[strategy.rank :: strategy.world_size]
        loss = token_loss(trained.model(input_ids=own).logits, own) / ROWS
        with strategy.accumulate(trained.model, is_last=True):
            strategy.backward(loss * strategy.gradient_average_factor, trained.optimizer)
        strategy.step(trained)
        losses.append(float(strategy.all_reduce(loss.detach())))
    updated = memory.read()
    memory.restart()
    strategy.save_model(trained.model, Path(out) / "saved")
    saved = memory.read()
    moments = [state[key] for state in trained.optimizer.state.values() for key in ("exp_avg", "exp_avg_sq")]
    told = {
        "num_parameters": num_parameters,
        "weights": held_bytes(trained.model.parameters()),
        "moments": held_bytes(moments),
        "planned": planned,
        "libraries": libraries,
        "building": built,
        "updates": updated,
        "saving": saved,
        "losses": losses,
    }
    (Path(out) / f"{rank}.json").write_text(json.dumps(told))
    strategy.teardown()


def measured(layout: str, updates: int, folder: str) -> list[dict[str, Any]]:
    """Results of each process of a layout. Also checks that the saved folder loads."""
    name, _, processes = layout.partition(":")
    with socket.socket() as free, tempfile.TemporaryDirectory() as out:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
        free.close()
        spawn(work, (int(processes), port, OPTIONS[name], updates, folder, out), nprocs=int(processes))
        config = Path(folder, "config.json").read_text()
        Path(out, "saved", "config.json").write_text(config)
        _, info = AutoModelForCausalLM.from_pretrained(Path(out, "saved"), output_loading_info=True)
        assert not info["missing_keys"] and not info["unexpected_keys"], info
        return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(int(processes))]


def report(seen: dict[str, list[dict[str, Any]]]) -> None:
    base = next(iter(seen.values()))
    num_parameters = base[0]["num_parameters"]
    whole = 16 * num_parameters
    print(f"{num_parameters / 1e6:.0f}M parameters: the whole takes {whole / 1e9:.2f} GB")
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {platform.machine()}, "
          f"{os.cpu_count()} cores, one thread a process\n")  # fmt: skip
    held, peaks = ("weights", "moments", "planned"), ("libraries", "building", "updates", "saving")
    print(
        "| layout | process | weights, MB | moments, MB | plan, MB | ratio | "
        + ", MB | ".join(peaks)
        + ", MB | peak / whole |"
    )
    print("|---" * 11 + "|")
    for layout, ranks in seen.items():
        for rank, each in enumerate(ranks):
            mb = {key: f"{each[key] / 1e6:,.0f}" for key in (*held, *peaks)}
            ratio = (each["weights"] + each["moments"]) / (base[0]["weights"] + base[0]["moments"])
            peak = max(each[key] for key in peaks)
            print(f"| {layout} | {rank} | {mb['weights']} | {mb['moments']} | {mb['planned']} | {ratio:.2f} | "
                  + " | ".join(mb[key] for key in peaks) + f" | {peak / whole:.2f} |")  # fmt: skip
    worst = {layout: max(abs(mine - first) for mine, first in zip(ranks[0]["losses"], base[0]["losses"], strict=True))
             for layout, ranks in seen.items()}  # fmt: skip
    print(f"\nlosses {base[0]['losses']}; largest difference to the first layout:", worst)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--parameters-m", type=float, default=300.0, help="model size in million parameters")
    parser.add_argument("--vocabulary", type=int, default=32_000)
    parser.add_argument("--updates", type=int, default=2)
    parser.add_argument("--layouts", nargs="+", default=["fsdp:2", "fsdp:4", "tensor:4", "sequence:4"])
    arguments = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        save_model(Path(folder), arguments.parameters_m, arguments.vocabulary)
        report({layout: measured(layout, arguments.updates, folder) for layout in arguments.layouts})


if __name__ == "__main__":
    main()
