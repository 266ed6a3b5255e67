"""The engine `vllm`: a `RolloutEngine` whose vLLM process receives the weights of this process's module."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rlhf_core.components import EngineContext
from rlhf_core.errors import ConfigError, RlhfError, SyncError
from rlhf_core.models import model_kind_of
from rlhf_core.protocols import InFlightEngine, SamplingRequest
from rlhf_core.rollout import named_weights
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_forward import BannedWords, request_shaping, sampled_columns, temperature_of
from rlhf_models import (
    GenerationJob,
    ImagePrompt,
    ImagePrompts,
    check_same_weights,
    checked_completion,
    eos_token_ids,
    is_lora,
    save_factors,
)
from rlhf_strategies import plain_shards, save_weights

from .config import VllmEngineConfig, min_p_problem, temperature_problem
from .images import TYPES
from .names import WeightNames, has_packed_output
from .process import VllmProcess
from .start import WHERE, Settings, describe_error


class VllmEngine:
    """An `InFlightEngine` with vLLM. Its copy of the weights is updated by `weights_updated`."""

    def __init__(self, config: VllmEngineConfig, context: EngineContext) -> None:
        """Raises `PluginError` if vLLM is broken, `ConfigError` if it cannot run this model."""
        self._config = config
        self._module: Any = context.model
        self._open: dict[tuple[int, int], GenerationJob] = {}
        self._seed = context.seed
        self.policy_version = 0
        self._loaded: list[int] = []
        """Versions loaded into vLLM, in order."""
        model: Any = context.model
        base = model.get_base_model() if is_lora(model) else model
        self.eos_token_ids = eos_token_ids(base, context.tokenizer)
        self._images = _images_of(base, config)
        unties = has_packed_output(base, context.device.type) and not config.adapter
        self._names = WeightNames(base, published=self._images is not None, unties=unties)
        words = config.banned_words
        self._banned = BannedWords(words, context.tokenizer, self.eos_token_ids) if words else None
        with tempfile.TemporaryDirectory(prefix="rlhf-vllm-") as folder:
            _config_of(base, unties=unties).save_pretrained(folder)
            context.tokenizer.save_pretrained(folder)
            if self._images is not None:
                self._images.save_processor(Path(folder))
            if config.adapter:
                save_weights(Path(folder), plain_shards(model, config.max_shard_bytes, merge=False))
            image_token_id = None if self._images is None else self._images.image_token_id
            end_ids = self.eos_token_ids if image_token_id is None else self.eos_token_ids | {image_token_id}
            self._dtype = context.compute_dtype or next(base.parameters()).dtype
            settings = Settings(
                config=config,
                folder=Path(folder),
                dtype=str(self._dtype).removeprefix("torch."),
                device=str(context.device),
                end_ids=tuple(sorted(end_ids)),
                lora_rank=model.peft_config["default"].r if config.adapter else None,
                in_flight=context.in_flight,
                model_type=base.config.model_type,
                image_token_id=image_token_id,
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
        jobs = self._jobs([(request, sampling) for request in requests])
        return self._single_version_completions(jobs) if jobs else iter(())

    def generate_in_flight(self, between: Callable[[], Sequence[SamplingRequest]]) -> Iterator[Completion]:
        """Answer the requests that `between` returns. It is called before each step (see `InFlightEngine`).

        Raises the errors of `generate` while iterating.
        """
        return self._completions(lambda: self._jobs(between()), in_flight=True)

    def _jobs(self, requests: Sequence[SamplingRequest]) -> list[GenerationJob]:
        """Return the jobs of requests. Those of one prompt share its images."""
        jobs = [self._job(*each) for each in requests]
        if self._images is None:
            return jobs
        prompts: dict[tuple[Any, ...], ImagePrompt] = {}
        for number, (request, _) in enumerate(requests):
            key = (request.prompt_ids, *map(id, request.inputs.values()))
            if key not in prompts:
                prompts[key] = self._image_prompt(request)
            jobs[number] = replace(jobs[number], prompt_ids=prompts[key].ids, images=prompts[key].images)
        return jobs

    def _image_prompt(self, request: GenerationRequest) -> ImagePrompt:
        assert self._images is not None
        prompt = self._images.image_prompt(request.prompt_ids, request.inputs)
        return replace(
            prompt, images=tuple(replace(each, pixels=each.pixels.to(self._dtype)) for each in prompt.images)
        )

    def _job(self, request: GenerationRequest, sampling: SamplingParams) -> GenerationJob:
        job = GenerationJob.of(
            request, sampling, context_tokens=self._backend.max_model_tokens, seed=self._seed, name="vllm"
        )
        where = f"{WHERE}, sample {job.sample_id}"
        if not sampling.greedy:
            own = temperature_of(request.options, where=where)
            min_p, _, _ = request_shaping(request, where=where)
            problem = temperature_problem(sampling.temperature if own is None else own)
            if problem := problem or min_p_problem(sampling.top_k, min_p):
                raise ConfigError(problem, where=where)
        return job

    def _single_version_completions(self, jobs: Sequence[GenerationJob]) -> Iterator[Completion]:
        version = self.policy_version
        batches = iter([jobs])
        for completion in self._completions(lambda: next(batches, ()), in_flight=False):
            check_same_weights(version, self.policy_version, where=WHERE)
            yield completion

    def _completions(self, joining: Callable[[], Sequence[GenerationJob]], *, in_flight: bool) -> Iterator[Completion]:
        """Answer the jobs that `joining` returns, called before each step, until all are answered."""
        if not self._loaded:
            self._load(self.policy_version)
        num_open = 0
        try:
            while True:
                if jobs := joining():
                    self._backend.add(jobs, in_flight=in_flight)
                    self._open |= {(job.sample_id, job.branch): job for job in jobs}
                    num_open += len(jobs)
                if not num_open:
                    return
                for completion in self._backend.step():
                    num_open -= 1
                    yield self._finish(completion)
        finally:
            self._open.clear()
            self._backend.rest()

    def _finish(self, completion: Completion) -> Completion:
        """Set policy versions from load counts, and columns. Raises `DivergenceError` if a log-prob is not finite."""
        job = self._open.pop((completion.sample_id, completion.branch))
        banned = None if job.sampling.greedy else self._banned
        columns = sampled_columns(job.options, banned, completion.token_ids, where=WHERE)
        completion = replace(completion, columns=columns)
        versions = [self._loaded[number - 1] for number in completion.policy_versions]
        return checked_completion(completion, versions, where=WHERE)

    def weights_updated(self, version: int) -> None:
        """Load the module's weights, now of `version`, into vLLM, with adapters merged, or the adapter alone.

        Raises `SyncError` if that fails. The engine is then closed, since vLLM may hold a mix of old and new weights.
        """
        self._load(version)
        self.policy_version = version

    def _load(self, version: int) -> None:
        try:
            if self._config.adapter:
                self._backend.load_adapter(
                    lambda folder: save_factors(self._module, named_weights(self._module), folder)
                )
            else:
                shards = plain_shards(self._module, self._config.max_shard_bytes)
                self._backend.update(self._names.renamed(shards))
        except Exception as error:  # vLLM may raise any class
            self.close()
            if isinstance(error, RlhfError):
                raise
            raise SyncError(f"vLLM did not take the new weights: {describe_error(error)}", where=WHERE) from error
        self._loaded.append(version)

    def close(self) -> None:
        """End vLLM. The module belongs to the caller."""
        self._backend.close()


def _config_of(base: Any, *, unties: bool) -> Any:
    """Return a model's config for vLLM.

    It has the name of the model's class in transformers, which a model made in code lacks. `unties`: without ties of
    weights.
    """
    config = copy.deepcopy(base.config)
    names = (each.__name__ for each in type(base).__mro__ if each.__module__.startswith("transformers."))
    config.architectures = config.architectures or [next(names, type(base).__name__)]
    if unties:
        config.tie_word_embeddings = config.get_text_config().tie_word_embeddings = False
    return config


def _images_of(base: Any, config: VllmEngineConfig) -> ImagePrompts | None:
    """Return the kind of a model that sees, or None. Raises `ConfigError` if vLLM cannot get the model's inputs."""
    kind = model_kind_of(base)
    if not (inputs := [name for name, column in kind.columns.items() if column.model_input]):
        return None
    if not isinstance(kind, ImagePrompts):
        raise ConfigError(
            f"vLLM gets tokens and images, not {', '.join(inputs)}", where="engine.name", hint="use the engine hf"
        )
    if (model_type := base.config.model_type) not in TYPES:
        problem = f"vLLM's log-probs are not known to be the trainer's for models of the type {model_type} with images"
        raise ConfigError(problem, where="engine.name", hint=f"use the engine hf, or one of {', '.join(TYPES)}")
    if config.adapter:
        problem = "vLLM applies adapters to the language model only, not to all of a model that sees"
        raise ConfigError(problem, where="engine.adapter", hint="set adapter: false")
    return kind


def build(config: VllmEngineConfig, context: EngineContext) -> InFlightEngine:
    """Build the engine `vllm`."""
    return VllmEngine(config, context)
