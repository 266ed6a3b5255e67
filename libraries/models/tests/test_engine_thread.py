"""One engine for callers on several threads."""

from __future__ import annotations

from contextlib import closing

import pytest
from running import PATIENCE_SECONDS

from rlhf_core.errors import RlhfError
from rlhf_core.types import GenerationRequest, SamplingParams
from rlhf_models import EngineThread
from rlhf_testing.engine import FakeEngine

SAMPLING = SamplingParams(max_new_tokens=8)


class WholeBatches(FakeEngine):
    """An engine that takes nothing on the way."""

    generate_in_flight = None


def answer(request, version):
    if request.sample_id == 13:
        raise ValueError("of the engine")
    return [5] * request.sample_id


def asked(*sample_ids):
    return [GenerationRequest(sample_id=each, prompt_ids=(1,)) for each in sample_ids]


@pytest.mark.parametrize("kind", [FakeEngine, WholeBatches])
def test_an_error_is_raised_to_those_who_wait_and_later_requests_are_answered(kind):
    with closing(EngineThread(kind(answer=answer))) as thread:
        (failed,) = thread.ask(asked(13), SAMPLING)
        with pytest.raises(ValueError, match="of the engine"):
            failed.result(PATIENCE_SECONDS)
        found = [each.result(PATIENCE_SECONDS) for each in thread.ask(asked(3, 2, 1), SAMPLING)]
    assert [each.sample_id for each in found] == [3, 2, 1]


@pytest.mark.parametrize("kind", [FakeEngine, WholeBatches])
def test_other_work_is_done_on_its_thread_also_while_it_rests(kind):
    with closing(EngineThread(kind(answer=answer))) as thread:
        assert thread.run(lambda: 7) == 7
        with pytest.raises(ZeroDivisionError):
            thread.run(lambda: 1 // 0)


def test_a_closed_one_takes_no_request():
    engine = FakeEngine(answer=answer)
    thread = EngineThread(engine)
    thread.close()
    assert engine.closed
    with pytest.raises(RlhfError, match="closed"):
        thread.ask(asked(1), SAMPLING)
    with pytest.raises(RlhfError, match="closed"):
        thread.run(lambda: None)
