"""The engine `vllm`: a `RolloutEngine` whose vLLM process receives the weights of this process's module."""

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
from .start import WHERE, Settings, describe_error

if TYPE_CHECKING:
    from torch import Tensor, nn


class VllmEngine:
    """An `InFlightEngine` with vLLM. Its copy of the weights is updated by `weights_updated`."""

    def __init__(self, config: VllmEngineConfig, context: EngineContext) -> None:
        """Raises `PluginError` if vLLM is broken, `ConfigError` if it cannot run this model."""
        self._config = config
        self._module = context.model
        self._seed = context.seed
        self.policy_version = 0
        self._loaded: list[int] = []
        """Versions loaded into vLLM, in order."""
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
        """Maximum sequence length for which vLLM was started."""
        return self._backend.max_model_tokens

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        """Check all requests, then yield completions as they finish (see `RolloutEngine.generate`).

        Raises `DataError` if a prompt leaves no room for an answer, and `ConfigError` for a truncation that vLLM cannot
        report. Iterating raises `RlhfError` if vLLM fails or its process dies, `DeadlineError`, `DivergenceError`, and
        `SyncError` if weights arrive before the last completion.
        """
        jobs = [self._job(request, sampling) for request in requests]
        return self._single_version_completions(jobs) if jobs else iter(())

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Answer the requests that `between` returns. It is called before each step (see `InFlightEngine`).

        Raises the errors of `generate` while iterating.
        """
        return self._completions(lambda: [self._job(*request) for request in between()], in_flight=True)

    def _job(self, request: GenerationRequest, sampling: SamplingParams) -> Job:
        """Build a job. Raises the errors of `generate`."""
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

    def _single_version_completions(self, jobs: Sequence[Job]) -> Iterator[Completion]:
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
        """Answer the jobs that `joining` returns, called before each step, until all are answered."""
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
                    yield self._finish(completion)
        finally:
            self._backend.rest()

    def _finish(self, completion: Completion) -> Completion:
        """Replace load counts with policy versions. Raises `DivergenceError` if a log-prob is not finite."""
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
        """Load the module's weights, now of `version`, into vLLM, with adapters merged.

        Raises `SyncError` if that fails. The engine is then closed, since vLLM may hold a mix of old and new weights.
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
            raise SyncError(f"vLLM did not take the new weights: {describe_error(error)}", where=WHERE) from error
        self._loaded.append(version)

    def close(self) -> None:
        """End vLLM. The module belongs to the caller."""
        self._backend.close()


def build(config: VllmEngineConfig, context: EngineContext) -> InFlightEngine:
    """Build the engine `vllm`."""
    return VllmEngine(config, context)


def plain_shards(module: nn.Module, max_shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yield the weights as vLLM loads them: under plain transformers names, tied tensors once.

    Shards have at most `max_shard_bytes` (or one tensor). With LoRA, the current increments are added to the base
    weights of each shard. `module` is unchanged, so increments do not accumulate. Only one shard is duplicated at a
    time.
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
    """Key of a request's sampling noise. For single-turn answers it is the sample id only."""
    turn = (request.branch, request.offset)
    return (request.sample_id, *turn) if any(turn) else (request.sample_id,)
