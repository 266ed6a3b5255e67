"""What a session does at the border of an episode, and when it stops."""

import json
from itertools import chain, repeat

import pytest

from rlhf_core.config.resolve import resolve
from rlhf_core.entry.train import check_run
from rlhf_core.errors import InterruptedRun
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.runfolder.folder import RunFolder
from rlhf_core.training.request import RunRequest
from rlhf_core.transports.local import LocalTransport
from rlhf_testing.runs import tiny_run

EVALUATED = {"eval": {"num_prompts": 4, "every_episodes": 1}}


class Heard:
    """A hook plugin that notes the order of events."""

    def __init__(self):
        self.events = []

    def rlhf_episode_end(self, episode, error):
        self.events.append(f"end {episode}" if error is None else f"end {episode}: {type(error).__name__}")

    def rlhf_sync_end(self, version):
        self.events.append(f"publish {version}")

    def rlhf_eval_end(self, step):
        self.events.append(f"evaluate {step}")


def fit(path, changes, interrupted=lambda: False, resume=None):
    """Runs the session of a tiny run as the transport `local` does; returns the result and the events."""
    heard, hooks = Heard(), HookRelay()
    hooks.register(heard)
    resolved = resolve(tiny_run(changes))
    with RunFolder.take(path, is_new=resume is None) as folder:
        if resume is None:
            folder.write_config({})
            folder.write_manifest({"events": []})
        request = RunRequest(
            resolved=resolved,
            folder=folder,
            hooks=hooks,
            inputs=check_run(resolved),
            resume=resume,
            interrupted=interrupted,
        )
        try:
            return LocalTransport().run(request), heard.events
        except InterruptedRun as error:
            return error, heard.events


def test_the_policy_is_published_and_evaluated_in_this_order(tmp_path):
    result, events = fit(tmp_path / "run", EVALUATED)
    assert events == [
        "publish 0", "evaluate 0",
        "publish 1", "evaluate 2", "end 0",
        "publish 2", "evaluate 4", "end 1",
    ]  # fmt: skip
    assert (tmp_path / "run" / "checkpoints" / "step-4").is_dir()
    assert result.step == 4
    assert result.eval_before is not None and result.eval_after is not None


@pytest.fixture(scope="module")
def interrupted(tmp_path_factory):
    """A run that was asked to stop during its first episode."""
    path = tmp_path_factory.mktemp("session") / "run"
    error, events = fit(path, EVALUATED, interrupted=lambda: True)
    return path, error, events


def test_an_interrupted_run_saves_and_says_how_to_go_on(interrupted):
    path, error, events = interrupted
    assert "stopped after episode 1 of 2" in str(error)
    assert f"--output {path} --resume auto" in error.hint
    assert events[2:4] == ["publish 1", "evaluate 2"]
    assert (path / "checkpoints" / "step-2").is_dir()
    assert (path / "model" / "config.json").exists()


def test_a_resume_goes_on_where_it_stopped(interrupted):
    path, _, _ = interrupted
    result, events = fit(path, EVALUATED, resume=path / "checkpoints" / "step-2")
    assert events == ["publish 1", "publish 2", "evaluate 4", "end 1"]
    state = json.loads((path / "checkpoints" / "step-4" / "state.json").read_text())
    before = json.loads((path / "checkpoints" / "step-2" / "state.json").read_text())
    assert result.eval_before == before["eval_before"] == state["eval_before"]
    assert state["wall_s"] > before["wall_s"] > 0
    lines = [json.loads(line) for line in (path / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss/policy" in line] == [1, 2, 3, 4]


def test_asked_in_the_last_episode_the_run_is_done(tmp_path):
    asked = chain([False] * 3, repeat(True))  # after two updates and the first episode
    result, events = fit(tmp_path / "run", {}, interrupted=lambda: next(asked))
    assert result.step == 4
    assert events[-1] == "end 1"
    assert (tmp_path / "run" / "checkpoints" / "step-4").is_dir()
    assert (tmp_path / "run" / "model").is_dir()


@pytest.mark.parametrize(("is_large", "releases"), [(True, 4), (False, 0)])
def test_a_large_models_free_memory_is_given_back_between_phases(tmp_path, monkeypatch, is_large, releases):
    """Before and after the updates of each of two episodes."""
    calls = []
    monkeypatch.setattr("rlhf_core.training.session.release_freed_memory", lambda: calls.append(1))
    monkeypatch.setattr("rlhf_core.training.session.fills_host_memory", lambda device, parameters: is_large)
    fit(tmp_path / "run", {})
    assert len(calls) == releases
