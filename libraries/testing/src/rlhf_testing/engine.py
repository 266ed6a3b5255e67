"""A rollout engine without a model: deterministic answers, for testing code that uses an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from rlhf_core.protocols import SamplingRequest
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_core.util.rng import derive_seed

EOS = 2
Answer = Callable[[GenerationRequest, int], Sequence[int]]
"""Function of (request, policy version) that returns response tokens, including EOS if the answer ends by itself."""


class FakeEngine:
    """Rollout engine without a model. Implements `InFlightEngine`.

    An answer depends only on seed, sample id, prompt and policy version. Completions are returned in reverse order,
    because callers must not rely on the order. `calls` records the requests.

    Example:
        >>> engine = FakeEngine(seed=1)
        >>> requests = [GenerationRequest(sample_id=7, prompt_ids=(5, 6))]
        >>> (completion,) = engine.generate(requests, SamplingParams(max_new_tokens=4))
        >>> completion.sample_id, completion.policy_version, len(completion.token_ids) <= 4
        (7, 0, True)
    """

    context_tokens: int | None = None
    eos_token_ids = frozenset({EOS})

    def __init__(
        self, *, seed: int = 0, vocabulary: Sequence[int] = range(4, 14), answer: Answer | None = None
    ) -> None:
        """Create an engine at policy version 0.

        Args:
            seed: Seed of the random answers.
            vocabulary: Token ids that random answers consist of.
            answer: Returns the tokens of an answer instead of random ones.
        """
        self._seed = seed
        self._vocabulary = tuple(vocabulary)
        self._answer = answer
        self.policy_version = 0
        self.calls: list[tuple[GenerationRequest, ...]] = []
        self.closed = False

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Yield answers of 1 to `max_new_tokens` tokens. The log-prob of each token is minus its id / 100."""
        self.calls.append(tuple(requests))
        for request in reversed(requests):
            tokens = self._tokens(request, sampling)
            yield self._completion(request, sampling, tokens, [self.policy_version] * len(tokens))

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Yield the same answers, one token per step, each sampled with the policy version at its start."""
        running: dict[GenerationRequest, tuple[SamplingParams, Sequence[int], list[int]]] = {}
        while True:
            for request, sampling in between():
                self.calls.append((request,))
                running[request] = sampling, self._tokens(request, sampling), []
            if not running:
                return
            for request, (sampling, tokens, versions) in list(running.items()):
                versions.append(self.policy_version)
                if len(versions) == len(tokens):
                    del running[request]
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
