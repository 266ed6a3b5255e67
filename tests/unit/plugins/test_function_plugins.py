"""Advantage estimators and policy losses of strangers, by name, with their own options."""

from __future__ import annotations

import pytest
import torch

from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins.discovery import discover
from rlhf_objective import FunctionUse

SOURCE = """
def scaled(batch, *, factor: float = 2.0, power: int = 1):
    return (batch * factor) ** power

def untyped(batch, *, factor=1):
    return batch

def greedy(batch, other):
    return batch

class Thing:
    pass
"""


@pytest.fixture(autouse=True)
def stranger(install) -> None:
    names = {name: f"acme_losses:{name}" for name in ("scaled", "untyped", "greedy", "Thing")}
    install(
        "acme", {"rlhf.policy_losses": names, "rlhf.advantages": {"scaled": names["scaled"]}}, {"acme_losses": SOURCE}
    )


@pytest.mark.parametrize("kind", ["policy_losses", "advantages"])
def test_options_are_bound(kind) -> None:
    assert FunctionUse(kind, "scaled").bind(where="it")(3.0) == 6.0
    assert FunctionUse(kind, {"name": "Scaled", "factor": 3, "power": 2}).bind(where="it")(1.0) == 9.0
    assert FunctionUse(kind, {"name": "scaled", "power": 2}, {"factor": 5}).bind(where="it")(1.0) == 25.0


@pytest.mark.parametrize(
    ("choice", "shared", "error", "message"),
    [
        ({"name": "scaled", "facto": 1}, {}, ConfigError, r"algorithm: x\.facto: unknown key; did you mean .factor."),
        ({"name": "scaled", "factor": "many"}, {}, ConfigError, r"algorithm: x\.factor: should be a valid number"),
        (
            {"name": "scaled", "factor": 1},
            {"factor": 2},
            ConfigError,
            r"algorithm: factor: is set in x, too",
        ),
        ("scaled", {"clip_eps": 0.1}, ConfigError, r"algorithm: clip_eps: .*does not have this option"),
        ({"factor": 1}, {}, ConfigError, r"needs a `name`"),
        ("scalde", {}, PluginError, r'no policy loss "scalde" is installed'),
        ("untyped", {}, PluginError, r'its option "factor" lacks a type'),
        ("greedy", {}, PluginError, r"it takes more positional parameters than the batch: other"),
        ("Thing", {}, PluginError, r"is a type, not a function"),
    ],
)
def test_what_does_not_fit_is_named(choice, shared, error, message) -> None:
    with pytest.raises(error, match=message) as caught:
        FunctionUse("policy_losses", choice, shared).bind(where="algorithm.x")
    assert caught.value.exit_code == 2


def test_a_kl_of_the_library_may_be_named_in_a_mapping() -> None:
    kl = FunctionUse("kl_estimators", {"name": "k2"}).bind(where="it")
    assert kl(torch.tensor([2.0]), torch.tensor([0.0])).tolist() == [2.0]


def test_only_the_types_of_options_must_be_there(install) -> None:
    """A module that is light to import names the rest for type checkers only."""
    source = """
from __future__ import annotations
from typing import TYPE_CHECKING
if TYPE_CHECKING:
    from no_such_module import Batch, Loss

def light(batch: Batch, *, power: int = 2) -> Loss:
    return batch**power
"""
    install("light", {"rlhf.policy_losses": {"light": "light_losses:light"}}, {"light_losses": source})
    assert FunctionUse("policy_losses", {"name": "light", "power": 3}).bind(where="it")(2) == 8


def test_they_are_listed() -> None:
    assert discover("policy_losses")["scaled"].distribution == "acme"
