"""Computes what frozen models and the critic say of finished samples, in batches of bounded tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

from ..batching import collate, default_tokens, masked, to_device
from ..types import BufferItem, Experience, RolloutGroup
from .batched_forward import forward_rows, on_device
from .forward import policy_forward, value_forward
from .teacher import TeacherModel, teacher_fields, teacher_forward

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..strategy import Strategy


class ReferencePass:
    """Adds `reference_log_probs`, the teacher's and `values` to items, without gradients.

    `reference_context` switches an adapter off around the reference forward when `reference` is the policy itself.
    Collective when a model is sharded: every rank calls `run` with its own groups.
    """

    def __init__(
        self,
        strategy: Strategy,
        *,
        temperature: float,
        reference: nn.Module | None = None,
        reference_context: Callable[[], AbstractContextManager[Any]] = nullcontext,
        critic: nn.Module | None = None,
        batch_tokens: int | None = None,
        offload: bool = False,
        teacher: TeacherModel | None = None,
    ) -> None:
        self._strategy = strategy
        self._temperature = temperature
        self._reference = reference
        self._reference_context = reference_context
        self._critic = critic
        self._batch_tokens = batch_tokens or default_tokens(strategy.device.type)
        self._offload = offload
        self._teacher = teacher

    def run(self, groups: Sequence[RolloutGroup]) -> list[RolloutGroup]:
        """The same groups with all values added to their items."""
        groups = self._strategy.agreed(list(groups))
        items = [item for group in groups for item in group.items]
        if self._reference is not None:
            with self._placed(self._reference, self._offload), self._reference_context():
                items = self._fill(items, _one("reference_log_probs"), self._reference, self._reference_forward)
        if (teacher := self._teacher) is not None:
            ask = partial(teacher_forward, teacher, temperature=self._temperature)
            with self._placed(teacher.model, teacher.offload):
                items = self._fill(items, teacher_fields, teacher.model, lambda _, batch: ask(batch))
        if self._critic is not None:
            items = self._fill(items, _one("values"), self._critic, value_forward)
        completed = iter(items)
        return [replace(group, items=tuple(next(completed) for _ in group.items)) for group in groups]

    def _reference_forward(self, model: nn.Module, batch: Experience) -> Tensor:
        return policy_forward(model, batch, self._temperature).log_probs

    def _fill(
        self,
        items: list[BufferItem],
        fields: Callable[[Tensor], dict[str, Any]],
        model: nn.Module,
        forward: Callable[[nn.Module, Experience], Tensor],
    ) -> list[BufferItem]:
        def run(batch: Sequence[BufferItem]) -> Tensor:
            return forward(model, to_device(collate(batch), self._strategy.device))

        empty = masked(items[0] if items else _placeholder())
        rows = forward_rows(self._strategy, model, items, run, empty=empty, batch_tokens=self._batch_tokens)
        return [replace(item, **fields(row[: item.num_response_tokens])) for item, row in zip(items, rows, strict=True)]

    def _placed(self, model: nn.Module, offload: bool) -> AbstractContextManager[Any]:
        return on_device(model, self._strategy) if offload else nullcontext()


def _one(field: str) -> Callable[[Tensor], dict[str, Any]]:
    return lambda row: {field: row}


def _placeholder() -> BufferItem:
    """A filler sample of two tokens, which a rank without samples runs to stay in step."""
    import torch

    return BufferItem(
        sample_id=-1,
        group_id=-1,
        policy_version=0,
        prompt_ids=torch.zeros(1, dtype=torch.int64),
        response_ids=torch.zeros(1, dtype=torch.int64),
        action_mask=torch.zeros(1, dtype=torch.bool),
        action_log_probs=torch.zeros(1),
    )
