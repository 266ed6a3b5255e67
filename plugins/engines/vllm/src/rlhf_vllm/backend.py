"""The vLLM backend in its own process: samples step by step and loads new weights in place between steps.

Weights are identified by the number of loads so far. vLLM keeps the keys and values of running requests when weights
change, and cannot drop cached prefixes meanwhile. A cache salt prevents later requests from reusing old prefixes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors.torch import load_file

from rlhf_core.errors import ConfigError, RlhfError, SyncError
from rlhf_core.types import Completion, FinishReason
from rlhf_models import GenerationJob

from .images import check_version, image_input
from .start import WHERE, Settings, can_sleep, describe_error, engine_args, import_vllm

if TYPE_CHECKING:
    from torch import Tensor

_ADAPTER = "policy"


class VllmBackend:
    """Generates with vLLM and loads new weights in place. Methods are called one at a time."""

    def __init__(self, settings: Settings) -> None:
        """Raises `PluginError` if vLLM cannot be imported, `ConfigError` if it cannot run this model."""
        self._end_ids = list(settings.end_ids)
        self._model_type, self._image_token_id = settings.model_type, settings.image_token_id
        self._banned_words = list(settings.config.banned_words)
        self._num_workers = settings.config.tensor_parallel_size
        self._vllm = vllm = import_vllm()
        if settings.image_token_id is not None:
            check_version()
        self._sleeps = can_sleep(settings)
        try:
            arguments = vllm.EngineArgs(**engine_args(settings, self._sleeps))
            self._engine: Any = vllm.LLMEngine.from_engine_args(arguments)
        except Exception as error:  # vLLM may raise any class, from config checks to kernel errors
            raise ConfigError(
                f"vLLM cannot start with this model: {describe_error(error)}",
                where=WHERE,
                hint="see engine.max_model_tokens, engine.kv_cache_bytes and model.dtype, or use the engine hf",
            ) from error
        self._asleep: tuple[str, ...] = ()
        """vLLM's tags of the memory that is currently released."""
        self._open: dict[str, _PartialAnswer] = {}
        self._num_loads = 0
        self._adapter: Any = None
        """vLLM's request for the adapter that all answers are sampled with."""

    @property
    def max_model_tokens(self) -> int:
        """Maximum length of prompt and answer together, in tokens."""
        return int(self._engine.model_config.max_model_len)

    def add(self, jobs: Sequence[GenerationJob], in_flight: bool) -> None:
        """Start sampling answers. `in_flight`: `update` may change the weights between two steps meanwhile."""
        self._wake()
        for job in jobs:
            prompt, parameters = self._prompt(job), self._sampling_params(job, in_flight)
            adapter = {} if self._adapter is None else {"lora_request": self._adapter}
            self._engine.add_request(name := _request_id(job), prompt, parameters, **adapter)
            self._open[name] = _PartialAnswer(job)

    def step(self) -> list[Completion]:
        """Run one decoding step and return the completed answers. `policy_versions` are load counts, one per token."""
        completed = []
        for output in self._engine.step():
            answer = self._open[output.request_id]
            answer.extend(output, self._num_loads)
            if output.finished:
                completed.append(answer.completion())
                del self._open[output.request_id]
        return completed

    def rest(self) -> None:
        """Abort open answers and release memory."""
        self._engine.abort_request([*self._open])
        self._open.clear()
        if self._sleeps and "kv_cache" not in self._asleep:
            self._engine.sleep(level=1)
            self._asleep = ("weights", "kv_cache")

    def update(self, shards: Iterable[Path]) -> None:
        """Load a full version in place, under transformers' names, and drop caches of the old one.

        `shards`: files, which are removed once loaded.

        Raises `SyncError` if some of vLLM's weights did not receive a value, or vLLM's own errors. vLLM may then hold a
        mix of old and new weights.
        """
        self._wake("weights")  # the cache stays dropped, to leave room for the load
        if self._num_workers == 1:
            self._engine.collective_rpc(_reload, args=(_read_shards(shards),))
        else:  # workers are processes that map the files, since calls to them cannot pass tensors
            files = list(shards)
            self._engine.collective_rpc(_reload_files, args=([str(file) for file in files],))
            for file in files:
                file.unlink()
        self._engine.reset_prefix_cache()
        self._num_loads += 1

    def load_adapter(self, folder: Path) -> None:
        """Replace the adapter in place, also for open answers, and drop caches of the old one.

        `folder`: adapter in PEFT's format.

        Raises `SyncError` if vLLM does not load it.
        """
        from vllm.lora.request import LoRARequest

        self._wake("weights")
        if not self._engine.add_lora(LoRARequest(_ADAPTER, 1, str(folder), load_inplace=True)):
            raise SyncError("vLLM did not load the adapter", where=WHERE)
        self._adapter = LoRARequest(_ADAPTER, 1, str(folder))
        self._engine.reset_prefix_cache()
        self._num_loads += 1

    def _prompt(self, job: GenerationJob) -> Any:
        version = str(self._num_loads)
        if self._image_token_id is None or not job.images:
            return {"prompt_token_ids": list(job.prompt_ids), "cache_salt": version}
        return image_input(
            job.prompt_ids,
            job.images,
            model_type=self._model_type,
            image_token_id=self._image_token_id,
            version=version,
        )

    def _sampling_params(self, job: GenerationJob, in_flight: bool) -> Any:
        sampling, kinds = job.sampling, self._vllm.sampling_params.RequestOutputKind
        chosen: dict[str, Any] = {"temperature": 0.0}
        if not sampling.greedy:
            chosen = {"top_k": sampling.top_k, "top_p": sampling.top_p, "seed": job.seed}
            # vLLM and rlhf_forward give these options the same names and meaning.
            chosen |= {"temperature": sampling.temperature, "bad_words": self._banned_words or None, **job.options}
        return self._vllm.SamplingParams(
            max_tokens=job.max_tokens,
            logprobs=job.num_top_logprobs,
            ignore_eos=True,  # all stop conditions are set here
            stop_token_ids=self._end_ids,
            stop=list(sampling.stop),
            include_stop_str_in_output=True,
            skip_special_tokens=False,
            detokenize=bool(sampling.stop),
            output_kind=kinds.DELTA if in_flight else kinds.FINAL_ONLY,
            **chosen,
        )

    def _wake(self, *tags: str) -> None:
        """Wake the sleeping parts among `tags`, by default all."""
        if wanted := [tag for tag in tags or self._asleep if tag in self._asleep]:
            self._engine.wake_up(wanted)
            self._asleep = tuple(tag for tag in self._asleep if tag not in wanted)


