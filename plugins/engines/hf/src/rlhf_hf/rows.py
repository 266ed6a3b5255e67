"""A row: one answer while it is generated, and the rules that end it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import inf
from typing import TYPE_CHECKING

from rlhf_core.errors import DataError
from rlhf_core.types import Completion, FinishReason, GenerationRequest, SamplingParams

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from .sampler import Sampler


@dataclass(slots=True, eq=False)
class Row:
    """A request and the tokens sampled for it so far."""

    request: GenerationRequest
    limit: int
    """Most tokens this row may sample, at least 1."""
    prompt_key: int
    """Equal for rows of one `make_rows` call exactly where their prompts are equal."""
    temperature: float | None = None
    """Its own, in place of the sampling parameters'."""
    sampler: Sampler = field(init=False)
    """Samples and ends it; set once it is known what is generated together."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    support_ids: list[Sequence[int]] = field(default_factory=list)
    """Per token; stays empty when nothing is truncated."""
    noise: list[float] = field(default_factory=list)
    """Uniform numbers for its first tokens, drawn in blocks."""
    finish_reason: FinishReason | None = None
    num_reused: int = 0
    """Prompt tokens that were not computed for it."""
    version: int = field(init=False)
    """Policy version that its next token is sampled by."""
    versions: list[int] = field(default_factory=list)
    """That of each token."""

    @property
    def prompt_ids(self) -> tuple[int, ...]:
        return self.request.prompt_ids

    @property
    def num_cached(self) -> int:
        """Tokens whose keys and values are known: all but the last sampled one."""
        return len(self.request.prompt_ids) + len(self.token_ids) - 1

    def completion(self) -> Completion:
        assert self.finish_reason is not None
        return Completion(
            sample_id=self.request.sample_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(self.logprobs),
            finish_reason=self.finish_reason,
            policy_version=min(self.versions),
            policy_versions=tuple(self.versions) if len(set(self.versions)) > 1 else (),
            support_ids=tuple(self.support_ids) if self.support_ids else None,
            branch=self.request.branch,
            num_reused=self.num_reused,
            columns={} if self.temperature is None else {"temperature": [self.temperature] * len(self.token_ids)},
        )

    @property
    def prefix(self) -> tuple[int, ...] | None:
        """The tokens whose keys and values the next turn may use; None where there is none, or weights changed."""
        if not self.request.goes_on or len(set(self.versions)) > 1:
            return None
        return (*self.request.prompt_ids, *self.token_ids[:-1])


def make_rows(
    requests: Sequence[GenerationRequest], sampling: SamplingParams, context_tokens: int | None, first_key: int = 0
) -> list[Row]:
    """Rows in the order of the requests, each with its token limit.

    `context_tokens` is the longest sequence the model has positions for, None when it has no such bound. `first_key`:
    prompt keys are this number and those after it.
    Raises `DataError` for a prompt that is empty or leaves no room for one token, and for an invalid option.
    """
    rows = []
    keys: dict[tuple[int, ...], int] = {}
    for request in requests:
        length = len(request.prompt_ids)
        where = f"engine hf, sample {request.sample_id}"
        if length == 0:
            raise DataError("the prompt has no token", where=where, hint="give the model something to continue")
        limit = sampling.max_new_tokens
        if request.max_new_tokens is not None:
            limit = min(limit, request.max_new_tokens)
        if sampling.max_length is not None:
            limit = min(limit, sampling.max_length - length)
        if context_tokens is not None:
            limit = min(limit, context_tokens - length)
        if limit < 1:
            bound = f"max_length {sampling.max_length}, the model has {context_tokens} positions"
            raise DataError(
                f"a prompt of {length} tokens leaves no room for an answer ({bound})",
                where=where,
                hint="lower prompts.max_prompt_tokens",
            )
        key = keys.setdefault(request.prompt_ids, first_key + len(keys))
        rows.append(Row(request, limit, key, None if sampling.greedy else _own_temperature(request, where)))
    return rows


def _own_temperature(request: GenerationRequest, where: str) -> float | None:
    value = request.options.get("temperature")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf):
        raise DataError(f"the option temperature is {value!r}", where=where, hint="use a number above 0")
    return value


class StopRule:
    """Ends a row at an EOS token, at a stop text, or at its limit, in this order.

    A stop text is looked for in the sampled text only, never across the border to the prompt, special
    tokens included, so that the text of one (`<|im_end|>`) serves too.
    """

    def __init__(self, eos_ids: frozenset[int], stop: tuple[str, ...], tokenizer: PreTrainedTokenizerBase) -> None:
        self._eos_ids = eos_ids
        self._stop = stop
        self._tokenizer = tokenizer
        # Every token but a special one has at least one byte, a character at most four.
        self._tail_tokens = 4 * max((len(text) for text in stop), default=0) + 8
        self._may_end_stop: dict[int, bool] = {}

    def reason(self, row: Row) -> FinishReason | None:
        """Why `row` ends with its last sampled token; None when it continues."""
        if row.token_ids[-1] in self._eos_ids or self._at_stop_text(row.token_ids):
            return "stop"
        return "length" if len(row.token_ids) >= row.limit else None

    def _at_stop_text(self, token_ids: list[int]) -> bool:
        if not self._stop or not self._can_end(token_ids[-1]):
            return False
        tail = self._decode(token_ids[-self._tail_tokens :])
        return any(text in tail for text in self._stop)

    def _can_end(self, token_id: int) -> bool:
        """False when no stop text can end inside this token: saves most decoding. Kept per token."""
        known = self._may_end_stop.get(token_id)
        if known is None:
            text = self._decode([token_id])
            # Alone, a token may lose its leading space or be half a character.
            known = "�" in text or any(last.isspace() or last in text for last in (s[-1] for s in self._stop))
            self._may_end_stop[token_id] = known
        return known

    def _decode(self, token_ids: list[int]) -> str:
        text = self._tokenizer.decode(token_ids, skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text
