"""Admission by success rates, pools, stages, retirement, and a state that continues exactly."""

import json
import pickle
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhf_core.errors import ConfigError
from rlhf_data.curriculum import make_curriculum
from rlhf_data.curriculum_section import CurriculumConfig
from rlhf_testing.episodes import prompt_stream
from rlhf_testing.models import tiny_tokenizer

TOKENIZER = tiny_tokenizer("0123456789")


def curriculum(count=10, **options):
    records = [{"prompt": str(index), "level": "hard" if index % 2 else "easy"} for index in range(count)]
    return make_curriculum(CurriculumConfig(**options), prompt_stream(records, TOKENIZER))


class Unsendable(list):
    """Records that stay in their process."""

    def __init__(self, count):
        super().__init__({"prompt": str(index)} for index in range(count))

    def __reduce_ex__(self, protocol):
        raise TypeError("the records are sent")


def learn_all(made, rates):
    for record, rate in rates.items():
        made.learn(record, rate)


def test_all_open_it_is_the_stream_itself():
    made = curriculum()
    records = prompt_stream([{"prompt": str(index)} for index in range(10)], TOKENIZER)
    assert made.draw(30, 0) == [records.order.index(position) for position in range(30)]


def test_it_can_be_sent_to_another_process_without_the_records():
    made = make_curriculum(CurriculumConfig(), prompt_stream(Unsendable(10), TOKENIZER))
    made.draw(3, 0)
    sent = pickle.loads(pickle.dumps(made))
    assert sent.draw(30, 0) == made.draw(30, 0)


def test_only_prompts_between_the_gates_are_drawn_until_they_are_due_again():
    made = curriculum(success=(0.2, 0.8), revisit_after=3)
    learn_all(made, {0: 0.0, 1: 1.0, 2: 0.5, 3: 0.8})
    drawn = Counter(made.draw(8 * 3, 0))
    assert drawn[0] == drawn[1] == 0 and drawn[2] == drawn[3] == 3
    again = Counter(made.draw(10, 0))
    assert again[0] == again[1] == 1, "after being passed over three times"


def test_the_newest_answers_count_most():
    made = curriculum(success=(0.5, 1.0), newest_share=0.5)
    learn_all(made, {0: 0.0})
    made.learn(0, 1.0)
    assert 0 in made.draw(10, 0)
    made.learn(0, 0.0)
    assert 0 not in made.draw(9, 0)


def test_solved_prompts_retire():
    made = curriculum(retire_after=2)
    for success in (1.0, 0.5, 1.0):
        made.learn(4, success)
    assert 4 in made.draw(10, 0)
    made.learn(4, 1.0)
    assert 4 not in made.draw(90, 0)
    assert made.take_metrics()["curriculum/records_retired"] == 1
    for record in range(10):
        learn_all(made, {record: 1.0})
        learn_all(made, {record: 1.0})
    assert len(made.draw(3, 0)) == 3, "with all of them retired it goes on"


def test_stages_name_pools_and_gates():
    stages = [{"from_episode": 0, "pools": ["easy"]}, {"from_episode": 5, "success": (0.5, 1.0)}]
    made = curriculum(pool="level", stages=stages)
    assert all(record % 2 == 0 for record in made.draw(20, 4))
    learn_all(made, {1: 0.0})
    later = made.draw(18, 5)
    assert {3, 5, 7, 9} <= set(later) and 1 not in later


def test_a_prompt_never_sampled_has_its_pools_rate():
    made = curriculum(count=200, pool="level", success=(0.1, 0.9), revisit_after=9)
    for record in range(1, 40, 2):
        made.learn(record, 0.0)
    drawn = made.draw(60, 0)
    hard = sum(record % 2 for record in drawn)
    assert 0 < hard <= 8, "one in ten of the hard ones, to see whether they still are"
    assert made.take_metrics()["curriculum/success/hard"] == 0.0


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 1)), max_size=20), st.integers(0, 7), st.booleans())
def test_a_restored_state_goes_on_as_the_first(outcomes, drawn, pooled):
    options = {"success": (0.3, 0.7), "retire_after": 1, "revisit_after": 2, "pool": "level" if pooled else None}
    first, second = curriculum(**options), curriculum(**options)
    for record, rate in outcomes:
        first.learn(record, rate)
    first.draw(drawn, 0)
    second.load_state_dict(json.loads(json.dumps(first.state_dict())))
    assert first.draw(25, 0) == second.draw(25, 0)
    assert first.state_dict() == second.state_dict()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"pool": "levle"}, "lacks `levle`"),
        ({"pool": "level", "stages": [{"pools": ["esay"]}]}, "pools: easy, hard"),
    ],
)
def test_pools_that_are_not_there(options, told):
    with pytest.raises(ConfigError, match=told):
        curriculum(**options)


@pytest.mark.parametrize(
    "options",
    [{"success": (0.8, 0.2)}, {"stages": [{"from_episode": 2}, {"from_episode": 1}]}, {"stages": [{"pools": ["a"]}]}],
)
def test_options_that_make_no_sense(options):
    with pytest.raises(ValueError, match="must be sorted|requires lowest|require `pool`"):
        CurriculumConfig(**options)
