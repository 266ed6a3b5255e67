"""Adapts the supported forms of environments to the form that core drives.

- `reset(task)` and `step(reply) -> (observation, reward, done)`. With `state()` and `restore(task, state)`, an episode
  that was interrupted continues from the last recorded state.
- A class whose public methods are tools, with docstrings and type hints, or whose `tools` maps names to functions.
  `reset(**row)` and `get_reward()` are optional.
- `async run(task, policy)`, the form that core drives.

Methods may be plain functions, which run on threads, or coroutines.
"""

from __future__ import annotations

import inspect
import json
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from rlhf_core.types import Message, ToolCall

from .attempt import Caller
from .compaction import Compact, next_turn
from .contents import Content, has_image_parts, text_of
from .contract import Environment, EpisodeTruncated, Messages, Outcome, Policy, Status, Task, Tool
from .environment_shape import tool_methods
from .progress import MAX_STATE_CHARS, RESET, Step
from .tool_functions import ToolFunction

logger = logging.getLogger(__name__)

UseTool = Callable[[ToolCall], Awaitable[Content]]
"""Executes a call of a known tool and returns the result as text, or as text and image parts."""
MAX_OBSERVATION_CHARS = 1_000_000
"""Maximum length of an observation. A longer one is an error of the environment."""


async def new_environment(make: Callable[[], Any], call: Caller) -> Environment:
    """Create the environment of one episode, on a thread since a constructor may be slow."""
    return adapt(await call("its constructor", make), call)


def adapt(environment: Any, call: Caller) -> Environment:
    """Return the environment in the form that core drives."""
    if callable(getattr(environment, "run", None)):
        return environment  # type: ignore[no-any-return]
    if callable(getattr(environment, "step", None)):
        return StepEnvironment(environment, call)
    return ToolEnvironment(environment, call)


