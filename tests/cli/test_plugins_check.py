"""`rlhf plugins check`: plugins are checked in another process, and only what is broken is called so."""

from __future__ import annotations

import pytest
from learners import LEARNER

from rlhf_cli.main import run
from rlhf_core.plugins.discovery import discover
from rlhf_testing.probe import probe

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


@pytest.mark.slow
def test_one_that_crashes_or_hangs_hurts_no_other(rewards):
    order = ["crash", "fine", "leave", "awaited"]
    verdicts = dict(zip(order, probe([rewards[name] for name in order], whole=True), strict=True))
    assert verdicts["fine"] == ("ok", "Fine.")
    assert verdicts["awaited"] == ("ok", "Asynchronous.")
    assert verdicts["crash"] == ("broken", "it crashed: its process was ended by SIGSEGV")
    assert verdicts["leave"] == ("broken", "it ended its process with exit code 3")
    (hung,) = probe([rewards["hang"]], whole=True, check_seconds=20.0)
    assert hung.status == "broken" and "gave no answer within 20 s" in hung.detail


@pytest.mark.slow
def test_what_a_reward_answers_is_looked_at_and_what_it_needs_is_told(rewards):
    short, wrong, needy = probe([rewards[name] for name in ("short", "wrong", "needy")], whole=True)
    assert short.status == "broken" and "returned 1 values for 8 samples" in short.detail
    assert wrong.status == "broken" and "nan is not finite" in wrong.detail
    assert needy.status == "not run" and "made-up answers" in needy.detail and "KeyError: 'tests'" in needy.detail


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


@pytest.mark.parametrize("kind", ["rewards", "prompts", "engines"])
@pytest.mark.slow
def test_components_with_their_default_options(install, kind):
    names = ("asks", "refuses", "raises", "other")
    targets = {f"acme-{name}": f"acme_components:{name}" for name in names}
    install("acme", {f"rlhf.{kind}": targets}, {"acme_components": COMPONENTS, "acme_builds": BUILDS})
    found = discover(kind)
    verdicts = dict(zip(names, probe([found[f"acme-{name}"] for name in names], whole=True), strict=True))
    assert verdicts["asks"] == ("not run", "Asks. (requires the option path)")
    assert verdicts["refuses"].status == "not run" and "there is no GPU here" in verdicts["refuses"].detail
    assert verdicts["raises"].status == "broken" and "RuntimeError: boom" in verdicts["raises"].detail
    assert verdicts["other"].status == "broken" and "returned a int" in verdicts["other"].detail


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


@pytest.mark.slow
def test_environments_are_played(install):
    names = ("fine", "needy", "brittle", "nothing")
    targets = {f"acme-{name}": f"acme_games:{name.capitalize()}" for name in names}
    install("acme", {"rlhf.environments": targets}, {"acme_games": GAMES})
    found = discover("environments")
    verdicts = dict(zip(names, probe([found[f"acme-{name}"] for name in names], whole=True), strict=True))
    assert verdicts["fine"] == ("ok", "Says it once more.")
    assert verdicts["needy"].status == "not run" and "a task without a prompt" in verdicts["needy"].detail
    assert verdicts["brittle"].status == "broken" and "step raised ValueError" in verdicts["brittle"].detail
    assert verdicts["nothing"].status == "broken" and "is not an environment" in verdicts["nothing"].detail


LEARNERS = (
    LEARNER
    + """
class Update(Fine):
    def loss(self, models, batch):
        return super().loss(models, replace(batch, advantages=batch.returns))

update = Component("Learns.", Options, "acme_learners:Update")
"""
)


@pytest.mark.slow
def test_an_algorithm_is_held_to_its_contract(install):
    install("acme", {"rlhf.algorithms": {"update": "acme_learners:update"}}, {"acme_learners": LEARNERS})
    fine, update = probe([discover("algorithms")[name] for name in ("rloo", "update")], whole=True)
    assert fine.status == "ok"
    assert update.status == "broken" and "TypeError" in update.detail


@pytest.mark.slow
def test_a_hook_plugin_without_hooks_is_broken(install, capsys):
    install("acme", {"rlhf.hooks": {"acme-deaf": "acme_deaf"}}, {"acme_deaf": "def other(): pass"})
    assert run(["plugins", "check", "hooks/acme-deaf"]) == 1
    assert "it does not define a hook" in capsys.readouterr().out


SLOPPY = """
from pydantic import BaseModel
from rlhf_core.components import Component

class Loose(BaseModel):
    path: str = "x"

loose = Component("Loose.", Loose, "acme_sloppy:build")
"""


def test_one_that_fails_its_contract_is_broken(install):
    install("acme", {"rlhf.hooks": {"acme-loose": "acme_sloppy:loose"}}, {"acme_sloppy": SLOPPY})
    ((status, detail),) = probe([discover("hooks")["acme-loose"]], whole=False)
    assert status == "broken" and "a misspelled option is not detected" in detail
