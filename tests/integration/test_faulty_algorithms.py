"""An algorithm, estimator or policy loss that fails in the middle of a run is named, with the line of its code."""

from __future__ import annotations

import pytest
from learners import LEARNER
from run_files import start

from rlhf_core.errors import DivergenceError, RlhfError
from rlhf_core.plugins.errors_of import errors_of

pytestmark = pytest.mark.usefixtures("no_plots")

SOURCE = (
    LEARNER
    + """
import torch

class BadLoss(Fine):
    def loss(self, models, batch):
        return masked_sum(torch.zeros(3, 5), batch.action_mask)  # raised in core

class BadAdvantages(Fine):
    def advantages(self, episode):
        return {}["baseline"]

class BadCounts(Fine):
    def counts(self, batch):
        return {}["tokens"]

def _component(name):
    return Component("Learns.", Options, f"acme_rl:{name}")

fine, bad_loss = _component("Fine"), _component("BadLoss")
bad_advantages, bad_counts = _component("BadAdvantages"), _component("BadCounts")

def estimator(episode):
    "Fails."
    raise ValueError("no baseline")
"""
)
FAULTS = {
    "loss": "loss raised RuntimeError: The size of tensor",
    "advantages": "advantages raised KeyError: 'baseline'",
    "counts": "counts raised KeyError: 'tokens'",
}


@pytest.fixture
def acme(install):
    names = {f"bad-{name}": f"acme_rl:bad_{name}" for name in FAULTS}
    groups = {"rlhf.algorithms": {"fine": "acme_rl:fine", **names}, "rlhf.advantages": {"worse": "acme_rl:estimator"}}
    install("acme-rl", groups, {"acme_rl": SOURCE})


def line_of(code):
    return next(number for number, text in enumerate(SOURCE.splitlines(), 1) if code in text)


@pytest.mark.parametrize("name", FAULTS)
def test_an_algorithm_that_fails_is_named(acme, tmp_path, name):
    with pytest.raises(RlhfError) as caught:
        start({"algorithm": {"name": f"bad-{name}"}}, tmp_path / "run")
    code = {"loss": "masked_sum(torch", "advantages": 'return {}["baseline"]', "counts": 'return {}["tokens"]'}[name]
    assert caught.value.exit_code == 1
    assert caught.value.where == f'algorithm "bad-{name}" (acme-rl 1.2.3)'
    assert caught.value.message.startswith(FAULTS[name])
    assert f"acme_rl.py, line {line_of(code)})" in caught.value.message, "the plugin's own line, also if core raised"
    assert "Traceback" in (tmp_path / "run" / "run.log").read_text()


def test_a_function_that_fails_is_named_with_the_algorithm_that_calls_it(acme, tmp_path):
    algorithm = {"name": "grpo", "kl_coef": 0.0, "advantage": "worse"}
    with pytest.raises(
        RlhfError, match=r"worse.* \(acme-rl 1.2.3\): estimator raised ValueError: no baseline"
    ) as caught:
        start({"algorithm": algorithm}, tmp_path / "run")
    assert f"acme_rl.py, line {line_of('raise ValueError')})" in caught.value.message
    assert '(algorithm "grpo" (rlhf-group' in caught.value.message


def test_what_is_not_the_plugins_keeps_its_name():
    for error in (RuntimeError("CUDA out of memory"), RuntimeError("gloo: Connection closed by peer")):
        with pytest.raises(RuntimeError) as caught, errors_of("algorithm x", "loss"):
            raise error
        assert caught.value is error
    with pytest.raises(DivergenceError, match=r"nan \(algorithm x\)"), errors_of("algorithm x", "loss"):
        raise DivergenceError("nan")
