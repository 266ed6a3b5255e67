"""The store behind `previous_response_id`: what it keeps, and what it counts."""

import copy
import ctypes
import tracemalloc

from rlhf_core.types import ToolCall
from rlhf_episodes import ChatMessage
from rlhf_serve.stored import StoredConversations


def user(text):
    return ChatMessage(role="user", content=text)


def kept(stored, count):
    return [stored.messages(f"r{number}") is not None for number in range(count)]


def test_the_conversations_that_were_used_last_are_kept(monkeypatch):
    monkeypatch.setattr("rlhf_serve.stored.MAX_RESPONSES", 3)
    stored = StoredConversations()
    for number in range(3):
        stored.add(f"r{number}", [user("x")])
    assert stored.messages("r0")
    stored.add("r3", [user("x")])
    assert kept(stored, 4) == [True, False, True, True]


def test_the_memory_of_conversations_is_bounded(monkeypatch):
    """Counted are all texts and ids, tuples of messages, and messages that only a later conversation keeps."""
    monkeypatch.setattr("rlhf_serve.stored.MAX_BYTES", 100_000)
    nested = ToolCall(name="n" * 9, arguments={"a": [[] for _ in range(500)]})
    large = [
        user("x" * 40_000),
        ChatMessage(role="assistant", tool_calls=(nested,), call_ids=("c" * 40_000,)),
        ChatMessage(role="tool", content="", tool_call_id="c" * 40_000),
        ChatMessage(role="user", images=((0, "data:" + "x" * 40_000),)),
        ChatMessage(role="assistant", tool_calls=(ToolCall(name="n" * 40_000),) * 1, call_ids=("c",)),
    ]
    for message in large:
        stored = StoredConversations()
        tracemalloc.start()
        for number in range(20):
            stored.add(f"r{number}", [copy.deepcopy(message)])
            child = (*(stored.messages(f"r{number}") or ()), user("small"))
            stored.add(f"r{number}c", child)
            stored.add(f"r{number}", [user("replaced")])
        del child
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert stored.num_bytes <= 100_000 and held < 200_000
    stored = StoredConversations()
    growing = user("\u20ac" * 20_000)
    stored.add("r0", [growing])
    ctypes.pythonapi.PyUnicode_AsUTF8(ctypes.py_object(growing.content))  # caches the UTF-8 form in the text
    stored.add("r0", [])
    assert stored.num_bytes == 0
    stored = StoredConversations()
    for number in range(100):
        stored.add(f"r{number}", large[:1] * 3000)
    assert sum(kept(stored, 100)) == (100_000 - 40_000) // (8 * 3000)
    stored.add("r0", [user("x" * 200_000)])
    assert (stored.num_bytes, kept(stored, 100)) == (0, [False] * 100)
