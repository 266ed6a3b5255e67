"""Plays episodes of environments written in tests with `FakeEngine`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.rollout.row import Played
from rlhf_core.rollout.samples import SampleRewards, item_of, rollout_of
from rlhf_core.types import BufferItem, PhaseTimes, Rollout, SamplingParams
from rlhf_episodes import AnswerStructures
from rlhf_episodes.contract import Outcome, make_task
from rlhf_episodes.play import EnvironmentPlayer
from rlhf_episodes.playable import Playable
from rlhf_episodes.rules import Rules
from rlhf_episodes.section import EnvironmentConfig
from rlhf_episodes.shapes import new_environment
from rlhf_episodes.sight import Sight
from rlhf_testing.engine import FakeEngine
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.samples import make_prompt

EOS = 2


class Says(FakeEngine):
    """Answers a turn with `answer(sample id, branch, number of the branch's earlier tokens)`."""

    def __init__(self, answer: Callable[[int, int, int], Sequence[int]]) -> None:
        super().__init__(answer=lambda request, version: answer(request.sample_id, request.branch, request.offset))


class Reworded(FakeEngine):
    """Answers the k-th turn of a sample with the ids of the k-th text, and an EOS."""

    def __init__(self, tokenizer: Any, texts: Sequence[str], end: int | None = None) -> None:
        turns: dict[int, int] = {}

        def answer(request: Any, version: int) -> Sequence[int]:
            turn = turns[request.sample_id] = turns.get(request.sample_id, -1) + 1
            ids = tokenizer(texts[turn % len(texts)], add_special_tokens=False)["input_ids"]
            return [*ids, EOS if end is None else end]

        super().__init__(answer=answer)


def player(
    make: Callable[[], Any],
    *,
    engine: Any = None,
    tokenizer: Any = None,
    max_new_tokens: int = 4,
    context_tokens: int | None = None,
    seed: int = 0,
    stop: tuple[str, ...] = (),
    times: PhaseTimes | None = None,
    sight: Sight | None = None,
    **options: Any,
) -> EnvironmentPlayer:
    """Create a player of the environments that `make` returns."""
    tokenizer = tokenizer or tiny_tokenizer()
    rules = Rules(
        options=EnvironmentConfig(**options),
        tokenizer=tokenizer,
        sampling=SamplingParams(max_new_tokens=max_new_tokens, stop=stop),
        context_tokens=context_tokens,
        eos_token_ids=frozenset({tokenizer.eos_token_id}),
        structures=AnswerStructures(engine, tokenizer),
        sight=sight,
    )
    return EnvironmentPlayer(
        [Playable(make=partial(new_environment, make), rules=rules, name="test")],
        engine=engine or FakeEngine(),
        task=partial(make_task, seed, "task"),
        times=times or PhaseTimes(),
    )


def play(make: Callable[[], Any], *, samples: int = 1, prompt: Any = None, **options: Any) -> list[Played]:
    """Play the episodes of one prompt, and return them sorted by sample id."""
    each = prompt or make_prompt(0)
    episodes = player(make, **options).play([(each, number) for number in range(samples)])
    return sorted(episodes, key=lambda played: played.sample_id)


def play_one(make: Callable[[], Any], **options: Any) -> Played:
    """Play the episode of one sample."""
    (played,) = play(make, **options)
    return played


class Echo:
    """Replies to each turn with its number, rewards turn k with k + 1, and ends after `turns`."""

    def __init__(self, turns: int = 3, first: Any = None, observations: Sequence[Any] | None = None) -> None:
        self.turns, self.first, self.observations = turns, first, observations
        self.replies: list[Any] = []

    def reset(self, task: Any) -> Any:
        self.task = task
        return self.first

    def step(self, reply: Any) -> tuple[Any, float, bool]:
        self.replies.append(reply)
        number = len(self.replies) - 1
        observation = f">{number}" if self.observations is None else self.observations[number]
        return observation, float(number + 1), number + 1 == self.turns


class Driven:
    """An environment of the form `run(task, policy)`."""

    def __init__(self, run: Callable[[Any, Any], Any]) -> None:
        self._run = run

    async def run(self, task: Any, policy: Any) -> Any:
        return await self._run(task, policy)


def driven(run: Callable[[Any, Any], Any]) -> Callable[[], Driven]:
    """Return a factory of environments from an async function."""
    return lambda: Driven(run)


def three_digits(sample: int, branch: int, offset: int) -> Sequence[int]:
    """Return 7, 8, EOS for each turn."""
    return [11, 12, EOS]


def branches(tokenizer: Any, replies: Sequence[str], given: Sequence[Any], *, history: str = "branch") -> list[Rollout]:
    """Return the rollouts of an episode after "hello", with sampled `replies`, each after its part of `given`."""
    prompt = PromptEncoder(tokenizer).prompt({"prompt": [{"role": "user", "content": "hello"}]}, 0, "test")
    sampled = iter(replies)

    async def run(task: Any, policy: Any) -> Outcome:
        for messages in given:
            await policy.turn(messages)
        return Outcome()

    engine = FakeEngine(answer=lambda request, version: tokenizer(next(sampled), add_special_tokens=False)["input_ids"])
    options = {"tokenizer": tokenizer, "prompt": prompt, "max_new_tokens": 99, "history": history}
    return rollouts(play_one(driven(run), engine=engine, **options))


def rollouts(played: Played) -> list[Rollout]:
    """Return a rollout for each row."""
    return [rollout_of(row, played) for row in played.rows]


def items(played: Played, scores: Mapping[str, float] | None = None) -> list[BufferItem]:
    """Return the trainer's item for each row. scores: of the rewards in addition to the environment."""
    rewards = SampleRewards.of(played, scores or {})
    return [
        item_of(row, rollout, rewards, played, None) for row, rollout in zip(played.rows, rollouts(played), strict=True)
    ]
