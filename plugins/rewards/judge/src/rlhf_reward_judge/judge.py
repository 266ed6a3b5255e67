"""The reward `judge`: questions for each answer or pair of answers, verdicts back, within a budget."""

from __future__ import annotations

import json
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

from rlhf_core.components import RewardContext
from rlhf_core.protocols import Reward
from rlhf_core.types import Rollout

from .config import JudgeConfig
from .ledger import BudgetSpent, Ledger
from .pairs import Comparison, comparisons
from .remote import JudgeError, RemoteJudge, Reply
from .verdicts import Messages, UnreadableVerdict, pairwise_messages, read_better, read_points, rubric_messages


class Judge(Protocol):
    """A model that replies to questions."""

    async def ask(self, questions: Sequence[Messages]) -> list[Reply | Exception]: ...

    async def aclose(self) -> None: ...


def build(config: JudgeConfig, context: RewardContext) -> Reward:
    """Raises `UserInputError` where the key is not set or the local model cannot be loaded."""
    who = json.dumps(config.model_dump(mode="json", include={"url", "model", "model_path", "temperature"}))
    judge: Judge
    if config.url is not None:
        judge = RemoteJudge(config)
    else:
        from .local import LocalJudge

        judge = LocalJudge(config, context)
    path = None if context.folder is None else context.folder / f"judge-{_digest(who)[:16]}.sqlite"
    ledger = Ledger(path, max_calls=config.max_calls, max_tokens=config.max_tokens)
    return JudgeReward(config, judge, ledger, who=who)


@dataclass(frozen=True, slots=True)
class _Question:
    messages: Messages
    read: Callable[[str], float]
    """The verdict of a reply; raises `UnreadableVerdict`."""
    lowest: float
    """The score where no reply can be read and that is allowed."""


class JudgeReward:
    """An async reward."""

    def __init__(self, config: JudgeConfig, judge: Judge, ledger: Ledger, *, who: str) -> None:
        """who: the judge and how it is asked, part of what a reply is remembered by."""
        self._config = config
        self._judge = judge
        self._ledger = ledger
        self._who = who
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """A score from 0 to 1 for each. Raises `JudgeError`."""
        if self._config.mode == "pairwise":
            return await self._pairwise(rollouts)
        config = self._config
        return await self._verdicts(
            [
                _Question(
                    rubric_messages(rollout, config.rubric, config.max_points),
                    lambda reply: read_points(reply, config.max_points),
                    lowest=0.0,
                )
                for rollout in rollouts
            ]
        )

    async def aclose(self) -> None:
        """Close the judge and its ledger."""
        try:
            await self._judge.aclose()
        finally:
            self._ledger.close()

    def take_counts(self) -> dict[str, float]:
        """Take the counts since the last call; logged as `reward_calls/<name>/…`."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return {name: float(number) for name, number in taken.items()}

    async def _pairwise(self, rollouts: Sequence[Rollout]) -> list[float]:
        compared = comparisons(rollouts, self._config.opponents)
        verdicts = await self._verdicts([self._comparison(each) for each in compared])
        won: list[list[float]] = [[] for _ in rollouts]
        for each, share in zip(compared, verdicts, strict=True):
            for index, own in each.shares(share):
                won[index].append(own)
        # An answer that there is nothing to compare with has neither won nor lost.
        return [sum(shares) / len(shares) if shares else 0.5 for shares in won]

    def _comparison(self, each: Comparison) -> _Question:
        messages = pairwise_messages(each.asked_about, each.first, each.second, self._config.rubric)
        return _Question(messages, read_better, lowest=0.5)

    async def _verdicts(self, questions: Sequence[_Question]) -> list[float]:
        """The verdict on each question: a known one, or the judge's, asked again where it cannot be read."""
        keys = [_digest(self._who + json.dumps(each.messages)) for each in questions]
        asked = dict(zip(keys, questions, strict=True))  # equal questions are asked once
        found: dict[str, float] = {}
        for key, each in asked.items():
            known = self._ledger.reply(key)
            if known is None:
                continue
            with suppress(UnreadableVerdict):  # somebody may have written into the file
                found[key] = each.read(known)
                self._count("remembered", keys.count(key))
        problem: UnreadableVerdict | None = None
        for _ in range(self._config.asked_again + 1):
            open_questions = {key: each for key, each in asked.items() if key not in found}
            if not open_questions:
                break
            replies = await self._ask([each.messages for each in open_questions.values()])
            for (key, each), reply in zip(open_questions.items(), replies, strict=True):
                try:
                    found[key] = each.read(reply.text)
                except UnreadableVerdict as error:
                    problem = error
                    self._count("unreadable")
                else:
                    self._ledger.remember(key, reply.text)
        if len(found) < len(asked) and self._config.unreadable == "fail":
            raise JudgeError(f"its verdict cannot be read: {problem}")
        return [found.get(key, each.lowest) for key, each in zip(keys, questions, strict=True)]

    async def _ask(self, questions: Sequence[Messages]) -> list[Reply]:
        """Replies within the budget. Raises `JudgeError` for the first that fails, once all are counted."""
        try:
            self._ledger.begin_calls(len(questions))
        except BudgetSpent as spent:
            raise JudgeError(f"the budget of the run is spent: {spent}") from None
        self._count("asked", len(questions))
        replies = await self._judge.ask(questions)
        tokens = sum(reply.num_tokens for reply in replies if isinstance(reply, Reply))
        self._ledger.add_tokens(tokens)
        self._count("tokens", tokens)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return [reply for reply in replies if isinstance(reply, Reply)]

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