@dataclass(frozen=True, slots=True)
class StepEnvironment:
    """Drives an environment with `reset` and `step`, and optionally `close`, `metrics`, `state` and `restore`."""

    environment: Any
    call: Caller

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Call `reset`, then alternate policy turns with `step` until the environment or a limit ends the episode."""
        rewards: dict[int, float] = {}
        try:
            status = await self._play(task, policy, rewards)
        finally:
            await self.call.close(self.environment)
        metrics = getattr(self.environment, "metrics", None)
        return Outcome(turn_rewards=rewards, status=status, metrics=metrics if isinstance(metrics, Mapping) else {})

    async def _play(self, task: Task, policy: Policy, rewards: dict[int, float]) -> Status:
        steps = iter(self.call.progress.steps)
        if (last := next(steps, None)) is not None:
            state = self.call.progress.steps[-1].state
            await self.call("restore", self.environment.restore, task, state)
            observation = last.observation
        else:
            observation = _check_observation(await self.call("reset", self.environment.reset, task), "reset")
            await self._record(RESET, observation)
        while True:
            try:
                reply = await next_turn(policy, observation, (), compact_of(self.environment, self.call))
            except EpisodeTruncated:
                return "truncated"
            if (known := next(steps, None)) is not None:
                observation, rewards[reply.turn], status = known.observation, known.reward, known.status
            else:
                result = await self.call("step", self.environment.step, reply)
                observation, rewards[reply.turn], status = _check_step(result)
                await self._record(reply.turn, observation, rewards[reply.turn], status)
            if status is not None or policy.remaining_turns < 1:
                return status or "truncated"

    async def _record(
        self, turn: int, observation: Messages, reward: float = 0.0, status: Status | None = None
    ) -> None:
        """Record a step with the environment's state, if it has `state` and `restore`.

        If its state cannot be recorded, a resume plays the episode again with the recorded turns.
        """
        record, state_of = self.call.progress.record, getattr(self.environment, "state", None)
        if record is None or not (callable(state_of) and callable(getattr(self.environment, "restore", None))):
            return
        try:
            state = _plain_state(await self.call("state", state_of))
        except Exception as error:  # `state` may have another meaning in the environment
            self.call.progress.record = None
            _warn_once(type(self.environment).__name__, str(error))
            return
        record(Step(turn=turn, observation=observation, reward=reward, status=status, state=state))


class ToolEnvironment:
    """Offers the environment's methods, or the functions in its `tools`, as tools.

    The episode ends with the first turn without calls.
    """

    def __init__(self, environment: Any, call: Caller) -> None:
        self._environment = environment
        self._call = call
        own_tools = getattr(environment, "tools", None)
        functions: Iterable[Callable[..., Any]] = (
            own_tools.values()
            if isinstance(own_tools, Mapping)
            else [getattr(environment, name) for name in tool_methods(type(environment))]
        )
        self._num_invalid = 0
        """Number of calls with invalid arguments."""
        self._tools = {tool.name: tool for tool in map(ToolFunction, functions)}

    async def run(self, task: Task, policy: Policy) -> Outcome:
        """Alternate turns of the policy with the tools it calls."""
        prompt = task.prompt
        row = {**prompt.metadata, "prompt": prompt.messages or prompt.text, "answer": prompt.answer}
        reset = getattr(self._environment, "reset", None)
        messages: Messages = None
        if reset is not None:
            messages = _check_observation(await self._call("reset", reset, **_accepted_keys(reset, row)), "reset")
        schemas = [tool.schema for tool in self._tools.values()]
        compact = compact_of(self._environment, self._call)
        status = await converse(policy, messages, schemas, self._use, compact)
        get_reward = getattr(self._environment, "get_reward", None)
        reward = 0.0 if get_reward is None else _number(await self._call("get_reward", get_reward), "get_reward")
        return Outcome(reward=reward, status=status, bad_tool_calls=self._num_invalid)

    async def _use(self, tool_call: ToolCall) -> Content:
        tool = self._tools[tool_call.name]
        arguments = tool.bind(tool_call)
        if isinstance(arguments, str):
            self._num_invalid += 1
            return f"error: {arguments}"
        result = await self._call(f"tool {tool_call.name}", tool.function, **arguments)
        content = list(result) if has_image_parts(result) else str(result)
        _check_length(text_of(content), f"tool {tool_call.name}")
        return content


async def converse(
    policy: Policy, messages: Messages, tools: Sequence[Tool], use: UseTool, compact: Compact | None = None
) -> Status:
    """Alternate turns of the policy with the tools it calls, until a turn without calls or a limit.

    Args:
        policy: The policy in the branch to continue.
        messages: New messages before the first turn.
        tools: Tools that the policy may call.
        use: Executes a call of one of `tools`. Unreadable calls and calls of unknown tools get an error as the result.
        compact: Shortens the conversation if a whole turn no longer fits. It continues in a new branch. None ends the
            episode at the limit.

    Returns:
        `truncated` at a limit, including a last turn that was cut, else `done`.

    Example:
        In `Environment.run`, with one function as a tool::

            add = ToolFunction(add_numbers)

            async def use(call):
                arguments = add.bind(call)
                return arguments if isinstance(arguments, str) else str(add.function(**arguments))

            status = await converse(policy, None, [add.schema], use)
    """
    names = [tool["function"]["name"] for tool in tools]
    while True:
        try:
            reply = await next_turn(policy, messages, tools, compact)
        except EpisodeTruncated:
            return "truncated"
        if not reply.tool_calls:
            return "done" if reply.finish_reason == "stop" else "truncated"
        messages = [await _result(tool_call, names, use) for tool_call in reply.tool_calls]
        if policy.remaining_turns < 1:
            return "truncated"


async def _result(tool_call: ToolCall, names: Sequence[str], use: UseTool) -> Message:
    content: Content
    if tool_call.error is not None:
        content = f"error: {tool_call.error}"
    elif tool_call.name not in names:
        content = f"error: there is no tool {tool_call.name!r}; there are: {', '.join(names)}"
    else:
        content = await use(tool_call)
    return {"role": "tool", "name": tool_call.name, "content": content}


def compact_of(environment: Any, call: Caller) -> Compact | None:
    """Return a function that calls the environment's `compact`. None if the environment does not define it.

    Args:
        environment: An environment in any form.
        call: Calls it under the episode's deadline.
    """
    function = getattr(environment, "compact", None)
    if not callable(function):
        return None

    async def compact(messages: Messages) -> Messages:
        shorter = _check_observation(await call("compact", function, messages), "compact")
        if not shorter or isinstance(shorter, str) != isinstance(messages, str):
            kind = "text" if isinstance(messages, str) else "chat messages"
            raise TypeError(f"compact returned {shorter!r:.100} for {kind}, not {kind}")
        return shorter

    return compact


def _accepted_keys(function: Callable[..., Any], row: Mapping[str, Any]) -> dict[str, Any]:
    """Return the entries of the record that the function accepts as arguments."""
    parameters = inspect.signature(function).parameters
    if any(each.kind is each.VAR_KEYWORD for each in parameters.values()):
        return dict(row)
    return {key: value for key, value in row.items() if key in parameters}


def _check_step(result: Any) -> tuple[Messages, float, Status | None]:
    if not (isinstance(result, tuple) and len(result) == 3):
        raise TypeError(f"step returned {result!r:.100}, not (observation, reward, done)")
    observation, reward, done = result
    status: Status | None = "truncated" if isinstance(done, str) and done == "truncated" else "done" if done else None
    return _check_observation(observation, "step"), _number(reward, "the reward of step"), status


def _plain_state(value: Any) -> Any:
    try:
        text = json.dumps(value, allow_nan=False)
    except (TypeError, ValueError) as error:
        raise TypeError(f"it returned {value!r:.100}, which is not JSON values: {error}") from None
    if len(text) > MAX_STATE_CHARS:
        raise ValueError(f"it returned {len(text)} characters of JSON, more than {MAX_STATE_CHARS}")
    return json.loads(text)


@lru_cache(maxsize=100)
def _warn_once(environment: str, problem: str) -> None:
    logger.warning("state of %s is not recorded, so a resume plays its episodes again: %s", environment, problem)


def _number(value: Any, name: str) -> float:
    try:
        return float(value)
    except (TypeError, ValueError):
        raise TypeError(f"{name} is {value!r:.100}, not a number") from None


def _check_observation(value: Any, caller: str) -> Messages:
    if value is None:
        return None
    if isinstance(value, str):
        return _check_length(value, caller)
    if isinstance(value, Sequence) and all(isinstance(each, Mapping) and "role" in each for each in value):
        for message in value:
            _check_length(text_of(message.get("content", "")), caller)
        return list(value)
    raise TypeError(f"{caller} returned {value!r:.100}, not text, chat messages or None")


def _check_length(text: str, caller: str) -> str:
    if len(text) > MAX_OBSERVATION_CHARS:
        raise ValueError(f"{caller} returned {len(text)} characters, more than {MAX_OBSERVATION_CHARS}")
    return text
