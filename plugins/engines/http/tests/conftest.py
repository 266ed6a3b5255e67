"""Engines over a stand-in server of either kind, which samples with a tiny model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from generation_server import GenerationServer, generation_server, save_base
from torch import nn

from rlhf_core.components import EngineContext
from rlhf_engine_http.config import HttpEngineConfig
from rlhf_engine_http.engine import HttpEngine
from rlhf_testing.tiny import contract_policy, contract_tokenizer


@pytest.fixture
def module() -> nn.Module:
    return contract_policy().eval()


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model that servers are started with: other weights than those of `module`."""
    return save_base(tmp_path_factory.mktemp("base"))


@pytest.fixture(params=["vllm", "sglang"])
def server(request: pytest.FixtureRequest, base_folder: Path) -> Iterator[GenerationServer]:
    with generation_server(request.param, base_folder) as started:
        yield started


@pytest.fixture
def make_engine(tmp_path: Path) -> Iterator[Callable[..., HttpEngine]]:
    """`make_engine(server, module, **options)` with run seed 11; closed afterwards."""
    made: list[HttpEngine] = []

    def make(server: GenerationServer, module: nn.Module, **options: object) -> HttpEngine:
        given = {"url": server.url, "kind": server.kind, "weights_folder": str(tmp_path / "w")}
        config = HttpEngineConfig(**{**given, "patience_seconds": 60.0, **options})
        context = EngineContext(model=module, tokenizer=contract_tokenizer(), device=torch.device("cpu"), seed=11)
        made.append(HttpEngine(config, context))
        return made[-1]

    yield make
    for each in made:
        each.close()
