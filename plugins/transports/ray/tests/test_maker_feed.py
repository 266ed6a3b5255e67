"""`MakerFeed`: what a maker sends, to whom, and what it waits for."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import ray
import torch

from rlhf_core.errors import DeadlineError
from rlhf_core.hooks import HookRelay
from rlhf_core.types import BufferItem, PhaseTimes, Prompt, RolloutGroup
from rlhf_ray.calls import NamedActors
from rlhf_ray.maker_feed import MakerFeed
from rlhf_ray.sample_store import StoredGroup

pytestmark = pytest.mark.usefixtures("local_ray")


@dataclass
class Taker:
    """Stands where a handle does; answers at once, or never."""

    answers: Callable[[list[StoredGroup]], Any]
    taken: list[tuple[str, int, list[StoredGroup]]] = field(default_factory=list)

    @property
    def submit(self) -> Taker:
        return self

    def remote(self, maker: str, era: int, made: list[StoredGroup], times: PhaseTimes) -> Any:
        self.taken.append((maker, era, made))
        return self.answers(made)


class Feed(MakerFeed):
    def batches(self) -> Iterator[tuple[int, list[Prompt]]]:
        return iter(())


def feed_to(*takers: Taker, timeout_seconds: float = 30.0) -> Feed:
    named = NamedActors([str(place) for place in range(len(takers))], timeout_seconds=1)
    named.add_handles({str(place): taker for place, taker in enumerate(takers)})
    return Feed("maker_0", 0, HookRelay(), named, timeout_seconds=timeout_seconds)


def group(position: int, num_samples: int = 1) -> RolloutGroup:
    item = BufferItem(
        sample_id=position,
        group_id=position,
        policy_version=0,
        prompt_ids=torch.tensor([position]),
        response_ids=torch.tensor([position]),
        action_mask=torch.tensor([True]),
        action_log_probs=torch.zeros(1),
    )
    return RolloutGroup(position=position, rollouts=(), items=(item,) * num_samples)


def all_of(made: list[StoredGroup]) -> Any:
    return ray.put(len(made))


@pytest.mark.slow
def test_groups_go_to_the_takers_in_turn_over_all_sends() -> None:
    takers = [Taker(all_of), Taker(all_of)]
    feed = feed_to(*takers)
    for era, positions in enumerate([(0, 1, 2), (3,), (4, 5)]):
        feed.send(era, [group(position) for position in positions], PhaseTimes(response_tokens=len(positions)))
    feed.flush()
    sent = [[[each.position for each in made] for _, _, made in taker.taken] for taker in takers]
    assert sent == [[[0, 2], [4]], [[1], [3], [5]]]
    assert [(maker, era) for maker, era, _ in takers[0].taken] == [("maker_0", 0), ("maker_0", 2)]
    assert (feed.num_samples, feed.times.response_tokens) == (6, 6)


def test_a_group_without_samples_is_not_to_be_trained_on() -> None:
    taker = Taker(all_of)
    feed_to(taker).send(0, [group(0), group(1, num_samples=0)], PhaseTimes())
    ((_, _, made),) = taker.taken
    assert [each.keep for each in made] == [True, False]


def test_a_taker_that_is_full_holds_up_the_next_send(local_ray: None) -> None:
    @ray.remote(num_cpus=0)
    class Full:
        def wait(self) -> None:
            import threading

            threading.Event().wait()

    full = Full.remote()
    taker = Taker(lambda made: full.wait.remote())
    feed = feed_to(taker, timeout_seconds=0.2)
    feed.send(0, [group(0)], PhaseTimes())
    with pytest.raises(DeadlineError, match="0.2 s for actor '0' to take samples"):
        feed.send(0, [group(1)], PhaseTimes())
    assert len(taker.taken) == 1
    ray.kill(full)


def test_groups_that_came_too_late_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    feed = feed_to(Taker(lambda made: ray.put(1)))
    with caplog.at_level(logging.INFO, logger="rlhf.ray"):
        feed.send(0, [group(0), group(1), group(2)], PhaseTimes())
        feed.flush()
        feed.flush()
    assert [record.getMessage()[:26] for record in caplog.records] == ["2 of 3 groups came too lat"]
