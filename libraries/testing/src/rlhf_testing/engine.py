"""An engine without a model: deterministic answers, to test code that uses an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rlhf_core.protocols import SamplingRequest
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_core.util.rng import derive_seed

EOS = 2
Answer = Callable[[GenerationRequest, int], Sequence[int]]
"""(request, policy version) -> response tokens, EOS included where the answer ends by itself."""


class FakeEngine:
    """Implements `InFlightEngine`. An answer depends on seed, sample id, prompt and policy version alone.

    Answers are returned in reverse order, since callers must not rely on any. `calls` records the requests.
    """

    context_tokens: int | None = None
    eos_token_ids = frozenset({EOS})

    def __init__(
        self, *, seed: int = 0, vocabulary: Sequence[int] = range(4, 14), answer: Answer | None = None
    ) -> None:
        self._seed = seed
        self._vocabulary = tuple(vocabulary)
        self._answer = answer
        self.policy_version = 0
        self.calls: list[tuple[GenerationRequest, ...]] = []
        self.closed = False

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """One to `max_new_tokens` tokens each; log-prob of every token is minus its id / 100."""
        self.calls.append(tuple(requests))
        for request in reversed(requests):
            tokens = self._tokens(request, sampling)
            yield self._completion(request, sampling, tokens, [self.policy_version] * len(tokens))

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """The same answers, those of the version at which they begin, a token of each at every step."""
        under_way: dict[GenerationRequest, tuple[SamplingParams, Sequence[int], list[int]]] = {}
        while True:
            for request, sampling in between():
                self.calls.append((request,))
                under_way[request] = sampling, self._tokens(request, sampling), []
            if not under_way:
                return
            for request, (sampling, tokens, versions) in list(under_way.items()):
                versions.append(self.policy_version)
                if len(versions) == len(tokens):
                    del under_way[request]
                    yield self._completion(request, sampling, tokens, versions)

    def _completion(
        self, request: GenerationRequest, sampling: SamplingParams, tokens: Sequence[int], versions: Sequence[int]
    ) -> Completion:
        return Completion(
            sample_id=request.sample_id,
            token_ids=tuple(tokens),
            logprobs=tuple(-token / 100 for token in tokens),
            finish_reason="stop" if tokens[-1] == EOS else "length",
            policy_version=min(versions),
            policy_versions=tuple(versions) if len(set(versions)) > 1 else (),
            support_ids=[[token, EOS] for token in tokens] if sampling.top_k else None,
            branch=request.branch,
        )

    def _tokens(self, request: GenerationRequest, sampling: SamplingParams) -> Sequence[int]:
        limit = min(sampling.max_new_tokens, request.max_new_tokens or sampling.max_new_tokens)
        if self._answer is not None:
            return self._answer(request, self.policy_version)[:limit]
        noise = derive_seed(self._seed, "fake-engine", request.sample_id, *request.prompt_ids, self.policy_version)
        length = noise % limit
        tokens = [self._vocabulary[(noise >> shift) % len(self._vocabulary)] for shift in range(length)]
        return [*tokens, EOS]

    def weights_updated(self, version: int) -> None:
        self.policy_version = version

    def close(self) -> None:
        self.closed = True
