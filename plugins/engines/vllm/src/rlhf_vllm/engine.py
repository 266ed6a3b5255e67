"""The engine `vllm`: a `RolloutEngine` over a module of this process; vLLM gets its weights at each version."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.components import EngineContext
from rlhf_core.errors import ConfigError, DivergenceError, RlhfError, SyncError
from rlhf_core.protocols import InFlightEngine, SamplingRequest
from rlhf_core.rollout import named_weights
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_core.util import derive_seed
from rlhf_models import answer_limit, eos_token_ids, is_lora, merged_weights
from rlhf_strategies import group_into_shards

from .backend import Job
from .config import VllmEngineConfig, truncation_problem
from .process import VllmProcess
from .start import WHERE, Settings, described

if TYPE_CHECKING:
    from torch import Tensor, nn


class VllmEngine:
    """vLLM's copy of the weights follows the module's at each `weights_updated`."""

    def __init__(self, config: VllmEngineConfig, context: EngineContext) -> None:
        """Raises `PluginError` when vLLM is broken, `ConfigError` when it cannot run this model."""
        self._config = config
        self._module = context.model
        self._seed = context.seed
        self.policy_version = 0
        self._loaded: list[int] = []
        """Versions that vLLM was given, in order."""
        model: Any = context.model
        base = model.get_base_model() if is_lora(model) else model
        self.eos_token_ids = eos_token_ids(base, context.tokenizer)
        with tempfile.TemporaryDirectory(prefix="rlhf-vllm-") as folder:
            base.config.save_pretrained(folder)
            context.tokenizer.save_pretrained(folder)
            settings = Settings(
                config=config,
                folder=Path(folder),
                dtype=str(context.compute_dtype or next(base.parameters()).dtype).removeprefix("torch."),
                device=str(context.device),
                eos_ids=tuple(sorted(self.eos_token_ids)),
                in_flight=context.in_flight,
            )
            self._backend = VllmProcess(settings)

    @property
    def context_tokens(self) -> int | None:
        """Longest sequence vLLM was started for."""
        return self._backend.max_model_tokens

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Check all requests, then yield completions as they finish (see `RolloutEngine.generate`).

        Raises `DataError` for a prompt that leaves no room for an answer and `ConfigError` for a truncation that
        vLLM cannot report, both here; while iterating `RlhfError` when vLLM fails or its process dies,
        `DeadlineError`, `DivergenceError` and, when weights arrive before the last completion, `SyncError`.
        """
        jobs = [self._job(request, sampling) for request in requests]
        return self._of_one_version(jobs) if jobs else iter(())

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Answer what `between` returns, which is called before each step (see `InFlightEngine`).

        Raises what `generate` raises, while iterating.
        """
        return self._completions(lambda: [self._job(*asked) for asked in between()], in_flight=True)

    def _job(self, request: GenerationRequest, sampling: SamplingParams) -> Job:
        """Raises as `generate` does."""
        if not sampling.greedy and (problem := truncation_problem(sampling.top_k, sampling.top_p)):
            raise ConfigError(problem, where=WHERE)
        return Job(
            sample_id=request.sample_id,
            branch=request.branch,
            prompt_ids=request.prompt_ids,
            max_tokens=answer_limit(request, sampling, self._backend.max_model_tokens, engine=WHERE),
            seed=derive_seed(self._seed, "engine-vllm", *_noise_key(request)),
            sampling=sampling,
        )

    def _of_one_version(self, jobs: Sequence[Job]) -> Iterator[Completion]:
        version = self.policy_version
        batches = iter([jobs])
        for completion in self._completions(lambda: next(batches, ()), in_flight=False):
            if version != self.policy_version:
                raise SyncError(
                    f"weights of version {self.policy_version} arrived while version {version} was generating",
                    where=WHERE,
                    hint="take all completions of a generate call before publishing",
                )
            yield completion

    def _completions(self, joining: Callable[[], Sequence[Job]], *, in_flight: bool) -> Iterator[Completion]:
        """Answer what `joining` returns, which is called before each step, until nothing is open."""
        if not self._loaded:
            self._load(self.policy_version)
        num_open = 0
        try:
            while True:
                if jobs := joining():
                    self._backend.add(jobs, in_flight=in_flight)
                    num_open += len(jobs)
                if not num_open:
                    return
                for completion in self._backend.step():
                    num_open -= 1
                    yield self._checked(completion)
        finally:
            self._backend.rest()

    def _checked(self, completion: Completion) -> Completion:
        """The completion with policy versions in place of numbers of loads. Raises `DivergenceError`."""
        if not all(-1e30 < value < 1 for value in completion.logprobs):
            raise DivergenceError(
                f"a log-prob of sample {completion.sample_id} is not finite",
                where=WHERE,
                hint="the weights have diverged: lower optimizer.lr",
            )
        versions = tuple(self._loaded[number - 1] for number in completion.policy_versions)
        return replace(
            completion, policy_version=min(versions), policy_versions=versions if len(set(versions)) > 1 else ()
        )

    def weights_updated(self, version: int) -> None:
        """The module has the weights of `version`: give them to vLLM, adapters merged.

        Raises `SyncError` when that fails; the engine is then closed, since vLLM may hold mixed weights.
        """
        self._load(version)
        self.policy_version = version

    def _load(self, version: int) -> None:
        try:
            self._backend.update(plain_shards(self._module, self._config.max_shard_bytes))
        except Exception as error:  # vLLM may raise any class
            self.close()
            if isinstance(error, RlhfError):
                raise
            raise SyncError(f"vLLM did not take the new weights: {described(error)}", where=WHERE) from error
        self._loaded.append(version)

    def close(self) -> None:
        """End vLLM; the module belongs to the caller."""
        self._backend.close()


def build(config: VllmEngineConfig, context: EngineContext) -> InFlightEngine:
    """Build the engine `vllm`."""
    return VllmEngine(config, context)


def plain_shards(module: nn.Module, max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """The weights as vLLM loads them, under plain transformers names; tied tensors once.

    In shards of at most `max_shard_bytes` (or one tensor). Under LoRA each is the base and the increments of today
    added once: nothing accumulates, `module` is unchanged, and no more than one shard is held twice.
    """
    weights = named_weights(module)
    if not is_lora(module):
        yield from group_into_shards(weights.items(), max_shard_bytes)
        return
    increments = {name: tensor for name, tensor in weights.items() if "lora_" in name}
    others = ((name, tensor) for name, tensor in weights.items() if name not in increments)
    for shard in group_into_shards(others, max_shard_bytes):
        yield {name: tensor.detach() for name, tensor in merged_weights(module, shard | increments).items()}


def _noise_key(request: GenerationRequest) -> tuple[int, ...]:
    """Key of a request's sampling noise; for a single answer its sample id alone."""
    turn = (request.branch, request.offset)
    return (request.sample_id, *turn) if any(turn) else (request.sample_id,)
