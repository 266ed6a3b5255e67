"""Weights in flight against weights between batches, where answers have a long tail and the trainer waits for makers.

    python benchmarks/in_flight.py [--real] [--train 0.5 --staleness 1 --prompts 4 --slots 64]

One maker, core's coordinator, 16 answers to a prompt; lengths are geometric, with a mean of a sixth of the limit. By
default time is simulated and every decoding step costs the same. `--real` has the engine `hf` over a tiny model, with
the maker's own loops, threads and staged weights; training is a sleep, and each version changes the weights. Training
takes the share `--train` of the time that between-batches needs for an episode's answers. Both modes have the same
bound on staleness. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from rlhf_core.components import EngineContext
from rlhf_core.hooks import HookRelay
from rlhf_core.models.builtin import build_character_tokenizer, build_llama
from rlhf_core.protocols import Asked
from rlhf_core.rewards import RewardScorer
from rlhf_core.rollout import PolicyExperienceMaker, RolloutCoordinator, SingleAnswers
from rlhf_core.types import Completion, GenerationRequest, PhaseTimes, Prompt, RolloutGroup, SamplingParams
from rlhf_hf.config import HfEngineConfig
from rlhf_hf.engine import HfEngine
from rlhf_ray.config import RayConfig
from rlhf_ray.engine_thread import EngineThread
from rlhf_ray.lanes import Lanes
from rlhf_ray.maker_parts import MakerWorker, staged_weights

SAMPLES = 16  # answers to a prompt
LIMIT = 240  # tokens of an answer
PROMPT = 16  # tokens of a prompt


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What both modes are given."""

    train: float = 0.5
    """Time to train on an episode, in that of making one between batches."""
    staleness: int = 1
    prompts: int = 4
    """Of an episode."""
    slots: int = 64
    """Answers decoded at once."""
    episodes: int = 24

    @property
    def config(self) -> RayConfig:
        return RayConfig(max_staleness=self.staleness)

    def coordinator(self) -> RolloutCoordinator[Any]:
        return RolloutCoordinator(
            num_episodes=self.episodes, prompts_per_episode=self.prompts, max_staleness=self.staleness
        )

    def num_lanes(self) -> int:
        """Batches at a time with weights in flight, as in a run."""
        config = RayConfig(max_staleness=self.staleness, weights="in-flight")
        return config.num_lanes(self.prompts) or 1


def length_of(sample_id: int) -> int:
    """Tokens of an answer, the same in both modes."""
    return 1 + min(LIMIT - 1, int(random.Random(sample_id).expovariate(6 / LIMIT)))


@dataclass(slots=True, eq=False)
class _Group:
    position: int
    episode: int
    left: int
    is_empty: bool = False


def simulated_seconds(case: Case, train_steps: float, *, in_flight: bool) -> float:
    """Decoding steps until the last episode is trained on. One step is one unit of time, however many rows it has."""
    coordinator, lanes = case.coordinator(), case.num_lanes() if in_flight else 1
    now, version, trained, ends = 0.0, 0, 0, None
    waiting: list[tuple[_Group, int]] = []
    active: list[list[Any]] = []
    batches: dict[int, int] = {}  # lease -> groups that are not over
    while trained < case.episodes:
        if ends is None and coordinator.ready(trained):
            coordinator.take(trained)
            ends = now + train_steps
        if len(batches) < lanes and (leases := coordinator.lease("maker", case.prompts)):
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
    """Samples a step in both modes."""
    steps = simulated_seconds(replace(case, staleness=1), 0.0, in_flight=False) / case.episodes * case.train
    samples = case.episodes * case.prompts * SAMPLES
    plain = samples / simulated_seconds(case, steps, in_flight=False)
    flying = samples / simulated_seconds(case, steps, in_flight=True)
    return {"between_batches": round(plain, 4), "in_flight": round(flying, 4), "ratio": round(flying / plain, 3)}


