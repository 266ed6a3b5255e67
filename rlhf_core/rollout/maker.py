"""`PolicyExperienceMaker`: generate, score, log-probs, values -> scored groups of samples.

What needs a model forward happens here: tokens with the engine's log-probs, reference log-probs, values, raw rewards
by name. What is arithmetic (combining rewards, KL penalty, advantages) is the trainer's.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import TYPE_CHECKING

from ..errors import RlhfError
from ..hooks.relay import HookRelay
from ..protocols import RolloutEngine
from ..rewards.scorer import RewardScorer, Scores
from ..types import BufferItem, Completion, GenerationRequest, PhaseTimes, Prompt, Rollout, RolloutGroup, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from ..models.reference_pass import ReferencePass


SCORED_TOGETHER = 64
"""Samples handed to the rewards at a time while later ones are still generated."""


@dataclass(frozen=True, slots=True)
class _Finished:
    """All answers to one prompt."""

    prompt: Prompt
    completions: list[Completion]


@dataclass(frozen=True, slots=True)
class _Scoring:
    """Groups whose rewards are being computed."""

    groups: list[_Finished]
    rollouts: list[Rollout]
    scores: Future[Scores]


class PolicyExperienceMaker:
    """Makes whole prompt groups with one engine, one scorer and, where needed, a reference and a critic.

    `sample_id(prompt position, k)` numbers samples; the seed classes bring their own numbering.
    """

    def __init__(
        self,
        *,
        engine: RolloutEngine,
        tokenizer: PreTrainedTokenizerBase,
        sampling: SamplingParams,
        samples_per_prompt: int,
        scorer: RewardScorer,
        hooks: HookRelay,
        reference_pass: ReferencePass | None = None,
        kl_coef: float | None = None,
        number: Callable[[int, int], int] | None = None,
    ) -> None:
        self._engine = engine
        self.tokenizer = tokenizer
        self._sampling = sampling
        self._samples_per_prompt = samples_per_prompt
        self._scorer = scorer
        self._hooks = hooks
        self._reference_pass = reference_pass
        self._kl_coef = kl_coef
        self._number = number or (lambda position, k: position * samples_per_prompt + k)
        self.times = PhaseTimes()

    def take_times(self) -> PhaseTimes:
        """The times since the last call, and what the rewards cost meanwhile."""
        taken, self.times = self.times, PhaseTimes()
        taken.reward_calls = self._scorer.take_metrics()
        return taken

    def make(self, prompts: Sequence[Prompt]) -> Iterator[RolloutGroup]:
        """Yield every prompt's group. A group all of whose samples were dropped comes back empty."""
        num_samples = len(prompts) * self._samples_per_prompt
        with self._hooks.span("make_experience", num_prompts=len(prompts), num_samples=num_samples) as span:
            scoring = self._generate(prompts)
            started = time.perf_counter()
            with self._hooks.span("reward", num_samples=num_samples):
                scored = [(part, part.scores.result()) for part in scoring]
            self.times.reward_s += time.perf_counter() - started
            groups = [group for part, scores in scored for group in self._groups(part, scores)]
            started = time.perf_counter()
            if self._reference_pass is not None:
                groups = self._reference_pass.run(groups)
            self.times.forward_s += time.perf_counter() - started
            span.set("groups", groups)
        yield from groups

    def _generate(self, prompts: Sequence[Prompt]) -> list[_Scoring]:
        """Generate all samples; finished groups go to the rewards while later ones are still generated."""
        by_id = {self._number(p.position, k): p for p in prompts for k in range(self._samples_per_prompt)}
        requests = [GenerationRequest(sample_id=i, prompt_ids=p.prompt_ids) for i, p in by_id.items()]
        arrived: dict[int, list[Completion]] = defaultdict(list)
        finished: list[_Finished] = []
        scoring: list[_Scoring] = []
        num_tokens = 0
        started = time.perf_counter()
        with self._hooks.span("rollout_batch", num_samples=len(requests)) as span:
            for completion in self._engine.generate(requests, self._sampling):
                prompt = by_id.pop(completion.sample_id, None)
                if prompt is None:
                    raise _engine_error(f"answered sample {completion.sample_id}, which is not or no longer asked for")
                group = arrived[prompt.position]
                group.append(completion)
                num_tokens += len(completion.token_ids)
                if len(group) == self._samples_per_prompt:
                    finished.append(_Finished(prompt, sorted(arrived.pop(prompt.position), key=_sample_id)))
                if len(finished) * self._samples_per_prompt >= SCORED_TOGETHER:
                    scoring.append(self._submit(finished))
                    finished = []
            if by_id:
                raise _engine_error(f"left {len(by_id)} of {len(requests)} samples without an answer")
            if finished:
                scoring.append(self._submit(finished))
            span.set("num_tokens", num_tokens)
        self.times.rollout_s += time.perf_counter() - started
        self.times.response_tokens += num_tokens
        return scoring

    def _submit(self, groups: list[_Finished]) -> _Scoring:
        completions = [(group.prompt, completion) for group in groups for completion in group.completions]
        texts = self.tokenizer.batch_decode([list(c.token_ids) for _, c in completions], skip_special_tokens=True)
        rollouts = [
            Rollout(
                sample_id=completion.sample_id,
                prompt=prompt.text,
                messages=prompt.messages,
                prompt_ids=prompt.prompt_ids,
                completion=text,
                completion_ids=completion.token_ids,
                logprobs=completion.logprobs,
                answer=prompt.answer,
                metadata=prompt.metadata,
                policy_version=completion.policy_version,
                finish_reason=completion.finish_reason,
                group_id=prompt.position,
            )
            for (prompt, completion), text in zip(completions, texts, strict=True)
        ]
        return _Scoring(groups, rollouts, self._scorer.submit(rollouts))

    def _groups(self, scoring: _Scoring, scores: Scores) -> Iterator[RolloutGroup]:
        """Rollouts with their items; samples that a reward's policy drops are left out."""
        rows = iter(zip(scoring.rollouts, scores, strict=True))
        for group in scoring.groups:
            kept = [
                (rollout, _to_item(rollout, completion, rewards, self._kl_coef))
                for completion, (rollout, rewards) in zip(group.completions, rows)  # noqa: B905 - rows go on
                if rewards is not None
            ]
            yield RolloutGroup(
                position=group.prompt.position,
                rollouts=tuple(rollout for rollout, _ in kept),
                items=tuple(item for _, item in kept),
            )


