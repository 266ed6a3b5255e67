"""Interface to a server's software. `vllm.py` and `sglang.py` implement it."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, TypeVar

from pydantic import BaseModel, ValidationError

from rlhf_core.errors import RlhfError
from rlhf_core.types import FinishReason
from rlhf_models import GenerationJob
from rlhf_web import JsonClient

from .config import WHERE

M = TypeVar("M", bound=BaseModel)
NOT_FINITE = float("-inf")


class VersionSpan(BaseModel):
    """Tokens `[start, end)` of an answer, and the label of the weights that sampled them."""

    version: str
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class ServerAnswer:
    """A server's answer to one request."""

    token_ids: Sequence[int]
    logprobs: Sequence[float]
    labels: Sequence[str]
    """Label of the weights that sampled each token."""
    finish_reason: FinishReason | None
    """None if the server aborted the answer, for example because it was shutting down."""
    support_ids: Sequence[Sequence[int]] | None = None
    num_reused: int = 0


class ModelCard(BaseModel):
    """A model in the list of `/v1/models`."""

    max_model_len: int | None = None


class ModelList(BaseModel):
    """Response of `/v1/models`."""

    data: list[ModelCard]


class Calls:
    """Calls to the server's control endpoints, with JSON both ways.

    `patience_seconds` is the maximum wait for a lost server. None is `engine.patience_seconds`.
    """

    def __init__(self, client: JsonClient) -> None:
        self._client = client

    async def get(self, path: str, model: type[M], *, patience_seconds: float | None = None) -> M:
        """Get a path and validate the response."""
        return parse(await self._client.get(path, patience_seconds=patience_seconds), model)

    async def post(self, path: str, body: Mapping[str, Any] | None = None) -> None:
        """Post to a path, once."""
        await self._client.post(lambda: json.dumps(body or {}).encode(), path, patience_seconds=0.0)

    async def ask(
        self, path: str, body: Mapping[str, Any], model: type[M], *, patience_seconds: float | None = None
    ) -> M:
        """Post to a path and validate the response."""
        content = json.dumps(body).encode()
        return parse(await self._client.post(lambda: content, path, patience_seconds=patience_seconds), model)


class ServerProtocol(ABC):
    """How to sample from a server and to change its weights. Holds no state of the server."""

    generate_path: ClassVar[str]
    setup_hint: ClassVar[str]
    """How to start the server, for errors of its endpoints."""

    @abstractmethod
    def request(self, job: GenerationJob, eos_ids: Sequence[int]) -> dict[str, Any]:
        """Body of the request for one answer."""

    @abstractmethod
    def answer(self, body: bytes, job: GenerationJob) -> ServerAnswer:
        """Parse the response. Raises `RlhfError` if it is not one."""

    @abstractmethod
    async def label(self, calls: Calls, *, patience_seconds: float | None) -> str:
        """Label of the server's weights, once it is reachable."""

    @abstractmethod
    async def load(self, calls: Calls, folder: Path, label: str) -> None:
        """Load weights and give them a label.

        Open requests wait meanwhile, and continue with keys and values that are computed again with the new weights.
        """

    @abstractmethod
    async def problem_with_logprobs(self, calls: Calls, prompt_ids: Sequence[int]) -> str | None:
        """Reason why the server's log-probs are not those of the sampled distribution, None if they are."""

    async def context_tokens(self, calls: Calls) -> int | None:
        """Maximum length of prompt and answer together, None if unknown."""
        models = (await calls.get("/v1/models", ModelList)).data
        return models[0].max_model_len if models else None


def parse(body: bytes, model: type[M]) -> M:
    """Validate a response. Raises `RlhfError`."""
    try:
        return model.model_validate_json(body)
    except ValidationError as error:
        problem = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(str(part) for part in problem["loc"])
        raise RlhfError(
            f"the server's response is not as expected: {path}: {problem['msg']}",
            where=WHERE,
            hint="check engine.kind and the server's version (docs/reference/engines.md)",
        ) from None


def labels_of(spans: Sequence[VersionSpan], num_tokens: int) -> list[str]:
    """Label of each token. Raises `RlhfError` if the spans do not cover the answer."""
    labels = [span.version for span in spans for _ in range(span.start, span.end)]
    if len(labels) != num_tokens:
        raise RlhfError(f"the server labeled {len(labels)} of {num_tokens} tokens with a version", where=WHERE)
    return labels
