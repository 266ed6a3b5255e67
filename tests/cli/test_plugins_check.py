"""`rlhf plugins check`: each plugin is tried in a process of its own, and only what is broken is called so."""

from __future__ import annotations

import pytest
from learners import LEARNER

from rlhf_cli.main import run
from rlhf_core.components import KINDS
from rlhf_core.plugins.discovery import discover
from rlhf_testing.probe import probe
from rlhf_testing.trial import try_plugin

REWARDS = """
import os, signal, sys, time

def fine(rollouts) -> list[float]:
    "Fine."
    print("chatter")
    return [1.0] * len(rollouts)

async def awaited(rollouts) -> list[float]:
    "Asynchronous."
    return [1.0] * len(rollouts)

def needy(rollouts) -> list[float]:
    "Needs metadata."
    return [rollout.metadata["tests"] for rollout in rollouts]

def short(rollouts) -> list[float]:
    "Answers too few."
    return [1.0]

def wrong(rollouts) -> list[float]:
    "Answers no numbers."
    return [float("nan")] * len(rollouts)

def crash(rollouts) -> list[float]:
    "Crashes."
    os.kill(os.getpid(), signal.SIGSEGV)

def leave(rollouts) -> list[float]:
    "Leaves."
    os._exit(3)

def hang(rollouts) -> list[float]:
    "Hangs."
    time.sleep(600)
"""
NAMES = ("fine", "awaited", "needy", "short", "wrong", "crash", "leave", "hang")


@pytest.fixture
def rewards(install):
    install(
        "acme", {"rlhf.rewards": {f"acme-{name}": f"acme_rewards:{name}" for name in NAMES}}, {"acme_rewards": REWARDS}
    )
    found = discover("rewards")
    return {name: found[f"acme-{name}"] for name in NAMES}


def test_one_that_crashes_or_hangs_hurts_no_other(rewards):
    order = ["crash", "fine", "leave", "awaited"]
    verdicts = dict(zip(order, probe([rewards[name] for name in order]), strict=True))
    assert verdicts["fine"] == ("ok", "Fine.")
    assert verdicts["awaited"] == ("ok", "Asynchronous.")
    assert verdicts["crash"] == ("broken", "its process ended by SIGSEGV")
    assert verdicts["leave"] == ("broken", "its process ended with exit code 3")
    hung = probe([rewards["hang"]], trial_seconds=2.0)
    assert hung == [("broken", "did not come to an end within 2 seconds")]


def test_what_a_reward_answers_is_looked_at(rewards):
    assert try_plugin(rewards["short"]) == ("broken", "returned 1 values for 3 samples")
    assert try_plugin(rewards["wrong"]) == ("broken", "answered what is no score: nan is not finite")


def test_one_that_needs_more_than_is_made_up_is_not_broken(rewards):
    status, detail = try_plugin(rewards["needy"])
    assert status == "not run"
    assert "made-up answers: KeyError: 'tests'" in detail


COMPONENTS = """
from pydantic import Field
from rlhf_core.components import Component
from rlhf_core.config import TransportConfig  # also a transport's options are its subclass

class Options(TransportConfig):
    path: str = Field(description="A path.")

class Nothing(TransportConfig):
    pass

asks = Component("Asks.", Options, "acme_builds:nothing")
refuses = Component("Refuses.", Nothing, "acme_builds:refuse")
raises = Component("Raises.", Nothing, "acme_builds:fail")
other = Component("Other.", Nothing, "acme_builds:nothing")
"""
BUILDS = """
from rlhf_core.errors import UserInputError

def nothing(config, context):
    return 7

def refuse(config, context):
    raise UserInputError("there is no GPU here")

def fail(config, context):
    raise RuntimeError("boom")
"""


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "sections"])  # which build nothing
def test_components_of_every_kind(install, kind):
    names = ("asks", "refuses", "raises", "other")
    targets = {f"acme-{name}": f"acme_components:{name}" for name in names}
    install("acme", {f"rlhf.{kind}": targets}, {"acme_components": COMPONENTS, "acme_builds": BUILDS})
    found = discover(kind)
    verdicts = {name: try_plugin(found[f"acme-{name}"]) for name in names}
    assert verdicts["asks"] == ("not run", "Asks. (needs the option path)")
    assert verdicts["refuses"] == ("not run", "Refuses. (there is no GPU here)")
    assert verdicts["raises"] == ("broken", "running it: RuntimeError: boom")
    assert verdicts["other"].status == "broken"
    assert "returned a int" in verdicts["other"].detail


