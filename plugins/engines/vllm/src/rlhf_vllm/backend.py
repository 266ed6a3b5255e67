"""vLLM in this process: samples, and takes new weights in place.

In flight, weights are identified by the number of loads so far. vLLM keeps the keys and values of running requests when
weights change, and cannot drop cached prefixes meanwhile. A salt keeps those of older weights from later requests.
"""

from __future__ import annotations

import tempfile
from collections.abc import Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlhf_core.errors import ConfigError, RlhfError, SyncError
from rlhf_core.types import Completion, FinishReason, SamplingParams
from rlhf_core.util import write_tensors

from .jobs import Between, Job
from .start import TIES, WHERE, Settings, can_sleep, contained, described, engine_args, import_vllm, scratch_folder

if TYPE_CHECKING:
    from torch import Tensor


class VllmBackend:
    """Generates with vLLM and takes new weights in place. Every method runs to its end before the next."""

    def __init__(self, settings: Settings) -> None:
        """Raises `PluginError` when vLLM cannot be imported, `ConfigError` when it cannot run this model."""
        self._eos_ids = list(settings.eos_ids)
        self._num_workers = settings.config.tensor_parallel_size
        self._sleep_level = settings.config.sleep_level
        with contained():
            vllm = import_vllm()
            self._vllm = vllm
            self._sleeps = can_sleep(settings)
            try:
                arguments = vllm.EngineArgs(**engine_args(settings, self._sleeps))
                self._engine: Any = vllm.LLMEngine.from_engine_args(arguments)
            except Exception as error:  # vLLM may raise any class, from its own checks to its kernels' errors
                raise ConfigError(
                    f"vLLM cannot start with this model: {described(error)}",
                    where=WHERE,
                    hint="see engine.max_model_tokens, engine.kv_cache_bytes and model.dtype, or use the engine hf",
                ) from error
        self._asleep: tuple[str, ...] = ()
        """vLLM's tags of the memory that is given back."""

    @property
    def forgets_weights(self) -> bool:
        """Whether weights are gone after each `generate`: they are then to come by `update` before the next."""
        return self._sleeps and self._sleep_level == 2

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt and answer together."""
        return int(self._engine.model_config.max_model_len)

    def generate(
        self, jobs: Sequence[Job], sampling: SamplingParams, version: int
    ) -> Generator[Completion, None, None]:
        """Yield completions as they finish, labelled with policy `version`. Closing the iterator drops the rest."""
        self._wake()
        waiting = {job.name: job for job in jobs}
        try:
            for name, job in waiting.items():
                self._engine.add_request(
                    name, {"prompt_token_ids": list(job.prompt_ids)}, self._sampling_params(job, sampling)
                )
            while waiting:
                for output in self._engine.step():
                    if output.finished:
                        yield completion_of(waiting.pop(output.request_id), output, sampling, version)
        finally:
            self._engine.abort_request(list(waiting))
            self._sleep()

    def update(self, shards: Iterable[Mapping[str, Tensor]]) -> None:
        """Load a whole version in place, under transformers' names, and drop everything derived from the old one.

        Raises `SyncError` when some of vLLM's weights got no value, and vLLM's own errors; weights may then be mixed.
        """
        self._wake("weights")  # the cache stays dropped, so that there is room for what is loaded
        if self._num_workers == 1:
            self._engine.collective_rpc(_reload, args=(_named(shards),))
        else:
            with tempfile.TemporaryDirectory(prefix="rlhf-vllm-", dir=scratch_folder()) as folder:
                self._engine.collective_rpc(_reload_files, args=(_written(shards, Path(folder)),))
        self._engine.reset_prefix_cache()

    def close(self) -> None:
        """End vLLM and leave the process group it made."""
        engine, self._engine = self._engine, None
        if engine is not None:
            engine.engine_core.shutdown()
            from vllm.distributed.parallel_state import cleanup_dist_env_and_memory

            cleanup_dist_env_and_memory()

    def generate_in_flight(self, between: Between) -> Iterator[Completion]:
        """Answer what `between` returns before each step, until there is nothing. `update` may be called in `between`.

        `policy_versions` of a completion are the numbers of loads, one per token.
        """
        growing: dict[str, _Growing] = {}
        self._wake()
        sleeps, self._sleeps = self._sleeps, False  # memory is given back only at the end
        try:
            while True:
                joining, num_loads = between(bool(growing))
                for job, sampling in joining:
                    params = self._sampling_params(job, sampling)
                    params.output_kind = self._vllm.sampling_params.RequestOutputKind.DELTA
                    prompt = {"prompt_token_ids": list(job.prompt_ids), "cache_salt": str(num_loads)}
                    self._engine.add_request(job.name, prompt, params)
                    growing[job.name] = _Growing(job, sampling)
                if not growing:
                    return
                for output in self._engine.step():
                    each = growing[output.request_id]
                    each.take(output, num_loads)
                    if output.finished:
                        del growing[output.request_id]
                        yield completion_of(each.job, each, each.sampling, each.loads[0], tuple(each.loads))
        finally:
            self._engine.abort_request([*growing])
            self._sleeps = sleeps
            self._sleep()

    def hold(self) -> None:
        """Do nothing: nothing is computed between two steps, so `update` may be called in `between`."""

    def _sampling_params(self, job: Job, sampling: SamplingParams) -> Any:
        chosen = {} if sampling.greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p, "seed": job.seed}
        return self._vllm.SamplingParams(
            max_tokens=job.max_tokens,
            temperature=0.0 if sampling.greedy else sampling.temperature,
            logprobs=_num_logprobs(sampling),
            ignore_eos=True,  # every stop condition is given here
            stop_token_ids=self._eos_ids,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(sampling.stop),
            output_kind=self._vllm.sampling_params.RequestOutputKind.FINAL_ONLY,
            **chosen,
        )

    def _wake(self, *tags: str) -> None:
        """Wake what sleeps of `tags`; without any, everything."""
        if wanted := [tag for tag in tags or self._asleep if tag in self._asleep]:
            self._engine.wake_up(wanted)
            self._asleep = tuple(tag for tag in self._asleep if tag not in wanted)

    def _sleep(self) -> None:
        if self._sleeps:
            self._engine.sleep(level=self._sleep_level)
            self._asleep = ("weights", "kv_cache")


@dataclass(slots=True)
class _Growing:
    """An answer whose tokens come step by step; at its end it has the form of a request of vLLM and of its output."""

    job: Job
    sampling: SamplingParams
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    loads: list[int] = field(default_factory=list)
    finish_reason: Any = None
    num_cached_tokens: int = 0

    @property
    def outputs(self) -> tuple[Any, ...]:
        return (self,)

    def take(self, request: Any, num_loads: int) -> None:
        """Take what a step brought."""
        (output,) = request.outputs
        self.loads += [num_loads] * len(output.token_ids)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.num_cached_tokens = request.num_cached_tokens or 0


def _named(shards: Iterable[Mapping[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    return ((name, tensor.detach()) for shard in shards for name, tensor in shard.items())


def _written(shards: Iterable[Mapping[str, Tensor]], folder: Path) -> list[str]:
    """Write the shards as files, which vLLM's workers map: tensors cannot be arguments of a call to them."""
    paths = []
    for number, shard in enumerate(shards):
        paths.append(str(folder / f"{number}.safetensors"))
        write_tensors(Path(paths[-1]), dict(shard))
    return paths


