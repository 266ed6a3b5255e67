"""A stand-in for a vLLM or SGLang server: their protocols over a model of transformers, with real weights.

It answers token by token, pauses, loads weights from files and labels tokens with versions as the real servers do.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from running import Forked, wait_until

STEP_SECONDS = 0.002


@dataclass
class Options:
    """One request, in the words of neither protocol."""

    prompt: list[int]
    max_tokens: int
    temperature: float
    top_k: int
    top_p: float
    seed: int | None
    end_ids: frozenset[int]
    stop: Sequence[str]
    num_top: int = 0


@dataclass
class Sampled:
    """An answer so far."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    tops: list[list[tuple[int, float]]] = field(default_factory=list)
    kept: list[list[int]] = field(default_factory=list)
    spans: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class Model:
    """Samples one token at a time, without any cache, so that only the current weights count."""

    def __init__(self, folder: str, *, raw_logprobs: bool) -> None:
        from transformers import AutoModelForCausalLM, AutoTokenizer

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype="float32").eval()
        self._tokenizer = AutoTokenizer.from_pretrained(folder)
        self._raw = raw_logprobs
        self.label = "default"
        self.context_tokens = int(self._model.config.max_position_embeddings)
        self.running = asyncio.Event()
        self.running.set()
        self.num_loads = 0

    def load(self, folder: str) -> None:
        from safetensors.torch import load_file

        files = sorted(Path(folder).glob("*.safetensors"))
        if not files:
            raise FileNotFoundError(f"no weights in {folder}")
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        missing, unexpected = self._model.load_state_dict(weights, strict=False)
        tied = set(getattr(self._model, "all_tied_weights_keys", ()) or ())
        assert not unexpected and set(missing) <= tied, (missing, unexpected)
        self._model.tie_weights()
        self.num_loads += 1

    async def sample(self, options: Options) -> Sampled:
        answer = Sampled()
        while answer.finish_reason is None:
            await self.running.wait()
            self._step(options, answer)
            await asyncio.sleep(STEP_SECONDS)
        return answer

    def _step(self, options: Options, answer: Sampled) -> None:
        import torch

        with torch.no_grad():
            ids = torch.tensor([[*options.prompt, *answer.token_ids]])
            logits = self._model(input_ids=ids).logits[0, -1].float()
        greedy = options.temperature == 0
        raw = torch.log_softmax(logits, -1)
        warm = raw if greedy else torch.log_softmax(logits / options.temperature, -1)
        if not greedy and options.top_k:
            warm = warm.masked_fill(warm < warm.topk(options.top_k).values[-1], -torch.inf)
            warm = torch.log_softmax(warm, -1)
        if not greedy and options.top_p < 1:
            values, order = warm.sort(descending=True)
            drop = values.exp().cumsum(-1) - values.exp() >= options.top_p
            warm = torch.log_softmax(warm.index_fill(0, order[drop], -torch.inf), -1)
        if greedy:
            token = int(logits.argmax())
        else:
            generator = torch.Generator()
            seed = None if options.seed is None else (options.seed + 7919 * len(answer.token_ids)) % 2**63
            generator.seed() if seed is None else generator.manual_seed(seed)
            token = int(torch.multinomial(warm.exp(), 1, generator=generator))
        shown = raw if self._raw else warm
        top = shown.topk(min(options.num_top, len(shown)))
        answer.token_ids.append(token)
        answer.logprobs.append(float(shown[token]))
        answer.tops.append(list(zip(top.indices.tolist(), top.values.tolist(), strict=True)))
        answer.kept.append(warm.isfinite().nonzero()[:, 0].tolist())
        if not answer.spans or answer.spans[-1]["version"] != self.label:
            answer.spans.append({"version": self.label, "start": len(answer.token_ids) - 1})
        answer.spans[-1]["end"] = len(answer.token_ids)
        text = self._tokenizer.decode(answer.token_ids) if options.stop else ""
        if token in options.end_ids or any(stop in text for stop in options.stop):
            answer.finish_reason = "stop"
        elif len(answer.token_ids) >= options.max_tokens:
            answer.finish_reason = "length"


