"""Options, and what is said where vLLM is missing, broken or cannot take the model."""

from __future__ import annotations

import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from pkgutil import resolve_name

import pytest
import torch
from pydantic import ValidationError
from running import PATIENCE_SECONDS

from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins.requirements import not_installed
from rlhf_core.plugins.selected import load
from rlhf_testing.contracts.base import ComponentContract
from rlhf_vllm import process
from rlhf_vllm.config import VllmEngineConfig
from rlhf_vllm.start import Settings, engine_args


def test_its_defaults_are_those_of_every_engine():
    config = VllmEngineConfig()
    assert (config.temperature, config.top_k, config.top_p) == (1.0, 0, 1.0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "top_p needs top_k"),
        ({"top_k": 2000}, "at most 1024"),
        ({"gpu_memory_fraction": 1.5}, "gpu_memory_fraction"),
        ({"kv_cache_bytes": 5}, "kv_cache_bytes"),
        ({"max_batch_size": 0}, "max_batch_size"),
        ({"sleep": "sometimes"}, "sleep"),
        ({"prepack": "on"}, "prepack"),
    ],
)
def test_wrong_options_are_refused(options, message):
    with pytest.raises(ValidationError, match=message):
        VllmEngineConfig(**options)


def test_top_p_with_top_k_is_fine():
    assert VllmEngineConfig(top_p=0.9, top_k=100).sampling().top_p == 0.9


@pytest.mark.parametrize(("workers", "backend"), [(1, "uni"), (4, "mp")])
def test_what_is_said_of_a_gpu_reaches_vllm(workers, backend, tmp_path):
    config = VllmEngineConfig(tensor_parallel_size=workers, gpu_memory_fraction=0.7)
    arguments = engine_args(Settings(config, tmp_path, "bfloat16", "cuda", (1,)), sleeps=True)
    expected = {
        "tensor_parallel_size": workers,
        "distributed_executor_backend": backend,
        "gpu_memory_utilization": 0.7,
        "kv_cache_memory_bytes": None,
        "enable_sleep_mode": True,
    }
    assert {name: arguments[name] for name in expected} == expected


@pytest.mark.parametrize(
    ("visible", "device", "workers", "chosen"),
    [("2,3", "cuda", 2, "2,3"), ("4,5,6", "cuda:1", 2, "5,6"), ("", "cuda:1", 1, "1"), ("7", "cuda:0", 1, "7")],
)
def test_it_sees_as_many_gpus_as_it_has_workers(visible, device, workers, chosen, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert process._environment(device, workers)["CUDA_VISIBLE_DEVICES"] == chosen


def test_more_workers_than_gpus_are_an_error_with_what_to_type(monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    with pytest.raises(ConfigError, match=r"is 2, but this process has 1 GPUs") as raised:
        process._environment("cuda:0", 2)
    assert "transport.maker_gpus to 2" in str(raised.value)


class TestComponent(ComponentContract):
    """What holds for its options with and without vLLM."""

    kind = "engines"
    plugin = "vllm"

    @pytest.fixture(scope="class")
    @classmethod
    def selected(cls):
        return load("engines", "vllm", check_requires=False)

    def test_component_is_whole(self, selected):
        """Its engine's module can be imported without vLLM."""
        assert callable(resolve_name(selected.component.build))


@pytest.mark.skipif(find_spec("vllm") is not None, reason="vLLM is installed here")
@pytest.mark.slow
def test_without_vllm_the_command_says_what_to_type():
    assert not_installed(load("engines", "vllm", check_requires=False).component.requires) == ("vllm",)
    with pytest.raises(PluginError, match="needs vllm, not installed here") as raised:
        load("engines", "vllm")
    assert "make setup-vllm" in str(raised.value)
    shown = subprocess.run(
        [str(Path(sys.executable).parent / "rlhf"), "train", "--engine", "vllm", "--dry-run"],
        capture_output=True,
        text=True,
        timeout=PATIENCE_SECONDS,
        check=False,
    )
    assert shown.returncode == 2, shown.stderr
    assert "needs vllm" in shown.stderr and "make setup-vllm" in shown.stderr and "Traceback" not in shown.stderr


def test_a_broken_vllm_is_named_with_what_to_type(module, engine, fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "broken")
    with pytest.raises(PluginError, match="torchvision::nms") as raised:
        engine(module)
    assert "make setup-vllm" in str(raised.value) and raised.value.exit_code == 2


def test_a_model_vllm_cannot_run_is_an_error_at_the_start(module, engine, fake_vllm, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", "unfit")
    with pytest.raises(ConfigError, match="head_dim=16"):
        engine(module)


def test_sleep_that_the_build_cannot_is_an_error(module, engine, fake_vllm):
    with pytest.raises(ConfigError, match="cannot release its memory"):
        engine(module, sleep="on")
