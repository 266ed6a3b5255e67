"""The contract of environments, and a few games."""

from types import SimpleNamespace

from rlhf_example_games.account import Account
from rlhf_example_games.corridor import Corridor

from rlhf_testing.contracts import EnvironmentContract


class TestCorridor(EnvironmentContract):
    plugin = "corridor"
    options = {"length": 3}
    replies = ("left", "I go right.")


class TestAccount(EnvironmentContract):
    plugin = "account"
    records = ({"prompt": "Pay in 3.", "answer": 3}, {"prompt": "Pay in 3, and then 4.", "answer": 7})
    replies = ('<tool_call>{"name": "deposit", "arguments": {"amount": 3}}</tool_call>', "Done.")


def test_the_door_is_found():
    game = Corridor(length=4, step_cost=0.25)
    game.reset(SimpleNamespace(seed=1))
    game.place, game.door = 0, 2
    steps = [game.step(SimpleNamespace(text=text)) for text in ("Hm", "Leftover", "left, no: RIGHT!", "right")]
    assert steps == [
        ("Say left or right.", -0.25, False),
        ("Say left or right.", -0.25, False),
        ("You stand at 1. The door is to the right.", -0.25, False),
        (None, 0.75, True),
    ]


def test_more_than_there_is_cannot_be_taken():
    account = Account()
    account.reset(answer="3")
    assert account.withdraw(1) == "refused: the balance is 0"
    assert [account.deposit(5), account.withdraw(2)] == ["balance: 5", "balance: 3"]
    assert account.get_reward() == 1.0
