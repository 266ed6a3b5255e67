"""vLLM in the process that serves it: samples step by step, and takes new weights in place between two steps.

Weights are identified by the number of loads so far. vLLM keeps the keys and values of running requests when weights
change, and cannot drop cached prefixes meanwhile. A salt keeps those of older weights from later requests.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from rlhf_core.errors import ConfigError, RlhfError, SyncError
from rlhf_core.types import Completion, FinishReason, SamplingParams

from .start import TIES, WHERE, Settings, can_sleep, described, engine_args, import_vllm

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True, slots=True)
class Job:
    """One answer to sample."""

    sample_id: int
    branch: int
    prompt_ids: tuple[int, ...]
    max_tokens: int
    seed: int
    sampling: SamplingParams

    @property
    def name(self) -> str:
        """Its name in vLLM."""
        return f"{self.sample_id}-{self.branch}"


class VllmBackend:
    """Generates with vLLM and takes new weights in place. Every method runs to its end before the next."""

    def __init__(self, settings: Settings) -> None:
        """Raises `PluginError` when vLLM cannot be imported, `ConfigError` when it cannot run this model."""
        self._eos_ids = list(settings.eos_ids)
        self._num_workers = settings.config.tensor_parallel_size
        self._vllm = vllm = import_vllm()
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
        self._open: dict[str, _Growing] = {}
        self._num_loads = 0

    @property
    def max_model_tokens(self) -> int:
        """Longest prompt and answer together."""
        return int(self._engine.model_config.max_model_len)

    def add(self, jobs: Sequence[Job], in_flight: bool) -> None:
        """Take up answers. in_flight: weights may change while they are made, by `update` between two steps."""
        self._wake()
        for job in jobs:
            prompt = {"prompt_token_ids": list(job.prompt_ids), "cache_salt": str(self._num_loads)}
            self._engine.add_request(job.name, prompt, self._sampling_params(job, in_flight))
            self._open[job.name] = _Growing(job)

    def step(self) -> list[Completion]:
        """One decoding step; returns what it completed. `policy_versions` are numbers of loads, one per token."""
        completed = []
        for output in self._engine.step():
            growing = self._open[output.request_id]
            growing.take(output, self._num_loads)
            if output.finished:
                completed.append(growing.completion())
                del self._open[output.request_id]
        return completed

    def rest(self) -> None:
        """Drop the answers that are open, and give memory back."""
        self._engine.abort_request([*self._open])
        self._open.clear()
        if self._sleeps and "kv_cache" not in self._asleep:
            self._engine.sleep(level=1)
            self._asleep = ("weights", "kv_cache")

    def update(self, shards: Iterable[Path]) -> None:
        """Load a whole version in place, under transformers' names, and drop everything derived from the old one.

        shards: files, which are removed when they are loaded.

        Raises `SyncError` when some of vLLM's weights got no value, and vLLM's own errors; weights may then be mixed.
        """
        self._wake("weights")  # the cache stays dropped, so that there is room for what is loaded
        if self._num_workers == 1:
            self._engine.collective_rpc(_reload, args=(_loaded(shards),))
        else:  # workers are processes, which map the files: tensors cannot be arguments of a call to them
            files = list(shards)
            self._engine.collective_rpc(_reload_files, args=([str(file) for file in files],))
            for file in files:
                file.unlink()
        self._engine.reset_prefix_cache()
        self._num_loads += 1

    def _sampling_params(self, job: Job, in_flight: bool) -> Any:
        sampling, kinds = job.sampling, self._vllm.sampling_params.RequestOutputKind
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
            output_kind=kinds.DELTA if in_flight else kinds.FINAL_ONLY,
            **chosen,
        )

    def _wake(self, *tags: str) -> None:
        """Wake what sleeps of `tags`; without any, everything."""
        if wanted := [tag for tag in tags or self._asleep if tag in self._asleep]:
            self._engine.wake_up(wanted)
            self._asleep = tuple(tag for tag in self._asleep if tag not in wanted)


@dataclass(slots=True)
class _Growing:
    """An answer whose tokens come step by step, or all at its end."""

    job: Job
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """Of each token, what vLLM told of it and of the likeliest tokens at its place, by token."""
    loads: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_reused: int = 0

    def take(self, request: Any, num_loads: int) -> None:
        """Take what a step brought."""
        (output,) = request.outputs
        self.loads += [num_loads] * len(output.token_ids)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.num_reused = request.num_cached_tokens or 0

    def completion(self) -> Completion:
        """The whole answer."""
        if self.finish_reason not in ("stop", "length"):
            raise RlhfError(f"vLLM gave an answer up: {self.finish_reason}", where=WHERE)
        support = None
        if _num_logprobs(self.job.sampling):
            # Truncated tokens have a log-prob of minus infinity.
            support = tuple(sorted(t for t, told in each.items() if told.logprob > -1e30) for each in self.logprobs)
        return Completion(
            sample_id=self.job.sample_id,
            token_ids=tuple(self.token_ids),
            logprobs=tuple(each[token].logprob for token, each in zip(self.token_ids, self.logprobs, strict=True)),
            finish_reason=self.finish_reason,
            policy_version=self.loads[0],
            policy_versions=tuple(self.loads),
            support_ids=support,
            branch=self.job.branch,
            num_reused=self.num_reused,
        )


def _loaded(shards: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in shards:
        shard = load_file(path)
        path.unlink()  # the pages live as long as the tensors; no file is left if either side is killed
        yield from shard.items()


def _reload_files(worker: Any, paths: Sequence[str]) -> None:
    """Runs in each of several workers, of which each takes its part of every weight."""
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
