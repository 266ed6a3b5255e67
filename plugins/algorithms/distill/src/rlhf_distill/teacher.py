"""The pass in which teachers score the tokens sampled by the policy."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from rlhf_core import Column, Columns
from rlhf_core.algorithm import GroupPass, PassContext
from rlhf_core.errors import DataError
from rlhf_core.types import BufferItem, Experience, Rollout, RolloutGroup
from rlhf_forward import TEMPERATURE, policy_forward

from .divergence import with_rest
from .question import Question, Teacher
from .server import TeacherServer
from .spans import UNALIGNED, align_answer

LOG_PROBS = "teacher_log_probs"
"""The teacher's log-probs in nats: [A, 1] of the sampled token, or [A, K + 1] of the tokens in `IDS` and all others.
With `SPANS`, [A, 1] is the sum over the token's span."""
IDS = "teacher_ids"
"""The teacher's K most likely tokens, [A, K]. Absent without `top_k`."""
SPANS = "teacher_spans"
"""[A]: the span of each token, -1 if it is not taught. Absent if each taught token is compared alone and all are."""


class TeacherPass(GroupPass):
    """Add the columns `LOG_PROBS`, with `top_k` `IDS`, and if tokens may be skipped `SPANS`."""

    def __init__(
        self,
        context: PassContext,
        teachers: Mapping[str, Teacher],
        *,
        top_k: int,
        vocabulary: int,
        key: str | None = None,
        with_spans: bool = False,
    ) -> None:
        """Create the pass.

        Args:
            context: Models and sampling settings of the run.
            teachers: Name -> teacher. Without `key` a single one.
            top_k: Number of the teacher's tokens to return. 0 scores the sampled token.
            vocabulary: Size of the policy's tokenizer. `IDS` contains only smaller ids.
            key: Key of the record with the name of the sample's teacher.
            with_spans: Whether to add `SPANS`.
        """
        self.columns: Mapping[str, Column] = {
            LOG_PROBS: Column(),
            IDS: Column(dtype="int32"),
            SPANS: Column(dtype="int32", fill=UNALIGNED),
        }
        self._context = context
        self._teachers = teachers
        self._top_k = top_k
        self._vocabulary = vocabulary
        self._key = key
        self._with_spans = with_spans

    def run(self, groups: Sequence[RolloutGroup]) -> list[dict[str, Any]]:
        questions: dict[str, list[Question]] = {name: [] for name in self._teachers}
        rows: list[dict[str, Any]] = []
        for group in groups:
            for rollout, item in zip(group.rollouts, group.items, strict=True):
                name = self._name_of(rollout)
                asked = self._question(self._teachers[name], len(rows), rollout, item, group)
                rows.append(self._untaught(item.num_response_tokens))
                if asked is not None:
                    questions[name].append(asked)
        for name, teacher in self._teachers.items():  # in this order on every rank, since forward passes are collective
            for asked, row in zip(questions[name], self._scores(teacher, questions[name]), strict=True):
                rows[asked.index] = self._of_answer(row, asked)
        return rows

    def _name_of(self, rollout: Rollout) -> str:
        if self._key is None:
            return next(iter(self._teachers))
        name = str(rollout.metadata.get(self._key))
        if name not in self._teachers:
            known = ", ".join(self._teachers)
            raise DataError(
                f"the key {self._key} of its record is {rollout.metadata.get(self._key)!r}, the teachers are {known}",
                where=f"algorithm.teacher_key, prompt {rollout.group_id}",
                hint="add a teacher of this name, or correct the record",
            )
        return name

    def _question(
        self, teacher: Teacher, index: int, rollout: Rollout, item: BufferItem, group: RolloutGroup
    ) -> Question | None:
        """Return the sample with the prompt and the tokens of the teacher. None if it is not taught."""
        if teacher.tokenizers is not None or isinstance(teacher.source, TeacherServer):
            self._check_temperature(teacher, rollout, item)
        ids = tuple(rollout.prompt_ids) if teacher.prompts is None else teacher.prompts.ids(rollout, group)
        if ids is None:
            return None
        prompt_ids = item.prompt_ids if teacher.prompts is None else torch.tensor(ids, dtype=torch.int64)
        if teacher.tokenizers is None:
            return Question(index, replace(item, prompt_ids=prompt_ids))
        theirs, spans, ranges = align_answer(*teacher.tokenizers, item.response_ids.tolist())
        if not theirs:
            return None
        size = len(theirs)
        own = replace(
            item,
            prompt_ids=prompt_ids,
            response_ids=torch.tensor(theirs, dtype=torch.int64),
            action_mask=torch.ones(size, dtype=torch.bool),
            action_log_probs=torch.zeros(size),
            reference_log_probs=None,
            values=None,
            policy_versions=None,
            support_ids=None,
            columns=Columns(),
        )
        return Question(index, own, spans, ranges)

    def _check_temperature(self, teacher: Teacher, rollout: Rollout, item: BufferItem) -> None:
        used = item.columns.get(TEMPERATURE)
        if used is not None and bool(((used > 0) & (used != self._context.temperature)).any()):
            raise DataError(
                "its tokens were sampled at other temperatures than engine.temperature",
                where=f"{teacher.where}, prompt {rollout.group_id}",
                hint="sample at one temperature, or use a local teacher with the policy's tokenizer",
            )

    def _scores(self, teacher: Teacher, asked: Sequence[Question]) -> Sequence[Tensor]:
        items = [each.item for each in asked]
        if isinstance(teacher.source, TeacherServer):
            pairs = [
                ([*item.prompt_ids.tolist(), *item.response_ids.tolist()], item.num_response_tokens) for item in items
            ]
            # Processes of one rank must have the same numbers, which a server's answers to two requests may lack.
            return self._context.place.agreed(teacher.source.score(pairs) if pairs else [])
        self._check_length(teacher, items)
        return self._context.forward(
            teacher.source, [RolloutGroup(position=0, rollouts=(), items=tuple(items))], self.forward
        )

    def _check_length(self, teacher: Teacher, items: Sequence[BufferItem]) -> None:
        """Raise `DataError` if a changed prompt does not fit into the teacher's context."""
        if teacher.prompts is None or not isinstance(teacher.source, str):
            return
        model = self._context.place.unwrap(self._context.models[teacher.source])
        limit = getattr(getattr(model, "config", None), "max_position_embeddings", None)
        longest = max((item.num_tokens for item in items), default=0)
        if isinstance(limit, int) and longest > limit:
            raise DataError(
                f"a prompt and its answer have {longest} tokens for this teacher, but its model has {limit} positions",
                where=teacher.where,
                hint="shorten context or the record's texts, or lower prompts.max_prompt_tokens",
            )

    def forward(self, model: nn.Module, batch: Experience) -> Tensor:
        """Return [B, A, 1] float32 log-probs, or with `top_k` [B, A, 2K + 1]: K + 1 log-probs, then K ids, exact in
        float32.
        """
        if not self._top_k:
            return policy_forward(model, batch, self._context.temperature).log_probs[..., None]

        def most_likely(logits: Tensor) -> Tensor:
            ids = logits[:, : self._vocabulary].topk(self._top_k, dim=-1).indices
            return torch.cat([with_rest(logits, ids), ids.float()], dim=-1)

        read = policy_forward(model, batch, self._context.temperature, read=most_likely).read
        assert read is not None
        return read

    def columns_of(self, row: Tensor) -> dict[str, Any]:
        """Split rows of the output of `forward` into columns."""
        if not self._top_k:
            return {LOG_PROBS: row}
        return {LOG_PROBS: row[..., : self._top_k + 1], IDS: row[..., self._top_k + 1 :]}

    def _of_answer(self, row: Tensor, asked: Question) -> dict[str, Any]:
        """Return the columns of a sample from its teacher's scores, [T, ...] of the teacher's T tokens."""
        if asked.spans is None:
            return self._with(self.columns_of(row), torch.arange(len(row)))
        totals = torch.stack([row[start:end, 0].double().sum() for start, end in asked.ranges])
        spans = torch.tensor(asked.spans)
        found = torch.where(spans >= 0, totals[spans.clamp(min=0)], 0.0).float()
        return self._with({LOG_PROBS: found[:, None]}, spans)

    def _untaught(self, length: int) -> dict[str, Any]:
        """Return the columns of a sample without a teacher's values."""
        spans = torch.full((length,), UNALIGNED)
        row = torch.zeros(length, 2 * self._top_k + 1)
        if self._top_k:  # distinct ids, of which the loss is not used
            row[:, self._top_k + 1 :] = torch.arange(self._top_k)
        return self._with(self.columns_of(row), spans)

    def _with(self, columns: dict[str, Any], spans: Tensor) -> dict[str, Any]:
        return {**columns, SPANS: spans} if self._with_spans else columns
