"""`gymnasium`: one episode of a Gymnasium environment, in text."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

from rlhf_core.components import TaskContext
from rlhf_core.errors import ConfigError
from rlhf_core.plugins import function_from_file

from .actions import ReadAction, named, numbered
from .config import GymnasiumConfig
from .text import RENDER, WriteObservation, template


class Game:
    """A Gymnasium environment that is reset with the task's seed, which all samples of a prompt share.

    Methods may be called on different threads, and `close` may be called while another method hangs.
    """

    def __init__(self, config: GymnasiumConfig, base_folder: Path) -> None:
        """Create the environment. Raises `ConfigError` if the library does not accept its id or options."""
        self.metrics = {"invalid_actions": 0.0}
        self._config = config
        self._base_folder = base_folder
        self._lock = threading.Lock()
        self._environment = _make(config)
        try:
            self._read = self._make_reader()
            self._write = self._make_writer()
        except BaseException:
            self._environment.close()
            raise
        self._observation = ""

    def reset(self, task: Any) -> str:
        """Return the instructions followed by the first observation."""
        with self._lock:
            observation, info = self._environment.reset(seed=task.seed)
            self._observation = self._write(observation, info, self._environment.render)
        return self._config.instructions + self._observation

    def step(self, reply: Any) -> tuple[str, float, bool | str]:
        """Execute the action of a reply. Without an action, return an error and the last observation."""
        action = self._read(reply.text)
        if action is None:
            self.metrics["invalid_actions"] += 1
            text = f"There is no action in this reply.{self._list_actions()}\n{self._observation}"
            return text, self._config.invalid_reward, self._config.invalid_action == "end"
        with self._lock:
            observation, reward, terminated, truncated, info = self._environment.step(action)
            if not (terminated or truncated):
                self._observation = self._write(observation, info, self._environment.render)
        return self._observation, float(reward), bool(terminated) or (bool(truncated) and "truncated")

    def close(self) -> None:
        """Close the environment."""
        with self._lock:
            self._environment.close()

    def _list_actions(self) -> str:
        space = self._environment.action_space
        if self._config.actions:
            return f" Actions: {', '.join(self._config.actions)}."
        if self._config.read_action is not None:
            return ""
        return f" Actions: {int(space.start)} to {int(space.start + space.n) - 1}."

    def _make_reader(self) -> ReadAction:
        from gymnasium.spaces import Discrete

        if self._config.read_action is not None:
            return function_from_file(self._config.read_action, self._base_folder, "function")
        space: Any = self._environment.action_space
        if not isinstance(space, Discrete):
            raise ConfigError(
                f"{self._config.env_id} has actions of {space!s:.100}, which are not numbered",
                where="environment.read_action",
                hint="set a function that parses a reply: read_action: FILE.py:FUNCTION",
            )
        first, count = int(space.start), int(space.n)
        return named(self._config.actions, first, count) if self._config.actions else numbered(first, count)

    def _make_writer(self) -> WriteObservation:
        if ".py:" not in self._config.observation:
            return template(self._config.observation)
        function = function_from_file(self._config.observation, self._base_folder, "function")
        return lambda observation, info, render: str(function(observation, info))


def _make(config: GymnasiumConfig) -> Any:
    import gymnasium

    options = dict(config.kwargs)
    if RENDER in config.observation:
        options.setdefault("render_mode", "ansi")
    try:
        return gymnasium.make(config.env_id, **options)
    except gymnasium.error.UnregisteredEnv as error:
        raise ConfigError(
            f"{error}", where="environment.env_id", hint="gymnasium.pprint_registry() lists all"
        ) from error
    except Exception as error:  # an error of the library or the environment about its options
        raise ConfigError(
            f"gymnasium.make failed: {type(error).__name__}: {error}",
            where="environment.env_id and environment.kwargs",
            hint="kwargs are arguments of the environment. Some environments need more of Gymnasium installed",
        ) from error


def build(config: GymnasiumConfig, context: TaskContext) -> Game:
    """Build the environment of one episode."""
    return Game(config, context.base_folder)
