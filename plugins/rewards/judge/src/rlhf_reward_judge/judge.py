"""The reward `judge`: sends a question for each answer or pair of answers and reads the verdicts, within a budget."""

from __future__ import annotations

import asyncio
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
from .images import check_images_installed, with_images
from .ledger import BudgetSpent, Ledger
from .pairs import comparisons
from .remote import JudgeError, JudgeReply, RemoteJudge
from .verdicts import Messages, UnreadableVerdict, pairwise_messages, read_better, read_points, rubric_messages


class Judge(Protocol):
    """A model that replies to questions, one batch at a time."""

    async def ask(self, questions: Sequence[Messages]) -> list[JudgeReply | Exception]:
        """Return a reply to each question, or the error of a failed one."""

    async def aclose(self) -> None:
        """Release connections or the model."""


def build(config: JudgeConfig, context: RewardContext) -> Reward:
    """Return the reward. Raises `UserInputError` if the key is not set or the local model cannot be loaded."""
    identity = json.dumps(config.model_dump(mode="json", include={"url", "model", "model_path", "temperature"}))
    judge: Judge
    if config.images:
        check_images_installed()
    if config.url is not None:
        judge = RemoteJudge(config)
    else:
        from .local import LocalJudge

        judge = LocalJudge(config, context)
    path = None if context.folder is None else context.folder / f"judge-{_digest(identity)[:16]}.sqlite"
    ledger = Ledger(path, max_calls=config.max_calls, max_tokens=config.max_tokens)
    return JudgeReward(config, judge, ledger, identity=identity)


@dataclass(frozen=True, slots=True)
class _Question:
    messages: Messages
    read: Callable[[str], float]
    """Reads the verdict in a reply. Raises `UnreadableVerdict`."""
    lowest: float
    """Score of an unreadable verdict if `unreadable: lowest`."""


class JudgeReward:
    """An async reward that scores by the verdicts of a judge."""

    def __init__(self, config: JudgeConfig, judge: Judge, ledger: Ledger, *, identity: str) -> None:
        """Create the reward.

        Args:
            config: options of the reward.
            judge: the judging model.
            ledger: known replies and budget.
            identity: description of the judge and its sampling, part of the key of a stored reply.
        """
        self._config = config
        self._judge = judge
        self._ledger = ledger
        self._identity = identity
        self._counts: Counter[str] = Counter()
        self._lock = threading.Lock()

    async def __call__(self, rollouts: Sequence[Rollout]) -> list[float]:
        """Score each sample from 0 to 1. Raises `JudgeError`."""
        if self._config.mode == "pairwise":
            return await self._pairwise(rollouts)
        config = self._config
        messages = [rubric_messages(rollout, config.rubric, config.max_points) for rollout in rollouts]
        return await self._verdicts(
            [
                _Question(each, lambda reply: read_points(reply, config.max_points), lowest=0.0)
                for each in await self._seen(rollouts, messages)
            ]
        )

    async def aclose(self) -> None:
        """Close the judge and its ledger."""
        try:
            await self._judge.aclose()
        finally:
            self._ledger.close()

    def take_counts(self) -> dict[str, float]:
        """Return and reset the counts, which are logged as `reward_calls/<name>/…`."""
        with self._lock:
            taken, self._counts = self._counts, Counter()
        return {name: float(number) for name, number in taken.items()}

    async def _pairwise(self, rollouts: Sequence[Rollout]) -> list[float]:
        pairs = comparisons(rollouts, self._config.opponents)
        rubric = self._config.rubric
        messages = [pairwise_messages(pair.rollout, pair.first, pair.second, rubric) for pair in pairs]
        seen = await self._seen([pair.rollout for pair in pairs], messages)
        verdicts = await self._verdicts([_Question(each, read_better, lowest=0.5) for each in seen])
        won: list[list[float]] = [[] for _ in rollouts]
        for pair, verdict in zip(pairs, verdicts, strict=True):
            for index, share in pair.shares(verdict):
                won[index].append(share)
        # An answer without an opponent has neither won nor lost.
        return [sum(shares) / len(shares) if shares else 0.5 for shares in won]

    async def _seen(self, rollouts: Sequence[Rollout], questions: Sequence[Messages]) -> Sequence[Messages]:
        """Add the images of each question's rollout, with the option `images`. Raises `DataError`."""
        if not self._config.images:
            return questions
        return await asyncio.to_thread(lambda: list(with_images(rollouts, questions)))

    async def _verdicts(self, questions: Sequence[_Question]) -> list[float]:
        """Return a verdict on each question, from the ledger or the judge. Unreadable ones are requested again."""
        keys = [_digest(self._identity + json.dumps(each.messages)) for each in questions]
        unique = dict(zip(keys, questions, strict=True))  # equal questions are sent once
        verdicts: dict[str, float] = {}
        for key, question in unique.items():
            known = self._ledger.reply(key)
            if known is None:
                continue
            with suppress(UnreadableVerdict):  # the file may have been edited
                verdicts[key] = question.read(known)
                self._count("remembered", keys.count(key))
        problem: UnreadableVerdict | None = None
        for _ in range(self._config.asked_again + 1):
            open_questions = {key: each for key, each in unique.items() if key not in verdicts}
            if not open_questions:
                break
            replies = await self._ask([each.messages for each in open_questions.values()])
            for (key, question), reply in zip(open_questions.items(), replies, strict=True):
                try:
                    verdicts[key] = question.read(reply.text)
                except UnreadableVerdict as error:
                    problem = error
                    self._count("unreadable")
                else:
                    self._ledger.remember(key, reply.text)
        if len(verdicts) < len(unique) and self._config.unreadable == "fail":
            raise JudgeError(f"its verdict cannot be read: {problem}")
        return [verdicts.get(key, each.lowest) for key, each in zip(keys, questions, strict=True)]

    async def _ask(self, questions: Sequence[Messages]) -> list[JudgeReply]:
        """Send questions within the budget. Raises `JudgeError` for the first failed one, after counting all."""
        try:
            self._ledger.begin_calls(len(questions))
        except BudgetSpent as spent:
            raise JudgeError(f"the budget of the run is spent: {spent}") from None
        self._count("asked", len(questions))
        replies = await self._judge.ask(questions)
        tokens = sum(reply.num_tokens for reply in replies if isinstance(reply, JudgeReply))
        self._ledger.add_tokens(tokens)
        self._count("tokens", tokens)
        for reply in replies:
            if isinstance(reply, Exception):
                raise reply
        return [reply for reply in replies if isinstance(reply, JudgeReply)]

    def _count(self, name: str, number: int = 1) -> None:
        with self._lock:
            self._counts[name] += number


def _digest(text: str) -> str:
    return sha256(text.encode("utf-8", "surrogatepass")).hexdigest()