def _reload_files(worker: Any, paths: Sequence[str]) -> None:
    """Runs in each of several workers, of which each takes its part of every weight."""
    from safetensors.torch import load_file

    _reload(worker, (item for path in paths for item in load_file(path).items()))


def _reload(worker: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Runs in vLLM's worker. `load_weights` alone fails on packed weights; `reload_weights` only logs missing ones."""
    model = worker.get_model()
    load, loaded = model.load_weights, set[str]()

    def recording_load(weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        loaded.update(load(weights))
        return loaded

    missing = {name for name, _ in model.named_parameters()}
    model.load_weights = recording_load
    try:
        worker.reload_weights(weights_iterator=named)
    finally:
        del model.load_weights
    missing -= loaded
    if missing:
        raise SyncError(f"vLLM's model got no weights for {', '.join(sorted(missing)[:5])}", where=WHERE)


def _num_logprobs(sampling: SamplingParams) -> int:
    """Number of top tokens whose log-probs vLLM returns, beside the sampled one."""
    return sampling.top_k + TIES if sampling.top_k and not sampling.greedy else 0


def completion_of(
    job: Job, request: Any, sampling: SamplingParams, version: int, versions: tuple[int, ...] = ()
) -> Completion:
    """A finished request of vLLM as a completion."""
    (output,) = request.outputs
    tokens = tuple(output.token_ids)
    support = None
    if _num_logprobs(sampling):
        # Truncated tokens have a log-prob of minus infinity.
        support = tuple(sorted(t for t, told in each.items() if told.logprob > -1e30) for each in output.logprobs)
    reason: FinishReason = output.finish_reason
    if reason not in ("stop", "length"):
        raise RlhfError(f"vLLM gave an answer up: {reason}", where=WHERE)
    return Completion(
        sample_id=job.sample_id,
        token_ids=tokens,
        logprobs=tuple(each[token].logprob for token, each in zip(tokens, output.logprobs, strict=True)),
        finish_reason=reason,
        policy_version=version,
        policy_versions=versions,
        support_ids=support,
        branch=job.branch,
        num_reused=request.num_cached_tokens or 0,
    )
