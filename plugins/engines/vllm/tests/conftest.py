"""A tiny Llama with heads that vLLM's CPU kernels take, engines over it, and a vLLM made of paper."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from quick_ranks import quick_vllm
from torch import nn

from rlhf_core.components import EngineContext
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_testing.tiny import contract_policy, contract_tokenizer
from rlhf_vllm.config import VllmEngineConfig
from rlhf_vllm.engine import VllmEngine, build

SMALL = {"kv_cache_bytes": 64 * 1024**2}


@pytest.fixture
def module() -> nn.Module:
    return contract_policy(hidden_size=64).eval()


@pytest.fixture
def engine() -> Iterator[Callable[..., VllmEngine]]:
    """`engine(module, **options)` with run seed 11; closed afterwards."""
    made: list[VllmEngine] = []

    def make(module: nn.Module, tokenizer: object = None, **options: object) -> VllmEngine:
        tokenizer = contract_tokenizer() if tokenizer is None else tokenizer
        context = EngineContext(model=module, tokenizer=tokenizer, device=torch.device("cpu"), seed=11)
        made.append(build(VllmEngineConfig(**{**SMALL, **options}), context))
        return made[-1]

    yield make
    for each in made:
        each.close()


@pytest.fixture
def fake_vllm(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A module `vllm` without a model, for this process and the engine's forked one (see `fake/vllm`); its folder."""
    folder = Path(__file__).parent / "fake"
    monkeypatch.syspath_prepend(str(folder))
    real = {name: sys.modules.pop(name) for name in vllm_modules()}
    with quick_vllm():
        yield folder
    for name in vllm_modules():
        del sys.modules[name]
    sys.modules.update(real)


def vllm_modules() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "vllm"]


@pytest.fixture
def collect() -> Callable[..., dict[int, Completion]]:
    """`collect(engine, requests, sampling)`: sample id -> completion."""

    def run(engine: VllmEngine, requests: list[GenerationRequest], sampling: SamplingParams) -> dict[int, Completion]:
        return {each.sample_id: each for each in engine.generate(requests, sampling)}

    return run
