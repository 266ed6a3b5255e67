"""Options of the engine `http`."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import ClassVar, Literal

from pydantic import Field, field_validator, model_validator

from rlhf_core.config import EngineConfig
from rlhf_models import truncation_problem
from rlhf_web import address_parts, is_loopback

NAME = "http"
WHERE = f"engine {NAME}"


class HttpEngineConfig(EngineConfig):
    """Rollouts by a vLLM or SGLang server."""

    is_remote: ClassVar[bool] = True
    """Generation needs no memory in the run's processes (`rlhf plan`)."""

    url: list[str] = Field(
        description="Address of the server, such as http://localhost:8000. A list has one server for each process that "
        "samples (transport.num_makers, or num_processes), and each process takes one that is free."
    )
    kind: Literal["vllm", "sglang"] = Field("vllm", description="The server's software, which decides the protocol.")
    api_key_env: str | None = Field(
        None, min_length=1, description="Environment variable with the server's key, sent as `Authorization: Bearer`."
    )
    weights_folder: str | None = Field(
        None,
        description="Folder to which each version of the weights is written for the server to read, and which needs "
        "room for two versions. null: a folder in the system's temporary folder, for a server on this machine.",
    )
    server_weights_folder: str | None = Field(
        None, description="Path of the same folder for the server, if it differs (containers). null: the same path."
    )
    max_batch_size: int = Field(
        256, ge=1, le=65536, description="Maximum number of requests at the server. Further ones wait in the run."
    )
    max_shard_bytes: int = Field(
        2 * 1024**3, ge=1024, description="Maximum size of one file of weights (or one tensor)."
    )
    patience_seconds: float = Field(
        300.0,
        gt=0,
        le=86400,
        description="Maximum wait for a server that is unreachable, at the start and whenever it is lost. A restarted "
        "server gets the current weights again, and unfinished answers are sampled again.",
    )
    answer_timeout_seconds: float = Field(
        1800.0, gt=0, le=86400, description="Maximum time for one answer. Then the server counts as lost."
    )
    load_timeout_seconds: float = Field(
        600.0, gt=0, le=86400, description="Maximum time for the server to load one version of the weights."
    )

    @field_validator("url", mode="before")
    @classmethod
    def _as_list(cls, url: object) -> object:
        return [url] if isinstance(url, str) else url

    @field_validator("url")
    @classmethod
    def _are_addresses(cls, urls: list[str]) -> list[str]:
        if not urls:
            raise ValueError("should be an address, such as http://localhost:8000")
        for url in urls:
            parts = address_parts(url, form="http://HOST[:PORT]", key_option="api_key_env")
            if parts.query or parts.fragment:
                raise ValueError("should not contain ? or #")
        cleaned = [url.rstrip("/") for url in urls]
        if len(set(cleaned)) < len(cleaned):
            raise ValueError("contains a server twice, but each one serves one process that samples")
        return cleaned

    @field_validator("weights_folder", "server_weights_folder")
    @classmethod
    def _is_absolute(cls, folder: str | None) -> str | None:
        if folder is not None and not PurePosixPath(folder).is_absolute():
            raise ValueError("should be an absolute path, since the server has another working directory")
        return folder

    @model_validator(mode="after")
    def _check_options(self) -> HttpEngineConfig:
        if problem := truncation_problem(self.top_k, self.top_p, engine=NAME):
            raise ValueError(problem)
        if self.weights_folder is None:
            for url in self.url:
                if not is_loopback(address_parts(url).hostname):
                    raise ValueError(
                        f"{url} is another machine: set weights_folder to a folder that this machine and the server "
                        "share (and server_weights_folder, if its path differs there)"
                    )
        if self.server_weights_folder is not None and self.weights_folder is None:
            raise ValueError("server_weights_folder needs weights_folder: the path of the same folder here")
        return self
