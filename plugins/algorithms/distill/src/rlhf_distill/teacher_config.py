"""Options of one teacher: a frozen model, a model on a server, or the policy with more in its prompt."""

from __future__ import annotations

from string import Formatter
from typing import Literal, Self

from pydantic import Field, field_validator, model_validator

from rlhf_core.config import Section
from rlhf_web import ClientOptions, server_address

PROMPT, ANSWER, DEMONSTRATION, FEEDBACK = "prompt", "answer", "demonstration", "feedback"
"""Fields of `context` that are not keys of the record."""


class TeacherServerConfig(ClientOptions):
    """A server that returns the log-probs of given tokens at temperature 1."""

    url: str = Field(
        description="Address that /completions is appended to, often ending in /v1.",
    )
    model: str = Field(min_length=1, description="Name of the model at that server.")
    key_env: str | None = Field(
        None, min_length=1, description="Environment variable with the key, sent as `Authorization: Bearer`."
    )
    protocol: Literal["vllm", "openai"] = Field(
        "vllm",
        description="vllm uses prompt_logprobs, and supports top_k up to the server's --max-logprobs. openai uses echo "
        "with logprobs, and returns only the sampled token's.",
    )
    answer_seconds: float = Field(
        120.0, gt=0, description="Maximum silence on a connection before a request counts as lost and is sent again."
    )
    patience_seconds: float = Field(
        300.0,
        ge=0,
        description="Total time for retries of a request while the server is busy, unavailable, or loses it.",
    )
    timeout_seconds: float = Field(
        1800.0, gt=0, description="Deadline of all requests for one batch of samples together."
    )

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str) -> str:
        return server_address(url)


class TeacherConfig(Section):
    """One teacher. Its vocabulary must be the policy's, unless `tokenizer` is set."""

    path: str | None = Field(
        None, min_length=1, description="A frozen model: folder, hub name, or `builtin:NAME`. Or set server or policy."
    )
    server: TeacherServerConfig | None = Field(None, description="A model on a server.")
    policy: Literal["current", "start"] | None = Field(
        None, description="The trained model itself: its current weights, or those that it started with. Needs context."
    )
    context: str | None = Field(
        None,
        description="Text that replaces the prompt (the last message of a chat) for this teacher only. {prompt} is the "
        "original, {answer} and other names are keys of the record. {demonstration} is the best other answer to the "
        "prompt, {feedback} is the text of the environment. Samples without them are not taught.",
    )
    demonstration_score: float = Field(1.0, description="Minimum score of {demonstration}.")
    tokenizer: str | None = Field(
        None,
        min_length=1,
        description="Folder or hub name of the teacher's tokenizer, if it differs from the policy's. Log-probs are "
        "then compared over the shortest texts that both tokenizers delimit.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Data type of the weights of path. auto uses model.dtype."
    )
    offload: bool = Field(
        False,
        description="Keep the model of path in host memory between passes. No effect if the strategy shards it.",
    )

    @property
    def context_names(self) -> frozenset[str]:
        """Names in `context`."""
        return frozenset(name for _, name, _, _ in Formatter().parse(self.context or "") if name is not None)

    @property
    def may_skip(self) -> bool:
        """Whether the teacher may leave out tokens."""
        return self.tokenizer is not None or not self.context_names.isdisjoint({DEMONSTRATION, FEEDBACK})

    @field_validator("context")
    @classmethod
    def _is_template(cls, context: str | None) -> str | None:
        if context is None:
            return None
        try:
            parts = list(Formatter().parse(context))
        except ValueError as error:
            raise ValueError(f"{error}: write literal braces twice, {{{{ and }}}}") from None
        names = {name for _, name, _, _ in parts if name is not None}
        if wrong := [
            name for _, name, spec, how in parts if name is not None and (not name.isidentifier() or spec or how)
        ]:
            raise ValueError(f"{{{wrong[0]}}} is not a plain name: write {{name}}, and literal braces twice")
        if PROMPT not in names:
            raise ValueError("must contain {prompt}, the original prompt")
        if names == {PROMPT}:
            raise ValueError("adds nothing of the record to the prompt: use {answer}, or another key of the record")
        return context

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(each is not None for each in (self.path, self.server, self.policy)) != 1:
            raise ValueError("set exactly one of path, server and policy")
        if self.policy is not None and self.context is None:
            raise ValueError("policy needs context: with the same prompt, the policy has nothing to learn from itself")
        if self.policy is not None and self.tokenizer is not None:
            raise ValueError("tokenizer is for path and server: the policy has its own tokenizer")
        if self.path is None and (self.offload or self.dtype != "auto"):
            raise ValueError("dtype and offload are for the model of path")
        return self