@dataclass(slots=True)
class _PartialAnswer:
    """An answer whose tokens arrive step by step, or all at its end."""

    job: GenerationJob
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    """Per position, vLLM's log-prob entries of the sampled token and the most likely ones, by token id."""
    loads: list[int] = field(default_factory=list)
    finish_reason: FinishReason | None = None
    num_reused: int = 0

    def extend(self, request: Any, num_loads: int) -> None:
        """Append the tokens of one step."""
        (output,) = request.outputs
        self.loads += [num_loads] * len(output.token_ids)
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.finish_reason = output.finish_reason
        self.num_reused = request.num_cached_tokens or 0

    def completion(self) -> Completion:
        """The finished answer."""
        if self.finish_reason not in ("stop", "length"):
            raise RlhfError(f"vLLM aborted an answer: {self.finish_reason}", where=WHERE)
        support = None
        if self.job.num_top_logprobs:
            # Truncated tokens have a log-prob of minus infinity.
            support = tuple(sorted(t for t, entry in each.items() if entry.logprob > -1e30) for each in self.logprobs)
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


def _request_id(job: GenerationJob) -> str:
    return f"{job.sample_id}-{job.branch}"


def _read_shards(shards: Iterable[Path]) -> Iterator[tuple[str, Tensor]]:
    for path in shards:
        shard = load_file(path)
        path.unlink()  # the pages live as long as the tensors. Files are not left over if either process is killed.
        yield from shard.items()


def _reload_files(worker: Any, paths: Sequence[str]) -> None:
    """Load weights in one of several workers, which keeps its part of every weight."""
    _reload(worker, (item for path in paths for item in load_file(path).items()))


def _reload(worker: Any, named: Iterable[tuple[str, Tensor]]) -> None:
    """Load weights in vLLM's worker and check that all were set.

    `load_weights` alone fails on packed weights, and `reload_weights` only logs missing ones.
    """
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
        raise SyncError(f"vLLM's model did not get weights for {', '.join(sorted(missing)[:5])}", where=WHERE)
