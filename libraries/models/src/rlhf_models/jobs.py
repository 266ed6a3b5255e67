"""Requests to engines with their own copy of the weights (a vLLM process, a server), and checks of all engines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from rlhf_core.errors import ConfigError, DivergenceError, SyncError
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_core.util import derive_seed

from .image_prompts import PromptImage
from .limits import answer_limit

MAX_TOP_K = 1024
"""Maximum `top_k` of these engines, which return the log-probs of the kept tokens."""
TIES = 16
"""Number of tokens requested beyond `top_k`, since tokens tied with the last kept one are kept too."""


@dataclass(frozen=True, slots=True)
class GenerationJob:
    """A request for one answer, with everything that the other process needs."""

    sample_id: int
    branch: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    sampling: SamplingParams
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the request, without those of a greedy one, which ignores them."""
    images: Sequence[PromptImage] = ()
    """Images of the prompt, in order. Jobs of one prompt share them."""

    @classmethod
    def of(
        cls,
        request: GenerationRequest,
        sampling: SamplingParams,
        *,
        context_tokens: int | None,
        seed: int,
        name: str,
    ) -> GenerationJob:
        """Return the job of a request. Its seed depends on the run's seed and the request's key only.

        Args:
            request: the request.
            sampling: sampling parameters.
            context_tokens: maximum sequence length, prompt included, or None if unbounded.
            seed: the run's seed.
            name: the engine's name.

        Raises:
            ConfigError: the engine cannot report the tokens that this truncation keeps.
            DataError: the prompt is empty or leaves no room for one token.
        """
        where = f"engine {name}"
        if not sampling.greedy and (problem := truncation_problem(sampling.top_k, sampling.top_p, engine=name)):
            raise ConfigError(problem, where=where)
        turn = (request.branch, request.offset)
        key = (request.sample_id, *turn) if any(turn) else (request.sample_id,)
        return cls(
            sample_id=request.sample_id,
            branch=request.branch,
            prompt_ids=request.prompt_ids,
            max_tokens=answer_limit(request, sampling, context_tokens, engine=where),
            seed=derive_seed(seed, f"engine-{name}", *key),
            sampling=sampling,
            options={} if sampling.greedy else request.options,
        )

    @property
    def num_top_logprobs(self) -> int:
        """Number of top tokens whose log-probs are needed, in addition to the sampled one."""
        return self.sampling.top_k + TIES if self.sampling.top_k and not self.sampling.greedy else 0


def checked_completion(completion: Completion, versions: Sequence[int], *, where: str) -> Completion:
    """Return a completion with its policy versions, after checking that its log-probs are finite.

    Args:
        completion: the completion.
        versions: policy version of each token.
        where: location for the error message.

    Raises:
        DivergenceError: a log-prob is not finite.
    """
    if not all(-1e30 < value < 1 for value in completion.logprobs):
        raise DivergenceError(
            f"a log-prob of sample {completion.sample_id} is not finite",
            where=where,
            hint="the weights have diverged: lower optimizer.lr",
        )
    several = tuple(versions) if len(set(versions)) > 1 else ()
    return replace(completion, policy_version=min(versions), policy_versions=several)


def check_same_weights(version: int, current: int, *, where: str) -> None:
    """Check that no weights arrived while an engine's `generate` was answering.

    Args:
        version: policy version at the call of `generate`.
        current: policy version now.
        where: location for the error message.

    Raises:
        SyncError: the versions differ.
    """
    if version != current:
        raise SyncError(
            f"weights of version {current} arrived while version {version} was generating",
            where=where,
            hint="take all completions of a generate call before publishing",
        )


def truncation_problem(top_k: int, top_p: float, *, engine: str) -> str | None:
    """Check whether an engine can report the set of tokens that was sampled from.

    The update needs the full set of kept tokens, and these engines report only the most likely `top_k`.

    Args:
        top_k: the option `top_k`.
        top_p: the option `top_p`.
        engine: the engine's name, for the message.

    Returns:
        The problem, or None.

    Example:
        >>> truncation_problem(top_k=50, top_p=0.9, engine="vllm") is None
        True
        >>> truncation_problem(top_k=2000, top_p=1.0, engine="vllm")
        'top_k is at most 1024 with the engine vllm'
    """
    if top_k > MAX_TOP_K:
        return f"top_k is at most {MAX_TOP_K} with the engine {engine}"
    if top_p < 1 and top_k == 0:
        return f"top_p needs top_k (1 to {MAX_TOP_K}) with the engine {engine}. Set it, or use the engine hf"
    return None
