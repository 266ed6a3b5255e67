"""How the time of a run is printed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import rlhf_plan
from rlhf_cli.main import main
from rlhf_testing.runs import tiny_run


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [(0.0, "a second"), (0.04, "a second"), (0.99, "a second"), (1.0, "1.0 s"), (4.24, "4.2 s"), (125, "2 min 05 s")],
)
def test_a_time_below_a_second_is_about_a_second(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    seconds: float,
    expected: str,
) -> None:
    found = rlhf_plan.Plan(
        num_parameters=1,
        num_trainable=1,
        device="cpu",
        tokens_per_sample=7.0,
        processes=[],
        seconds_per_episode={"rollout": seconds},
        total_seconds=seconds,
    )
    monkeypatch.setattr(rlhf_plan, "plan_run", lambda *given, **options: found)
    (tmp_path / "run.yaml").write_text(json.dumps(tiny_run()))
    with pytest.raises(SystemExit) as ended:
        main(["plan", str(tmp_path / "run.yaml")])
    assert ended.value.code == 0
    out = capsys.readouterr().out
    assert f"at most about {expected}, without rewards" in out and "about 0" not in out
