"""`examples/sweep`: every combination and seed is trained once, and the table names the best."""

from __future__ import annotations

import runpy
from pathlib import Path

import pytest
from run_files import write_run

pytestmark = pytest.mark.usefixtures("no_plots")
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "sweep" / "sweep.py"


def sweep(*arguments: object) -> None:
    runpy.run_path(str(SCRIPT))["main"]([str(each) for each in arguments])


@pytest.mark.slow
def test_every_combination_is_trained_once_and_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"episodes": 1, "prompts_per_episode": 2, "samples_per_prompt": 2, "train_batch_size": 4}
    changes = {"train": sizes, "rewards": [{"name": "length", "target_tokens": 4}]}
    run, output = write_run(tmp_path, changes), tmp_path / "sweep"
    given = (run, "--grid", "optimizer.lr=1e-4,1e-3", "--seeds", 2, "--metric", "reward/mean", "--output", output)
    sweep(*given)
    names = [f"optimizer.lr={lr}-seed={seed}" for lr in ("1e-3", "1e-4") for seed in (0, 1)]
    assert sorted(path.name for path in output.iterdir()) == names
    head, *rows, last = capsys.readouterr().out.splitlines()[-4:]
    assert head.split() == ["reward/mean", "std", "runs", "options"]
    assert sorted(row.split()[2:] for row in rows) == [["2", "optimizer.lr=1e-3"], ["2", "optimizer.lr=1e-4"]]
    assert [float(row.split()[0]) for row in rows] == sorted((float(row.split()[0]) for row in rows), reverse=True)
    assert last == f"compare the curves: rlhf report {output}/*"
    before = {path: path.stat().st_mtime_ns for path in output.glob("*/model/*")}
    sweep(*given)
    assert capsys.readouterr().out.splitlines()[-3:-1] == rows
    assert {path: path.stat().st_mtime_ns for path in output.glob("*/model/*")} == before


def test_a_run_that_fails_does_not_end_the_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = {"episodes": 1, "prompts_per_episode": 2, "samples_per_prompt": 2, "train_batch_size": 4}
    run = write_run(tmp_path, {"train": sizes})
    sweep(
        run, "--grid", "optimizer.lr=-1,1e-3", "--seeds", 1, "--metric", "reward/mean", "--output", tmp_path / "sweep"
    )
    out, err = capsys.readouterr()
    assert [row.split()[2:] for row in out.splitlines()[-3:-1]] == [
        ["1", "optimizer.lr=1e-3"],
        ["0", "optimizer.lr=-1"],
    ]
    assert "optimizer.lr" in err


def test_random_combinations_are_the_same_at_each_start() -> None:
    draw = runpy.run_path(str(SCRIPT))["combinations"]
    grid = ["optimizer.lr=1,2,3", "algorithm.kl_coef=4,5"]
    assert len(draw(grid, None)) == 6 == len(draw(grid, 9))
    chosen = draw(grid, 3)
    assert chosen == draw(grid, 3) and len(set(chosen)) == 3
    assert all(first.startswith("optimizer.lr=") and second[-1] in "45" for first, second in chosen)
