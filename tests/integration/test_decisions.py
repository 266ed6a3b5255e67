"""What a hook plugin of anybody decides about whole runs, in one process and in two."""

import json
import re
from pathlib import Path

import pytest
from run_files import command, lines, start, write_run

from rlhf_core.errors import GuardStop, InterruptedRun, PluginError
from rlhf_core.hookspecs import Action

PAGE = Path(__file__).resolve().parents[2] / "docs" / "hooks.md"
TRAIN = {"episodes": 4, "prompts_per_episode": 4, "samples_per_prompt": 2, "train_batch_size": 4}
BASE = {"train": TRAIN, "checkpoint": {"every_episodes": None, "keep": 9}}
pytestmark = pytest.mark.usefixtures("no_plots")


def decisions(folder):
    events = json.loads((folder / "manifest.json").read_text())["events"]
    return [(each["action"], each["step"]) for each in events if each["kind"] == "decision"]


def checkpoints(folder):
    return {path.name for path in (folder / "checkpoints").glob("step-*")}


class Decides:
    """Gives its answers at the moments `(at, step)`."""

    def __init__(self, **answers):
        self.answers = {tuple(key.split("_")): kind for key, kind in answers.items()}

    def rlhf_decide(self, moment):
        kind = self.answers.get((moment.at, str(moment.step)))
        options = {"key": "optimizer.lr", "value": 5e-4} if kind == "set" else {}
        return kind and Action(kind=kind, by="mine", reason="asked for by the test", **options)


