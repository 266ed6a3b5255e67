"""What an environment of `reset` and `step` may have besides: `close`, `metrics`, and an end by a bound of its own."""

import pytest
from playing import player

from rlhf_core.errors import EpisodeError
from rlhf_testing.samples import make_prompt


class Holds:
    """Holds something until it is closed."""

    metrics = {"held": 1.0}

    def __init__(self, closed, step=None):
        self.closed = closed
        self.step = step or (lambda reply: (None, 1.0, "truncated"))

    def reset(self, task):
        return "go"

    def close(self):
        self.closed.append(self)


def test_an_environment_is_closed_measured_and_may_truncate():
    closed = []
    (played,) = player(lambda: Holds(closed)).play([(make_prompt(0), 0)])
    assert len(closed) == 1
    measured = played.rows[0].columns["environment"]
    assert (measured["own/held"], measured["truncated"]) == (1.0, 1.0)


def test_what_is_said_of_a_failure_is_about_the_step_and_not_the_close():
    closed = []
    with pytest.raises(EpisodeError, match="step returned 3, not"):
        list(player(lambda: Holds(closed, lambda reply: 3)).play([(make_prompt(0), 0)]))
    assert len(closed) == 1


def test_a_close_that_fails_spoils_no_episode_and_hides_no_error(caplog):
    made = Holds([])
    made.close = lambda: 1 / 0
    (played,) = player(lambda: made).play([(make_prompt(0), 0)])
    assert played.turn_rewards == {0: 1.0}
    assert "close of an environment raised ZeroDivisionError" in caplog.text
    made.step = lambda reply: 3
    with pytest.raises(EpisodeError, match="step returned 3, not"):
        list(player(lambda: made).play([(make_prompt(0), 0)]))
