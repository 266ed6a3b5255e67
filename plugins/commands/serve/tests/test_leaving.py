"""A client that leaves takes its rows with it, and a call joins those that are being sampled."""

import asyncio
import threading
from contextlib import closing

import pytest
from chat_templates import chat_tokenizer
from running import wait_until

from rlhf_core.protocols import InFlightEngine
from rlhf_episodes import Call
from rlhf_models import OpenEngine
from rlhf_serve.serving import ServedModel
from rlhf_testing.engine import FakeEngine
from rlhf_testing.models import tiny_model

ENDLESS = 10**9


class Endless(FakeEngine):
    """Samples a token of every open request at each step, up to its limit; `steps` counts."""

    def __init__(self):
        super().__init__(answer=lambda request, version: [5] * request.max_new_tokens)
        self.open, self.steps = {}, 0

    def generate_in_flight(self, between):
        while True:
            for request, sampling in between():
                assert request.sample_id not in self.open
                self.open[request.sample_id] = [request, sampling, 0]
            if not self.open:
                return
            self.steps += 1
            for each in list(self.open.values()):
                each[2] += 1
                if each[2] == each[0].max_new_tokens:
                    del self.open[each[0].sample_id]
                    yield self._completion(each[0], each[1], [5] * each[2], [0] * each[2])

    def cancel(self, sample_id, branch=0):
        del self.open[sample_id]


class WholeBatches(FakeEngine):
    """An engine that takes nothing on the way; its answers come one by one."""

    generate_in_flight = None


def served(engine):
    return closing(model_of(engine))


def model_of(engine):
    tokenizer = chat_tokenizer("qwen2")
    return ServedModel(OpenEngine(engine, tokenizer, tiny_model(tokenizer)), max_new_tokens=ENDLESS)


def call(max_tokens, text="hello", **options):
    return Call(text=text, max_tokens=max_tokens, **options)


async def until(condition):
    await asyncio.to_thread(wait_until, condition, "the engine")


def test_rows_of_a_client_that_left_are_sampled_no_further():
    engine = Endless()
    assert hasattr(engine, "cancel")

    async def leave_and_ask(model):
        leaving = asyncio.create_task(model.answer(call(ENDLESS)))
        staying = asyncio.create_task(model.answer(call(ENDLESS, temperature=0.5)))
        await until(lambda: len(engine.open) == 2)
        leaving.cancel()
        assert (await model.answer(call(2))).completion_tokens == 2
        await until(lambda: len(engine.open) == 1)
        staying.cancel()
        await until(lambda: not engine.open)
        assert (await model.answer(call(3))).completion_tokens == 3

    with served(engine) as model:
        asyncio.run(leave_and_ask(model))


def test_calls_with_one_seed_wait_for_each_other_and_a_left_one_for_none():
    engine = Endless()

    async def ask(model):
        first = asyncio.create_task(model.answer(call(ENDLESS, seed=1)))
        await until(lambda: engine.open)
        second = asyncio.create_task(model.answer(call(2, seed=1)))
        left = asyncio.create_task(model.answer(call(2, seed=1)))
        await until(lambda: engine.steps > 10)
        assert not second.done()
        left.cancel()
        first.cancel()
        assert (await second).completion_tokens == 2

    with served(engine) as model:
        asyncio.run(ask(model))


def test_greedy_calls_with_one_seed_do_not_wait():
    """Clients such as lm-eval send one seed with every request, at temperature 0."""
    engine = Endless()

    async def ask(model):
        asking = [asyncio.create_task(model.answer(call(ENDLESS, seed=1, temperature=0))) for _ in range(2)]
        await until(lambda: len(engine.open) == 2)
        for each in asking:
            each.cancel()
        await asyncio.wait(asking)

    with served(engine) as model:
        asyncio.run(ask(model))


def test_closing_ends_what_is_being_sampled():
    engine = Endless()

    async def ask(model):
        asking = asyncio.create_task(model.answer(call(ENDLESS)))
        await until(lambda: engine.open)
        await asyncio.to_thread(model.close)
        assert engine.closed and not engine.open
        assert not any(each.name == "engine" for each in threading.enumerate())
        asking.cancel()

    asyncio.run(ask(model_of(engine)))


@pytest.mark.parametrize("engine", [FakeEngine, WholeBatches])
def test_an_engine_that_cannot_cancel_answers_all_the_same(engine):
    made = engine()
    assert not hasattr(made, "cancel")
    assert (engine is FakeEngine) == isinstance(made, InFlightEngine)

    async def ask(model):
        leaving = asyncio.create_task(model.answer(call(4)))
        await asyncio.sleep(0)
        leaving.cancel()
        found = await asyncio.gather(*(model.answer(call(3, seed=seed)) for seed in (1, 1, 2)))
        assert found[0].text == found[1].text and all(each.completion_tokens <= 4 for each in found)

    with served(made) as model:
        asyncio.run(ask(model))


def test_log_probs_of_a_client_that_left_are_computed_no_further(monkeypatch):
    monkeypatch.setattr("rlhf_forward.token_scores._MAX_LOGITS", 1)  # a pass for each token
    began, may_go_on, passes = threading.Event(), threading.Event(), []

    async def leave_and_ask(model):
        run = model._thread.run

        def counted(work):
            passes.append(work)
            began.set()
            assert may_go_on.wait(60)
            return run(work)

        monkeypatch.setattr(model._thread, "run", counted)
        leaving = asyncio.create_task(model.answer(call(0, "hello hello", echo=True, top_logprobs=1)))
        await until(began.is_set)
        leaving.cancel()
        await asyncio.wait([leaving])
        may_go_on.set()
        assert (await model.answer(call(2))).completion_tokens == 2

    with served(Endless()) as model:
        asyncio.run(leave_and_ask(model))  # waits for its threads
    assert len(passes) == 1
