"""The example distribution with every kind of part: here, in two processes, over Ray, and after a resume."""

from __future__ import annotations

import json
import os
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from shutil import rmtree
from typing import Any

import pytest
import torch
import yaml
from plugin_tests import run_pytest
from run_files import metrics, samples, start, write_run

from rlhf_cli.main import run
from rlhf_core.config.sections import ModelConfig
from rlhf_core.errors import InterruptedRun
from rlhf_models import load_policy

FOLDER = Path(__file__).resolve().parents[2] / "examples" / "novelty"
POINTS = tomllib.loads((FOLDER / "pyproject.toml").read_text(encoding="utf-8"))["project"]["entry-points"]
PARTS = ("model", "novelty", "algorithm", "engine", "optimizer", "hooks")
FILE = yaml.safe_load((FOLDER / "run.yaml").read_text(encoding="utf-8"))
RUN: dict[str, Any] = {
    **{name: FILE[name] for name in PARTS},
    "engine": {**FILE["engine"], "max_new_tokens": 4},
    "rewards": [{"name": "regex", "pattern": "^[0-4]"}],
    "train": {"episodes": 3, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 8},
    "checkpoint": {"every_episodes": 1},
}
"""Three updates."""
ENDED_EARLY = {**RUN, "novelty": {"goal": 0.5, "patience": 2}}
REPEATS = {
    **ENDED_EARLY,
    "prompts": {"size": 4},
    "engine": {**FILE["engine"], "max_new_tokens": 1},
    "train": {"episodes": 3, "prompts_per_episode": 4, "samples_per_prompt": 4, "train_batch_size": 16},
}
"""All episodes have the same four prompts, and an answer is one of 16 tokens, so the player draws some again."""


@pytest.fixture
def example(install: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    install("rlhf-example-novelty", POINTS, version="0.1.0")
    monkeypatch.syspath_prepend(str(FOLDER / "src"))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(tmp_path / "site"), str(FOLDER / "src")]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    yield
    for name in [name for name in sys.modules if name.startswith("rlhf_example_novelty")]:
        del sys.modules[name]


INTERRUPTS = """
from pathlib import Path

from rlhf_core import Component, Section, hookimpl
from rlhf_core.hookspecs import Action


class Config(Section):
    flag: str


class Interrupts:
    def __init__(self, config, context):
        self.flag = Path(config.flag)

    @hookimpl
    def rlhf_decide(self, moment):
        if moment.at == "episode" and self.flag.exists():
            self.flag.unlink()
            return Action(kind="interrupt", by="test", reason="once")


interrupts = Component("Does what Ctrl-C does, once, after an episode.", Config, "acme_interrupts:Interrupts")
"""


def finished(folder: Path) -> dict[str, Any] | None:
    return json.loads((folder / "summary.json").read_text()).get("finished")


def check(tmp_path: Path, changes: dict[str, Any]) -> int:
    return run(["config", "check", str(write_run(tmp_path, changes))])


def said(capsys: pytest.CaptureFixture[str]) -> str:
    """Both streams, without line breaks."""
    return " ".join("".join(capsys.readouterr()).split())


@pytest.mark.usefixtures("example")
def test_each_part_acts(tmp_path: Path) -> None:
    lines = metrics(start(RUN, tmp_path / "run").run_folder)
    assert len(lines) == 3
    for line in lines:
        bonus = 0.5 * line["novelty/mean"] / 5.0
        assert line["novelty/mean"] > 1.0
        assert line["novelty/weight"] == pytest.approx(1.0 + bonus, abs=0.05), "the loss reads the column"
        assert line["rollout/logprob_gap_max"] < 1e-5, "the trainer reads the temperature of each token"
    assert lines[0]["policy/grad_norm"] > 0.0
    assert [line["policy/lr"] for line in lines] == pytest.approx([1e-3, 0.25e-3, 0.75e-3]), "of the schedule"


@pytest.mark.usefixtures("example")
def test_the_option_of_the_engine_acts(tmp_path: Path) -> None:
    """First tokens of a policy that hardly prefers any: at a low temperature, the answers to a prompt are the same."""
    cold = {**REPEATS["engine"], "options": {"first_temperature": 0.001}}
    folder = start({**REPEATS, "engine": cold}, tmp_path / "run").run_folder
    answers = {(line["prompt"], line["completion"]) for line in samples(folder)[:16]}
    assert len(answers) == 4
    assert metrics(folder)[0]["novelty/draws"] == 1.75, "the player draws all but the first twice"


@pytest.mark.usefixtures("example")
def test_an_option_that_the_engine_does_not_accept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, {**RUN, "engine": {**RUN["engine"], "options": {"last_temperature": 2.0}}}) == 2
    assert "it accepts first_temperature" in said(capsys)