def _engine_error(what: str) -> RlhfError:
    return RlhfError(f"the engine {what}", where="rollout", hint="report this to the authors of the engine plugin")


def _sample_id(completion: Completion) -> int:
    return completion.sample_id


def _to_item(rollout: Rollout, completion: Completion, rewards: dict[str, float], kl_coef: float | None) -> BufferItem:
    import torch

    num_actions = len(rollout.completion_ids)
    mask = rollout.action_mask
    return BufferItem(
        sample_id=rollout.sample_id,
        group_id=rollout.group_id,
        policy_version=rollout.policy_version,
        prompt_ids=torch.tensor(rollout.prompt_ids, dtype=torch.int64),
        response_ids=torch.tensor(rollout.completion_ids, dtype=torch.int64),
        action_mask=torch.ones(num_actions, dtype=torch.bool) if mask is None else torch.tensor(mask),
        action_log_probs=torch.tensor(rollout.logprobs, dtype=torch.float32),
        rewards=rewards,
        support_ids=_support_tensor(completion.support_ids),
        truncated=rollout.finish_reason == "length",
        kl_coef=kl_coef,
    )


def _support_tensor(support: Sequence[Sequence[int]] | None):  # type: ignore[no-untyped-def]
    """[A, K] int32, padded with -1 to the widest token."""
    if support is None:
        return None
    import torch

    width = max((len(ids) for ids in support), default=0)
    table = torch.full((len(support), width), -1, dtype=torch.int32)
    for row, ids in enumerate(support):
        table[row, : len(ids)] = torch.tensor(ids, dtype=torch.int32)
    return table
