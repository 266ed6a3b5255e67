"""The kind of model of docs/kinds/models.md trains: here, in two processes, under Ray, and after a resume."""

import json
import re
import tomllib
from pathlib import Path

import pytest
import torch
from quick_ray import quick_workers
from run_files import metrics, start

from rlhf_cli.main import run as rlhf
from rlhf_core.config.sections import LoraConfig, ModelConfig
from rlhf_models import load_policy

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "kinds" / "models.md").read_text(encoding="utf-8")
SOURCES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
POINTS = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])["project"]["entry-points"]
GAP = 2e-6
"""Of log-probs in float32: rounding."""


@pytest.fixture(autouse=True)
def acme(install, tmp_path, monkeypatch):
    install("acme-conditioned", POINTS, SOURCES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))  # of other processes
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.fixture
def conditioned(tmp_path):
    """Changes to the tiny run: this kind of model, and prompts with a condition."""
    file = tmp_path / "prompts.jsonl"
    records = [
        {"prompt": f"{i}{(i * 7) % 10}>"[: 2 + i % 2], "answer": "1", "condition": [i - 3.5, (-1.0) ** i, 2.0]}
        for i in range(8)
    ]
    file.write_text("\n".join(map(json.dumps, records)))
    (tmp_path / "spread.py").write_text(
        "def spread(rollouts):\n    return [sum(r.completion_ids) % 7 for r in rollouts]\n"
    )
    return {
        "model": {"path": "builtin:conditioned"},
        "prompts": {"name": "jsonl", "path": str(file)},
        "rewards": [{"name": f"{tmp_path}/spread.py:spread"}],
        "algorithm": {"name": "ppo", "kl_coef": 0.1},
        "train": {"episodes": 2, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 8},
        "checkpoint": {"every_episodes": 1},
        "optimizer": {"lr": 0.01},
    }


def gaps(lines):
    return [line["rollout/logprob_gap_max"] for line in lines]


def test_engine_and_trainer_see_the_same_inputs(conditioned, tmp_path):
    run = start(conditioned, tmp_path / "run", trust=True).run_folder
    found = metrics(run)
    assert len(found) == 2 and max(gaps(found)) < GAP
    assert found[-1]["kl/mean"] != 0
    manifest = json.loads((run / "manifest.json").read_text())
    assert manifest["owners"]["models"] == {"conditioned": "acme-conditioned 1.2.3"}


def test_the_saved_model_is_of_its_kind(conditioned, tmp_path, capsys):
    run = start(conditioned, tmp_path / "run", trust=True).run_folder
    assert "acme-conditioned" in (run / "model" / "README.md").read_text()
    model = load_policy(ModelConfig(path=str(run / "model")), dtype=torch.float32, seed=0).eval()
    assert type(model).__name__ == "ConditionedLM"
    ids = torch.tensor([[5, 6, 14]])
    plain, moved = model(ids).logits, model(ids, condition=torch.ones(1, 3)).logits
    assert not torch.equal(plain, moved)
    assert rlhf(["generate", "--model", str(run / "model"), "--prompt", "12>", "--max-new-tokens", "4"]) == 0
    assert rlhf(["export", str(run), "--to", str(tmp_path / "exported")]) == 0
    assert (tmp_path / "exported" / "README.md").exists()


def test_it_resumes_bit_for_bit(conditioned, tmp_path):
    straight = metrics(start(conditioned, tmp_path / "straight", trust=True).run_folder)
    half = {**conditioned, "train": {**conditioned["train"], "episodes": 1}}
    start(half, tmp_path / "run", trust=True)
    assert metrics(start(conditioned, tmp_path / "run", resume="auto", trust=True).run_folder) == straight


def test_with_an_adapter(conditioned, tmp_path):
    changes = {**conditioned, "model": {**conditioned["model"], "lora": LoraConfig(r=2).model_dump()}}
    run = start(changes, tmp_path / "run", trust=True).run_folder
    assert max(gaps(metrics(run))) < GAP
    assert load_policy(ModelConfig(path=str(run / "model")), dtype=torch.float32, seed=0)


@pytest.mark.slow
def test_two_processes_train_as_one(conditioned, tmp_path):
    one = metrics(start(conditioned, tmp_path / "one", trust=True).run_folder)
    ddp = {**conditioned, "strategy": "torch-ddp"}
    two = metrics(start(ddp, tmp_path / "two", num_processes=2, trust=True).run_folder)
    assert max(gaps(two)) < GAP
    assert [line["reward/mean"] for line in two] == [line["reward/mean"] for line in one]
    assert two[0]["policy/grad_norm"] == pytest.approx(one[0]["policy/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_makers_of_ray_see_them_too(conditioned, tmp_path, ray_worker_source):
    pytest.importorskip("rlhf_ray", reason="the transport ray is not installed")
    ray = {**conditioned, "transport": {"name": "ray", "num_makers": 1, "num_trainers": 1, "max_staleness": 0}}
    local = metrics(start(conditioned, tmp_path / "local", trust=True).run_folder)
    with quick_workers():
        found = metrics(start(ray, tmp_path / "ray", trust=True).run_folder)
    assert max(gaps(found)) < GAP
    assert [line["reward/mean"] for line in found] == [line["reward/mean"] for line in local]
