"""`single`, `torch-ddp` and `fsdp` on one GPU."""

from __future__ import annotations

import pytest
import torch

from rlhf_testing.strategy_suite import StrategyCase, observe
from rlhf_testing.tiny_training import change_cosine, tiny_model, train_alone

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("single", {"precision": "fp32"}),
        ("single", {}),
        ("torch-ddp", {"precision": "fp32"}),
        ("torch-ddp", {}),
        ("fsdp", {"precision": "fp32"}),
        ("fsdp", {}),
        ("fsdp", {"offload": True}),
        ("single", {"precision": "fp32", "liger": True}),
        ("single", {"liger": True}),
        ("torch-ddp", {"liger": True}),
        ("fsdp", {"liger": True}),
    ],
)
def test_trains_and_resumes_on_a_gpu(name, options, tmp_path, monkeypatch):
    if "liger" in options:
        pytest.importorskip("liger_kernel")
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    strategy = StrategyCase(name, name, options, device="cuda").make()
    strategy.setup()
    try:
        seen = observe(strategy, tmp_path)
    finally:
        strategy.teardown()
    alone = train_alone(updates=3)
    exact = strategy.precision == "fp32"
    for split in ("whole", "accumulated"):
        assert seen[split]["losses"] == pytest.approx(alone["losses"], rel=1e-4 if exact else 5e-3)
        cosine = change_cosine(tiny_model().state_dict(), seen[split]["weights"], alone["weights"])
        assert cosine > (0.999 if exact else 0.9)
    resumed = seen["resumed"]
    assert resumed["resumed"]["losses"] == pytest.approx(resumed["uninterrupted"]["losses"], rel=1e-3)
    assert seen["diverged"]["refused"] == [True]
