"""Weights in flight: one engine for several batches, which takes new weights between two decoding steps."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from playing import Echo, play, rollouts
from running import PATIENCE_SECONDS
from torch import nn

from rlhf_core import train
from rlhf_core.config.resolve import resolve
from rlhf_core.errors import ConfigError, RlhfError
from rlhf_core.hooks import HookRelay
from rlhf_core.rollout import PolicyExperienceMaker, SingleTurnPlayer
from rlhf_core.rollout.weight_sync import named_weights
from rlhf_core.types import GenerationRequest, PhaseTimes, RolloutGroup, SamplingParams
from rlhf_ray.config import RayConfig
from rlhf_ray.engine_thread import SharedEngine
from rlhf_ray.experience_maker_holder import BatchPool
from rlhf_ray.holder_weights import StagedWeights
from rlhf_ray.maker_parts import MakerWorker
from rlhf_testing.engine import EOS, FakeEngine
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.samples import make_prompt

SAMPLING = SamplingParams(max_new_tokens=64)


class Engine(FakeEngine):
    """Answers with as many tokens as the sample's id; tells what happens before each step."""

    def __init__(self) -> None:
        super().__init__(answer=lambda request, version: [7] * (request.sample_id - 1) + [EOS])
        self.before: Callable[[int], None] = lambda step: None
        self.num_steps = 0

    def generate_in_flight(self, between: Callable[[], Any]) -> Iterator[Any]:
        def watched() -> Any:
            self.before(self.num_steps)
            self.num_steps += 1
            return between()

        return super().generate_in_flight(watched)


@pytest.fixture
def module() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def engine() -> Engine:
    return Engine()


@pytest.fixture
def staged(module: nn.Module, engine: Engine) -> StagedWeights:
    return StagedWeights({"policy": module}, published=engine.weights_updated)


@pytest.fixture
def shared(engine: Engine, staged: StagedWeights) -> Iterator[SharedEngine]:
    thread = SharedEngine(engine, staged)
    yield thread
    thread.close()
    assert engine.closed


def send(staged: StagedWeights, module: nn.Module, version: int) -> None:
    staged.begin(version)
    staged.stage(version, "policy", {n: torch.full_like(t, float(version)) for n, t in named_weights(module).items()})
    staged.commit(version)


def ask(sample_id: int, branch: int = 0) -> GenerationRequest:
    return GenerationRequest(sample_id=sample_id, prompt_ids=(5,), branch=branch)


def test_callers_share_the_steps_and_a_later_one_need_not_wait(engine: Engine, shared: SharedEngine) -> None:
    gate = threading.Event()
    engine.before = lambda step: gate.wait(PATIENCE_SECONDS) if step == 3 else None
    long = shared.generate([ask(40)], SAMPLING)
    short = shared.generate([ask(2)], SAMPLING)
    gate.set()
    assert next(short).sample_id == 2
    assert next(long).sample_id == 40
    assert engine.num_steps < 50  # not one after the other


def test_weights_come_between_two_steps(
    engine: Engine, shared: SharedEngine, staged: StagedWeights, module: nn.Module
) -> None:
    engine.before = lambda step: send(staged, module, 1) if step == 10 else None
    answers = {each.sample_id: each for each in shared.generate([ask(20), ask(3)], SAMPLING)}
    assert answers[3].policy_versions == () and answers[3].policy_version == 0
    assert answers[20].policy_version == 0
    assert answers[20].policy_versions == tuple(sorted(answers[20].policy_versions))
    assert set(answers[20].policy_versions) == {0, 1} and len(answers[20].policy_versions) == 20
    assert bool((module.weight == 1.0).all())
    assert staged.newest == shared.policy_version == 1


def test_other_work_with_the_models_comes_between_two_steps_too(
    engine: Engine, shared: SharedEngine, staged: StagedWeights, module: nn.Module
) -> None:
    def broken() -> None:
        raise ValueError("of the work alone")

    answers = shared.generate([ask(60)], SAMPLING)
    assert shared.run(lambda: threading.current_thread().name) == "engine"
    with pytest.raises(ValueError, match="of the work alone"):
        shared.run(broken)
    assert len(list(answers)) == 1
    send(staged, module, 2)  # it rests: nobody has to let them in
    assert shared.run(lambda: shared.policy_version) == 2
    assert shared.take_seconds() > 0.0