@pytest.mark.usefixtures("example")
def test_the_player_draws_again_what_is_known(tmp_path: Path) -> None:
    run = {**REPEATS, "novelty": {"goal": 5.0, "tries": 50}}
    folder = start(run, tmp_path / "run").run_folder
    draws = [line["novelty/draws"] for line in metrics(folder)]
    assert 1.0 < draws[0] < draws[1] < draws[2], "the more answers are known, the more are drawn again"
    found = {(line["prompt"], line["completion"]) for line in samples(folder)}
    assert len(found) >= 36, "12 tokens for each prompt; four have no text"


@pytest.mark.usefixtures("example")
def test_the_kind_of_model_trains_and_is_saved(tmp_path: Path) -> None:
    folder = start(RUN, tmp_path / "run").run_folder
    assert json.loads((folder / "manifest.json").read_text())["owners"]["models"] == {
        "varied": "rlhf-example-novelty 0.1.0"
    }
    made, trained = (
        load_policy(ModelConfig(path=path), dtype=torch.float32, seed=0)
        for path in ("builtin:varied-digits", str(folder / "model"))
    )
    assert type(trained).__name__ == "VariedLM"
    assert not torch.equal(made.model.direction.weight, trained.model.direction.weight), "its input has a gradient"
    ids = torch.tensor([[5, 6, 14]])
    assert not torch.equal(trained(ids).logits, trained(ids, variety=torch.ones(1)).logits)


@pytest.mark.usefixtures("example")
def test_the_hook_ends_the_run(tmp_path: Path) -> None:
    result = start(ENDED_EARLY, tmp_path / "run")
    assert len(result.metrics) == 2 and result.summary["status"] == "done"
    reason = f"novelty/mean is {result.metrics[-1]['novelty/mean']:.3g}, the goal is 0.5"
    assert finished(result.run_folder) == {"guard": "novelty-goal", "reason": reason}


@pytest.mark.usefixtures("example")
def test_what_is_adapted_is_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert check(tmp_path, RUN) == 0
    shown = said(capsys)
    assert "novelty.patience: None -> 1 (a tenth of the episodes of this run)" in shown
    assert "algorithm.goal: None -> 5.0 (from the section novelty)" in shown
    assert "hooks.novelty-goal.patience: None -> 1 (from the section novelty)" in shown


@pytest.mark.usefixtures("example")
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"algorithm": {"name": "ppo"}}, "novelty.goal: the algorithm ppo measures no novelty"),
        ({"novelty": {"patience": 4}}, "novelty.patience: is 4, the run has 3 episodes"),
        ({"novelty": {"gaol": 1.0}}, 'did you mean "goal"?'),
    ],
)
def test_cross_checks(tmp_path: Path, capsys: pytest.CaptureFixture[str], changes: Any, message: str) -> None:
    assert check(tmp_path, {**RUN, **changes}) == 2
    assert message in said(capsys)


@pytest.fixture
def resumed(install: Any, tmp_path: Path, example: None) -> Callable[..., None]:
    """Function that compares a run, interrupted after its first episode and resumed, with one that is not.

    Bit for bit, also what depends on state: the hook has counted one episode of two, the player knows answers.
    """
    install(
        "acme-interrupts", {"rlhf.hooks": {"interrupts": "acme_interrupts:interrupts"}}, {"acme_interrupts": INTERRUPTS}
    )

    def compare(changes: dict[str, Any], **options: Any) -> None:
        flag, folder = tmp_path / "flag", tmp_path / "run"
        run = {**REPEATS, **changes, "hooks": {**REPEATS["hooks"], "interrupts": {"flag": str(flag)}}}
        straight = start(run, tmp_path / "straight", **options).run_folder
        assert len(metrics(straight)) == 2 and metrics(straight)[1]["novelty/draws"] > 1.0
        flag.touch()
        with pytest.raises(InterruptedRun):
            start(run, folder, **options)
        assert len(metrics(folder)) == 1
        start(run, folder, resume="auto", **options)
        assert learned(folder) == learned(straight)
        assert samples(folder) == samples(straight)
        assert finished(folder) == finished(straight) is not None

    return compare


def learned(folder: Path) -> list[dict[str, Any]]:
    """Metrics without the times and bytes of transport ray."""
    return [
        {key: value for key, value in line.items() if not key.startswith(("transport/", "sync/"))}
        for line in metrics(folder)
    ]


def test_it_continues_after_a_resume(resumed: Callable[..., None]) -> None:
    resumed({})


@pytest.mark.slow
def test_two_processes_continue_after_a_resume(resumed: Callable[..., None]) -> None:
    resumed({"strategy": "torch-ddp"}, num_processes=2)


@pytest.mark.slow
@pytest.mark.usefixtures("ray_worker_source")
def test_a_run_over_ray_continues_after_a_resume(resumed: Callable[..., None]) -> None:
    pytest.importorskip("rlhf_ray", reason="the transport ray is not installed")
    from quick_ray import quick_workers

    with quick_workers():
        resumed({"transport": {"name": "ray", "max_staleness": 0}})