@pytest.fixture
def calm(tmp_path):
    """The example of the page."""
    (block,) = re.findall(r"```python\n(# calm\.py\n.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    (tmp_path / "calm.py").write_text(block)
    return f"{tmp_path / 'calm.py'}:Calm"


def test_the_pages_example_sets_a_rate_and_writes_a_checkpoint(calm, tmp_path):
    result = start({**BASE, "hooks": {calm: {"most_kl": -1.0, "lr": 5e-4, "goal": 9.0}}}, tmp_path / "run")
    assert [line["policy/lr"] for line in result.metrics] == pytest.approx([1e-3] + [5e-4] * 7)
    assert decisions(result.run_folder) == [("set", 1), ("checkpoint", 1)]
    assert checkpoints(result.run_folder) == {"step-2", "step-8"}


def test_the_pages_example_ends_a_run_at_its_goal(calm, tmp_path):
    result = start({**BASE, "hooks": {calm: {"goal": -1.0}}}, tmp_path / "run")
    assert result.summary["finished"] == {"guard": "Calm", "reason": "the mean reward is above -1"}
    assert len(result.metrics) == 2


def test_a_hook_may_pause_and_go_on_and_end_the_run_as_a_signal_does(tmp_path):
    hook = Decides(update_1="pause", paused_1="resume", episode_4="interrupt")
    with pytest.raises(InterruptedRun, match="stopped after episode 2 of 4"):
        start(BASE, tmp_path / "run", hooks=[hook])
    assert decisions(tmp_path / "run") == [("pause", 1), ("resume", 1), ("interrupt", 4)]
    assert checkpoints(tmp_path / "run") == {"step-4"}
    assert start(BASE, tmp_path / "run", resume="auto").summary["status"] == "done"


def test_what_a_hook_set_is_kept_over_a_resume(tmp_path):
    with pytest.raises(InterruptedRun):
        start(BASE, tmp_path / "run", hooks=[Decides(update_1="set", update_2="interrupt")])
    resumed = start(BASE, tmp_path / "run", resume="auto")
    assert [line["policy/lr"] for line in resumed.metrics] == pytest.approx([1e-3] + [5e-4] * 7)


def test_a_stop_after_an_episode_is_an_error_that_names_who_asked(tmp_path):
    with pytest.raises(GuardStop, match=r"guard mine: asked for by the test \(update 4, episode 2\)"):
        start(BASE, tmp_path / "run", hooks=[Decides(episode_4="stop")])


def test_guards_and_control_can_be_turned_off_but_not_listed(tmp_path):
    off = {**BASE, "guards": {"kl": {"bound": 1e-9}}, "hooks": {"disable": ["guards", "control"]}}
    assert start(off, tmp_path / "off").summary["status"] == "done"
    with pytest.raises(PluginError, match=r"hooks\.guards: is on in every run"):
        start({**BASE, "hooks": {"guards": {}}}, tmp_path / "run")
    assert not (tmp_path / "run").exists()


SAFETY = """
from rlhf_core import Component, Section
from rlhf_core.hookspecs import Action


class SafetyConfig(Section):
    last_update: int = 100


class Safety:
    def __init__(self, config):
        self.config = config

    def rlhf_decide(self, moment):
        if moment.at == "episode" and moment.step >= self.config.last_update:
            return [Action(kind="finish", by="safety", reason="it was asked for")]


def build(config, context):
    return Safety(config)


section = Component("Bounds a run.", SafetyConfig)
hook = Component("Ends a run.", SafetyConfig, "acme_safety:build", always_on=True)
"""


@pytest.mark.parametrize("name", ["safety", "my_safety"])
@pytest.mark.parametrize(("options", "num_updates"), [({"last_update": 4}, 4), (None, 8)])
@pytest.mark.slow
def test_a_strangers_hook_is_on_when_installed_with_its_sections_options(tmp_path, install, name, options, num_updates):
    groups = {"rlhf.sections": {name: "acme_safety:section"}, "rlhf.hooks": {name: "acme_safety:hook"}}
    install("acme-safety", groups, {"acme_safety": SAFETY})
    run = BASE if options is None else {**BASE, name: options}
    done = start(run, tmp_path / "run")
    assert (done.summary["status"], len(done.metrics)) == ("done", num_updates)
    assert start(run, tmp_path / "run", resume="auto").summary["status"] == "done"
    off = start({**run, "hooks": {"disable": [name]}}, tmp_path / "off")
    assert len(off.metrics) == 8
    with pytest.raises(PluginError, match=rf"hooks\.{name}: is on in every run"):
        start({**BASE, "hooks": {name: {}}}, tmp_path / "listed")


EVERYTHING = """
from rlhf_core.hookspecs import Action


class Everything:
    may_roll_back = True

    def __init__(self):
        self.left = {
            ("update", 1): ["set", "checkpoint"], ("update", 2): ["pause"], ("paused", 2): ["resume"],
            ("update", 3): ["skip"], ("update", 5): ["rollback"], ("episode", 6): ["interrupt"],
        }

    def rlhf_decide(self, moment):
        return [self.action(kind) for kind in self.left.pop((moment.at, moment.step), [])]

    def action(self, kind):
        options = {"key": "optimizer.lr", "value": 5e-4} if kind == "set" else {}
        return Action(kind=kind, by="Everything", reason="asked for by the test", **options)
"""


@pytest.mark.slow
def test_two_processes_do_the_same(tmp_path):
    (tmp_path / "everything.py").write_text(EVERYTHING)
    changes = {**BASE, "hooks": {f"{tmp_path / 'everything.py'}:Everything": {}}, "strategy": {"name": "ddp"}}
    file, folder = write_run(tmp_path, changes), tmp_path / "run"
    done = command("train", file, "--output", folder, "--num-processes", "2", quick_ranks=True)
    assert done.returncode == 130, done.stderr
    told = [("set", 1), ("checkpoint", 1), ("pause", 2), ("resume", 2), ("interrupt", 6)]
    assert decisions(folder) == told
    assert checkpoints(folder) == {"step-0", "step-2", "step-6"}
    written = lines(folder / "metrics.jsonl")
    assert [line["step"] for line in written] == [1, 2, 3, 4, 5, 6]  # back from 5 to 2, and nothing is skipped again
    assert written[-1]["policy/lr"] == pytest.approx(0.5 * 5e-4)
    assert json.loads((folder / "summary.json").read_text())["rollbacks"] == 1
