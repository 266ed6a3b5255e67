"""The in-process channel: every rank makes its share, and all come to the same episode."""

import tempfile
import threading
from pathlib import Path

import pytest
from drawn_columns import assert_same_columns, columns_of
from hypothesis import given, settings

from rlhf_core.errors import RlhfError
from rlhf_core.rollout.coordinator import RolloutCoordinator
from rlhf_core.transports.local import LocalChannel
from rlhf_core.types import PhaseTimes, RolloutGroup
from rlhf_core.util.tensor_files import load_tree, save_tree
from rlhf_testing.samples import make_group, make_prompt
from rlhf_testing.thread_ranks import Ranks as ThreadRanks

SECONDS = 30.0


class Ranks:
    """Ranks as threads."""

    def __init__(self, world_size):
        self.world_size = world_size
        self.barrier = threading.Barrier(world_size)
        self.values = [None] * world_size

    def strategy(self, rank):
        return Rank(rank, self)


class Rank:
    def __init__(self, rank, ranks):
        self.rank, self.world_size, self._ranks = rank, ranks.world_size, ranks

    def all_gather_objects(self, value):
        self._ranks.values[self.rank] = value
        self._ranks.barrier.wait(SECONDS)
        values = list(self._ranks.values)
        self._ranks.barrier.wait(SECONDS)
        return values


class Maker:
    def __init__(self, empty=()):
        self.made = []
        self.empty = empty

    def make(self, prompts):
        for prompt in reversed(prompts):
            self.made.append(prompt.position)
            if prompt.position in self.empty:
                yield RolloutGroup(position=prompt.position, rollouts=(), items=())
            else:
                yield make_group(prompt.position, 2)

    def take_times(self):
        return PhaseTimes(response_tokens=len(self.made))

    def published(self, version):
        """Passes are told of each version."""


def channel(strategy, *, episodes=3, prompts=4, keep=lambda group: True, empty=()):
    maker = Maker(empty)
    coordinator = RolloutCoordinator(num_episodes=episodes, prompts_per_episode=prompts)
    made = {"coordinator": coordinator, "prompt": make_prompt, "maker": maker, "scorer": None}
    return maker, LocalChannel(place=strategy, keep=keep, **made)


def positions(episode):
    return list(dict.fromkeys(row.group_id for row in episode.rows))


def run_ranks(world_size, work):
    """work(rank) in a thread each; their results."""
    results = [None] * world_size

    def run(rank):
        results[rank] = work(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world_size)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(SECONDS)
    return results


@pytest.mark.parametrize("world_size", [1, 2, 3, 5])
def test_ranks_share_the_prompts_and_get_the_same_episodes(world_size):
    ranks = Ranks(world_size)
    makers = {}

    def work(rank):
        makers[rank], mine = channel(ranks.strategy(rank), keep=lambda group: group.position % 3 != 1)
        episodes = []
        for index in range(2):
            episodes.append(positions(mine.episode(index)))
            mine.published(index + 1)
        return episodes

    results = run_ranks(world_size, work)
    assert results == [[[0, 2, 3, 5], [6, 8, 9, 11]]] * world_size
    made = [position for maker in makers.values() for position in maker.made]
    assert sorted(made) == list(range(12))


def test_groups_without_a_sample_left_are_replaced():
    _, mine = channel(Ranks(1).strategy(0), empty={1, 4})
    assert positions(mine.episode(0)) == [0, 2, 3, 5]


def test_an_episode_that_may_not_start_yet_is_an_error_not_a_hang():
    _, mine = channel(Ranks(1).strategy(0))
    mine.episode(0)
    with pytest.raises(RlhfError, match="episode 1"):
        mine.episode(1)


def test_its_state_goes_through_a_file(tmp_path):
    _, first = channel(Ranks(1).strategy(0))
    first.episode(0)
    first.published(1)
    save_tree(tmp_path / "channel.safetensors", first.state_dict())
    _, second = channel(Ranks(1).strategy(0))
    second.load_state_dict(load_tree(tmp_path / "channel.safetensors"))
    assert positions(second.episode(1)) == positions(first.episode(1)) == [4, 5, 6, 7]


def test_groups_of_a_transport_that_made_episodes_ahead_are_made_again():
    _, first = channel(Ranks(1).strategy(0))
    first.episode(0)
    first.published(1)
    state = first.state_dict()
    ahead = {"outstanding": [6, 7], "accepted": [{"position": 5}, {"position": 4}], "refused": 0, "outcomes": {}}
    state |= {"cursor": 8, "next_episode": 2, "open": {"1": ahead}}
    maker, second = channel(Ranks(1).strategy(0))
    second.load_state_dict(state)
    assert positions(second.episode(1)) == [4, 5, 6, 7] == sorted(maker.made)


class Given(Maker):
    """Makes groups of given items."""

    def __init__(self, items):
        super().__init__()
        self.items = items

    def make(self, prompts):
        for prompt in prompts:
            own = tuple(item for item in self.items if item.group_id == prompt.position)
            yield RolloutGroup(position=prompt.position, rollouts=(), items=own)


@given(columns_of())
@settings(max_examples=15, deadline=None)
def test_any_columns_reach_all_ranks(items):
    """Three groups, an episode each; the run is resumed after the first."""
    options = {"num_episodes": 3, "prompts_per_episode": 1}

    def channel_of(place):
        return LocalChannel(
            coordinator=RolloutCoordinator(**options),
            prompt=make_prompt,
            maker=Given(items),
            scorer=None,
            place=place,
            keep=lambda group: True,
        )

    def rows(channel, index):
        found = channel.episode(index)
        channel.published(index + 1)
        return found.data.load(range(len(found.rows)), [])[0]

    with tempfile.TemporaryDirectory() as folder:

        def work(rank, place):
            first, file = channel_of(place), Path(folder) / str(rank)
            found = rows(first, 0)
            save_tree(file, first.state_dict())
            resumed = channel_of(place)
            resumed.load_state_dict(load_tree(file))
            return [*found, *rows(resumed, 1), *rows(resumed, 2)]

        for found in ThreadRanks(2).run(work):
            assert [item.sample_id for item in found] == list(range(5))
            for one, other in zip(items, found, strict=True):
                assert_same_columns(one, other)
