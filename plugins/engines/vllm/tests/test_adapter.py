"""Adapters that vLLM applies: what its process gets at the start and at each version, with `fake/vllm`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from rlhf_core import train
from rlhf_core.config.sections import LoraConfig
from rlhf_core.errors import ConfigError, SyncError
from rlhf_core.types import SamplingParams
from rlhf_models import CausalLM
from rlhf_testing.contracts.engine import make_requests
from rlhf_testing.runs import tiny_run
from rlhf_vllm.config import VllmEngineConfig
from rlhf_vllm.start import Settings, engine_args

THREE = SamplingParams(max_new_tokens=3)


def adapted(module: Any, value: float, **options: Any) -> Any:
    """A model whose adapter's factors sum up to `value`, or the model itself with its adapter changed so."""
    if not hasattr(module, "peft_config"):
        module = CausalLM().add_adapter(module, LoraConfig(r=4, **options), seed=0)
    factors = [parameter for name, parameter in module.named_parameters() if ".default." in name]
    with torch.no_grad():
        for parameter in factors:
            parameter.zero_()
        factors[0].view(-1)[0] = value
    return module


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize("options", [{}, {"init": "pissa"}], ids=["default", "pissa"])
def test_each_version_sends_the_adapter_alone(options: dict[str, Any], module: Any, engine: Any, collect: Any) -> None:
    model = adapted(module, 5, **options)
    made = engine(model, adapter=True)
    for version, value in enumerate((5, 8, 2)):
        adapted(model, value)
        if version:
            made.weights_updated(version)
        found = collect(made, make_requests(3), THREE)
        assert {each.policy_version for each in found.values()} == {version}
        for request in make_requests(3):
            assert found[request.sample_id].token_ids == (request.prompt_ids[0] + value,) * 3


@pytest.mark.usefixtures("fake_vllm")
def test_an_adapter_that_is_not_loaded_ends_the_engine(module: Any, engine: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("FAKE_VLLM", "torn")
    made = engine(adapted(module, 1), adapter=True)
    with pytest.raises(SyncError, match="vLLM did not load the adapter"):
        list(made.generate(make_requests(1), THREE))


def test_vllm_gets_the_next_rank_that_it_has_memory_for() -> None:
    config = VllmEngineConfig(adapter=True)
    settings = Settings(config, Path("model"), "float32", "cpu", (0,), lora_rank=20)
    arguments = engine_args(settings, sleeps=False)
    chosen = {name: arguments[name] for name in ("enable_lora", "max_loras", "max_lora_rank", "load_format")}
    assert chosen == {"enable_lora": True, "max_loras": 1, "max_lora_rank": 32, "load_format": "safetensors"}


@pytest.mark.usefixtures("fake_vllm")
@pytest.mark.parametrize(
    ("lora", "message"),
    [
        (None, "engine.adapter: needs an adapter, but model.lora is not set"),
        ({"dora": True}, "engine.adapter: vLLM cannot apply an adapter with model.lora.dora"),
        ({"r": 1024}, "engine.adapter: vLLM applies adapters up to rank 512, not 1024"),
    ],
)
def test_what_vllm_cannot_apply_is_refused_by_name(lora: Any, message: str) -> None:
    run = tiny_run({"model": {"lora": lora}, "engine": {"name": "vllm", "max_new_tokens": 4, "adapter": True}})
    with pytest.raises(ConfigError, match=message):
        train(run, dry_run=True)