GAMES = """
class Fine:
    "Says it once more."
    def reset(self, task):
        return "say it"
    def step(self, reply):
        return "once more", 1.0, False

class Needy(Fine):
    "Needs an answer."
    def reset(self, task):
        return "say " + task.prompt.answer

class Brittle(Fine):
    "Takes the policy at its word."
    def step(self, reply):
        return "once more", float(reply.text), False

class Nothing:
    "No environment."
"""


def test_environments_are_played(install):
    names = ("fine", "needy", "brittle", "nothing")
    targets = {f"acme-{name}": f"acme_games:{name.capitalize()}" for name in names}
    install("acme", {"rlhf.environments": targets}, {"acme_games": GAMES})
    found = discover("environments")
    verdicts = {name: try_plugin(found[f"acme-{name}"]) for name in names}
    assert verdicts["fine"] == ("ok", "Says it once more.")
    assert verdicts["needy"].status == "not run" and "a task without a prompt" in verdicts["needy"].detail
    assert verdicts["brittle"].status == "broken" and "step raised ValueError" in verdicts["brittle"].detail
    assert verdicts["nothing"] == ("broken", "its build returned a Nothing: Nothing is no environment: it has no reset")


LEARNERS = (
    LEARNER
    + """
class Update(Fine):
    def loss(self, models, batch):
        return super().loss(models, replace(batch, advantages=batch.returns))

class Buffer(Fine):
    def advantages(self, episode):
        return EpisodeOutput(replace(episode, advantages=[0.0] * len(episode)), {})

class Terms(Fine):
    def counts(self, batch):
        return {"tokens": 1.0}

class Records(Fine):
    def loss(self, models, batch):
        return LossOutput({"policy": super().loss(models, batch).sums["policy"] * float("nan")})

fine, update, buffer, terms, records = (
    Component("Learns.", Options, f"acme_learners:{name}") for name in ("Fine", "Update", "Buffer", "Terms", "Records")
)
"""
)


def test_an_algorithm_takes_its_first_update(install):
    names = ("fine", "update", "buffer", "terms", "records")
    install("acme", {"rlhf.algorithms": {n: f"acme_learners:{n}" for n in names}}, {"acme_learners": LEARNERS})
    found = discover("algorithms")
    verdicts = {name: try_plugin(found[name]) for name in names}
    assert verdicts["fine"] == ("ok", "Learns.")
    assert all(verdicts[name].status == "broken" for name in names[1:])
    assert "its first update fails: TypeError" in verdicts["update"].detail
    assert "acme_learners.py, line 23)" in verdicts["update"].detail
    assert "its first update fails" in verdicts["buffer"].detail
    assert "counts of ['tokens'], but its terms are ['policy']" in verdicts["terms"].detail
    assert "its gradient is not finite" in verdicts["records"].detail


def test_a_hook_plugin_without_hooks_is_broken(install, capsys):
    install("acme", {"rlhf.hooks": {"acme-deaf": "acme_deaf"}}, {"acme_deaf": "def other(): pass"})
    assert run(["plugins", "check", "hooks/acme-deaf"]) == 1
    assert "it has no hook" in capsys.readouterr().out


SLOPPY = """
from pydantic import BaseModel
from rlhf_core.components import Component

class Loose(BaseModel):
    path: str = "x"

loose = Component("Loose.", Loose, "acme_sloppy:build")
"""


def test_one_that_fails_its_contract_is_broken(install):
    install("acme", {"rlhf.hooks": {"acme-loose": "acme_sloppy:loose"}}, {"acme_sloppy": SLOPPY})
    status, detail = try_plugin(discover("hooks")["acme-loose"])
    assert status == "broken" and "a misspelled option goes unseen" in detail
