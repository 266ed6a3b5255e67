"""`gymnasium`: one episode of an environment of that library, in text."""

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
    """Made and reset with the task's seed, which all samples of a prompt share; closed when the episode ends.

    Its calls may come on different threads, and that of `close` while another one hangs.
    """

    def __init__(self, config: GymnasiumConfig, base_folder: Path) -> None:
        """Raises `ConfigError` where the library does not know the environment or its options."""
        self.metrics = {"invalid_actions": 0.0}
        self._config = config
        self._base_folder = base_folder
        self._lock = threading.Lock()
        self._environment = _make(config)
        try:
            self._read = self._reader()
            self._write = self._writer()
        except BaseException:
            self._environment.close()
            raise
        self._shown = ""

    def reset(self, task: Any) -> str:
        """The first observation, after the instructions."""
        with self._lock:
            observation, info = self._environment.reset(seed=task.seed)
            self._shown = self._write(observation, info, self._environment.render)
        return self._config.instructions + self._shown

    def step(self, reply: Any) -> tuple[str, float, bool | str]:
        """Do what a reply says; where it has no action, say so and show the last observation again."""
        action = self._read(reply.text)
        if action is None:
            self.metrics["invalid_actions"] += 1
            told = f"There is no action in this reply.{self._known()}\n{self._shown}"
            return told, self._config.invalid_reward, self._config.invalid_action == "end"
        with self._lock:
            observation, reward, terminated, truncated, info = self._environment.step(action)
            if not (terminated or truncated):
                self._shown = self._write(observation, info, self._environment.render)
        return self._shown, float(reward), bool(terminated) or (bool(truncated) and "truncated")

    def close(self) -> None:
        """Let go of what the environment holds."""
        with self._lock:
            self._environment.close()

    def _known(self) -> str:
        space = self._environment.action_space
        if self._config.actions:
            return f" Actions: {', '.join(self._config.actions)}."
        if self._config.read_action is not None:
            return ""
        return f" Actions: {int(space.start)} to {int(space.start + space.n) - 1}."

    def _reader(self) -> ReadAction:
        from gymnasium.spaces import Discrete

        if self._config.read_action is not None:
            return function_from_file(self._config.read_action, self._base_folder, "function")
        space: Any = self._environment.action_space
        if not isinstance(space, Discrete):
            raise ConfigError(
                f"{self._config.env_id} has actions of {space!s:.100}, which are not numbered",
                where="environment.read_action",
                hint="name a function that makes one of a reply's text: read_action: FILE.py:FUNCTION",
            )
        first, count = int(space.start), int(space.n)
        return named(self._config.actions, first, count) if self._config.actions else numbered(first, count)

    def _writer(self) -> WriteObservation:
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
    except Exception as error:  # of the library, or of the environment, about the options
        raise ConfigError(
            f"gymnasium.make fails: {type(error).__name__}: {error}",
            where="environment.env_id and environment.kwargs",
            hint="kwargs are the options of the environment itself; some need more of Gymnasium to be installed",
        ) from error


def build(config: GymnasiumConfig, context: TaskContext) -> Game:
    """An environment for one episode."""
    return Game(config, context.base_folder)
