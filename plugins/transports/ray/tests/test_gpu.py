"""A maker and a trainer that share one GPU."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch

from rlhf_core import train
from rlhf_testing.runs import tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]
HALF = {"name": "ray", "maker_gpus": 0.5, "trainer_gpus": 0.5}


@pytest.mark.parametrize("sync", ["chunked", "direct"])
def test_they_train_and_fall_back_to_the_object_store(
    sync: str, tmp_path: Path, no_plots: None, caplog: pytest.LogCaptureFixture
) -> None:
    """NCCL has no link between two processes of one GPU."""
    run = tiny_run({"algorithm": {"name": "grpo"}, "model": {"device": "cuda"}, "transport": {**HALF, "sync": sync}})
    run["transport"]["sync_timeout_seconds"] = 60.0
    with caplog.at_level(logging.WARNING):
        result = train(run, output=tmp_path / "run")
    assert result.summary["status"] == "done"
    lines = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["episode"] == 1
    assert ("through the object store" in caplog.text) == (sync == "direct")
    # Only samples of the newest weights have a gap.
    assert all(line.get("rollout/logprob_gap_max", 0.0) < 0.1 for line in lines)
    assert 0 < lines[-1]["memory/peak_bytes"] < 1e9
