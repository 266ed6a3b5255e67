"""The protocol of vLLM's server: token ids in and out, and the endpoints of its development mode."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import BaseModel, Field

from rlhf_core.errors import RlhfError
from rlhf_models import GenerationJob

from .config import WHERE
from .protocol import NOT_FINITE, Calls, ServerAnswer, ServerProtocol, VersionSpan, labels_of, parse

_LEAST_LOGPROB = -9998.0
"""vLLM writes -9999 for log-probs that are minus infinity or not a number."""


class Token(BaseModel):
    """A token and its log-prob."""

    token_id: int
    logprob: float


class SampledToken(Token):
    """A sampled token, with the most likely ones."""

    top_logprobs: list[Token] = []


class Logprobs(BaseModel):
    """Log-probs of an answer."""

    content: list[SampledToken]


class Choice(BaseModel):
    """One answer."""

    token_ids: list[int]
    logprobs: Logprobs
    weight_versions: list[VersionSpan]
    finish_reason: str | None


class PromptUsage(BaseModel):
    """Prompt tokens from the cache."""

    cached_tokens: int | None = None


class Usage(BaseModel):
    """Numbers of tokens."""

    prompt_tokens_details: PromptUsage | None = None


class VllmResponse(BaseModel):
    """Response of `/inference/v1/generate`."""

    choices: list[Choice] = Field(min_length=1)
    usage: Usage | None = None


class WeightInfo(BaseModel):
    """Response of `/weight_info`."""

    weight_version: str


class CacheReset(BaseModel):
    """Response of `/reset_prefix_cache`."""

    success: bool


class VllmProtocol(ServerProtocol):
    """vLLM 0.32, started with VLLM_SERVER_DEV_MODE=1, --enable-scale-out and --logprobs-mode processed_logprobs."""

    generate_path = "/inference/v1/generate"
    setup_hint = (
        "start it as VLLM_SERVER_DEV_MODE=1 vllm serve MODEL --enable-scale-out --logprobs-mode processed_logprobs "
        "--generation-config vllm (and --max-logprobs N, at least engine.top_k + 16)"
    )

    def request(self, job: GenerationJob, eos_ids: Sequence[int]) -> dict[str, Any]:
        sampling = job.sampling
        chosen = {} if sampling.greedy else {"top_k": sampling.top_k, "top_p": sampling.top_p, "seed": job.seed}
        return {
            "token_ids": job.prompt_ids,
            "sampling_params": {
                "max_tokens": job.max_tokens,
                "temperature": 0.0 if sampling.greedy else sampling.temperature,
                "logprobs": job.num_top_logprobs,
                "ignore_eos": True,  # all stop conditions are set here
                "stop_token_ids": eos_ids,
                "stop": sampling.stop,
                "include_stop_str_in_output": True,
                "skip_special_tokens": False,
                "detokenize": bool(sampling.stop),
                **chosen,
            },
        }

    def answer(self, body: bytes, job: GenerationJob) -> ServerAnswer:
        response = parse(body, VllmResponse)
        choice = response.choices[0]
        tokens = choice.logprobs.content
        if [each.token_id for each in tokens] != choice.token_ids:
            raise RlhfError("the server's log-probs are not those of its tokens", where=WHERE)
        support = None
        if job.num_top_logprobs:
            support = [
                sorted({top.token_id for top in (each, *each.top_logprobs) if top.logprob > _LEAST_LOGPROB})
                for each in tokens
            ]
        details = response.usage and response.usage.prompt_tokens_details
        return ServerAnswer(
            token_ids=choice.token_ids,
            logprobs=[each.logprob if each.logprob > _LEAST_LOGPROB else NOT_FINITE for each in tokens],
            labels=labels_of(choice.weight_versions, len(tokens)),
            finish_reason={"stop": "stop", "length": "length"}.get(choice.finish_reason or ""),  # type: ignore[arg-type]
            support_ids=support,
            num_reused=(details and details.cached_tokens) or 0,
        )

    async def label(self, calls: Calls, *, patience_seconds: float | None) -> str:
        return (await calls.get("/weight_info", WeightInfo, patience_seconds=patience_seconds)).weight_version

    async def load(self, calls: Calls, folder: Path, label: str) -> None:
        await calls.post("/pause?mode=keep")
        await calls.post("/collective_rpc", {"method": "reload_weights", "kwargs": {"weights_path": str(folder)}})
        reset = await calls.ask("/reset_prefix_cache?reset_running_requests=true", {}, CacheReset, patience_seconds=0.0)
        if not reset.success:
            raise RlhfError("the server did not drop the keys and values of older weights", where=WHERE)
        await calls.post("/update_weight_version", {"new_version": label})
        await calls.post("/resume")

    async def problem_with_logprobs(self, calls: Calls, prompt_ids: Sequence[int]) -> str | None:
        # The only kept token has probability 1.
        params = {"max_tokens": 1, "temperature": 1.0, "top_k": 1, "logprobs": 0, "detokenize": False}
        body = {"token_ids": list(prompt_ids), "sampling_params": params}
        response = await calls.ask(self.generate_path, body, VllmResponse)
        logprob = response.choices[0].logprobs.content[0].logprob
        if abs(logprob) < 1e-3:
            return None
        return (
            "the server returns log-probs from before temperature, top-k and top-p: start it with "
            "--logprobs-mode processed_logprobs"
        )
