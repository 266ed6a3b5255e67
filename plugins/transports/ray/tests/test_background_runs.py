"""`checkpoint.background` over Ray, where the trainer's rank 0 has the thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_control.control_box import ControlBox, parse_command
from rlhf_core import train
from rlhf_core.errors import InterruptedRun
from rlhf_core.runfolder import find_complete_checkpoint

pytestmark = pytest.mark.usefixtures("local_ray")


class Stop:
    def rlhf_run_start(self, run_folder: Path) -> None:
        ControlBox(run_folder / "control").send(parse_command(["stop"]))


def checkpoints(run: Path) -> list[str]:
    return sorted(path.name for path in (run / "checkpoints").iterdir())


@pytest.mark.slow
def test_an_interrupted_run_resumes_and_ends_like_the_local_run(
    tmp_path: Path, run_file: Callable[..., dict[str, Any]], check_samples: Callable[[Path], None]
) -> None:
    local = train(run_file(), output=tmp_path / "local")
    run = run_file(max_staleness=0)
    run["checkpoint"] |= {"background": True, "keep": 2}
    with pytest.raises(InterruptedRun, match="stopped after episode 1 of 3"):
        train(run, output=tmp_path / "ray", hooks=[Stop()])
    assert find_complete_checkpoint(tmp_path / "ray") == tmp_path / "ray/checkpoints/step-2"
    assert checkpoints(tmp_path / "ray") == ["last", "step-2"]
    result = train(run, output=tmp_path / "ray", resume="auto")
    assert result is not None and local is not None
    assert result.summary["status"] == "done"
    check_samples(tmp_path / "ray")
    assert find_complete_checkpoint(tmp_path / "ray") == tmp_path / "ray/checkpoints/step-6"
    assert checkpoints(tmp_path / "ray") == ["last", "step-4", "step-6"]
    for ours, theirs in zip(result.metrics, local.metrics, strict=True):
        for name in ("step", "episode", "loss/policy", "loss/value", "reward/mean", "kl/mean"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-5), name
