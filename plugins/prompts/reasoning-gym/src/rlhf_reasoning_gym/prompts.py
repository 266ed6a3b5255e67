"""The prompt source `reasoning-gym`: problems of one task, generated when the run starts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from typing import Any

from rlhf_containment.processes import ProcessFault, ProcessTimeout, RequestProcess
from rlhf_core.components import TaskContext
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.protocols import PromptSource
from rlhf_core.util import suggestion

from .config import ReasoningGymPrompts

KEY = "reasoning_gym"
"""Record key of the task, its options, and the problem in the verifier's form, all plain JSON."""
_SECONDS_PER_PROBLEM = 600.0
"""Deadline per problem. The slowest task of the library takes about ten seconds."""


class ReasoningGymSource:
    """All problems of one order, stored in memory as JSON text, since generating one may take seconds."""

    def __init__(self, config: ReasoningGymPrompts, *, chat: bool) -> None:
        """Generate the problems. Raise `ConfigError` if the task is unknown or an option is wrong."""
        self._name = config.task
        self._options = dict(config.task_options)
        self._chat = chat
        order = {"task": config.task, "options": self._options, "seed": config.seed, "size": config.size}
        self._problems = list(_generate(order))
        if config.unique:
            first: dict[str, str] = {}
            for problem in self._problems:
                first.setdefault(json.loads(problem)["question"], problem)
            self._problems = list(first.values())

    def __len__(self) -> int:
        return len(self._problems)

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        problem = json.loads(self._problems[index])
        question = problem["question"]
        return {
            "prompt": [{"role": "user", "content": question}] if self._chat else question,
            "answer": problem.get("answer"),
            KEY: {"task": self._name, "task_options": self._options, "entry": problem},
        }

    def describe(self, index: int) -> str:
        return f"reasoning-gym {self._name} problem {index}"


def _generate(order: Mapping[str, Any]) -> Iterator[str]:
    process = RequestProcess("rlhf_reasoning_gym.generate", environment={"PYTHONHASHSEED": "0"})
    count = 0
    try:
        reply = json.loads(process.start(json.dumps(order).encode()))
        if "error" in reply:
            raise _order_error(order["task"], reply["error"], reply["known"])
        for count in range(order["size"]):
            yield process.ask(json.dumps(count).encode(), _SECONDS_PER_PROBLEM).decode()
    except ProcessTimeout as fault:
        raise PluginError(
            f"a problem of {order['task']}: its process {fault}", hint="make the task easier with prompts.task_options"
        ) from fault
    except ProcessFault as fault:
        raise PluginError(
            f"the generator of {order['task']} ended after {count} of {order['size']} problems (its output is above)",
            hint="try another prompts.seed or prompts.task_options, or report it to the authors of reasoning-gym",
        ) from fault
    finally:
        process.end()


def _order_error(task: str, error: str, known: list[str]) -> ConfigError:
    if known:
        return ConfigError(f"{error}{suggestion(task, known)}", where="prompts.task", hint=f"tasks: {', '.join(known)}")
    return ConfigError(f"{task} rejects its options: {error}", where="prompts.task_options")


def build(config: ReasoningGymPrompts, context: TaskContext) -> PromptSource:
    """Build the prompt source `reasoning-gym`."""
    chat = context.has_chat_template if config.chat is None else config.chat
    return ReasoningGymSource(config, chat=chat)
