"""Min-p, penalties, banned words and temperature of a request reach vLLM, and come back as columns."""

from __future__ import annotations

from dataclasses import replace

import pytest
from pydantic import ValidationError

from rlhf_core.errors import ConfigError, DataError
from rlhf_core.types import SamplingParams
from rlhf_models import GenerationJob
from rlhf_testing.contracts.engine import make_requests
from rlhf_vllm.backend import VllmBackend
from rlhf_vllm.config import VllmEngineConfig

OPTIONS = {"temperature": 0.6, "repetition_penalty": 1.2, "presence_penalty": 0.5}
RUN = SamplingParams(max_new_tokens=4, temperature=0.9, top_k=8)


class Backend(VllmBackend):
    """Only the conversion of a job to vLLM's parameters."""

    def __init__(self, words=()):
        from types import SimpleNamespace

        kinds = SimpleNamespace(DELTA=1, FINAL_ONLY=2)
        self._vllm = SimpleNamespace(
            SamplingParams=SimpleNamespace, sampling_params=SimpleNamespace(RequestOutputKind=kinds)
        )
        self._end_ids, self._banned_words = [1], list(words)


def params(sampling, options, words=()):
    request = replace(make_requests(1)[0], options=options)
    job = GenerationJob.of(request, sampling, context_tokens=None, seed=3, name="vllm")
    return Backend(words)._sampling_params(job, False)


def test_vllm_gets_the_options_of_a_request():
    made = params(RUN, {**OPTIONS, "min_p": 0.1}, ["no"])
    assert {name: getattr(made, name) for name in OPTIONS} == OPTIONS
    assert (made.min_p, made.bad_words, made.top_k) == (0.1, ["no"], 8)
    plain = params(RUN, {})
    assert (plain.temperature, plain.bad_words, hasattr(plain, "min_p")) == (0.9, None, False)


def test_a_greedy_request_has_none():
    made = params(replace(RUN, greedy=True), OPTIONS, ["no"])
    assert made.temperature == 0.0
    assert not {"repetition_penalty", "presence_penalty", "bad_words", "top_k"} & vars(made).keys()


@pytest.mark.usefixtures("fake_vllm")
def test_columns_report_what_was_asked(module, engine, collect):
    made = engine(module)
    asked = [replace(each, options=OPTIONS) for each in make_requests(3)] + make_requests(2, first_id=500)
    for sample_id, answer in collect(made, asked, RUN).items():
        assert answer.columns == ({} if sample_id >= 500 else {k: [v] * 4 for k, v in OPTIONS.items()})


@pytest.mark.usefixtures("fake_vllm")
def test_what_vllm_cannot_report_is_refused(module, engine):
    (request,) = make_requests(1)
    with pytest.raises(ConfigError, match="min_p needs top_k"):
        engine(module).generate([replace(request, options={"min_p": 0.1})], replace(RUN, top_k=0))
    with pytest.raises(DataError, match="the option temperature is 0"):
        engine(module).generate([replace(request, options={"temperature": 0})], RUN)
    for temperature in (1e-3, 2.5):
        with pytest.raises(ConfigError, match=r"outside 0\.01 to 2"):
            engine(module).generate([replace(request, options={"temperature": temperature})], RUN)
        with pytest.raises(ValidationError, match=r"outside 0\.01 to 2"):
            VllmEngineConfig(temperature=temperature)
    with pytest.raises(ValidationError, match="min_p needs top_k"):
        VllmEngineConfig(min_p=0.1)
    assert VllmEngineConfig(min_p=0.1, top_k=50).sampling().options == {"min_p": 0.1}
