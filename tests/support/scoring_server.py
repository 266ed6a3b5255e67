"""A server that scores given tokens for vLLM's and OpenAI's requests, in float64."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import torch

from rlhf_testing.models import tiny_tokenizer


def slow_log_probs(model: Any, prompt: Sequence[int], response: Sequence[int]) -> list[list[float]]:
    """Log-probs of all tokens at each token of the response, in float64."""
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[*prompt, *response]])).logits[0].double().log_softmax(-1)
    return logits[len(prompt) - 1 : -1].tolist()


@dataclass
class ScoringServer:
    """Answers vLLM's and OpenAI's requests for log-probs of prompts."""

    model: Any
    url: str = ""
    requests: list[tuple[dict[str, str], dict[str, Any]]] = field(default_factory=list)
    refusals: list[tuple[int, dict[str, Any]]] = field(default_factory=list)
    """Statuses and bodies of the next responses."""
    change: Callable[[dict[str, Any]], Any] = lambda body: body
    delay_seconds: float = 0.0
    tokenizer: Any = field(default_factory=tiny_tokenizer)

    @property
    def texts(self) -> list[str]:
        return [self.tokenizer.decode([each]) for each in range(len(self.tokenizer))]

    def answer(self, body: dict[str, Any]) -> dict[str, Any]:
        ids = body["prompt"]
        rows = slow_log_probs(self.model, ids[:1], ids[1:])
        if "prompt_logprobs" in body:
            found: list[Any] = [None]
            for token, row in zip(ids[1:], rows, strict=True):
                kept = {token, *sorted(range(len(row)), key=lambda i: -row[i])[: body["prompt_logprobs"]]}
                found.append(
                    {str(each): {"logprob": row[each], "rank": 1, "decoded_token": self.texts[each]} for each in kept}
                )
            return {"choices": [{"text": "", "prompt_logprobs": found}]}
        assert body["echo"] and body["max_tokens"] == 0
        known = [None, *(row[token] for token, row in zip(ids[1:], rows, strict=True))]
        return {
            "choices": [
                {"text": "", "logprobs": {"tokens": [self.texts[each] for each in ids], "token_logprobs": known}}
            ]
        }


@contextmanager
def scoring_server(model: Any) -> Iterator[ScoringServer]:
    """A server in threads of this process."""
    served, lock = ScoringServer(model), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                served.requests.append(({**self.headers, "path": self.path}, body))
                status, answer = served.refusals.pop(0) if served.refusals else (200, None)
                answer = served.change(served.answer(body)) if answer is None else answer
            time.sleep(served.delay_seconds)
            content = json.dumps(answer).encode()
            with suppress(ConnectionError):  # of a client that stopped waiting
                self.send_response(status)
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, *arguments: Any) -> None: ...

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        served.url = f"http://127.0.0.1:{server.server_address[1]}/v1"
        thread = threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True)
        thread.start()
        try:
            yield served
        finally:
            server.shutdown()
            thread.join()
