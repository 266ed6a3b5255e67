"""Tools that the policy calls in an episode."""

from __future__ import annotations

import pytest
from chat_templates import chat_tokenizer
from playing import Reworded, driven, play_one, rollouts

from rlhf_core.errors import EpisodeError
from rlhf_core.prompts.stream import PromptEncoder


def encoded(tokenizer, record):
    return PromptEncoder(tokenizer).prompt(record, 0, "test")


def adder(log):
    class Adder:
        def reset(self, question=None, **row):
            log.append(row)
            return question

        def add(self, a: int, b: int) -> int:
            """Adds."""
            log.append((a, b))
            return a + b

        def get_reward(self):
            return 0.5

    return Adder


def test_methods_are_tools():
    tokenizer = chat_tokenizer("qwen2")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    calls = [
        '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>',
        "<tool_call>\n{oops}\n</tool_call>",
        '<tool_call>\n{"name": "sub", "arguments": {}}\n</tool_call>'
        '<tool_call>\n{"name": "add", "arguments": {"a": "x"}}\n</tool_call>',
        "3",
    ]
    prompt = encoded(tokenizer, {"prompt": "hello", "answer": "3", "level": 2})
    log = []
    played = play_one(
        adder(log), engine=Reworded(tokenizer, calls, end), tokenizer=tokenizer, prompt=prompt, max_new_tokens=300
    )
    assert log == [{"prompt": "hello", "answer": "3", "level": 2}, (1, 2)]
    said = [turn.text for turn in played.rows[0].turns if turn.role == "environment"]
    assert said[0] == "3"
    assert said[1].startswith("error: The tool call could not be read")
    assert "there is no tool 'sub'; there are: add" in said[2]
    assert 'argument "b" is missing' in said[2]
    assert (
        played.reward,
        played.rows[0].columns["environment"]["bad_tool_calls"],
        played.rows[0].columns["environment"]["num_turns"],
    ) == (0.5, 3.0, 4.0)
    assert rollouts(played)[0].turns[0].tool_calls[0].arguments == {"a": 1, "b": 2}
    assert '"name": "add"' in rollouts(played)[0].prompt


def test_arguments_of_a_tool_may_have_any_name():
    class Archive:
        def look_up(self, name: str, function: str, what: str) -> str:
            """Looks up."""
            return f"{name} {function} {what}"

    tokenizer = chat_tokenizer("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    arguments = '{"name": "a", "function": "b", "what": "c"}'
    call = f'<tool_call>\n{{"name": "look_up", "arguments": {arguments}}}\n</tool_call>'
    options = {"tokenizer": tokenizer, "engine": Reworded(tokenizer, [call, "3"], end), "max_new_tokens": 300}
    played = play_one(Archive, prompt=encoded(tokenizer, {"prompt": "hello"}), **options)
    assert [turn.text for turn in played.rows[0].turns] == [call, "a b c", "3"]


def test_tools_may_be_functions_and_are_fixed_at_the_first_turn():
    class Functions:
        def __init__(self):
            self.tools = {"add": adder([])().add}

    tokenizer = chat_tokenizer("chatml")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1, "b": 2}}\n</tool_call>'
    options = {"tokenizer": tokenizer, "engine": Reworded(tokenizer, [call, "3"], end), "max_new_tokens": 99}
    played = play_one(Functions, prompt=encoded(tokenizer, {"prompt": "hello"}), **options)
    assert [turn.text for turn in played.rows[0].turns] == [call, "3", "3"]

    async def run(task, policy):
        await policy.turn()
        await policy.turn(">", tools=[{"type": "function"}])

    with pytest.raises(EpisodeError, match="first turn"):
        play_one(driven(run))