def test_an_error_of_the_engine_reaches_every_caller(engine: Engine, shared: SharedEngine) -> None:
    asked = threading.Event()

    def fails(step: int) -> None:
        if step == 5:
            assert asked.wait(PATIENCE_SECONDS)
            raise RlhfError("out of memory", where="engine fake")

    engine.before = fails
    first, second = shared.generate([ask(30)], SAMPLING), shared.generate([ask(31)], SAMPLING)
    asked.set()
    for each in (first, second):
        with pytest.raises(RlhfError, match="out of memory"):
            list(each)
    with pytest.raises(RlhfError, match="out of memory"):
        shared.run(lambda: None)


def test_a_sample_that_is_made_again_waits_for_the_one_under_way(engine: Engine, shared: SharedEngine) -> None:
    first = shared.generate([ask(20), ask(21)], SAMPLING)
    again = shared.generate([ask(20)], SAMPLING)
    assert [each.sample_id for each in again] == [20]
    assert sorted(each.sample_id for each in first) == [20, 21]


def test_when_it_is_closed_callers_are_told(engine: Engine, staged: StagedWeights) -> None:
    shared = SharedEngine(engine, staged)
    inside, gate = threading.Event(), threading.Event()

    def hold(step: int) -> None:
        if step == 2:
            inside.set()
            gate.wait(PATIENCE_SECONDS)

    engine.before = hold
    answers = shared.generate([ask(30)], SAMPLING)
    assert inside.wait(PATIENCE_SECONDS)
    threading.Timer(0.05, gate.set).start()
    shared.close()
    with pytest.raises(RlhfError, match="closed"):
        next(answers)


class Scorer:
    """Scores nothing."""

    def submit(self, rollouts: list[Any]) -> Any:
        from concurrent.futures import Future

        done: Future[list[dict[str, float]]] = Future()
        done.set_result([{"r": 1.0} for _ in rollouts])
        return done

    def take_metrics(self) -> dict[str, float]:
        return {}

    def close(self) -> None:
        """Nothing to close."""


class Feed:
    """Gives the prompts of some batches, and keeps what is sent."""

    def __init__(self, batches: list[list[int]]) -> None:
        self.hooks = HookRelay()
        self.sending = threading.RLock()
        self.sent: list[tuple[int, list[RolloutGroup]]] = []
        self.under_way: list[int] = []
        self.two_sent = threading.Event()
        self._batches = batches

    def batches(self, wait_for_room: Callable[[], int]) -> Iterator[tuple[int, list[Any]]]:
        for era, positions in enumerate(self._batches):
            self.under_way.append(wait_for_room())
            yield era, [make_prompt(position) for position in positions]

    def send(self, era: int, groups: list[RolloutGroup], times: PhaseTimes) -> None:
        self.sent.append((era, groups))
        if len(self.sent) == 2:
            self.two_sent.set()

    def flush(self) -> None:
        """Nothing is under way."""


def worker_of(shared: SharedEngine, staged: StagedWeights, max_batches: int) -> MakerWorker:
    scorer: Any = Scorer()
    makers = [
        PolicyExperienceMaker(
            player=SingleTurnPlayer(shared, tiny_tokenizer("0123456789"), SAMPLING),
            samples_per_prompt=1,
            scorer=scorer,
            hooks=HookRelay(),
        )
        for _ in range(max_batches)
    ]
    return MakerWorker(makers, shared, scorer, staged, torch.device("cpu"))


def test_batches_are_made_side_by_side_and_each_is_sent_when_it_is_done(
    engine: Engine, shared: SharedEngine, staged: StagedWeights
) -> None:
    """The second batch ends before the long answer of the first. A third batch takes its place."""
    feed: Any = Feed([[50, 2], [3, 4], [5]])

    def hold(step: int) -> None:
        """Let the long answer go on only with what the other batches ask for, until they are over."""
        for _ in range(4000):
            if step <= 20 or len(shared._open) > 1 or shared._waiting or feed.two_sent.wait(0.005):
                return

    engine.before = hold
    BatchPool(worker_of(shared, staged, 2), feed).make_all()
    made = {era: sorted(group.position for group in groups) for era, groups in feed.sent}
    assert made == {0: [2, 50], 1: [3, 4], 2: [5]}
    assert feed.sent[-1][0] == 0
    assert feed.under_way[0] == 0 and max(feed.under_way) == 1