def _vllm_routes(model: Model) -> dict[str, Any]:
    async def generate(body: dict[str, Any], query: dict[str, str]) -> Any:
        given = body["sampling_params"]
        answer = await model.sample(
            Options(
                body["token_ids"],
                given["max_tokens"],
                given["temperature"],
                given.get("top_k", 0),
                given.get("top_p", 1.0),
                given.get("seed"),
                frozenset(given.get("stop_token_ids", [])),
                given.get("stop", []),
                given["logprobs"],
            )
        )

        def entry(token: int, logprob: float) -> dict[str, Any]:
            return {"token_id": token, "logprob": max(logprob, -9999.0), "rank": 1}

        content = [
            {**entry(token, logprob), "top_logprobs": [entry(token, logprob), *(entry(*each) for each in top)]}
            for token, logprob, top in zip(answer.token_ids, answer.logprobs, answer.tops, strict=True)
        ]
        choice = {
            "index": 0,
            "finish_reason": answer.finish_reason,
            "token_ids": answer.token_ids,
            "weight_versions": answer.spans,
            "logprobs": {"content": content},
        }
        return {"request_id": "1", "usage": {"prompt_tokens_details": None}, "choices": [choice]}

    async def pause(body: dict[str, Any], query: dict[str, str]) -> Any:
        assert query["mode"] == "keep"
        model.running.clear()
        return {"status": "paused"}

    async def resume(body: dict[str, Any], query: dict[str, str]) -> Any:
        model.running.set()
        return {"status": "resumed"}

    async def collective_rpc(body: dict[str, Any], query: dict[str, str]) -> Any:
        assert body["method"] == "reload_weights" and not model.running.is_set()
        model.load(body["kwargs"]["weights_path"])
        return {"results": [None]}

    async def update_weight_version(body: dict[str, Any], query: dict[str, str]) -> Any:
        assert not model.running.is_set()
        model.label = body["new_version"]
        return {"success": True}

    async def reset_prefix_cache(body: dict[str, Any], query: dict[str, str]) -> Any:
        return {"success": query["reset_running_requests"] == "true"}

    async def weight_info(body: dict[str, Any], query: dict[str, str]) -> Any:
        return {"weight_version": model.label}

    return {
        "POST /inference/v1/generate": generate,
        "POST /pause": pause,
        "POST /resume": resume,
        "POST /collective_rpc": collective_rpc,
        "POST /update_weight_version": update_weight_version,
        "POST /reset_prefix_cache": reset_prefix_cache,
        "GET /weight_info": weight_info,
    }


def _sglang_routes(model: Model) -> dict[str, Any]:
    async def generate(body: dict[str, Any], query: dict[str, str]) -> Any:
        given = body["sampling_params"]
        top_k = given.get("top_k", -1)
        answer = await model.sample(
            Options(
                body["input_ids"],
                given["max_new_tokens"],
                given["temperature"],
                max(top_k, 0),
                given.get("top_p", 1.0),
                given.get("sampling_seed"),
                frozenset(given.get("stop_token_ids", [])),
                given.get("stop") or [],
                body.get("top_logprobs_num", 0),
            )
        )
        meta: dict[str, Any] = {
            "finish_reason": {"type": answer.finish_reason},
            "weight_version": model.label,
            "weight_versions": answer.spans if len(answer.spans) > 1 else None,
            "cached_tokens": 0,
            "output_token_logprobs": [
                [logprob, token, None] for logprob, token in zip(answer.logprobs, answer.token_ids, strict=True)
            ],
            "output_top_logprobs": [[[logprob, token, None] for token, logprob in top] for top in answer.tops],
        }
        if body.get("return_sampling_mask"):
            assert top_k > 0, "a sampling mask needs a finite top_k"
            meta |= {"output_token_sampling_mask": answer.kept, "output_token_sampling_logprobs": answer.logprobs}
        return {"text": "", "output_ids": answer.token_ids, "meta_info": meta}

    async def pause_generation(body: dict[str, Any], query: dict[str, str]) -> Any:
        assert body["mode"] == "retract"
        model.running.clear()
        return {"status": "ok"}

    async def continue_generation(body: dict[str, Any], query: dict[str, str]) -> Any:
        model.running.set()
        return {"status": "ok"}

    async def update_weights_from_disk(body: dict[str, Any], query: dict[str, str]) -> Any:
        assert body["flush_cache"] and not model.running.is_set()
        model.load(body["model_path"])
        model.label = body["weight_version"]
        return {"success": True}

    async def model_info(body: dict[str, Any], query: dict[str, str]) -> Any:
        return {"weight_version": model.label}

    return {
        "POST /generate": generate,
        "POST /pause_generation": pause_generation,
        "POST /continue_generation": continue_generation,
        "POST /update_weights_from_disk": update_weights_from_disk,
        "GET /model_info": model_info,
    }


