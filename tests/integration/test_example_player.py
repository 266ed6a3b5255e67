"""The player of docs/players.md trains: here, in two processes and under Ray, and after a resume."""

import json
import re
import tomllib
from pathlib import Path

import pytest
from quick_ray import quick_workers
from run_files import metrics, start

from rlhf_core.errors import RlhfError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "players.md").read_text(encoding="utf-8")
SOURCES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
READER = '''
"""PPO with metrics of the column that the player adds."""
from dataclasses import replace

import torch
from rlhf_core.algorithm import Mean
from rlhf_ppo import algorithm
from rlhf_ppo.plugin import ppo

reads = replace(ppo, build="acme_reads:build")


def build(config, context):
    made = algorithm.build(config, context)
    made.__class__ = Reads
    return made


class Reads(algorithm.PPO):
    def loss(self, models, batch):
        found = super().loss(models, batch)
        found.metrics["acme/drawn"] = Mean(batch.columns["drawn"].sum(), torch.tensor(len(batch.columns["drawn"])))
        return found
'''
TRAIN = {"episodes": 2, "prompts_per_episode": 2, "samples_per_prompt": 2, "train_batch_size": 4}
RUN = {
    "algorithm": "acme-reads",
    "shortest": {"tries": 3},
    "train": TRAIN,
    "checkpoint": {"every_episodes": 1},
    "rewards": [{"name": "length", "target_tokens": 4}],
}
pytestmark = pytest.mark.usefixtures("no_plots")


class Fail:
    def rlhf_episode_start(self, episode):
        if episode == 1:
            raise RlhfError("stopped by the test")


@pytest.fixture(autouse=True)
def plugin(install, tmp_path, monkeypatch):
    points = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])["project"]["entry-points"]
    install("acme-best", points, SOURCES)
    install("acme-reads", {"rlhf.algorithms": {"acme-reads": "acme_reads:reads"}}, {"acme_reads": READER})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))  # of other processes
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def journal(folder):
    files = sorted((folder / "journal" / "shortest" / "train").glob("*.jsonl"))
    return [[json.loads(line) for line in file.read_text().splitlines()] for file in files]


def check(changes, folder, drawn, **options):
    """The run has the means `drawn` of the column in its two updates, also if it is stopped between them."""
    straight = start({**RUN, **changes}, folder / "straight", **options).run_folder
    assert [line["acme/drawn"] for line in metrics(straight)] == drawn
    with pytest.raises(RlhfError, match="stopped by the test"):
        start({**RUN, **changes}, folder / "run", hooks=[Fail()], **options)
    resumed = start({**RUN, **changes}, folder / "run", resume="auto", **options).run_folder
    assert metrics(resumed) == metrics(straight)
    return resumed


def test_it_trains_and_keeps_its_state_over_a_resume(tmp_path):
    resumed = check({}, tmp_path, [7.5, 19.5])  # 3, 6, 9, 12 and 15, 18, 21, 24
    first, second = journal(resumed)
    assert [line["drawn"] for line in first + second] == [3, 6, 9, 12, 15, 18, 21, 24]


@pytest.mark.slow
def test_two_processes_have_a_state_each(tmp_path):
    full = {**RUN, "strategy": "torch-ddp"}
    start({**full, "train": {**TRAIN, "episodes": 1}}, tmp_path / "run", num_processes=2)
    resumed = start(full, tmp_path / "run", resume="auto", num_processes=2).run_folder
    assert [line["acme/drawn"] for line in metrics(resumed)] == [4.5, 10.5]  # 3, 6 and 9, 12 of both ranks
    assert [len(lines) for lines in journal(resumed)] == [2, 2, 2, 2]


@pytest.mark.slow
def test_the_makers_of_ray_play_too(tmp_path, ray_worker_source):
    cluster = pytest.importorskip("rlhf_ray.cluster", reason="the transport ray is not installed")
    from rlhf_ray.config import RayConfig

    ray = {**RUN, "transport": {"name": "ray", "max_staleness": 0}}
    with quick_workers(), cluster.connect(RayConfig()):
        start({**ray, "train": {**TRAIN, "episodes": 1}}, tmp_path / "run")
        resumed = start(ray, tmp_path / "run", resume="auto").run_folder
    assert [line["acme/drawn"] for line in metrics(resumed)] == [7.5, 19.5]
    assert sorted(line["drawn"] for lines in journal(resumed) for line in lines) == [3, 6, 9, 12, 15, 18, 21, 24]
