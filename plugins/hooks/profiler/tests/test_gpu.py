"""A traced episode on a GPU: kernels in the trace, and a snapshot of the GPU's memory."""

import json

import pytest
import torch

from rlhf_core import train
from rlhf_testing.runs import tiny_run

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")]


def test_kernels_and_the_memory_of_the_gpu_are_traced(tmp_path, no_plots):
    run = tiny_run({"hooks": {"profiler": {"episodes": [1], "memory": True}}, "model": {"device": "cuda"}})
    assert train(run, output=tmp_path / "run").summary["status"] == "done"
    profile = tmp_path / "run" / "profile"
    assert {each.name for each in profile.iterdir()} == {"episode-1.json", "episode-1-memory.pickle"}
    assert (profile / "episode-1-memory.pickle").stat().st_size > 1000
    events = json.loads((profile / "episode-1.json").read_text())["traceEvents"]
    assert any(event.get("cat") == "kernel" for event in events)
