"""PPOTrainer on real ColossalAI Boosters, in one process and in two."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from running import PATIENCE_SECONDS
from safetensors.torch import load_file

SCRIPT = Path(__file__).with_name("booster_process.py")


def start(rank: int, world_size: int, folder: Path) -> subprocess.Popen[str]:
    arguments = [str(rank), str(world_size), str(folder / "store"), str(folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen(
        [sys.executable, str(SCRIPT), *arguments], env=environment, stderr=subprocess.PIPE, text=True
    )


@pytest.mark.slow  # ColossalAI takes long to import, in three processes at a time
@pytest.mark.skipif(find_spec("colossalai") is None, reason="needs colossalai")
def test_two_processes_train_as_one_does(tmp_path: Path) -> None:
    """The same answers, half of them on each process, make the same updates."""
    folders = [tmp_path / "one", tmp_path / "two"]
    for folder in folders:
        folder.mkdir()
    running = [start(0, 1, folders[0]), start(0, 2, folders[1]), start(1, 2, folders[1])]
    try:
        for process in running:
            _, errors = process.communicate(timeout=PATIENCE_SECONDS)
            assert process.returncode == 0, errors[-3000:]
    finally:
        for process in running:
            process.kill()
    alone = load_file(folders[0] / "rank-0.safetensors")
    first, second = (load_file(folders[1] / f"rank-{rank}.safetensors") for rank in (0, 1))
    for name, tensor in alone.items():
        assert torch.equal(first[name], second[name]), name
        torch.testing.assert_close(first[name], tensor, rtol=1e-4, atol=1e-5, msg=name)
    lines = [(folder / "logs" / "metrics.jsonl").read_text().count("\n") for folder in folders]
    assert lines == [2, 2]
