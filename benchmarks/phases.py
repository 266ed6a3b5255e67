"""Time of the phases of a PPO iteration, compared with the limits of the machine.

A phase's floor is the time of its matrix products at the rate of one large product, or, for the optimizer's step, of
its memory traffic at the rate of a large copy. Both rates are measured in this process before and after the run.
Attention scores, norms, activation functions, sampling and padding are not included in the floors. The time outside
phases and rewards is the framework's own.

    python benchmarks/phases.py --model M --iterations 3
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

PEERS = Path(__file__).parent / "peers"
sys.path.insert(0, str(PEERS))
from inputs import PROMPT_TOKENS, SIZES, Size, write_inputs  # noqa: E402 - next to run_rlhf.py
from run_rlhf import run_file  # noqa: E402

import rlhf_forward.scoring  # noqa: E402
import rlhf_objective.policy  # noqa: E402
import rlhf_ppo.critic  # noqa: E402
from rlhf_core import RolloutGroup, train  # noqa: E402
from rlhf_hf.engine import HfEngine  # noqa: E402
from rlhf_passes.fast_linear import multiply  # noqa: E402
from rlhf_strategies.base import StrategyBase  # noqa: E402
from rlhf_torch.single import SingleStrategy  # noqa: E402

BOUND = 0.03
PHASES = ("generate", "scoring forward", "forward", "backward", "step", "rewards")


class Clock:
    """Seconds of each phase during measured episodes."""

    def __init__(self, iterations: int) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.wall = 0.0
        self.tokens = 0
        self._measured = range(1, 1 + iterations)
        self._on = False
        self._started = 0.0

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        started = time.perf_counter()
        try:
            yield
        finally:
            if self._on:
                self.seconds[name] += time.perf_counter() - started

    def watch(self, owner: Any, attribute: str, phase: str) -> None:
        function: Callable[..., Any] = getattr(owner, attribute)

        def timed(*args: Any, **options: Any) -> Any:
            with self.phase(phase):
                return function(*args, **options)

        setattr(owner, attribute, timed)

    def watch_iterator(self, owner: Any, attribute: str, phase: str) -> None:
        function: Callable[..., Iterator[Any]] = getattr(owner, attribute)

        def timed(*args: Any, **options: Any) -> Iterator[Any]:
            with self.phase(phase):
                items = function(*args, **options)
            while True:
                with self.phase(phase):
                    item = next(items, None)
                if item is None:
                    return
                yield item

        setattr(owner, attribute, timed)

    def rlhf_episode_start(self, episode: int) -> None:
        self._on, self._started = episode in self._measured, time.perf_counter()

    def rlhf_make_experience_end(self, groups: Sequence[RolloutGroup]) -> None:
        self.tokens += _sampled(groups) if self._on else 0

    def rlhf_episode_end(self, metrics: Mapping[str, Any]) -> None:
        if self._on:
            self.seconds["rewards"] += metrics.get("time/reward_s", 0.0)
            self.wall += time.perf_counter() - self._started
        self._on = False


def _sampled(groups: Sequence[RolloutGroup]) -> int:
    return sum(len(rollout.sampled_ids) for group in groups for rollout in group.rollouts)


def rates() -> tuple[float, float]:
    """float32 operations per second of a large product, and bytes per second (read and written) of a large copy."""
    square, large = torch.randn(2048, 2048), torch.randn(64_000_000)
    target = torch.empty_like(large)

    def fastest(action: Callable[[], Any]) -> float:
        best = float("inf")
        for _ in range(5):
            started = time.perf_counter()
            action()
            best = min(best, time.perf_counter() - started)
        return best

    return 2 * 2048**3 / fastest(lambda: multiply(square, square)), 8 * 64e6 / fastest(lambda: target.copy_(large))


def floors(shape: Size, prompt_tokens: float, tokens: float, flops: float) -> dict[str, float]:
    """Seconds of each phase for these numbers of prompt and answer tokens, without the optimizer step."""
    trunk = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)
    head = shape.vocabulary * shape.hidden
    policy = 2 * (trunk * (prompt_tokens + tokens) + head * tokens) / flops
    critic = 2 * trunk * (prompt_tokens + tokens) / flops
    both = policy + critic
    return {"generate": policy, "scoring forward": both, "forward": both, "backward": 2 * both}


def step_floor(shape: Size, bandwidth: float) -> float:
    """Seconds of AdamW's step: it reads weight, gradient and two moments and writes three of them, for both models."""
    trunk = shape.layers * (4 * shape.hidden**2 + 3 * shape.hidden * shape.intermediate)
    embedding = shape.vocabulary * shape.hidden
    return 7 * 4 * (2 * trunk + 3 * embedding) / bandwidth


def watched(iterations: int) -> Clock:
    """Clock on all work that is not the framework's own."""
    clock = Clock(iterations)
    clock.watch_iterator(HfEngine, "generate", "generate")
    for owner, name in ((rlhf_objective.policy, "policy_forward"), (rlhf_ppo.critic, "value_forward")):
        clock.watch(rlhf_forward.scoring, name, "scoring forward")
        clock.watch(owner, name, "forward")
    clock.watch(StrategyBase, "backward", "backward")
    clock.watch(SingleStrategy, "step", "step")
    return clock


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(SIZES), default="M")
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--new-tokens", type=int, default=64)
    parser.add_argument("--varied", action="store_true", help="answers of geometric length, up to --new-tokens")
    parser.add_argument("--iterations", type=int, default=3)
    parser.add_argument("--micro-batch-tokens", type=int)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    options = parser.parse_args()
    options.epochs, options.samples, options.precision, options.device = 1, 1, "fp32", "cpu"
    torch.set_num_threads(options.threads)
    clock = watched(options.iterations)
    before = rates()
    with tempfile.TemporaryDirectory() as folder:
        write_inputs(Path(folder), options.model, varied=options.varied, num_prompts=options.prompts)
        train(run_file(Path(folder), options), output=Path(folder) / "run", hooks=[clock])
    flops, bandwidth = (max(pair) for pair in zip(before, rates(), strict=True))
    count, shape = options.iterations, SIZES[options.model]
    floor = floors(shape, options.prompts * sum(PROMPT_TOKENS) / 2, clock.tokens / count, flops)
    floor["step"] = step_floor(shape, bandwidth)
    print(f"{options.model}: products {flops / 1e9:.0f} GFLOP/s, copies {bandwidth / 1e9:.0f} GB/s")
    print("| phase | s an iteration | share of the iteration | floor, s | floor / measured |\n|---|---|---|---|---|")
    for phase in PHASES:
        seconds = clock.seconds[phase] / count
        known = f"{floor[phase]:.2f} | {floor[phase] / seconds:.2f}" if phase in floor else "- | -"
        print(f"| {phase} | {seconds:.3f} | {clock.seconds[phase] / clock.wall:.1%} | {known} |")
    own = clock.wall - sum(clock.seconds.values())
    print(f"| framework | {own / count:.3f} | {own / clock.wall:.1%} | - | - |")
    print(f"| together | {clock.wall / count:.3f} | 100% | {sum(floor.values()):.2f} | |")
    return int(own > BOUND * clock.wall)


if __name__ == "__main__":
    sys.exit(main())
