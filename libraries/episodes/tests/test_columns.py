"""Columns of an environment: declared in its class or config, given by its outcome, in the items of its episodes."""

from __future__ import annotations

from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from playing import items

from rlhf_core.batching import collate
from rlhf_core.columns import Column
from rlhf_core.config.problems import Problems
from rlhf_core.config.resolved import Configured
from rlhf_core.errors import EpisodeError
from rlhf_core.plugins.functions import component_of
from rlhf_core.rollout.row import Played
from rlhf_core.types import SamplingParams
from rlhf_episodes.contract import EpisodeTruncated, Outcome
from rlhf_episodes.player import build_environment_player
from rlhf_episodes.section import EnvironmentConfig
from rlhf_episodes.selected import resolve_environment
from rlhf_testing.engine import FakeEngine
from rlhf_testing.episodes import episode_tokenizer
from rlhf_testing.samples import make_prompt


class Grades:
    """Two branches of two turns each; gives what `given` makes of the sample id."""

    columns: ClassVar[dict[str, Column]] = {
        "grade": Column(fill=-1.0),
        "depth": Column(per="sample", dtype="int16", fill=7.0),
        "judge": Column(per="metrics"),
        "maybe": Column(optional=True),
    }
    given: ClassVar[Any] = staticmethod(lambda sample, turns: {})

    async def run(self, task: Any, policy: Any) -> Outcome:
        turns = [await policy.turn()]
        other = policy.fork()
        turns += [await policy.turn("a"), await other.turn("b")]
        if task.sample_id == 3:
            raise EpisodeTruncated
        return Outcome(columns=self.given(task.sample_id, turns))


def play(given: Any, *, samples: int = 1, environment: Any = Grades, **options: Any) -> list[Played]:
    kind = type("Given", (environment,), {"given": staticmethod(given)})
    component = component_of(kind, "environments", where="test")
    config = EnvironmentConfig(**options)
    return played(Configured("environments", "given", component, "acme", "1.0", function=kind, config=config), samples)


def played(environment: Configured, samples: int) -> list[Played]:
    player = build_environment_player(
        environment,
        FakeEngine(answer=lambda request, version: (5, 6, 2)),
        episode_tokenizer(chat=False),
        sampling=SamplingParams(max_new_tokens=4),
        seed=5,
    )
    with closing(player):
        found = list(player.play([(replace(make_prompt(0)), number) for number in range(samples)]))
    return sorted(found, key=lambda each: each.sample_id)


def grades(sample: int, turns: Any) -> dict[str, Any]:
    return {
        "grade": {turns[0].turn: 0.5, turns[1].turn: [1.0, 2.0, 3.0], turns[2].turn: torch.tensor([4.0, 5.0, 6.0])},
        "depth": np.int16(sample),
        "judge": {"clarity": sample / 2},
    }


def test_they_are_in_the_items_of_all_branches() -> None:
    whole, forked = items(play(grades)[0])
    assert whole.columns["grade"].tolist() == [0.5] * 3 + [-1.0] + [1.0, 2.0, 3.0]
    assert forked.columns["grade"].tolist() == [-1.0] * 4 + [4.0, 5.0, 6.0], "what is shared is the first branch's"
    assert whole.columns["turn_number"].tolist() == [0] * 3 + [-1] + [1] * 3
    assert forked.columns["turn_number"].tolist() == [-1] * 4 + [2] * 3
    for item in (whole, forked):
        assert (item.columns["depth"].dtype, int(item.columns["depth"])) == (torch.int16, 0)
        assert item.columns["judge"] == {"clarity": 0.0} and "maybe" not in item.columns


def test_an_episode_without_them_has_their_fill_so_that_batches_are_whole() -> None:
    batch = collate([item for each in play(grades, samples=4) for item in items(each)])
    assert batch.columns["depth"].tolist() == [0, 0, 1, 1, 2, 2, 7, 7]
    assert (batch.columns["grade"][6:] == -1.0).all()
    assert batch.columns["judge"][5:] == ({"clarity": 1.0}, {}, {})


@given(
    st.dictionaries(st.sampled_from(["0", "1", "2"]), st.floats(width=32, allow_nan=False, allow_infinity=False)),
    st.integers(-(2**15), 2**15 - 1),
    st.dictionaries(st.text(max_size=3), st.floats(allow_nan=False, allow_infinity=False), max_size=2),
)
@settings(max_examples=20, deadline=None)
def test_any_values_arrive_exactly(grade: dict[str, float], depth: int, judge: dict[str, float]) -> None:
    (one,) = play(
        lambda sample, turns: {"grade": {int(k): v for k, v in grade.items()}, "depth": depth, "judge": judge}
    )
    whole, forked = items(one)
    own = [whole.columns["grade"][0], whole.columns["grade"][-1], forked.columns["grade"][-1]]
    assert [float(each) for each in own] == [grade.get(turn, -1.0) for turn in "012"]
    assert int(forked.columns["depth"]) == depth and whole.columns["judge"] == judge


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"grade": {0: [1.0]}}, r"1 values of column 'grade' for the 3 tokens of turn 0"),
        ({"grade": [1.0]}, r"a column 'grade' that does not map the 3 turns to values: \[1.0\]"),
        ({"grade": {7: 1.0}}, r"a column 'grade' that does not map the 3 turns to values"),
        ({"grad": {0: 1.0}}, "a column 'grad', which it does not declare in `columns`"),
        ({"depth": object()}, "columns that are not finite numbers: .*object"),
        ({"depth": float("nan")}, "columns that are not finite numbers"),
    ],
)
def test_wrong_ones_are_a_fault_of_the_environment(given: dict[str, Any], message: str) -> None:
    with pytest.raises(EpisodeError, match=message):
        play(lambda sample, turns: given)
    (failed,) = play(lambda sample, turns: given, on_failure="zero")
    assert int(items(failed)[0].columns["depth"]) == 7


GAME = """
from rlhf_core import Column
from rlhf_episodes import Outcome


class Game:
    columns = {"grade": Column(fill=-1.0), "pair": Column(per="sample", dtype="int64"), "judge": Column(per="metrics")}

    async def run(self, task, policy):
        first = await policy.turn()
        await policy.turn("a")
        return Outcome(columns={"grade": {first.turn: 0.1}, "pair": [task.sample_id, 2**62], "judge": {"a": 0.3}})
"""


def test_they_are_the_same_from_a_process_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "game.py").write_text(GAME)
    found = []
    for isolate in (False, True):
        problems = Problems()
        environment = resolve_environment({"name": f"{tmp_path}/game.py:Game", "isolate": isolate}, problems)
        problems.raise_if_any("environment")
        assert environment is not None and set(environment.columns) == {"grade", "pair", "judge"}
        found.append([item for each in played(environment, 2) for item in items(each)])
    for here, there in zip(*found, strict=True):
        for name in ("grade", "pair"):
            assert torch.equal(here.columns[name], there.columns[name])
        assert here.columns["judge"] == there.columns["judge"] == {"a": 0.3}
    assert found[1][1].columns["pair"].tolist() == [1, 2**62]
