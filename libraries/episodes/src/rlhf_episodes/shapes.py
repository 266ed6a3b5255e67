"""Environments as people write them, brought into the form that core drives.

- `reset(task)` and `step(reply) -> (observation, reward, done)`;
- a class whose methods are tools: `reset(**row)`, public methods with docstrings and type hints, optionally
  `get_reward()`; or whose `tools` is a mapping of functions by name;
- `async run(task, policy)`, which is that form already.

Methods may be plain functions, which run on threads, or coroutines.
"""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlhf_core.types import Message, ToolCall

from .attempt import Caller
from .contract import Environment, EpisodeTruncated, Messages, Outcome, Policy, Status, Task, Tool
from .environment_shape import tool_methods
from .tool_functions import ToolFunction

UseTool = Callable[[ToolCall], Awaitable[str]]
"""Makes a call of a tool that there is; what it answers."""
MAX_OBSERVATION_CHARS = 1_000_000
"""A longer observation is an error of its environment."""


async def new_environment(make: Callable[[], Any], call: Caller) -> Environment:
    """An environment of its own for one episode, made on a thread: a constructor may take its time, too."""
    return adapt(await call("its constructor", make), call)


def adapt(environment: Any, call: Caller) -> Environment:
    """The environment in the form that core drives."""
    if callable(getattr(environment, "run", None)):
        return environment  # type: ignore[no-any-return]
    if callable(getattr(environment, "step", None)):
        return Stepwise(environment, call)
    return WithTools(environment, call)


@dataclass(frozen=True, slots=True)
class Stepwise:
    """`reset` and `step`, and `close` and `metrics` where there are some."""

    environment: Any
    call: Caller

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Reset, then a turn of the policy and a step, until the environment or a bound ends it."""
        rewards: dict[int, float] = {}
        try:
            status = await self._play(task, policy, rewards)
        finally:
            await self.call.close(self.environment)
        metrics = getattr(self.environment, "metrics", None)
        return Outcome(turn_rewards=rewards, status=status, metrics=metrics if isinstance(metrics, Mapping) else {})

    async def _play(self, task: Task, policy: Policy, rewards: dict[int, float]) -> Status:
        observation = _observation(await self.call("reset", self.environment.reset, task), "reset")
        while True:
            try:
                reply = await policy.turn(observation)
            except EpisodeTruncated:
                return "truncated"
            observation, rewards[reply.turn], status = _step(await self.call("step", self.environment.step, reply))
            if status is not None or policy.remaining_turns < 1:
                return status or "truncated"


class WithTools:
    """Methods, or the functions in `tools`, are the policy's tools; the episode ends when it calls none."""

    def __init__(self, environment: Any, call: Caller) -> None:
        self._environment = environment
        self._call = call
        given = getattr(environment, "tools", None)
        functions: Iterable[Callable[..., Any]] = (
            given.values()
            if isinstance(given, Mapping)
            else [getattr(environment, name) for name in tool_methods(type(environment))]
        )
        self._num_unbound = 0
        """Calls whose arguments were wrong."""
        self._tools = {tool.name: tool for tool in map(ToolFunction, functions)}

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Turns of the policy, each followed by the tools it calls."""
        prompt = task.prompt
        row = {**prompt.metadata, "prompt": prompt.messages or prompt.text, "answer": prompt.answer}
        reset = getattr(self._environment, "reset", None)
        messages: Messages = None
        if reset is not None:
            messages = _observation(await self._call("reset", reset, **_accepted(reset, row)), "reset")
        schemas = [tool.schema for tool in self._tools.values()]
        status = await converse(policy, messages, schemas, self._use)
        get_reward = getattr(self._environment, "get_reward", None)
        reward = 0.0 if get_reward is None else _number(await self._call("get_reward", get_reward), "get_reward")
        return Outcome(reward=reward, status=status, bad_tool_calls=self._num_unbound)

    async def _use(self, tool_call: ToolCall) -> str:
        tool = self._tools[tool_call.name]
        arguments = tool.bind(tool_call)
        if isinstance(arguments, str):
            self._num_unbound += 1
            return f"error: {arguments}"
        found = await self._call(f"tool {tool_call.name}", tool.function, **arguments)
        return _bounded(found if isinstance(found, str) else str(found), f"tool {tool_call.name}")


async def converse(policy: Policy, messages: Messages, tools: Sequence[Tool], use: UseTool) -> Status:
    """Turns of the policy, each followed by the tools it calls, until it calls none or a bound ends them.

    messages: what is new before the first turn. use: makes a call of one of `tools`; a call that could not be read, or
    of another tool, is answered without it.
    """
    names = [tool["function"]["name"] for tool in tools]
    while True:
        try:
            reply = await policy.turn(messages, tools)
        except EpisodeTruncated:
            return "truncated"
        if not reply.tool_calls:
            return "done" if reply.finish_reason == "stop" else "truncated"
        messages = [await _result(tool_call, names, use) for tool_call in reply.tool_calls]
        if policy.remaining_turns < 1:
            return "truncated"


async def _result(tool_call: ToolCall, names: Sequence[str], use: UseTool) -> Message:
    if tool_call.error is not None:
        content = f"error: {tool_call.error}"
    elif tool_call.name not in names:
        content = f"error: there is no tool {tool_call.name!r}; there are: {', '.join(names)}"
    else:
        content = await use(tool_call)
    return {"role": "tool", "name": tool_call.name, "content": content}


def _accepted(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """The keys of the record that the function takes."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(row)
    return {key: value for key, value in row.items() if key in parameters}


def _step(found: Any) -> tuple[Messages, float, Status | None]:
    if not (isinstance(found, tuple) and len(found) == 3):
        raise TypeError(f"step gave {found!r:.100}, not (observation, reward, done)")
    observation, reward, done = found
    status: Status | None = "truncated" if isinstance(done, str) and done == "truncated" else "done" if done else None
    return _observation(observation, "step"), _number(reward, "the reward of step"), status


def _number(value: Any, what: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{what} is {value!r:.100}, not a number") from None


def _observation(found: Any, what: str) -> Messages:
    if found is None:
        return None
    if isinstance(found, str):
        return _bounded(found, what)
    if isinstance(found, Sequence) and all(isinstance(each, Mapping) and "role" in each for each in found):
        for message in found:
            _bounded(str(message.get("content", "")), what)
        return list(found)
    raise TypeError(f"{what} gave {found!r:.100}, neither text nor chat messages nor None")


def _bounded(text: str, what: str) -> str:
    if len(text) > MAX_OBSERVATION_CHARS:
        raise ValueError(f"{what} gave {len(text)} characters, more than {MAX_OBSERVATION_CHARS}")
    return text
