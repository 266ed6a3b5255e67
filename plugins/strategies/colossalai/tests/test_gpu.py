"""The three strategies on one GPU: real streams."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from rlhf_testing.strategy_suite import StrategyCase, observe
from rlhf_testing.tiny_training import change_cosine, largest_difference, tiny_model, train_alone

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]

CASES = [
    ("ddp", {"precision": "fp32"}),
    ("ddp", {}),
    ("low-level-zero", {"precision": "fp32"}),
    ("low-level-zero", {}),
    ("low-level-zero", {"stage": 2}),
    ("low-level-zero", {"cpu_offload": True}),
    ("gemini", {}),
    ("gemini", {"offload_optim_frac": 1.0, "offload_param_frac": 1.0}),
]


@pytest.mark.parametrize(("name", "options"), CASES)
def test_trains_and_resumes_on_a_gpu(name, options, tmp_path, monkeypatch):
    for key in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(key, raising=False)
    strategy = StrategyCase(name, name, options, device="cuda").make()
    strategy.setup()
    try:
        seen = observe(strategy, tmp_path)
        assert strategy.device.type == "cuda"
    finally:
        strategy.teardown()
    assert not dist.is_initialized()
    alone = train_alone(updates=3)
    exact = strategy.precision == "fp32"
    for split in ("whole", "accumulated"):
        assert seen[split]["losses"] == pytest.approx(alone["losses"], rel=1e-4 if exact else 5e-3)
        cosine = change_cosine(tiny_model().state_dict(), seen[split]["weights"], alone["weights"])
        assert cosine > (0.999 if exact else 0.9)
    resumed = seen["resumed"]
    assert largest_difference(resumed["saved"], resumed["loaded"]) == 0.0
    assert resumed["resumed"]["losses"] == pytest.approx(resumed["uninterrupted"]["losses"], rel=1e-3)
    assert seen["diverged"]["refused"] == [True]


def test_the_step_agrees_with_torchs_adamw_on_the_gpu():
    from rlhf_colossalai.adam import RunHybridAdam

    start = torch.randn(1000, device="cuda")
    ours, theirs = torch.nn.Parameter(start.clone()), torch.nn.Parameter(start.clone())
    optimizer = RunHybridAdam([ours], 0.01, (0.9, 0.99), 1e-8, 0.1)
    reference = torch.optim.AdamW([theirs], lr=0.01, betas=(0.9, 0.99), eps=1e-8, weight_decay=0.1)
    ours.grad = theirs.grad = torch.randn(1000, device="cuda")
    optimizer.step()
    reference.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
