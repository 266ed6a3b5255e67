"""Options reach the engine with each request, and its columns reach the samples."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from playing import driven, items, play_one, player

from rlhf_core import Column
from rlhf_core.errors import PluginError
from rlhf_core.rollout.player import SingleTurnPlayer
from rlhf_core.rollout.row import Row
from rlhf_core.rollout.samples import SampleRewards, item_of, rollout_of
from rlhf_core.rollout.samples import _engine_columns as engine_columns
from rlhf_core.types import Completion, GenerationRequest, SamplingParams
from rlhf_episodes.contract import Outcome
from rlhf_testing.engine import FakeEngine
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.samples import make_prompt

RUN = SamplingParams(max_new_tokens=4, options={"bias": 2})


class Biased(FakeEngine):
    """Gives each token the request's bias times its id, and each answer its number of tokens."""

    request_options = {"bias": "factor of the column", "temperature": "of the request"}
    columns = {"score": Column(fill=-1.0), "level": Column(per="sample", dtype="int32"), "pair": Column(dtype="int64")}

    def generate(self, requests: Sequence[GenerationRequest], sampling: SamplingParams) -> Iterator[Completion]:
        asked = {(request.sample_id, request.branch): request for request in requests}
        for done in super().generate(requests, sampling):
            options = asked[done.sample_id, done.branch].options
            columns: dict[str, Any] = {"level": len(done.token_ids)}
            if "bias" in options:
                columns["score"] = [options["bias"] * token for token in done.token_ids]
                columns["pair"] = [(token, token) for token in done.token_ids]
            if "temperature" in options:
                columns["temperature"] = [options["temperature"]] * len(done.token_ids)
            yield replace(done, columns=columns)


def biased(answer: Sequence[int] = (5, 6, 2)) -> Biased:
    return Biased(answer=lambda request, version: answer)


def single(engine: FakeEngine, sampling: SamplingParams = RUN) -> Any:
    play = SingleTurnPlayer(engine, tiny_tokenizer(), sampling).play([(make_prompt(0), 0)])
    (played,) = list(play)
    (row,) = played.rows
    return item_of(row, rollout_of(row, played), SampleRewards.of(played, {}), played, None)


def test_the_options_of_the_run_reach_the_engine_and_its_columns_the_sample():
    engine = biased()
    item = single(engine)
    assert engine.calls[0][0].options == {"bias": 2}
    assert item.columns["score"].tolist() == [10.0, 12.0, 4.0]
    assert item.columns["level"] == 3
    assert item.columns["pair"].tolist() == [[5, 5], [6, 6], [2, 2]]
    assert "temperature" not in item.columns


def test_a_run_without_options_is_as_it_was():
    engine = FakeEngine()
    assert not single(engine, SamplingParams(max_new_tokens=4)).columns
    assert not engine.calls[0][0].options


def test_each_turn_has_its_own_options_and_observations_the_fill():
    async def run(task: Any, policy: Any) -> Outcome:
        await policy.turn(options={"bias": 1, "temperature": 0.5})
        await policy.turn("78")
        branch = policy.fork()
        await policy.turn("7", options={"bias": 3})
        await branch.turn("8", options={"bias": 4})
        return Outcome()

    whole, forked = items(play_one(driven(run), engine=biased()))
    given = [-1.0] * 2
    assert whole.columns["score"].tolist() == [5, 6, 2, *given, -1, -1, -1, -1, 15, 18, 6]
    assert whole.columns["temperature"].tolist() == [0.5] * 3 + [0.0] * 9
    assert whole.columns["pair"].shape == (12, 2) and whole.columns["pair"][3:9].sum() == 0
    assert forked.columns["score"].tolist() == [-1.0] * 9 + [20, 24, 8]  # the other branch counts what they share
    assert "temperature" not in forked.columns


def test_the_options_of_a_turn_take_precedence():
    async def run(task: Any, policy: Any) -> Outcome:
        await policy.turn(options={"bias": 7})
        await policy.turn("7")
        return Outcome()

    engine = biased()
    playing = player(driven(run), engine=engine)
    object.__setattr__(playing.environments[0].rules, "sampling", RUN)
    list(playing.play([(make_prompt(0), 0)]))
    assert [request.options for (request,) in engine.calls] == [{"bias": 7}, {"bias": 2}]


def test_an_option_that_the_engine_does_not_accept_is_refused():
    async def run(task: Any, policy: Any) -> Outcome:
        await policy.turn(options={"baas": 1})
        return Outcome()

    with pytest.raises(
        PluginError, match=r"sample 0: a request sets the option 'baas', which Biased does not"
    ) as found:
        play_one(driven(run), engine=biased())
    assert found.value.hint == "it accepts bias, temperature"
    with pytest.raises(PluginError, match="'bias', which FakeEngine does not accept"):
        single(FakeEngine())


def test_columns_that_the_engine_does_not_declare_are_refused():
    class Undeclared(Biased):
        columns = {"level": Column(per="sample")}

    with pytest.raises(PluginError, match="no column '(score|pair)' is declared"):
        single(Undeclared())


def test_columns_that_do_not_fit_the_tokens_are_refused():
    class Short(Biased):
        def generate(self, requests: Any, sampling: Any) -> Iterator[Completion]:
            for done in super().generate(requests, sampling):
                yield replace(done, columns={"score": [1.0]})

    with pytest.raises(PluginError, match=r"column 'score': Short returned 1 values for 3 tokens"):
        single(Short(answer=lambda request, version: (5, 6, 2)))


def test_no_part_has_columns():
    row = Row(text="", prompt_ids=(1,))
    row.sample(
        Completion(sample_id=0, token_ids=(5, 2), logprobs=(0.0, 0.0), finish_reason="stop", policy_version=0), ""
    )
    assert dict(engine_columns(row)) == {}
