"""Options that select a chat model, without importing a client."""

from __future__ import annotations

from typing import Any, ClassVar, Self

from pydantic import Field, field_validator, model_validator

from .servers import ClientOptions, environment_key, server_address


class ChatModelOptions(ClientOptions):
    """Options that select a chat model: `url` for one on a server, `model_path` for a local one."""

    called: ClassVar[str] = "model"
    """Name of the model's role in messages."""

    url: str | None = Field(
        None,
        description="An OpenAI-compatible server: the address that /chat/completions is appended to, often ending in "
        "/v1. Either this or model_path.",
    )
    model: str | None = Field(None, min_length=1, description="Name of the model at that server.")
    key_env: str | None = Field(
        None, min_length=1, description="Environment variable with the key, sent as `Authorization: Bearer`."
    )
    model_path: str | None = Field(
        None, min_length=1, description="A local model, which is not trained: folder or hub name."
    )
    engine: str = Field("hf", min_length=1, description="Engine of a local model.")
    engine_options: dict[str, Any] = Field(default_factory=dict, description="Its options, as in the section engine.")

    @field_validator("url")
    @classmethod
    def _is_address(cls, url: str | None) -> str | None:
        return None if url is None else server_address(url)

    @model_validator(mode="after")
    def _one_model(self) -> Self:
        if (self.url is None) == (self.model_path is None):
            raise ValueError(f"set exactly one of them: url for a server, or model_path for a local {self.called}")
        if self.url is not None and self.model is None:
            raise ValueError(f"model is required with url: the {self.called}'s name at the server")
        if self.model_path is not None and (self.key_env is not None or self.model is not None):
            raise ValueError(f"key_env and model are for a server (url), not for a local {self.called}")
        return self

    def read_key(self, *, where: str) -> str | None:
        """Return the key of the server, or None if it needs none.

        Args:
            where: Plugin named in the error.

        Raises:
            UserInputError: The variable of the key is not set.
        """
        if self.key_env is None:
            return None
        hint = f"export {self.key_env}=…, in the shell that starts the run"
        return environment_key(self.key_env, where=f"{where}: key_env", hint=hint)
