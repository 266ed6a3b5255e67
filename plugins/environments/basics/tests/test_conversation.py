"""The scripted conversation: its order, its end, and datasets that do not fit."""

from types import SimpleNamespace

import pytest

from rlhf_environments.config import ConversationConfig
from rlhf_environments.conversation import Conversation, build


def task(metadata):
    prompt = SimpleNamespace(text="Hello", messages=None, answer=None, metadata=metadata, position=4)
    return SimpleNamespace(prompt=prompt, sample_id=4, seed=0, sample_seed=0)


REPLY = SimpleNamespace(text="…")


def test_the_turns_come_in_order_and_the_last_answer_ends_it():
    message = {"role": "user", "content": "And then?"}
    conversation = Conversation()
    assert conversation.reset(task({"turns": ["Why?", message, [message, message]]})) is None
    assert [conversation.step(REPLY) for _ in range(4)] == [
        ("Why?", 0.0, False),
        ([message], 0.0, False),
        ([message, message], 0.0, False),
        (None, 0.0, True),
    ]


def test_without_further_turns_it_is_one_answer():
    conversation = Conversation()
    conversation.reset(task({"turns": []}))
    assert conversation.step(REPLY) == (None, 0.0, True)


def test_the_dataset_is_left_as_it_is():
    turns = ["a", "b"]
    for _ in range(2):
        conversation = build(ConversationConfig(turns_key="questions"), None)
        conversation.reset(task({"questions": turns}))
        assert conversation.step(REPLY)[0] == "a"
    assert turns == ["a", "b"]


@pytest.mark.parametrize("turns", [None, "Why?", {"role": "user"}, [""], [3], [[]], [{"content": "x"}]])
def test_turns_that_are_none_name_prompt_and_key(turns):
    with pytest.raises(ValueError, match=r"metadata 'turns' of prompt 4 .*environment\.turns_key"):
        Conversation().reset(task({} if turns is None else {"turns": turns}))
