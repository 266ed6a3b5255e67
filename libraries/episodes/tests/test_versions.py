"""The policy versions of a row's tokens, where weights changed while it was played."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from playing import EOS, Echo, Says, driven, items, play_one, rollouts

from rlhf_core.rollout import collected_episode
from rlhf_core.training.estimates import _response_metrics
from rlhf_core.types import Completion, GenerationRequest, PhaseTimes, SamplingParams
from rlhf_episodes.contract import Outcome


class Moving(Says):
    """New weights come before the third token of every turn, and before every turn but the first of a branch."""

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        for done in super().generate(requests, sampling):
            first = self.policy_version
            self.weights_updated(first + 1)
            versions = (first, first, first + 1)[: len(done.token_ids)]
            yield replace(done, policy_versions=versions if len(set(versions)) > 1 else ())


def test_each_token_has_its_version_and_given_ones_none() -> None:
    played = play_one(Echo, engine=Moving(lambda sample, branch, offset: [11, 12, EOS]))
    (rollout,), (item,) = rollouts(played), items(played)
    assert rollout.policy_versions == (0, 0, 1, -1, -1, 1, 1, 2, -1, -1, 2, 2, 3)
    assert [version >= 0 for version in rollout.policy_versions] == list(rollout.action_mask or ())
    assert rollout.policy_version == item.policy_version == 0
    assert item.policy_versions is not None and item.policy_versions.tolist() == list(rollout.policy_versions)
    assert collected_episode([item], PhaseTimes()).rows[0].mixed


def test_several_turns_of_one_version_need_no_list() -> None:
    played = play_one(Echo, engine=Says(lambda sample, branch, offset: [11, 12, EOS]))
    assert rollouts(played)[0].policy_versions == ()
    assert items(played)[0].policy_versions is None


def test_a_fork_counts_its_own_tokens_and_is_as_old_as_what_it_began_with() -> None:
    async def forks(task, policy):
        await policy.turn("1")
        other = policy.fork()
        await policy.turn("2")
        await other.turn("3")
        return Outcome()

    played = play_one(driven(forks), engine=Moving(lambda sample, branch, offset: [11, EOS]))
    trunk, fork = rollouts(played)
    assert trunk.policy_version == fork.policy_version == 0
    assert {version for version in fork.policy_versions if version >= 0} == {2}
    assert fork.policy_versions[:2] == (-1, -1)


def test_the_share_of_such_samples_is_told_where_there_are_any() -> None:
    plain = items(play_one(Echo, engine=Says(lambda sample, branch, offset: [11, EOS])))
    mixed = items(play_one(Echo, engine=Moving(lambda sample, branch, offset: [11, 12, EOS])))
    rows = [collected_episode([each], PhaseTimes()).rows for each in (*plain, *mixed)]
    assert _response_metrics(rows, 1)["staleness/mixed_fraction"] == 0.5
    assert "staleness/mixed_fraction" not in _response_metrics(rows[:1], 1)
    assert _response_metrics(rows, 3)["staleness/max"] == 3.0
