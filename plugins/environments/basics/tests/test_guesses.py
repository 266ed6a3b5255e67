"""The prompt source of the game: its contract, and the form of what the warm start learns."""

from collections import Counter

import pytest

from rlhf_environments.config import GuessesConfig
from rlhf_environments.guess_number import direction
from rlhf_environments.guesses import Guesses
from rlhf_testing.contracts import PromptsContract
from rlhf_testing.models import builtin_model


class TestGuesses(PromptsContract):
    plugin = "guess-number"
    options = {"max_past_guesses": 3, "size": 50}


def source(numbers=10, size=10, past=0, seed=0):
    config = GuessesConfig(numbers=numbers, size=size, max_past_guesses=past, problem_seed=seed)
    return Guesses(config)


def test_a_game_for_each_number():
    games = source(numbers=100, size=100)
    assert [games[index]["answer"] for index in range(100)] == list(range(100))
    assert {game["prompt"] for game in (games[index] for index in range(100))} == {">,"}
    with pytest.raises(IndexError):
        games[100]


def test_past_guesses_are_wrong_and_answered_rightly():
    games = source(size=400, past=3)
    lengths = Counter()
    for index in range(400):
        record = games[index]
        past = record["prompt"].removeprefix(">,").split("<eos>")
        guesses = [int(part[-1]) for part in past[:-1]]
        answers = [part[0] for part in past[1:]]
        assert answers == [direction(guess, record["answer"]) for guess in guesses]
        assert record["answer"] not in guesses
        lengths[len(guesses)] += 1
    assert set(lengths) == {0, 1, 2, 3}
    assert min(lengths.values()) > 60


def test_completions_are_even_and_know_nothing_of_the_number():
    games = [source(size=5000, past=3)[index] for index in range(5000)]
    counts = Counter(game["completion"] for game in games)
    assert set(counts) == set("0123456789")
    assert max(counts.values()) < 1.25 * min(counts.values())
    assert 0.08 < sum(game["completion"] == str(game["answer"]) for game in games) / 5000 < 0.12


def test_the_quickstarts_alphabet_holds_a_game():
    _, tokenizer = builtin_model("builtin:tiny-digits", 0)
    ids = tokenizer(source(past=3, size=64)[3]["prompt"])["input_ids"]
    assert tokenizer.unk_token_id not in ids
    games = source(size=64, past=3)
    for index in range(64):
        ids = tokenizer(games[index]["prompt"])["input_ids"]
        assert tokenizer.unk_token_id not in ids
        assert ids.count(tokenizer.eos_token_id) == games[index]["prompt"].count("<eos>")