class LongTail:
    """The engine `hf`, whose answers end at the drawn lengths and nowhere else."""

    def __init__(self, engine: HfEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        return self._engine.generate([_cut(request) for request in requests], sampling)

    def generate_in_flight(self, between: Callable[[], Sequence[Asked]]) -> Iterator[Completion]:
        return self._engine.generate_in_flight(lambda: [(_cut(request), sampling) for request, sampling in between()])


def _cut(request: GenerationRequest) -> GenerationRequest:
    return replace(request, max_new_tokens=length_of(request.sample_id))


class Feed:
    """A maker's side of the coordinator, which is in this process."""

    def __init__(self, case: Case) -> None:
        self.hooks = HookRelay()
        self.sending = threading.RLock()
        self.changed = threading.Condition()
        self.coordinator = case.coordinator()
        self.over = False
        self._case = case

    def batches(self, wait_for_room: Callable[[], int] = lambda: 0) -> Iterator[tuple[int, list[Prompt]]]:
        while True:
            wait_for_room()
            with self.changed:
                leases = self.coordinator.lease("maker", self._case.prompts)
                if not leases:
                    if self.over:
                        return
                    self.changed.wait(0.02)
                    continue
            yield 0, [_prompt(lease.position) for lease in leases]

    def send(self, era: int, groups: Sequence[RolloutGroup], times: PhaseTimes) -> None:
        with self.changed:
            for group in groups:
                self.coordinator.submit(group)
            self.changed.notify_all()

    def flush(self) -> None:
        """Nothing is under way."""


def _prompt(position: int) -> Prompt:
    ids = tuple(4 + (position * 7 + i * i) % 10 for i in range(PROMPT))
    return Prompt(position=position, text="", prompt_ids=ids)


def make_maker(case: Case, *, in_flight: bool) -> tuple[MakerWorker, nn.Module]:
    """A maker over a tiny model without an end token."""
    tokenizer = build_character_tokenizer("0123456789")
    tokenizer.eos_token = None
    model = build_llama(tokenizer, hidden_size=128, num_layers=4, num_heads=4, seed=0).eval().requires_grad_(False)
    model.generation_config.eos_token_id = None
    context = EngineContext(model=model, tokenizer=tokenizer, device=torch.device("cpu"), seed=0)
    engine: Any = LongTail(HfEngine(HfEngineConfig(max_batch_size=case.slots, max_new_tokens=LIMIT), context))
    weights = staged_weights(engine, {"policy": model}, {"policy": frozenset()}, idle_seconds=600.0)
    if in_flight:
        engine = EngineThread(engine, weights)
    scorer = RewardScorer([], may_be_empty=True)
    makers = [
        PolicyExperienceMaker(
            player=SingleAnswers(engine, tokenizer, SamplingParams(max_new_tokens=LIMIT)),
            samples_per_prompt=SAMPLES,
            scorer=scorer,
            hooks=HookRelay(),
        )
        for _ in range(case.num_lanes() if in_flight else 1)
    ]
    return MakerWorker(makers, engine, scorer, weights), model


def real_seconds(case: Case, train_seconds: float, *, in_flight: bool) -> float:
    """Until the last episode is trained on."""
    worker, model = make_maker(case, in_flight=in_flight)
    feed: Any = Feed(case)

    def make() -> None:
        if in_flight:
            Lanes(worker, feed).make_all()
            return
        for era, prompts in feed.batches():
            feed.send(era, *worker.make(prompts))

    maker = threading.Thread(target=make, daemon=True)
    worker.make([_prompt(10**6)])  # the engine's trial of its paths is none of either mode
    sent = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    started = time.perf_counter()
    maker.start()
    for episode in range(case.episodes):
        with feed.changed:
            if not feed.changed.wait_for(lambda episode=episode: feed.coordinator.ready(episode), 120.0):
                raise TimeoutError(f"waited 120 s for episode {episode}: {feed.coordinator.progress(episode)}")
            feed.coordinator.take(episode)
            feed.changed.notify_all()
        time.sleep(train_seconds)
        sent["lm_head.weight"] = sent["lm_head.weight"] * 1.0001
        worker.weights.begin(episode + 1)
        worker.weights.stage(episode + 1, "policy", sent)
        worker.weights.commit(episode + 1)
        with feed.changed:
            feed.coordinator.publish(episode + 1)
            feed.changed.notify_all()
    seconds = time.perf_counter() - started
    feed.over = True
    maker.join(120.0)
    worker.close()
    return seconds


def measure(case: Case, repeats: int = 3) -> dict[str, float]:
    """Samples a second of the engine in both modes; medians of alternating runs."""
    torch.set_num_threads(1)
    train = real_seconds(replace(case, episodes=8), 0.0, in_flight=False) / 8 * case.train
    samples = case.episodes * case.prompts * SAMPLES
    rates: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(repeats):
        for mode, found in rates.items():
            found.append(samples / real_seconds(case, train, in_flight=mode))
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
