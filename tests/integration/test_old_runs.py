"""Run folders of earlier commits go on: what they hold is read, and what is trained from there is what it was.

`old_runs/run-of-COMMIT.tar.gz` was written at that commit: `model`, a tiny Llama; `stopped`, PPO with a penalty on the
KL and the reward `regex`, ended after two of three episodes; `whole`, the metrics of the run that had all three.
cdb591d is the last commit before modules moved into rooms. 60a1844 is the last one before columns were a seam: there
`stopped` is PPO in an environment with a reward for each turn (`game.py`).
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import pytest
from run_files import metrics

from rlhf_cli.main import run as rlhf

OLD = sorted(Path(__file__).with_name("old_runs").glob("*.tar.gz"))


@pytest.mark.parametrize("archive", OLD, ids=lambda path: path.name.removesuffix(".tar.gz"))
@pytest.mark.usefixtures("no_plots", "own_logger")
def test_it_resumes_and_trains_as_it_did(archive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with tarfile.open(archive) as packed:
        packed.extractall(tmp_path, filter="data")
    (folder,) = tmp_path.iterdir()
    monkeypatch.chdir(folder)  # the run names its model by a path from here
    before = (folder / "stopped" / "metrics.jsonl").read_text()
    assert (
        rlhf(["train", "--output", "stopped", "--resume", "auto", "--set", "train.episodes=3", "--trust", "--quiet"])
        == 0
    )
    assert (folder / "stopped" / "metrics.jsonl").read_text().startswith(before)
    for mine, theirs in zip(metrics(folder / "stopped"), metrics(folder / "whole"), strict=True):
        assert theirs.keys() <= mine.keys()  # later versions measure more
        assert {key: mine[key] for key in theirs} == pytest.approx(theirs, rel=1e-4, abs=1e-7)
