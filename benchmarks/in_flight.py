"""Weight updates in flight compared with updates between batches, for answers with a long tail of lengths.

    python benchmarks/in_flight.py [--real] [--train 0.5 --staleness 1 --prompts 4 --slots 64]

One maker, core's coordinator, and 16 answers per prompt with geometric lengths, with a mean of a sixth of the limit.
The trainer waits for the maker. By default time is simulated and every decoding step costs the same. `--real` runs the
engine `hf` with a tiny model whose weights change with each version. Its time is the engine's CPU time, so that other
work on the machine does not count. Training takes the share `--train` of the generation time of an episode between
batches. Both modes have the same bound on staleness. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from rlhf_core.components import EngineContext
from rlhf_core.protocols import SamplingRequest
from rlhf_core.rollout import RolloutCoordinator
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine
from rlhf_ray.config import RayConfig
from rlhf_testing.models import tiny_model, tiny_tokenizer

SAMPLES = 16  # answers per prompt
LIMIT = 240  # maximum tokens per answer
PROMPT = 16  # tokens per prompt
SAMPLING = SamplingParams(max_new_tokens=LIMIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """Settings of both modes."""

    train: float = 0.5
    """Training time of an episode, relative to its generation time in the mode between batches."""
    staleness: int = 1
    prompts: int = 4
    """Prompts per episode."""
    slots: int = 64
    """Answers decoded at once."""
    episodes: int = 24

    def coordinator(self) -> RolloutCoordinator[Any]:
        return RolloutCoordinator(
            num_episodes=self.episodes, prompts_per_episode=self.prompts, max_staleness=self.staleness
        )

    def max_batches(self) -> int:
        """Maximum concurrent batches with weights in flight, as in a run."""
        config = RayConfig(max_staleness=self.staleness, weights="in-flight")
        return config.max_batches(self.prompts) or 1


def length_of(sample_id: int) -> int:
    """Length of an answer in tokens, the same in both modes."""
    return 1 + min(LIMIT - 1, int(random.Random(sample_id).expovariate(6 / LIMIT)))


@dataclass(slots=True, eq=False)
class _Group:
    position: int
    episode: int
    left: int
    is_empty: bool = False


def simulated_seconds(case: Case, train_steps: float, *, in_flight: bool) -> float:
    """Decoding steps until the last episode is trained on. A step takes one unit of time for any number of rows."""
    coordinator, lanes = case.coordinator(), case.max_batches() if in_flight else 1
    now, version, trained, ends = 0.0, 0, 0, None
    waiting: list[tuple[_Group, int]] = []
    active: list[list[Any]] = []
    batches: dict[int, int] = {}  # unfinished groups by lease
    while trained < case.episodes:
        if ends is None and coordinator.ready(trained):
            coordinator.take(trained)
            ends = now + train_steps
        if len(batches) < lanes and (leases := coordinator.lease(case.prompts)):
            batches[leases[0].position] = len(leases)
            for lease in leases:
                group = _Group(lease.position, leases[0].position, SAMPLES)
                waiting += [(group, length_of(lease.position * SAMPLES + k)) for k in range(SAMPLES)]
        while waiting and len(active) < case.slots:
            active.append([*waiting.pop(0)])
        if not active:
            assert ends is not None, "the maker rests and nothing is trained on"
        now = now + 1 if active else max(now, ends or now)
        for row in active:
            row[1] -= 1
        for group, left in active:
            if left == 0:
                group.left -= 1
                if group.left == 0:
                    coordinator.submit(group)
                    batches[group.episode] -= 1
        active = [row for row in active if row[1] > 0]
        batches = {key: count for key, count in batches.items() if count}
        if ends is not None and now >= ends:
            ends, trained, version = None, trained + 1, version + 1
            coordinator.publish(version)
    return now


def simulate(case: Case) -> dict[str, float]:
    """Samples per step in both modes."""
    steps = simulated_seconds(replace(case, staleness=1), 0.0, in_flight=False) / case.episodes * case.train
    samples = case.episodes * case.prompts * SAMPLES
    plain = samples / simulated_seconds(case, steps, in_flight=False)
    flying = samples / simulated_seconds(case, steps, in_flight=True)
    return {"between_batches": round(plain, 4), "in_flight": round(flying, 4), "ratio": round(flying / plain, 3)}


class RealMaker:
    """The engine `hf` with a tiny model, answers of the given lengths, and a trainer that only takes time.

    Its clock is the CPU time of this process, so that other work on the machine does not count. Idle time of the maker
    is skipped.
    """

    def __init__(self, case: Case, train_seconds: float) -> None:
        tokenizer = tiny_tokenizer("0123456789")
        tokenizer.eos_token = None
        model = tiny_model(tokenizer, hidden_size=64, num_layers=2, num_heads=2, seed=0).eval().requires_grad_(False)
        model.generation_config.eos_token_id = None
        context = EngineContext(model=model, tokenizer=tokenizer, device=torch.device("cpu"), seed=0)
        self._engine = HfEngine(HfEngineConfig(max_batch_size=case.slots), context)
        self._model = model
        self._weights = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        self._case = case
        self._coordinator = case.coordinator()
        self._train_seconds = train_seconds
        self._skipped = 0.0
        self._trained = 0
        self._ends: float | None = None
        self._left: Counter[int] = Counter()
        """Number of running answers by position."""
        self._leases: Counter[int] = Counter()
        """Number of running answers by first position of a lease."""
        list(self._engine.generate(self._requests([10**6])[:2], SamplingParams(max_new_tokens=2)))  # warm-up

    def seconds(self, *, in_flight: bool) -> float:
        """Seconds until the last episode is trained on."""
        started = self._now()
        while self._trained < self._case.episodes:
            if in_flight:
                for done in self._engine.generate_in_flight(self._between):
                    self._done(done)
            elif asked := self._lease(1):
                self._take_weights()
                for done in self._engine.generate(asked, SAMPLING):
                    self._done(done)
            self._train()
            if not self._left and self._ends is not None and not self._coordinator.can_lease:
                self._skipped += max(0.0, self._ends - self._now())
                self._train()
        return self._now() - started

    def _now(self) -> float:
        return time.process_time() + self._skipped

    def _between(self) -> list[SamplingRequest]:
        self._train()
        self._take_weights()
        return [(request, SAMPLING) for request in self._lease(self._case.max_batches())]

    def _take_weights(self) -> None:
        """Update the engine to the newest version, if it has an older one."""
        if (version := self._trained) > self._engine.policy_version:
            self._weights["lm_head.weight"] = self._weights["lm_head.weight"] * 1.0001
            self._model.load_state_dict(self._weights)
            self._engine.weights_updated(version)

    def _lease(self, lanes: int) -> list[GenerationRequest]:
        if len(+self._leases) >= lanes or not (leases := self._coordinator.lease(self._case.prompts)):
            return []
        positions = [lease.position for lease in leases]
        self._left.update(dict.fromkeys(positions, SAMPLES))
        self._leases[positions[0]] = SAMPLES * len(positions)
        return self._requests(positions)

    def _requests(self, positions: Sequence[int]) -> list[GenerationRequest]:
        return [
            GenerationRequest(
                sample_id=position * SAMPLES + k,
                prompt_ids=tuple(4 + (position * 7 + i * i) % 10 for i in range(PROMPT)),
                max_new_tokens=length_of(position * SAMPLES + k),
            )
            for position in positions
            for k in range(SAMPLES)
        ]

    def _done(self, completion: Completion) -> None:
        position = completion.sample_id // SAMPLES
        self._leases[position // self._case.prompts * self._case.prompts] -= 1
        self._left[position] -= 1
        if not self._left[position]:
            del self._left[position]
            self._coordinator.submit(_Group(position, 0, 0))
            self._train()

    def _train(self) -> None:
        """Continue training: start an episode that is complete, and publish one whose training time is over."""
        if self._ends is not None and self._now() >= self._ends:
            self._trained += 1
            self._coordinator.publish(self._trained)
            self._ends = None
        if self._ends is None and self._trained < self._case.episodes and self._coordinator.ready(self._trained):
            self._coordinator.take(self._trained)
            self._ends = self._now() + self._train_seconds


def measure(case: Case, repeats: int = 3) -> dict[str, float]:
    """Samples per second of the engine in both modes, as medians of alternating runs."""
    torch.set_num_threads(1)
    train = RealMaker(replace(case, episodes=4), 0.0).seconds(in_flight=False) / 4 * case.train
    samples = case.episodes * case.prompts * SAMPLES
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for mode, found in rates.items():
            found.append(samples / RealMaker(case, train).seconds(in_flight=mode))
    plain, flying = (statistics.median(found) for found in rates.values())
    return {"between_batches": round(plain, 1), "in_flight": round(flying, 1), "ratio": round(flying / plain, 3)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--real", action="store_true")
    parser.add_argument("--train", type=float, default=None)
    parser.add_argument("--staleness", type=int, default=1)
    parser.add_argument("--prompts", type=int, default=4)
    parser.add_argument("--slots", type=int, default=64)
    parser.add_argument("--episodes", type=int, default=None)
    given = parser.parse_args()
    episodes = given.episodes or (12 if given.real else 200)
    found = {}
    for train in (0.25, 0.5) if given.train is None else (given.train,):
        case = Case(train=train, staleness=given.staleness, prompts=given.prompts, slots=given.slots, episodes=episodes)
        found[f"train {train:g}"] = measure(case) if given.real else simulate(case)
        print(json.dumps({"case": f"train {train:g}", **found[f"train {train:g}"]}), flush=True)
    print(json.dumps({"engine": "hf" if given.real else "simulated", **found}))


if __name__ == "__main__":
    main()