def make_app(kind: str, model: Model, key: str | None) -> Any:
    """The application of a kind of server."""
    from starlette.requests import Request
    from starlette.responses import JSONResponse, Response
    from starlette.routing import Route

    from rlhf_web import Guard

    handlers = _vllm_routes(model) if kind == "vllm" else _sglang_routes(model)

    async def models(body: dict[str, Any], query: dict[str, str]) -> Any:
        return {"data": [{"id": "model", "max_model_len": model.context_tokens}]}

    handlers["GET /v1/models"] = models

    def route(name: str, handler: Any) -> Route:
        method, _, path = name.partition(" ")

        async def handle(request: Request) -> Response:
            body = await request.json() if method == "POST" else {}
            try:
                return JSONResponse(await handler(body, dict(request.query_params)))
            except FileNotFoundError as error:
                return JSONResponse({"error": str(error)}, status_code=400)

        return Route(path, handle, methods=[method])

    return Guard(
        [route(name, handler) for name, handler in handlers.items()],
        refusal=lambda _, refused: JSONResponse({"error": str(refused)}, status_code=refused.status),
        knows=None if key is None else lambda given: given == key,
    )


def serve(kind: str, folder: str, port: int, raw_logprobs: bool, key: str | None) -> None:
    """Serve until the process ends, and print the address."""
    import torch

    from rlhf_web import ServerLimits, serve_until_stopped

    torch.set_num_threads(1)
    serve_until_stopped(
        make_app(kind, Model(folder, raw_logprobs=raw_logprobs), key),
        ServerLimits(max_body_bytes=64 * 2**20),
        host="127.0.0.1",
        port=port,
        where="stand-in",
        ready=lambda address: print(address, flush=True),
    )


class GenerationServer:
    """The stand-in in its own process, which can be killed and started again at the same address."""

    def __init__(self, kind: str, folder: Path, *, raw_logprobs: bool = False, key: str | None = None) -> None:
        self._arguments = (kind, str(folder)), (raw_logprobs, key)
        self.kind = kind
        self.url = ""
        self.start()

    def start(self) -> None:
        """Start it, at the same port as before."""
        first, last = self._arguments
        self.process = Forked(serve, *first, int(self.url.rpartition(":")[2] or 0), *last)
        wait_until(self._has_started, "the stand-in server")
        self.url = self.process.output()[0].strip()

    def kill(self) -> None:
        """End it without any chance to clean up."""
        self.process.end()

    def _has_started(self) -> bool:
        self.process.assert_runs()
        return self.process.output()[0].endswith("\n")


def save_base(folder: Path, *, hidden_size: int = 32) -> Path:
    """Save a model to start a server with: the contracts' tiny policy with other weights."""
    from rlhf_testing.tiny import contract_policy, contract_tokenizer, perturb

    base = contract_policy(hidden_size=hidden_size)
    perturb(base, seed=8)
    base.save_pretrained(folder)
    contract_tokenizer().save_pretrained(folder)
    return folder


@contextmanager
def generation_server(kind: str, folder: Path, **options: Any) -> Iterator[GenerationServer]:
    """A stand-in server that is ended at the end."""
    server = GenerationServer(kind, folder, **options)
    try:
        yield server
    finally:
        server.kill()
