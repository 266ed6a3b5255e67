"""An answer of the engine `hot-start` during sampling, and the rules that end it."""

from dataclasses import dataclass, field
from math import inf
from typing import Any

from rlhf_core import Completion, DataError, GenerationRequest, SamplingParams
from rlhf_core.types import FinishReason


@dataclass
class Answer:
    """A request, and the tokens sampled for it so far."""

    request: GenerationRequest
    sampling: SamplingParams
    limit: int
    """Maximum number of tokens."""
    first_temperature: float | None
    """The option of the request. None if unset, and for greedy answers."""
    ids: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    support: list[list[int]] = field(default_factory=list)
    """For each token, the ids kept by top-k and top-p. Empty without them."""
    finish: FinishReason | None = None

    @property
    def temperature(self) -> float:
        """Temperature of the next token."""
        return self.sampling.temperature if self.ids or self.first_temperature is None else self.first_temperature

    @property
    def noise_counter(self) -> tuple[int, int]:
        """Sample and token index for the next token's noise. A response has fewer than 2^32 tokens."""
        return self.request.sample_id, (self.request.branch << 32) + self.request.offset + len(self.ids)

    def extend(self, token: int, log_prob: float, support: list[int], eos_ids: frozenset[int], tokenizer: Any) -> None:
        """Add a token. support: ids padded with -1, empty if all tokens were possible."""
        self.ids.append(token)
        self.log_probs.append(log_prob)
        self.support += [[kept for kept in support if kept >= 0]] if support else []
        text = tokenizer.decode(self.ids) if self.sampling.stop else ""
        if token in eos_ids or any(stop in text for stop in self.sampling.stop):
            self.finish = "stop"
        elif len(self.ids) >= self.limit:
            self.finish = "length"

    def completion(self, version: int) -> Completion:
        """Return the completion. Core's column `temperature` contains the sampling temperature of each token."""
        columns: dict[str, Any] = {}
        if self.first_temperature is not None:
            columns["temperature"] = [self.first_temperature, *[self.sampling.temperature] * (len(self.ids) - 1)]
        return Completion(
            sample_id=self.request.sample_id,
            branch=self.request.branch,
            token_ids=tuple(self.ids),
            logprobs=tuple(self.log_probs),
            finish_reason=self.finish or "length",
            policy_version=version,
            support_ids=self.support or None,
            columns=columns,
        )


def begin(request: GenerationRequest, sampling: SamplingParams, context_tokens: int | None) -> Answer:
    """Start the answers. Raises `DataError` for a prompt without room for a token, and for an invalid option."""
    where = f"engine hot-start, sample {request.sample_id}"
    longest = min(sampling.max_length or inf, context_tokens or inf) - len(request.prompt_ids)
    limit = min(longest, sampling.max_new_tokens, request.max_new_tokens or inf)
    if limit < 1 or not request.prompt_ids:
        problem = f"a prompt of {len(request.prompt_ids)} tokens cannot be answered"
        raise DataError(problem, where=where, hint="prompts.max_prompt_tokens has to leave room for an answer")
    value = request.options.get("first_temperature")
    if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < inf):
        raise DataError(f"first_temperature is {value!r}", where=where, hint="use a number above 0")
    return Answer(request, sampling, int(limit), None if sampling.greedy else value)
