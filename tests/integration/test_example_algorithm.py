"""The example distribution is found, keeps the contract and trains, as a stranger's that was installed."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rlhf_core import train
from rlhf_testing.contracts import AlgorithmContract
from rlhf_testing.runs import tiny_run

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "algorithm"
ENTRY_POINTS = {"rlhf.algorithms": {"best-of": "rlhf_example_best_of:best_of"}}
LOSS = '''
from rlhf_objective import PolicyLoss, importance_ratio

def unclipped(batch, *, factor: float = 1.0):
    """The ratio times the advantage, and nothing else."""
    ratio = importance_ratio(batch.log_probs, batch.old_log_probs, batch.mask)
    never = batch.mask & False
    return PolicyLoss(-factor * ratio * batch.advantages, ratio.detach(), never, never)

def score(episode, *, scale: float = 1.0):
    """The answer's own reward, with no baseline."""
    return episode.mask * scale * episode.totals[:, None]
'''
SHORT = {
    "rewards": [{"name": "length", "target_tokens": 1, "shape": "at-most"}],
    "engine": {"max_new_tokens": 8},
    "optimizer": {"lr": 3e-3},
    "train": {"episodes": 4, "prompts_per_episode": 8, "samples_per_prompt": 4, "train_batch_size": 16},
}


@pytest.fixture
def example(install: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FOLDER / "src"))
    install("rlhf-example-best-of", ENTRY_POINTS)
    yield
    for name in [name for name in sys.modules if name.startswith("rlhf_example_best_of")]:
        del sys.modules[name]


def test_it_is_short() -> None:
    lines = [line for path in FOLDER.glob("src/*/*.py") for line in path.read_text(encoding="utf-8").splitlines()]
    assert len(lines) < 60


def test_it_says_what_it_is(example: None) -> None:
    text = (FOLDER / "pyproject.toml").read_text(encoding="utf-8")
    for group, names in ENTRY_POINTS.items():
        assert f'[project.entry-points."{group}"]' in text
        assert all(f'{name} = "{target}"' in text for name, target in names.items())


def test_it_trains(example: None, tmp_path: Path) -> None:
    result = train(tiny_run({"algorithm": "best-of", **SHORT}), output=tmp_path / "run")
    assert result is not None
    assert result.metrics[-1]["reward/mean"] > result.metrics[0]["reward/mean"]
    assert all(line["best_of/kept_fraction"] == pytest.approx(0.25) for line in result.metrics)


class TestBestOf(AlgorithmContract):
    plugin = "best-of"

    @pytest.fixture(scope="class", autouse=True)
    @classmethod
    def installed(cls, tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
        info = tmp_path_factory.mktemp("site") / "rlhf_example_best_of-0.1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: rlhf-example-best-of\nVersion: 0.1.0\n")
        lines = [f"[{group}]\n{name} = {target}\n" for group, e in ENTRY_POINTS.items() for name, target in e.items()]
        (info / "entry_points.txt").write_text("".join(lines))
        with pytest.MonkeyPatch.context() as patch:
            for folder in (info.parent, FOLDER / "src"):
                patch.syspath_prepend(str(folder))
            path = os.pathsep.join([str(info.parent), str(FOLDER / "src")])
            patch.setenv("PYTHONPATH", path)  # one of the contract's tests starts a process
            yield
        for name in [name for name in sys.modules if name.startswith("rlhf_example_best_of")]:
            del sys.modules[name]


def test_a_strangers_loss_and_estimator_train_by_name(install: Any, tmp_path: Path) -> None:
    groups = {"rlhf.policy_losses": {"unclipped": "acme_rl:unclipped"}, "rlhf.advantages": {"score": "acme_rl:score"}}
    install("acme-rl", groups, {"acme_rl": LOSS})
    options = {"name": "grpo", "kl_coef": 0, "policy_loss": {"name": "unclipped", "factor": 2.0}}
    run = tiny_run({"algorithm": {**options, "advantage": {"name": "score", "scale": 3.0}}, **SHORT})
    run["rewards"] = [{"name": "length", "target_tokens": 8, "shape": "at-most"}]  # 1 for every answer
    result = train(run, output=tmp_path / "run")
    assert result is not None
    first = result.metrics[0]
    assert first["loss/policy"] == pytest.approx(-2.0 * 3.0, rel=1e-4), "the ratio is 1 before the first step"
    assert first["policy/clip_fraction"] == 0.0
