"""Actors that are killed, really, at the worst moments; and what a run does then."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_core.errors import RlhfError

pytestmark = pytest.mark.usefixtures("local_ray")

RunFile = Callable[..., dict[str, Any]]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("weights", "sync"),
    list(itertools.product(("between-batches", "in-flight"), ("chunked", "direct"))),
)
def test_makers_that_die_are_replaced_and_no_sample_is_lost_or_doubled(
    weights: str,
    sync: str,
    tmp_path: Path,
    run_file: RunFile,
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    """One dies with prompts in the making, one (maybe the same) while weights arrive; one loses its engine."""
    faults("maker-generates")
    faults("maker-loses-engine")
    faults("maker-receives-2")
    run = run_file({"episodes": 4}, num_makers=2, max_staleness=1, weights=weights, sync=sync, max_shard_bytes=200_000)
    result = train(run, output=tmp_path / "ray")
    assert result is not None
    check_samples(tmp_path / "ray")
    assert result.summary["status"] == "done"
    fallbacks = {line["episode"]: line.get("sync/fallbacks") for line in result.metrics}
    if sync == "direct":  # a maker whose sender died receives that version through the object store
        assert sorted(fallbacks.values()) in ([0] * 4, [0] * 3 + [1])
    else:
        assert set(fallbacks.values()) == {None}
    assert all(line["staleness/max"] <= 1 for line in result.metrics)
    log = (tmp_path / "ray" / "run.log").read_text()
    assert log.count("is restarted") == 3


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["maker-sent-3", "maker-dies-when-taken"])
def test_samples_that_go_with_their_maker_are_made_again_as_they_were(
    fault: str,
    tmp_path: Path,
    run_file: RunFile,
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    """It dies when its first groups wait to be trained on, or when a trainer has just been told where they are."""
    local = train(run_file(), output=tmp_path / "local")
    faults(fault)
    result = train(run_file(max_staleness=0, prompts_per_lease=2), output=tmp_path / "ray")
    assert result is not None and local is not None
    check_samples(tmp_path / "ray")
    said = "are generated again" if fault == "maker-dies-when-taken" else "of its prompts will be generated again"
    assert said in (tmp_path / "ray" / "run.log").read_text()
    for ours, theirs in zip(result.metrics, local.metrics, strict=True):
        assert ours["loss/policy"] == pytest.approx(theirs["loss/policy"], abs=1e-5)
        assert ours["reward/mean"] == pytest.approx(theirs["reward/mean"], abs=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["maker-sent-3", "maker-dies-when-taken"])
def test_with_weights_in_flight_they_are_made_again_too(
    fault: str,
    tmp_path: Path,
    run_file: RunFile,
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    faults(fault)
    result = train(run_file(max_staleness=1, prompts_per_lease=2, weights="in-flight"), output=tmp_path / "ray")
    assert result is not None
    check_samples(tmp_path / "ray")
    assert all(line["staleness/max"] <= 1 for line in result.metrics)


@pytest.mark.slow
@pytest.mark.parametrize("sync", ["chunked", "direct"])
@pytest.mark.parametrize("weights", ["between-batches", "in-flight"])
def test_a_trainer_that_dies_inside_a_sync_ends_the_run_with_its_cause_and_a_resume_goes_on(
    weights: str,
    sync: str,
    tmp_path: Path,
    run_file: RunFile,
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    faults("trainer-syncs-2")
    run = run_file(max_staleness=1, sync=sync, max_shard_bytes=200_000, weights=weights)
    with pytest.raises(RlhfError, match=r"trainer-0: its process exited"):
        train(run, output=tmp_path / "ray")
    assert train(run, output=tmp_path / "ray", resume="auto", restart=True) is not None
    check_samples(tmp_path / "ray")


@pytest.mark.slow
def test_a_maker_that_keeps_dying_ends_the_run(tmp_path: Path, run_file: RunFile) -> None:
    reward = tmp_path / "deadly.py"
    reward.write_text("import os, signal\n\ndef deadly(rollouts):\n    os.kill(os.getpid(), signal.SIGKILL)\n")
    run = run_file(max_staleness=0, max_restarts=1)
    run["rewards"] = [f"{reward}:deadly"]
    with pytest.raises(RlhfError, match=r"(?s)maker-0.*already restarted 1 times"):
        train(run, output=tmp_path / "ray")


@pytest.mark.slow
@pytest.mark.parametrize("weights", ["between-batches", "in-flight"])
def test_a_maker_that_hangs_is_held_for_dead(
    weights: str,
    tmp_path: Path,
    run_file: RunFile,
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    """Stopped by a signal, it neither works nor says so; its prompts are made elsewhere."""
    faults("maker-hangs")
    run = run_file(num_makers=2, max_staleness=1, heartbeat_seconds=8, weights=weights)
    assert train(run, output=tmp_path / "ray") is not None
    check_samples(tmp_path / "ray")
    assert "sent no heartbeat" in (tmp_path / "ray" / "run.log").read_text()


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(20))
def test_twenty_times_in_a_row(
    turn: int,
    tmp_path: Path,
    run_file: RunFile,
    faults: Callable[[str], Path],
    check_samples: Callable[[Path], None],
) -> None:
    kinds = ["maker-generates", "maker-receives-1", "trainer-syncs-2", "maker-receives-2", "maker-receives-3"]
    fault = kinds[turn % 5]
    faults(fault)
    weights = "in-flight" if turn % 3 and turn % 2 else "between-batches"
    sync = ["full", "chunked", "direct"][turn // 2 % 3]
    run = run_file({"episodes": 4}, num_makers=2, max_staleness=turn % 3, sync=sync, weights=weights)
    if fault.startswith("trainer"):
        with pytest.raises(RlhfError, match="trainer-0: its process exited"):
            train(run, output=tmp_path / "ray")
    resume = "auto" if fault.startswith("trainer") else None
    assert train(run, output=tmp_path / "ray", resume=resume, restart=True) is not None
    check_samples(tmp_path / "ray")
