"""Contract of an environment: the same task gives the same episode, independent of other episodes."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any, ClassVar

import pytest

from rlhf_core.config.problems import Problems
from rlhf_core.config.resolved import Configured
from rlhf_core.errors import EpisodeError
from rlhf_core.plugins.selected import SelectedPlugin
from rlhf_core.rollout.row import Played, Row
from rlhf_episodes.environment_shape import check_shape
from rlhf_episodes.selected import resolve_environment

from ..episodes import PlayedEpisodes, episode_tokenizer, play_episodes
from .base import ComponentContract


class EnvironmentContract(ComponentContract):
    """Tests of an environment. Override `records` and `replies` if made-up ones do not exercise the environment.

    Example:
        class TestMyGame(EnvironmentContract):
            plugin = "my-game"
            records = [{"prompt": "Guess a number."}]
            replies = ["7", "give up"]
    """

    kind = "environments"
    records: ClassVar[Sequence[Mapping[str, Any]]] = ()
    """Prompts as returned by a source. Empty uses empty tasks, as in a run without prompts."""
    replies: ClassVar[Sequence[str]] = ()
    """Texts for the policy to write, one in most turns. Other turns are random characters."""
    chat: ClassVar[bool] = True
    """Whether the model has a chat template. Set it to False for a plain-text environment."""
    deterministic: ClassVar[bool] = True
    """Whether task and policy text determine the episode. Set it to False if the environment uses the network."""
    max_turns: ClassVar[int] = 4
    timeout_seconds: ClassVar[float] = 60.0

    @pytest.fixture(scope="class")
    @classmethod
    def environment(cls, selected: SelectedPlugin, given: dict[str, Any]) -> Configured:
        """The environment with the options of this class, as in a run."""
        if isinstance(selected.function, type):
            check_shape(selected.function, selected.label)
        problems = Problems()
        bounds = {"max_turns": cls.max_turns, "timeout_seconds": cls.timeout_seconds}
        environment = resolve_environment({**given, **bounds, "name": cls.plugin}, problems)
        problems.raise_if_any(cls.__name__)
        assert environment is not None
        return environment

    @pytest.fixture(scope="class")
    @classmethod
    def episodes(cls, environment: Configured, folder: Path) -> PlayedEpisodes:
        """Two samples of each prompt, played concurrently."""
        return cls._play(environment, folder)

    @classmethod
    def _play(cls, environment: Configured, folder: Path) -> PlayedEpisodes:
        """Play through core, which rejects malformed steps and metrics, values that are not finite, and hung calls."""
        try:
            return play_episodes(
                environment,
                episode_tokenizer(chat=cls.chat),
                records=copy.deepcopy(list(cls.records)),
                replies=cls.replies,
                num_prompts=len(cls.records) or 4,
                folder=folder,
            )
        except EpisodeError as error:
            pytest.fail(f"{environment.label}: an episode failed: {error}")

    def test_episodes_end(self, episodes: PlayedEpisodes) -> None:
        """Episodes end whatever the policy writes: random text, nothing, or truncated turns."""
        assert all(each.rows and each.rows[0].columns["environment"]["num_turns"] >= 1 for each in episodes.played)

    def test_bounds_are_kept(self, episodes: PlayedEpisodes) -> None:
        longest = max(each.rows[0].columns["environment"]["num_turns"] for each in episodes.played)
        assert longest <= self.max_turns, f"an episode has {longest:g} turns, above max_turns {self.max_turns}"

    def test_a_turn_goes_on_where_the_last_one_ended(self, episodes: PlayedEpisodes) -> None:
        """Token ids of a turn start with those of the previous turn, and the last turn ends its row."""
        rows = {(each.sample_id, row.branch): row for each in episodes.played for row in each.rows}
        for place, turns in _by_branch(episodes).items():
            before: tuple[int, ...] = ()
            for request, completion in turns:
                assert request.prompt_ids[: len(before)] == before, f"sample, branch {place}: earlier tokens changed"
                before = (*request.prompt_ids, *completion.token_ids)
            assert rows[place].sequence == before, f"sample, branch {place}: the row must end with the last turn"

    def test_what_was_sampled_is_learnt_and_nothing_else(self, episodes: PlayedEpisodes) -> None:
        for each in episodes.played:
            for row in each.rows:
                _check_mask(row, _by_branch(episodes)[each.sample_id, row.branch])

    def test_each_branch_is_there_once(self, episodes: PlayedEpisodes) -> None:
        places = [(each.sample_id, row.branch) for each in episodes.played for row in each.rows]
        assert len(places) == len(set(places)) and set(places) == set(_by_branch(episodes))

    def test_the_samples_of_a_prompt_begin_alike(self, episodes: PlayedEpisodes) -> None:
        """Samples of a prompt are compared with each other: `reset` may use `task.seed`, but not `task.sample_seed`."""
        starts = defaultdict(set)
        for each in episodes.played:
            starts[each.prompt.position].add((each.rows[0].text, each.rows[0].prompt_ids))
        different = [position for position, texts in starts.items() if len(texts) > 1]
        assert not different, f"samples of prompt {different[0]} have different tasks: draw tasks from task.seed"

    def test_the_same_seeds_give_the_same_episodes(
        self, environment: Configured, folder: Path, episodes: PlayedEpisodes
    ) -> None:
        """A lost episode is replayed from its seeds."""
        if self.deterministic:
            _check_same(episodes, self._play(environment, folder), "the first time", "replayed")

    def test_an_episode_does_not_look_at_others(
        self, environment: Configured, folder: Path, episodes: PlayedEpisodes
    ) -> None:
        """Episodes played one at a time equal those played concurrently, unless state in a class or module leaks."""
        if self.deterministic:
            alone = self._play(_with_options(environment, concurrency=1), folder)
            _check_same(episodes, alone, "played concurrently", "played one at a time")

    def test_it_plays_in_a_process_of_its_own(
        self, environment: Configured, folder: Path, episodes: PlayedEpisodes
    ) -> None:
        """`isolate: true` creates the environment in another process, from its name and options alone."""
        isolated = self._play(_with_options(environment, isolate=True), folder)
        if self.deterministic:
            _check_same(episodes, isolated, "in this process", "in a separate process")


def _with_options(environment: Configured, **options: Any) -> Configured:
    return replace(environment, config=environment.config.model_copy(update=options))


def _by_branch(episodes: PlayedEpisodes) -> dict[tuple[int, int], list[Any]]:
    turns = defaultdict(list)
    for request, completion in episodes.sampled:
        turns[request.sample_id, request.branch].append((request, completion))
    return dict(turns)


def _check_mask(row: Row, turns: Sequence[Any]) -> None:
    """Check that the mask is True and the log-probs are the engine's exactly for the sampled tokens of this branch."""
    mask, logprobs = [False] * len(row.ids), [0.0] * len(row.ids)
    for request, completion in turns:
        start = len(request.prompt_ids) - len(row.prompt_ids)
        stop = start + len(completion.token_ids)
        mask[start:stop] = [True] * (stop - start)
        logprobs[start:stop] = completion.logprobs
    assert row.mask == mask, f"branch {row.branch}: the mask must be True exactly for sampled tokens"
    assert row.logprobs == logprobs, f"branch {row.branch}: log-probs differ from those of the engine"


def _check_same(one: PlayedEpisodes, other: PlayedEpisodes, when: str, otherwise: str) -> None:
    for left, right in zip(one.played, other.played, strict=True):
        expected = _facts(right)
        for name, fact in _facts(left).items():
            assert fact == expected[name], (
                f"sample {left.sample_id}: {name} {when}: {fact!s:.200}, {otherwise}: {expected[name]!s:.200}. "
                "Draw randomness from task.seed or task.sample_seed, and keep no state between episodes "
                "(set deterministic = False for an environment that uses the network)."
            )


def _facts(played: Played) -> dict[str, Any]:
    ids = list(chain.from_iterable(row.sequence for row in played.rows))
    return {"reward": played.reward, "rewards of turns": played.turn_rewards, "tokens": ids}
