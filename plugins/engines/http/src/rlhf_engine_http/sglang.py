"""The protocol of SGLang's server: its native `/generate` with token ids, and its weight update from disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel

from rlhf_core.errors import RlhfError
from rlhf_core.types import FinishReason
from rlhf_models import GenerationJob

from .config import WHERE
from .protocol import NOT_FINITE, Calls, ServerAnswer, ServerProtocol, VersionSpan, labels_of, parse

TokenLogprob = tuple[float | None, int, str | None]
"""Log-prob, token id and text."""
_PROBE_TEMPERATURE = 0.25


class FinishedBy(BaseModel):
    """Why an answer ended."""

    type: str


class MetaInfo(BaseModel):
    """Everything about an answer but its tokens."""

    finish_reason: FinishedBy | None
    weight_version: str
    weight_versions: list[VersionSpan] | None = None
    cached_tokens: int = 0
    output_token_logprobs: list[TokenLogprob]
    output_top_logprobs: list[list[TokenLogprob] | None] | None = None
    output_token_sampling_mask: list[list[int]] | None = None
    output_token_sampling_logprobs: list[float | None] | None = None


class SglangResponse(BaseModel):
    """Response of `/generate`."""

    output_ids: list[int]
    meta_info: MetaInfo


class ModelInfo(BaseModel):
    """Response of `/model_info`."""

    weight_version: str


class SglangProtocol(ServerProtocol):
    """SGLang 0.5.23. Requests with `top_k` use its sampling mask, which contains the kept tokens."""

    generate_path = "/generate"
    setup_hint = (
        "start it as python -m sglang.launch_server --model-path MODEL (and --sampling-mask-max-tokens N, at least "
        "engine.top_k; --enable-deterministic-inference makes answers depend on the run's seed)"
    )

    def request(self, job: GenerationJob, eos_ids: Sequence[int]) -> dict[str, Any]:
        sampling = job.sampling
        params: dict[str, Any] = {
            "max_new_tokens": job.max_tokens,
            "stop_token_ids": eos_ids,
            "stop": sampling.stop or None,
            "no_stop_trim": True,
            "skip_special_tokens": False,
        }
        if sampling.greedy:
            params["temperature"] = 0.0
        else:
            params |= {"temperature": sampling.temperature, "top_p": sampling.top_p, "sampling_seed": job.seed}
            params["top_k"] = sampling.top_k or -1
        return {
            "input_ids": job.prompt_ids,
            "sampling_params": params,
            "return_logprob": True,
            **({"return_sampling_mask": True} if job.num_top_logprobs else {}),
        }

    def answer(self, body: bytes, job: GenerationJob) -> ServerAnswer:
        response = parse(body, SglangResponse)
        meta = response.meta_info
        reason: FinishReason | None = None
        if meta.finish_reason is not None and meta.finish_reason.type in ("stop", "length"):
            reason = "stop" if meta.finish_reason.type == "stop" else "length"
        logprobs = [logprob for logprob, _, _ in meta.output_token_logprobs]
        support = None
        if job.num_top_logprobs and reason is not None:
            if meta.output_token_sampling_mask is None or meta.output_token_sampling_logprobs is None:
                raise RlhfError("the server did not return the kept tokens", where=WHERE, hint=self.setup_hint)
            support, logprobs = meta.output_token_sampling_mask, meta.output_token_sampling_logprobs
        num_tokens = len(response.output_ids)
        if [token for _, token, _ in meta.output_token_logprobs] != response.output_ids or len(logprobs) != num_tokens:
            raise RlhfError("the server's log-probs are not those of its tokens", where=WHERE)
        spans = meta.weight_versions or [VersionSpan(version=meta.weight_version, start=0, end=num_tokens)]
        return ServerAnswer(
            token_ids=response.output_ids,
            logprobs=[NOT_FINITE if each is None else each for each in logprobs],
            labels=labels_of(spans, num_tokens),
            finish_reason=reason,
            support_ids=support,
            num_reused=meta.cached_tokens,
        )

    async def label(self, calls: Calls, *, patience_seconds: float | None) -> str:
        return (await calls.get("/model_info", ModelInfo, patience_seconds=patience_seconds)).weight_version

    async def load(self, calls: Calls, folder: Path, label: str) -> None:
        # Paused so, open requests give up their keys and values, which makes the cache free to be flushed.
        await calls.post("/pause_generation", {"mode": "retract"})
        body = {"model_path": str(folder), "load_format": "auto", "flush_cache": True, "weight_version": label}
        await calls.post("/update_weights_from_disk", body)
        await calls.post("/continue_generation")

    async def problem_with_logprobs(self, calls: Calls, prompt_ids: Sequence[int]) -> str | None:
        plain, cold = [await self._spread(calls, prompt_ids, each) for each in (1.0, _PROBE_TEMPERATURE)]
        if plain < 1e-4 or cold > 2 * plain:  # differences of log-probs are divided by the temperature
            return None
        return "the server returns log-probs from before temperature: unset SGLANG_RETURN_ORIGINAL_LOGPROB for it"

    async def _spread(self, calls: Calls, prompt_ids: Sequence[int], temperature: float) -> float:
        """Difference between the highest and the lowest of the top log-probs after the prompt."""
        body = {
            "input_ids": list(prompt_ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": temperature},
            "return_logprob": True,
            "top_logprobs_num": 8,
        }
        meta = (await calls.ask(self.generate_path, body, SglangResponse)).meta_info
        tops = [each[0] for each in (meta.output_top_logprobs or [None])[0] or [] if each[0] is not None]
        return max(tops) - min(tops) if tops else 0.0
