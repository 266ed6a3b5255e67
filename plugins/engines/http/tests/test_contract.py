"""The contract of engines, over stand-in servers that speak the protocols of vLLM and SGLang."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from generation_server import generation_server, save_base

from rlhf_testing.contracts import EngineContract


class OverServer(EngineContract):
    plugin = "http"
    server_kind: ClassVar[str]
    url: ClassVar[str]

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def served(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        with generation_server(cls.server_kind, save_base(tmp_path_factory.mktemp("base"))) as server:
            cls.url = server.url
            yield

    @pytest.fixture(scope="class")
    @classmethod
    def given(cls, folder: Path, served: None) -> dict[str, Any]:
        return {"url": cls.url, "kind": cls.server_kind, "weights_folder": str(folder)}

    @classmethod
    def make_options(cls, folder: Path) -> Mapping[str, Any]:
        raise NotImplementedError


class TestVllm(OverServer):
    server_kind = "vllm"


class TestSglang(OverServer):
    server_kind = "sglang"


del OverServer, EngineContract
