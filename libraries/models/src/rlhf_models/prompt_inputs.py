"""Kinds of models whose inputs belong to the prompt, so that an engine may continue answers from a cache."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


class PromptInputs(ABC):
    """Mixin for a `ModelKind`: `inputs` affects tokens of the prompt only, and later tokens need `continued` instead.

    An engine computes a prompt once for all of its answers, and then feeds one token at a time. Without this mixin it
    computes whole sequences at every step.

    Example:
        first = model(input_ids=prompts, **kind.inputs(prompts, mask, columns))  # in an engine, once for each prompt
        kept = kind.kept(columns)
        while not done:  # one token of each answer
            arguments = {"input_ids": tokens, **kind.continued(tokens, lengths, kept)}
            output = model(**arguments, past_key_values=first.past_key_values)
    """

    @abstractmethod
    def kept(self, columns: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return what `continued` needs, name -> [B, ...]. The inputs themselves are released after the prompt.

        Args:
            columns: Name -> [B, ...], the prompt columns marked `model_input`.
        """

    @abstractmethod
    def continued(self, input_ids: Tensor, lengths: Tensor, kept: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Return the forward's arguments for tokens that continue a cache, among them `position_ids`.

        Args:
            input_ids: [B, 1] int64, one sampled token per row. The result may contain other `input_ids`.
            lengths: [B] int64, number of tokens in the cache, without padding.
            kept: The result of `kept`, with a row for each answer.
        """
