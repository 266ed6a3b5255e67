"""Requests and weights that come while vLLM generates. It is `fake/vllm`.

Its tokens are the first one of the prompt, plus the sum of the weights, plus a hundred times the salt of its prefix.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from rlhf_core.errors import DataError, DeadlineError, RlhfError
from rlhf_core.protocols import InFlightEngine, SamplingRequest
from rlhf_core.types import SamplingParams
from rlhf_testing.contracts.engine import make_requests

pytestmark = pytest.mark.usefixtures("fake_vllm")
LONG = SamplingParams(max_new_tokens=40)
SHORT = SamplingParams(max_new_tokens=2)


def fill(module, value: int):
    """Weights that sum up to `value`."""
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
        next(module.parameters()).view(-1)[0] = value
    return module


class Script:
    """What comes at which call."""

    def __init__(self, made: InFlightEngine, module) -> None:
        self.made, self.module, self.calls = made, module, 0
        self.asked: dict[int, Sequence[SamplingRequest]] = {}
        self.weights: dict[int, int] = {}

    def __call__(self) -> Sequence[SamplingRequest]:
        self.calls += 1
        if self.calls in self.weights:
            fill(self.module, self.weights[self.calls])
            self.made.weights_updated(self.made.policy_version + 1)
        return self.asked.get(self.calls, ())


@pytest.mark.parametrize("sleeps", [False, True])
def test_answers_go_on_with_new_weights_and_tell_the_version_of_each_token(
    sleeps, module, engine, monkeypatch, collect
):
    if sleeps:
        monkeypatch.setenv("FAKE_VLLM_SLEEPS", "1")
    made = engine(fill(module, 5))
    assert isinstance(made, InFlightEngine)
    script = Script(made, module)
    first, later = make_requests(2), make_requests(2, first_id=200)
    script.asked = {1: [(each, LONG) for each in first], 3: [(each, SHORT) for each in later]}
    script.weights = {2: 9}
    found = {each.sample_id: each for each in made.generate_in_flight(script)}
    assert sorted(found) == [100, 101, 200, 201]
    for request in first:
        answer = found[request.sample_id]
        versions = answer.policy_versions
        assert len(answer.token_ids) == len(versions) == 40 and versions == tuple(sorted(versions))
        salt = 100 * (1 + versions[0])
        expected = [request.prompt_ids[0] + (5, 9)[version] + salt for version in versions]
        assert list(answer.token_ids) == expected
        assert versions == (0,) + (1,) * 39 and answer.policy_version == 0
    for request in later:
        answer = found[request.sample_id]
        assert (answer.policy_version, answer.policy_versions) == (1, ())
        assert answer.token_ids == (request.prompt_ids[0] + 9 + 200,) * 2, "a prefix of older weights is shared"
    assert len(collect(made, first, SHORT)) == 2, "afterwards it generates as ever"


def test_it_ends_when_nothing_is_under_way_and_begins_anew(module, engine):
    made = engine(fill(module, 5))
    for _ in range(2):
        script = Script(made, module)
        script.asked = {1: [(each, SHORT) for each in make_requests(3)]}
        assert len(list(made.generate_in_flight(script))) == 3
    assert list(made.generate_in_flight(lambda: ())) == []


def test_a_prompt_without_room_is_said_as_ever(module, engine):
    made = engine(fill(module, 5), max_model_tokens=4)
    script = Script(made, module)
    script.asked = {1: [(make_requests(7)[6], SHORT)]}
    with pytest.raises(DataError, match="leaves no room"):
        list(made.generate_in_flight(script))


@pytest.mark.parametrize(("fault", "said"), [("hang", "waited 1 s for a step of vLLM"), ("die", "SIGKILL")])
def test_a_process_that_hangs_or_dies_is_named(fault, said, module, engine, monkeypatch):
    monkeypatch.setenv("FAKE_VLLM", fault)
    made = engine(fill(module, 5), answer_timeout_seconds=1)
    script = Script(made, module)
    script.asked = {1: [(each, SHORT) for each in make_requests(3)]}
    with pytest.raises((DeadlineError, RlhfError), match=said):
        list(made.generate_in_flight(script))


def test_steps_do_not_run_ahead_of_what_they_tell(module, tmp_path):
    from rlhf_vllm.config import VllmEngineConfig
    from rlhf_vllm.start import Settings, engine_args

    plain = Settings(config=VllmEngineConfig(), folder=tmp_path, dtype="float32", device="cpu", end_ids=(2,))
    flying = Settings(
        config=VllmEngineConfig(), folder=tmp_path, dtype="float32", device="cpu", end_ids=(2,), in_flight=True
    )
    assert "async_scheduling" not in engine_args(plain, sleeps=False)
    assert engine_args(flying, sleeps=False)["async_scheduling"] is False
