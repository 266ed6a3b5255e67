"""Leases, admission, refills and the ledger, under every schedule hypothesis can think of."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.errors import RlhfError
from rlhf_core.types import RolloutGroup
from rlhf_ray.groups import group_from_tree, group_to_tree, with_groups
from rlhf_ray.leases import LeasedCoordinator
from rlhf_testing.samples import make_group


def empty(position):
    return RolloutGroup(position=position, rollouts=(), items=())


def coordinator(episodes=4, prompts=3, **options):
    return LeasedCoordinator(num_episodes=episodes, prompts_per_episode=prompts, **options)


def positions(leases):
    return [lease.position for lease in leases]


def finish(owner, episode):
    for lease in owner.lease(1 << 20, "m"):
        owner.submit(empty(lease.position))
    taken = owner.take(episode)
    owner.publish(episode + 1)
    return [group.position for group in taken]


class TestLeases:
    def test_positions_are_leased_once_lowest_first(self):
        owner = coordinator()
        assert positions(owner.lease(2, "a")) == [0, 1]
        assert positions(owner.lease(5, "b")) == [2]
        assert owner.lease(1, "c") == []

    def test_a_lease_that_ended_is_given_again(self):
        owner = coordinator()
        owner.lease(3, "a")
        assert owner.lease(3, "b") == []
        owner.release("a")
        again = owner.lease(2, "b")
        assert [lease.position for lease in again] == [0, 1]

    def test_release_ends_only_the_leases_of_the_maker_that_is_gone(self):
        owner = coordinator()
        owner.lease(1, "a"), owner.lease(2, "b")
        assert owner.release("b") == 2
        assert owner.release("b") == 0
        assert positions(owner.lease(9, "c")) == [1, 2]

    def test_a_late_group_of_a_lease_that_ended_counts_and_the_second_is_refused(self):
        owner = coordinator(prompts=1)
        owner.lease(1, "slow")
        owner.release("slow")
        assert positions(owner.lease(1, "fast")) == [0]
        assert owner.submit(empty(0)) is True
        assert owner.submit(empty(0)) is False
        assert len(owner.take(0)) == 1
        assert owner.submit(empty(0)) is False

    def test_a_position_nobody_asked_for_is_refused(self):
        owner = coordinator()
        owner.lease(1, "a")
        assert owner.submit(empty(77)) is False


class TestAdmission:
    @pytest.mark.parametrize("max_staleness", [0, 1, 3])
    def test_prompts_start_when_their_episode_is_near_enough(self, max_staleness):
        owner = coordinator(episodes=9, prompts=2, max_staleness=max_staleness)
        assert positions(owner.lease(99, "a")) == list(range(2 * (max_staleness + 1)))
        owner.publish(2)
        assert positions(owner.lease(99, "a")) == list(range(2 * (max_staleness + 1), 2 * (max_staleness + 3)))

    def test_nothing_starts_after_the_last_episode(self):
        owner = coordinator(episodes=2, prompts=2, max_staleness=5)
        assert positions(owner.lease(99, "a")) == [0, 1, 2, 3]
        assert not owner.finished

    def test_versions_never_go_back(self):
        owner = coordinator()
        owner.publish(3)
        owner.publish(3)
        with pytest.raises(RlhfError, match="version 2 is older than 3"):
            owner.publish(2)

    def test_episodes_are_exactly_the_blocks_of_the_stream(self):
        owner = coordinator(episodes=3, prompts=3)
        assert [finish(owner, e) for e in range(3)] == [[0, 1, 2], [3, 4, 5], [6, 7, 8]]
        assert owner.finished

    def test_episodes_are_taken_once_and_in_order(self):
        owner = coordinator(prompts=1, max_staleness=2)
        for lease in owner.lease(3, "a"):
            owner.submit(empty(lease.position))
        with pytest.raises(RlhfError, match="episode 1 cannot be taken"):
            owner.take(1)
        owner.take(0)
        with pytest.raises(RlhfError, match="episode 0 cannot be taken"):
            owner.take(0)

    def test_progress_says_what_is_missing(self):
        owner = coordinator(prompts=2)
        owner.lease(2, "maker-7")
        owner.submit(empty(0))
        assert owner.progress(0) == "1 of 2 groups are complete, in progress: 1 at maker-7"
        assert "not open" in owner.progress(1)


class TestDynamicSampling:
    def test_refused_groups_are_replaced_only_when_the_whole_wave_is_in(self):
        owner = coordinator(prompts=3)
        owner.lease(3, "a")
        owner.submit(empty(0), keep=False)
        assert owner.lease(9, "a") == []
        owner.submit(empty(2))
        owner.submit(empty(1), keep=False)
        assert positions(owner.lease(9, "a")) == [3, 4]
        owner.submit(empty(4))
        owner.submit(empty(3))
        assert [group.position for group in owner.take(0)] == [2, 3, 4]
        owner.publish(1)
        assert positions(owner.lease(9, "a")) == [5, 6, 7]

    @given(order=st.permutations(range(4)), refused=st.sets(st.integers(0, 3)))
    def test_what_is_drawn_does_not_depend_on_who_was_first(self, order, refused):
        owner = coordinator(prompts=4)
        owner.lease(4, "a")
        for position in order:
            owner.submit(empty(position), keep=position not in refused)
        assert positions(owner.lease(9, "a")) == list(range(4, 4 + len(refused)))

    @pytest.mark.parametrize(
        ("make", "said"),
        [
            (make_group, "dynamic sampling: episode 0 drew 8 prompts that were all refused"),
            (empty, "rewards: episode 0 lost all samples: on_failure dropped those of 8 prompts"),
        ],
    )
    def test_refills_are_bounded_and_say_why(self, make, said):
        owner = coordinator(prompts=2, max_refill_factor=3)
        with pytest.raises(RlhfError, match=said):
            for _ in range(20):
                for lease in owner.lease(9, "a"):
                    owner.submit(make(lease.position), keep=False)


class TestState:
    def test_finished_groups_survive_and_prompts_in_flight_are_made_again(self):
        owner = coordinator(prompts=2, max_staleness=1)
        owner.lease(4, "a")
        owner.submit(make_group(0, 2))
        owner.submit(make_group(3, 2), keep=False)
        tree = with_groups(owner.state_dict(), group_to_tree)
        again = coordinator(prompts=2, max_staleness=1)
        again.load_state_dict(with_groups(tree, group_from_tree))
        assert again.version == owner.version
        assert positions(again.lease(9, "b")) == [1, 2]
        assert again.submit(make_group(0, 2)) is False
        again.submit(make_group(1, 2))
        kept = again.take(0)
        assert [group.position for group in kept] == [0, 1]
        assert [item.sample_id for group in kept for item in group.items] == [0, 1, 2, 3]
        again.submit(make_group(2, 2))
        assert positions(again.lease(9, "b")) == [4]

    def test_a_state_is_a_snapshot(self):
        owner = coordinator(prompts=2)
        owner.lease(2, "a")
        state = owner.state_dict()
        owner.submit(make_group(0))
        assert state["open"]["0"]["outstanding"] == [0, 1]
        assert state["open"]["0"]["accepted"] == []


MAKERS = ("a", "b", "c")
EVENT = st.one_of(
    st.tuples(st.just("lease"), st.sampled_from(MAKERS), st.integers(1, 4)),
    st.tuples(st.just("submit"), st.sampled_from(MAKERS), st.integers(0, 7)),
    st.tuples(st.just("refuse"), st.sampled_from(MAKERS), st.integers(0, 7)),
    st.tuples(st.just("twice"), st.sampled_from(MAKERS), st.integers(0, 7)),
    st.tuples(st.just("die"), st.sampled_from(MAKERS), st.just(0)),
    st.tuples(st.just("seem lost"), st.sampled_from(MAKERS), st.just(0)),
    st.tuples(st.just("train"), st.just("-"), st.just(0)),
    st.tuples(st.just("lose"), st.just("-"), st.integers(0, 2)),
    st.tuples(st.just("lose taken"), st.just("-"), st.integers(0, 2)),
    st.tuples(st.just("resume"), st.just("-"), st.just(0)),
)


@settings(max_examples=150)
@given(events=st.lists(EVENT, max_size=60), max_staleness=st.integers(0, 2), prompts=st.integers(1, 3))
def test_every_sample_enters_exactly_one_episode(events, max_staleness, prompts):
    """Makers die, come late, answer twice and refuse; the trainer is resumed: nothing is lost or doubled."""
    world = World(max_staleness, prompts)
    for event in events:
        world.act(*event)
    world.run_to_the_end()
    world.check()


class World:
    episodes = 5

    def __init__(self, max_staleness, prompts):
        self.max_staleness = max_staleness
        self.prompts = prompts
        self.owner = self.new()
        self.holding = {maker: [] for maker in MAKERS}
        self.refused = set()
        self.trained = []

    def new(self):
        return coordinator(
            self.episodes,
            self.prompts,
            max_staleness=self.max_staleness,
            max_refill_factor=1000,
        )

    def act(self, kind, maker, number):
        if kind == "lease":
            for lease in self.owner.lease(number, maker):
                assert lease.episode <= self.owner.version + self.max_staleness
                self.holding[maker].append(lease.position)
        elif kind in ("submit", "refuse", "twice") and self.holding[maker]:
            position = self.holding[maker].pop(number % len(self.holding[maker]))
            self.submit(position, keep=kind != "refuse")
            if kind == "twice":
                self.submit(position, keep=True)
        elif kind == "die":
            self.owner.release(maker)
            self.holding[maker].clear()
        elif kind == "seem lost":
            self.owner.release(maker)
        elif kind == "train":
            self.train()
        elif kind == "lose":
            lost = self.owner.withdraw(lambda group: group.position % 3 == number)
            assert self.owner.withdraw(lambda group: group.position % 3 == number) == 0 <= lost
        elif kind == "lose taken":
            self.lose_taken(number)
        elif kind == "resume":
            state = with_groups(self.owner.state_dict(), group_to_tree)
            self.owner = self.new()
            self.owner.load_state_dict(with_groups(state, group_from_tree))

    def submit(self, position, *, keep):
        if self.owner.submit(make_group(position), keep=keep) and not keep:
            self.refused.add(position)

    def train(self):
        episode = len(self.trained)
        if episode < self.episodes and self.owner.ready(episode):
            self.trained.append([group.position for group in self.owner.take(episode)])
            self.owner.publish(episode + 1)

    def lose_taken(self, number):
        episode = len(self.trained)
        if episode < self.episodes and self.owner.ready(episode):
            groups = self.owner.take(episode)
            lost = [group.position for group in groups][number : number + 2]
            self.owner.give_back(groups, lost)
            assert self.owner.ready(episode) == (not lost)
            assert not self.owner.finished

    def run_to_the_end(self):
        for _ in range(200):
            if self.owner.finished:
                return
            for maker in MAKERS:
                self.owner.release(maker)
            for lease in self.owner.lease(100, "a"):
                self.submit(lease.position, keep=True)
            self.train()
        raise AssertionError(f"stuck: {self.owner.progress(len(self.trained))}")

    def check(self):
        everything = [position for episode in self.trained for position in episode]
        assert all(len(episode) == self.prompts for episode in self.trained)
        assert all(episode == sorted(episode) for episode in self.trained)
        assert len(everything) == len(set(everything))
        assert not self.refused & set(everything)
        assert set(everything) | self.refused == set(range(len(everything) + len(self.refused)))


class Recorder:
    """A sampler that draws 100, 101, … and remembers what it was told."""

    def __init__(self):
        self.next, self.learnt, self.episodes = 100, [], []

    def draw(self, count, episode):
        self.episodes.append(episode)
        self.next += count
        return list(range(self.next - count, self.next))

    def learn(self, record, success):
        self.learnt.append((record, success))

    def take_metrics(self):
        return {"curriculum/learnt": float(len(self.learnt))}

    def state_dict(self):
        return {"next": self.next, "learnt": [list(each) for each in self.learnt]}

    def load_state_dict(self, state):
        self.next, self.learnt = state["next"], [tuple(each) for each in state["learnt"]]


class TestSampler:
    def test_leases_name_the_record_that_was_drawn_also_when_made_again(self):
        owner = coordinator(sampler=Recorder())
        assert [(each.position, each.record) for each in owner.lease(3, "a")] == [(0, 100), (1, 101), (2, 102)]
        owner.release("a")
        assert [(each.position, each.record) for each in owner.lease(1, "b")] == [(0, 100)]

    def test_it_learns_a_wave_at_a_time_in_order_refused_ones_included(self):
        sampler = Recorder()
        owner = coordinator(sampler=sampler)
        owner.lease(3, "a")
        for position, keep in ((2, True), (0, False), (1, True)):
            assert sampler.learnt == []
            owner.submit(make_group(position), keep=keep, success=position / 2)
        assert sampler.learnt == [(100, 0.0), (101, 0.5), (102, 1.0)]
        assert [(each.position, each.record) for each in owner.lease(9, "a")] == [(3, 103)]
        owner.submit(make_group(3), success=None)
        owner.take(0)
        assert len(sampler.learnt) == 3 and sampler.episodes == [0, 0]
        assert owner.take_metrics() == {"rollout/refused_prompts": 1.0, "curriculum/learnt": 3.0}

    def test_a_group_that_was_learnt_and_then_lost_counts_once_also_after_a_resume(self):
        first = coordinator(sampler=Recorder())
        first.lease(3, "a")
        for position in (0, 1, 2):
            first.submit(make_group(position), success=position / 10)
        assert first.withdraw(lambda group: group.position == 1) == 1
        sampler = Recorder()
        second = coordinator(sampler=sampler)
        second.load_state_dict(with_groups(with_groups(first.state_dict(), group_to_tree), group_from_tree))
        assert [each.position for each in second.lease(9, "b")] == [1]
        second.submit(make_group(1), success=0.9)
        assert second.ready(0) and sampler.learnt == [(100, 0.0), (101, 0.1), (102, 0.2)]

    def test_a_resume_in_the_middle_of_a_wave_forgets_nothing(self):
        first = coordinator(sampler=Recorder(), max_staleness=1)
        first.lease(6, "a")
        for position in (4, 0, 1):
            first.submit(make_group(position), success=position / 10)
        sampler = Recorder()
        second = coordinator(sampler=sampler, max_staleness=1)
        second.load_state_dict(with_groups(with_groups(first.state_dict(), group_to_tree), group_from_tree))
        leases = second.lease(9, "b")
        assert [(each.position, each.record) for each in leases] == [(2, 102), (3, 103), (5, 105)]
        second.submit(make_group(2), success=0.2)
        assert sampler.learnt == [(100, 0.0), (101, 0.1), (102, 0.2)]
        second.submit(make_group(3), success=0.3)
        second.submit(make_group(5), success=0.5)
        assert sampler.learnt[3:] == [(103, 0.3), (104, 0.4), (105, 0.5)]