@pytest.mark.usefixtures("example")
def test_a_resume_without_the_distribution_names_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    start({**RUN, "train": {**RUN["train"], "episodes": 1}}, tmp_path / "run")
    rmtree(tmp_path / "site" / "rlhf_example_novelty-0.1.0.dist-info")
    assert run(["train", "--resume", str(tmp_path / "run")]) == 2
    shown = said(capsys)
    assert " of rlhf-example-novelty 0.1.0, which is not installed" in shown
    assert "pip install rlhf-example-novelty==0.1.0" in shown


@pytest.mark.slow
@pytest.mark.usefixtures("example")
def test_two_processes_make_the_run_of_one(tmp_path: Path) -> None:
    one = start(ENDED_EARLY, tmp_path / "one").run_folder
    two = start({**ENDED_EARLY, "strategy": "torch-ddp"}, tmp_path / "two", num_processes=2).run_folder
    assert same(metrics(two), metrics(one))
    assert finished(two) == finished(one) is not None


@pytest.mark.slow
@pytest.mark.usefixtures("example", "ray_worker_source")
def test_a_run_over_ray_is_the_local_run(tmp_path: Path) -> None:
    pytest.importorskip("rlhf_ray", reason="the transport ray is not installed")
    from quick_ray import quick_workers

    local = start(ENDED_EARLY, tmp_path / "local").run_folder
    with quick_workers():
        far = start({**ENDED_EARLY, "transport": {"name": "ray", "max_staleness": 0}}, tmp_path / "ray").run_folder
    assert same(metrics(far), metrics(local))
    assert finished(far) == finished(local) is not None


def same(ours: list[dict[str, Any]], theirs: list[dict[str, Any]]) -> bool:
    """Whether the first updates agree, and the parts acted in as many."""
    keys = ["novelty/mean", "novelty/draws", "novelty/weight", "loss/policy", "reward/mean", "policy/lr"]
    first = [[line[key] for key in keys] for line in (ours[0], theirs[0])]
    return len(ours) == len(theirs) and first[0] == pytest.approx(first[1], rel=1e-3, abs=1e-5)


OTHER = """
from rlhf_core import Column, Component, Section
from rlhf_core.algorithm import GroupPass
from rlhf_example_novelty.algorithm import Novel
from rlhf_example_novelty.config import NovelConfig


class Rarity(GroupPass):
    columns = {"novelty": Column()}

    def run(self, groups):
        return [{"novelty": item.action_log_probs} for group in groups for item in group.items]


class Rare(Novel):
    def passes(self, context):
        return [*super().passes(context), Rarity()]


section = Component("Another section of this name.", Section)
rare = Component("Another column of this name.", NovelConfig, "acme_rare:Rare")
"""


@pytest.mark.usefixtures("example")
def test_a_section_of_two_distributions(tmp_path: Path, install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-rare", {"rlhf.sections": {"novelty": "acme_rare:section"}}, {"acme_rare": OTHER})
    assert check(tmp_path, RUN) == 2
    shown = said(capsys)
    assert "rlhf-example-novelty 0.1.0" in shown and "acme-rare 1.2.3" in shown


@pytest.mark.usefixtures("example")
def test_a_column_of_two_passes(tmp_path: Path, install: Any, capsys: pytest.CaptureFixture[str]) -> None:
    install("acme-rare", {"rlhf.algorithms": {"rare": "acme_rare:rare"}}, {"acme_rare": OTHER})
    file = write_run(tmp_path, {**RUN, "algorithm": {**RUN["algorithm"], "name": "rare"}})
    algorithm = 'of the algorithm "rare" (acme-rare 1.2.3)'
    for flags in (["--dry-run"], ["--output", str(tmp_path / "run"), "--quiet"]):
        assert run(["train", str(file), *flags]) == 2
        assert (
            f"the pass rlhf_example_novelty.witness.WitnessPass {algorithm} and the pass acme_rare.Rarity {algorithm} "
            "both declare a column 'novelty'"
        ) in said(capsys)
    assert not (tmp_path / "run").exists(), "nothing ran"


@pytest.mark.slow
@pytest.mark.usefixtures("example")
def test_its_own_tests_pass(tmp_path: Path) -> None:
    """The contract suites."""
    assert " passed" in (output := run_pytest(FOLDER / "tests", str(tmp_path / "site"), str(FOLDER / "src")))
    assert "failed" not in output and "error" not in output.lower(), output


def test_each_part_is_short() -> None:
    """A file is what an author copies."""
    for path in FOLDER.glob("src/*/*.py"):
        assert len(path.read_text(encoding="utf-8").splitlines()) <= 80, path


@pytest.mark.parametrize("name", ["run.yaml", "run-ddp.yaml", "run-ray.yaml"])
@pytest.mark.usefixtures("example")
def test_its_run_files_are_right(name: str) -> None:
    assert run(["config", "check", str(FOLDER / name)]) == 0