def test_an_error_in_a_batch_ends_the_loop(engine: Engine, shared: SharedEngine, staged: StagedWeights) -> None:
    def fails(step: int) -> None:
        if step == 5:
            raise RlhfError("out of memory", where="engine fake")

    engine.before = fails
    with pytest.raises(RlhfError, match="out of memory"):
        BatchPool(worker_of(shared, staged, 2), Feed([[50], [3], [4]])).make_all()  # type: ignore[arg-type]


def test_samples_carry_the_versions_of_their_tokens(
    engine: Engine, shared: SharedEngine, staged: StagedWeights, module: nn.Module
) -> None:
    engine.before = lambda step: send(staged, module, 1) if step == 10 else None
    groups, _ = worker_of(shared, staged, 1).make([make_prompt(30), make_prompt(4)])
    mixed, plain = sorted(groups, key=lambda group: -group.position)
    (rollout,), (item,) = mixed.rollouts, mixed.items
    assert len(rollout.policy_versions) == len(rollout.completion_ids) == 30
    assert rollout.policy_version == item.policy_version == 0
    assert item.policy_versions is not None
    assert item.policy_versions.tolist() == list(rollout.policy_versions)
    assert item.policy_versions.dtype is torch.int32
    assert plain.rollouts[0].policy_versions == () and plain.items[0].policy_versions is None


def test_weights_come_in_the_middle_of_an_episode(
    engine: Engine, shared: SharedEngine, staged: StagedWeights, module: nn.Module
) -> None:
    engine._answer = lambda request, version: [11, 12, EOS]
    engine.before = lambda step: send(staged, module, 1) if engine.num_steps == 5 else None
    played = play(Echo, engine=shared, samples=2)
    for rollout in (rollout for each in played for rollout in rollouts(each)):
        assert len(rollout.policy_versions) == len(rollout.completion_ids)
        sampled = [version for version in rollout.policy_versions if version >= 0]
        assert [version >= 0 for version in rollout.policy_versions] == list(rollout.action_mask or ())
        assert sampled == sorted(sampled) and set(sampled) == {0, 1} and rollout.policy_version == 0


@pytest.mark.parametrize(
    ("options", "max_batches"),
    [
        ({}, None),
        ({"weights": "in-flight"}, 2),
        ({"weights": "in-flight", "max_staleness": 3, "num_makers": 4}, 4),
        ({"weights": "in-flight", "prompts_per_lease": 16}, 8),
        ({"weights": "in-flight", "prompts_per_lease": 1}, 32),
    ],
)
def test_as_many_batches_at_a_time_as_the_bound_lets_it_have(options: dict[str, Any], max_batches: int | None) -> None:
    assert RayConfig(**options).max_batches(64) == max_batches


def test_what_cannot_go_together_is_said_at_check(run_file: Callable[..., dict[str, Any]]) -> None:
    with pytest.raises(
        ConfigError, match=r"(?s)transport.*max_staleness: 0 forbids\. Set max_staleness: 1, or weights"
    ):
        resolve(run_file(weights="in-flight", max_staleness=0))
    run = run_file(weights="in-flight")
    assert resolve(run).algorithm.config.model_dump()["importance_cap"] == 2.0


@pytest.mark.usefixtures("local_ray")
@pytest.mark.slow
def test_a_run_keeps_every_promise_but_one_version_a_sample(
    tmp_path: Path,
    run_file: Callable[..., dict[str, Any]],
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
    samples: Callable[[Path], list[dict[str, Any]]],
) -> None:
    faults("maker-waits-in-flight")
    run = run_file({"episodes": 3}, weights="in-flight", max_staleness=1)
    del run["eval"]
    result = train(run, output=tmp_path / "ray")
    assert result is not None
    check_samples(tmp_path / "ray")
    assert all(0 <= line["staleness/max"] <= 1 for line in result.metrics)
    gaps = [line["rollout/logprob_gap_max"] for line in result.metrics if "rollout/logprob_gap_max" in line]
    assert max(gaps) < 1e-4
    lines = samples(tmp_path / "ray")
    mixed = [line for line in lines if "policy_versions" in line]
    assert mixed
    for line in mixed:
        versions = line["policy_versions"]
        assert len(versions) == line["num_tokens"] and versions == sorted(versions)
        assert min(versions) == line["policy_version"] and max(versions) <= line["episode"]
    last = [line for line in lines if line["episode"] == 2]
    share = sum("policy_versions" in line for line in last) / len(last)
    assert result.metrics[-1].get("staleness/mixed_fraction", 0.0) == share
