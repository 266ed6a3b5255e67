"""The game: what is answered, what is paid, and what depends on which seed."""

from collections import Counter
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from rlhf_core.components import TaskContext
from rlhf_environments.config import GuessNumberConfig
from rlhf_environments.guess_number import GuessNumber, build


def task(position=0, *, answer=None, text="", seed=1, sample_seed=2):
    prompt = SimpleNamespace(text=text, messages=None, answer=answer, metadata={}, position=position)
    return SimpleNamespace(prompt=prompt, sample_id=position * 8, seed=seed, sample_seed=sample_seed)


def play(game, guesses, **of_task):
    opening = game.reset(task(**of_task))
    return opening, [game.step(SimpleNamespace(text=guess)) for guess in guesses]


def test_a_game_from_opening_to_the_number():
    opening, steps = play(GuessNumber(), ["2", "8", "5"], position=5)
    assert opening == ">,"
    assert steps == [(">", 0.0, False), (",", 0.0, False), (None, 1.0, True)]


def test_every_guess_of_every_number():
    for number in range(10):
        for guess in range(10):
            _, [(observation, reward, done)] = play(GuessNumber(), [str(guess)], position=number)
            assert observation == (None if guess == number else ">" if number > guess else ",")
            assert (reward, done) == ((1.0, True) if guess == number else (0.0, False))


@pytest.mark.parametrize("text", ["", "10", "-1", "1,2", "007", "ten", "٣", "5" * 10_000])
def test_what_is_no_number_of_the_game_costs_a_turn(text):
    _, steps = play(GuessNumber(), [text, "5"], position=5)
    assert steps == [(">,", 0.0, False), (None, 1.0, True)]


def test_each_number_comes_equally_often_and_is_that_of_all_samples_of_a_prompt():
    def number(position, sample_seed):
        return next(
            guess
            for guess in range(7)
            if play(GuessNumber(numbers=7), [str(guess)], position=position, sample_seed=sample_seed)[1][0][2]
        )

    assert Counter(number(position, 0) for position in range(70)) == dict.fromkeys(range(7), 10)
    assert {number(23, sample_seed) for sample_seed in range(5)} == {2}


def test_the_prompts_answer_is_the_number_and_its_text_the_opening():
    opening, steps = play(GuessNumber(numbers=100), ["42", "6", "07"], position=5, answer="7", text=">,")
    assert opening is None
    assert steps == [(",", 0.0, False), (">", 0.0, False), (None, 1.0, True)]


@pytest.mark.parametrize("answer", [10, "-1", "x", 2.5, []])
def test_an_answer_outside_of_the_game_names_the_prompt(answer):
    with pytest.raises(ValueError, match=r"answer of prompt 3 .* not a number from 0 to 9: .*environment\.numbers"):
        play(GuessNumber(), [], position=3, answer=answer)


def test_shuffled_answers_are_of_the_sample_seed_alone():
    def answers(**of_task):
        return [step[0] for step in play(GuessNumber(shuffle_observations=True), ["0"] * 64, position=5, **of_task)[1]]

    assert answers(sample_seed=1) == answers(sample_seed=1, seed=99)
    assert answers(sample_seed=1) != answers(sample_seed=2)
    assert set(answers(sample_seed=1)) == {">", ","}
    assert play(GuessNumber(shuffle_observations=True), ["5"], position=5)[1] == [(None, 1.0, True)]


def test_built_from_its_options(tmp_path):
    game = build(GuessNumberConfig(numbers=3), TaskContext(seed=0, base_folder=tmp_path))
    assert play(game, ["1"], position=4)[1] == [(None, 1.0, True)]


@pytest.mark.parametrize("options", [{"numbers": 1}, {"shuffle_observations": "maybe"}, {"number": 5}])
def test_options_that_are_refused(options):
    with pytest.raises(ValidationError):
        GuessNumberConfig(**options)
