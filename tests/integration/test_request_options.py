"""The engine of docs/requests.md trains, here and over Ray; rows at two temperatures train without a gap."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from quick_ray import quick_workers
from run_files import command, metrics, start, write_run

from rlhf_core.errors import ConfigError, InterruptedRun, UserInputError
from rlhf_core.hookspecs import Action

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "requests.md").read_text(encoding="utf-8")
SOURCES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
POINTS = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])["project"]["entry-points"]
ENGINE = yaml.safe_load(re.search(r"```yaml\n(engine:.*?)```", PAGE, re.DOTALL)[1])
READER = """
from rlhf_core import Component
from rlhf_group.config import RLOOConfig

reader = Component(summary="RLOO that reads the column.", config=RLOOConfig, build="acme_reader_build:build")
"""
READER_BUILD = """
from dataclasses import replace

from rlhf_core.algorithm import Mean
from rlhf_group.critic_free import CriticFree


class Reader(CriticFree):
    def loss(self, models, batch):
        output = super().loss(models, batch)
        mask = batch.action_mask
        found = batch.columns["confidence"]
        gap = (found - 2.0 - batch.action_log_probs.exp())[mask].abs().max()
        own = batch.columns["temperature"][mask].max() if "temperature" in batch.columns else 0.0
        seen = {"acme/gap": Mean(gap, 1), "acme/fill": Mean(found.min(), 1), "acme/temperature": Mean(own, 1)}
        return replace(output, metrics={**output.metrics, **seen})


def build(config, context):
    return Reader(config, context)
"""
GAME = """
from rlhf_episodes.contract import Outcome


class Game:
    async def run(self, task, policy):
        options = {"temperature": 0.5 + task.sample_id % 3}
        if task.sample_id % 2:
            await policy.turn(options=options)
        else:
            await policy.turn()
        await policy.turn("7>", options={"temperature": 2.5})
        return Outcome(reward=float(task.sample_id % 2))
"""
RUN = {
    **ENGINE,
    "algorithm": {"name": "reader"},
    "train": {"episodes": 1, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4},
}
RAY = {"transport": {"name": "ray", "max_staleness": 0}}


@pytest.fixture(autouse=True)
def acme(install, tmp_path, monkeypatch):
    points = {**POINTS, "rlhf.algorithms": {"reader": "acme_reader:reader"}}
    install("acme-confidence", points, {**SOURCES, "acme_reader": READER, "acme_reader_build": READER_BUILD})
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_the_column_reaches_the_loss(tmp_path):
    found = metrics(start(RUN, tmp_path / "run").run_folder)
    assert len(found) == 2
    assert all(line["acme/gap"] < 1e-6 for line in found)


@pytest.mark.slow
def test_the_column_reaches_the_loss_over_ray(tmp_path, ray_worker_source):
    from rlhf_ray.cluster import connect
    from rlhf_ray.config import RayConfig

    local = metrics(start(RUN, tmp_path / "local").run_folder)
    with quick_workers(), connect(RayConfig()):
        remote = metrics(start({**RUN, **RAY}, tmp_path / "ray").run_folder)
    assert [line["acme/gap"] for line in remote] == [line["acme/gap"] for line in local]
    assert [line["loss/policy"] for line in remote] == [line["loss/policy"] for line in local]


class Interrupts:
    """Does after the first episode what Ctrl-C does."""

    def rlhf_decide(self, moment):
        return Action(kind="interrupt", by="test", reason="once") if moment.at == "episode" else None


def test_the_column_reaches_the_loss_after_a_resume(tmp_path):
    run = {**RUN, "train": {**RUN["train"], "episodes": 2}, "checkpoint": {"every_episodes": 1}}
    straight = metrics(start(run, tmp_path / "straight").run_folder)
    with pytest.raises(InterruptedRun):
        start(run, tmp_path / "run", hooks=[Interrupts()])
    resumed = metrics(start(run, tmp_path / "run", resume="auto").run_folder)
    assert resumed == straight and len(resumed) == 4
    assert all(line["acme/gap"] < 1e-6 for line in resumed)


@pytest.mark.slow
def test_the_column_reaches_the_loss_of_two_processes(tmp_path):
    one = metrics(start(RUN, tmp_path / "one").run_folder)
    two = metrics(start({**RUN, "strategy": "torch-ddp"}, tmp_path / "two", num_processes=2).run_folder)
    assert len(two) == len(one) == 2
    assert all(line["acme/gap"] < 1e-6 for line in two)
    assert two[0]["loss/policy"] == pytest.approx(one[0]["loss/policy"], rel=1e-3, abs=1e-5)


def test_turns_at_several_temperatures_train_without_a_gap(tmp_path):
    (tmp_path / "game.py").write_text(GAME)
    run = {**RUN, "environment": {"name": f"{tmp_path}/game.py:Game"}, "rewards": []}
    found = metrics(start(run, tmp_path / "run", trust=True).run_folder)
    for line in found:
        assert line["rollout/logprob_gap_max"] < 1e-5
        assert line["acme/fill"] == -1.0 and line["acme/gap"] < 1e-6
        assert line["acme/temperature"] == 2.5


def test_an_option_that_the_engine_does_not_accept_is_exit_2(tmp_path):
    wrong = {"engine": {"name": "hf", "options": {"bias": 1.0}}}
    with pytest.raises(ConfigError, match=r"engine\.options\.bias: the engine hf does not accept this request option"):
        start(wrong, tmp_path / "run")
    done = command("train", write_run(tmp_path, wrong), "--output", tmp_path / "run")
    assert done.returncode == 2
    assert "engine.options.bias" in done.stderr and "it accepts temperature" in done.stderr
    assert not (tmp_path / "run").exists()


def test_options_of_the_section_are_refused_among_those_of_requests(tmp_path):
    with pytest.raises(UserInputError, match=r"engine\.options\.temperature: is an option of the section"):
        start({"engine": {"name": "hf", "options": {"temperature": 0.5}}}, tmp_path / "run")
