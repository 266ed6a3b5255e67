"""The optimizer and schedule of docs/kinds/optimizers.md train: here, in two processes, and after a resume."""

import re
import tomllib
from pathlib import Path

import pytest
import yaml
from run_files import metrics, start

from rlhf_core.errors import UserInputError

PAGE = (Path(__file__).resolve().parents[2] / "docs" / "kinds" / "optimizers.md").read_text(encoding="utf-8")
SOURCES = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", PAGE, re.DOTALL))
SECTION = yaml.safe_load(PAGE.rpartition("```\noptimizer:")[2].join(("optimizer:", "")).partition("```")[0])
RUN = {**SECTION, "train": {"episodes": 4}, "checkpoint": {"every_episodes": 1}}
HALF = {**RUN, "train": {"episodes": 2}, "optimizer": {**RUN["optimizer"], "schedule": "constant"}}
"""Its rates are those of the first half of `RUN`."""


@pytest.fixture(autouse=True)
def lion(install, tmp_path, monkeypatch):
    points = tomllib.loads(re.search(r"```toml\n(.*?)```", PAGE, re.DOTALL)[1])["project"]["entry-points"]
    install("acme-lion", points, SOURCES)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "site"))  # of the processes of torch-ddp
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_it_trains_at_the_rates_of_its_schedule(tmp_path):
    found = [line["policy/lr"] for line in metrics(start(RUN, tmp_path / "run").run_folder)]
    assert found == pytest.approx([1e-3] * 5 + [0.75e-3, 0.5e-3, 0.25e-3])


@pytest.mark.slow
def test_it_continues_after_a_resume_bit_for_bit(tmp_path):
    straight = start(RUN, tmp_path / "straight").run_folder
    start(HALF, tmp_path / "run")
    resumed = start(RUN, tmp_path / "run", resume="auto").run_folder
    assert metrics(resumed) == metrics(straight)
    with pytest.raises(UserInputError, match=r"optimizer\.name: 'lion' -> 'adamw'"):
        start({"optimizer": {"name": "adamw"}, "train": {"episodes": 5}}, tmp_path / "run", resume="auto")


@pytest.mark.slow
def test_two_processes_train_as_one(tmp_path):
    (tmp_path / "spread.py").write_text(
        "def spread(rollouts):\n    return [sum(r.completion_ids) % 7 for r in rollouts]\n"
    )
    reward = {"rewards": [{"name": f"{tmp_path}/spread.py:spread"}]}
    one = metrics(start({**RUN, **reward}, tmp_path / "one", trust=True).run_folder)
    ddp = {"strategy": "torch-ddp", **reward}
    start({**HALF, **ddp}, tmp_path / "two", num_processes=2, trust=True)
    two = metrics(start({**RUN, **ddp}, tmp_path / "two", num_processes=2, trust=True, resume="auto").run_folder)
    assert len(two) == len(one) == 8
    for mine, theirs in zip(two, one, strict=True):
        assert mine["policy/lr"] == theirs["policy/lr"]
    assert two[0]["policy/grad_norm"] == pytest.approx(one[0]["policy/grad_norm"], rel=1e-3)


@pytest.mark.slow
def test_it_trains_over_ray_as_here_and_after_a_resume(tmp_path, ray_worker_source):
    pytest.importorskip("rlhf_ray", reason="the transport ray is not installed")
    from quick_ray import quick_workers

    far = {"transport": {"name": "ray", "max_staleness": 0}}
    local = metrics(start(RUN, tmp_path / "local").run_folder)
    with quick_workers():
        start({**HALF, **far}, tmp_path / "ray")
        remote = metrics(start({**RUN, **far}, tmp_path / "ray", resume="auto").run_folder)
    for key in ("policy/lr", "policy/grad_norm", "loss/policy"):
        assert [line[key] for line in remote] == [line[key] for line in local], key
