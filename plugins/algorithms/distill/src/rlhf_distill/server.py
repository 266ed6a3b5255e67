"""Log-probs of given tokens under a model on a server."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from pydantic import ValidationError
from torch import Tensor

from rlhf_core.errors import ConfigError, DeadlineError, RlhfError
from rlhf_web import JsonClient, RemoteError, environment_key, model_client

from .divergence import LEAST_REST
from .server_wire import ServerChoice, ServerCompletion, checked_log_prob, problem_of
from .spans import PARTIAL
from .teacher_config import TeacherServerConfig

_MAX_RESPONSE_BYTES = 2**28


class TeacherServer:
    """A teacher on a server that speaks vLLM's or OpenAI's completions."""

    def __init__(
        self, config: TeacherServerConfig, *, where: str, top_k: int, vocabulary: int, text_of: Callable[[int], str]
    ) -> None:
        """Read the key. Connections are opened by `score`.

        Args:
            config: Options of the server.
            where: Place of the options, for errors.
            top_k: Number of most likely tokens to return. 0 returns the given token's log-prob only.
            vocabulary: Size of the policy's vocabulary.
            text_of: Token id -> its text, which the server's must have.

        Raises:
            UserInputError: The variable of the key is not set.
        """
        self._config = config
        self._where = where
        self._top_k = top_k
        self._vocabulary = vocabulary
        self._text_of = text_of
        self._texts: dict[int, str] | None = {}
        """Texts of tokens at the server. None once they are checked."""
        self._key = None
        if config.key_env is not None:
            hint = f"export {config.key_env}=…, in the shell that starts the run"
            self._key = environment_key(config.key_env, where=f"{where}.key_env", hint=hint)

    def score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        """Return the log-probs of the last tokens of each row.

        Args:
            rows: Token ids of prompt and response, and the number A of tokens of the response.

        Returns:
            [A, 1] float32 for each row, or with `top_k` [A, 2K + 1]: log-probs of K tokens and of the rest, then K ids.

        Raises:
            DeadlineError: Not all rows were scored within `timeout_seconds`.
            ConfigError: The server rejects the requests, or has other tokens.
            RlhfError: The server is lost, or its response is not as expected.
        """
        with ThreadPoolExecutor(1) as pool:  # this thread may run an event loop, for example that of a notebook
            return pool.submit(asyncio.run, self._score(rows)).result()

    async def _score(self, rows: Sequence[tuple[Sequence[int], int]]) -> list[Tensor]:
        config = self._config
        client = model_client(f"{config.url}/completions", config, self._key, max_response_bytes=_MAX_RESPONSE_BYTES)
        try:
            async with asyncio.timeout(config.timeout_seconds), asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._row(client, ids, length)) for ids, length in rows]
            self._check_texts(client)
            return [task.result() for task in tasks]
        except TimeoutError:
            raise DeadlineError(
                f"{client.shown} did not score {len(rows)} samples within {config.timeout_seconds:g} s",
                where=self._where,
                hint="raise timeout_seconds, or lower train.prompts_per_episode",
            ) from None
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None
        finally:
            await client.aclose()

    async def _row(self, client: JsonClient, ids: Sequence[int], length: int) -> Tensor:
        body = json.dumps(self._request(ids)).encode()
        try:
            content = await client.post(lambda: body)
        except RemoteError as error:
            raise self._explained(error) from None
        try:
            choice = ServerCompletion.model_validate_json(content).choices[0]
        except (ValidationError, IndexError) as error:
            raise self._unusable(client, f"it is not a completion: {problem_of(error)}") from None
        read = self._of_vllm if self._config.protocol == "vllm" else self._of_openai
        try:
            return read(choice, ids, length)
        except ValueError as error:
            raise self._unusable(client, str(error)) from None

    def _request(self, ids: Sequence[int]) -> dict[str, Any]:
        shared = {"model": self._config.model, "prompt": list(ids), "temperature": 1.0}
        if self._config.protocol == "vllm":
            return {**shared, "max_tokens": 1, "prompt_logprobs": self._top_k}
        return {**shared, "max_tokens": 0, "echo": True, "logprobs": 1}

    def _of_vllm(self, choice: ServerChoice, ids: Sequence[int], length: int) -> Tensor:
        found = choice.prompt_logprobs
        if found is None:
            raise ValueError("it lacks prompt_logprobs")
        if len(found) != len(ids):
            raise ValueError(f"it scores {len(found)} tokens, {len(ids)} were sent")
        rows = []
        start = len(ids) - length
        for token, entries in zip(ids[start:], found[start:], strict=True):
            if entries is None or token not in entries:
                raise ValueError(f"it lacks the log-prob of the token {token}")
            self._note_text(token, entries[token].decoded_token)
            known = {each: checked_log_prob(entry.logprob) for each, entry in entries.items()}
            rows.append(self._most_likely(known) if self._top_k else [known[token]])
        return torch.tensor(rows, dtype=torch.float32)

    def _most_likely(self, known: Mapping[int, float]) -> list[float]:
        """Return K + 1 log-probs, then K ids, of the policy's tokens only."""
        ids = sorted((each for each in known if 0 <= each < self._vocabulary), key=lambda each: -known[each])
        if len(ids) < self._top_k:
            raise ValueError(f"only {len(ids)} of its most likely tokens are in the policy's vocabulary")
        ids = ids[: self._top_k]
        rest = 1.0 - math.fsum(math.exp(known[each]) for each in ids)
        return [*(known[each] for each in ids), math.log(max(rest, LEAST_REST)), *map(float, ids)]

    def _of_openai(self, choice: ServerChoice, ids: Sequence[int], length: int) -> Tensor:
        if choice.logprobs is None:
            raise ValueError("it lacks logprobs")
        found = choice.logprobs.token_logprobs
        if len(found) != len(ids):
            raise ValueError(f"it scores {len(found)} tokens, {len(ids)} were sent")
        start = len(ids) - length
        for token, text in zip(ids[start:], (choice.logprobs.tokens or [])[start:], strict=False):
            self._note_text(token, text)
        return torch.tensor([[checked_log_prob(each)] for each in found[start:]], dtype=torch.float32)

    def _note_text(self, token: int, text: str | None) -> None:
        if self._texts is not None and text is not None and not text.startswith("token_id:"):
            self._texts[token] = text

    def _check_texts(self, client: JsonClient) -> None:
        """Raise `ConfigError` if most tokens of the first samples have other texts at the server."""
        pairs = {token: (text.strip(), self._text_of(token).strip()) for token, text in (self._texts or {}).items()}
        compared = {token: pair for token, pair in pairs.items() if all(pair) and PARTIAL not in "".join(pair)}
        other = [token for token, (its, ours) in compared.items() if its != ours]
        if 2 * len(other) > len(compared):
            its, ours = compared[other[0]]
            raise ConfigError(
                f"{client.shown}: its model has other tokens: {len(other)} of {len(compared)} differ in their text, "
                f"for example {other[0]} is {its!r} there and {ours!r} here",
                where=self._where,
                hint="check model, or set tokenizer (next to server) to the tokenizer of that model",
            )
        self._texts = None if compared else self._texts

    def _unusable(self, client: JsonClient, problem: str) -> RlhfError:
        return RlhfError(
            f"{client.shown}: the response is not usable: {problem}",
            where=self._where,
            hint=f"check protocol ({self._config.protocol}), and that the server returns log-probs of prompts",
        )

    def _explained(self, error: RemoteError) -> RlhfError:
        if error.is_lost:
            hint = "check url and that the server runs, or raise patience_seconds. Continue with --resume auto"
            return RlhfError(f"the teacher's server is unreachable: {error}", where=self._where, hint=hint)
        hint = "name the environment variable with the server's key in key_env"
        if error.status not in (401, 403):
            hint = "check model, protocol and tokenizer. vllm limits top_k by --max-logprobs"
        return ConfigError(f"the teacher's server rejected a request: {error}", where=self._where, hint=hint)
