"""One environment of the library, from `make` to `close`; every method is called on one thread."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rlhf_core.errors import ConfigError
from rlhf_core.plugins import function_of_file

from .actions import ReadAction, named, numbered
from .config import GymnasiumConfig
from .text import RENDER, WriteObservation, template


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of a reply."""

    text: str
    """The next observation; what was wrong and the last one, where the reply had no action."""
    reward: float
    ended: Literal["done", "truncated"] | None = None
    is_valid: bool = True


class Game:
    """Raises `ConfigError` where the library does not know the environment or its options."""

    def __init__(self, config: GymnasiumConfig, base_folder: Path) -> None:
        self._config = config
        self._base_folder = base_folder
        self._environment = _make(config)
        try:
            self._read = self._reader()
            self._write = self._writer()
        except BaseException:
            self._environment.close()
            raise
        self._shown = ""

    def begin(self, seed: int) -> str:
        """The first observation, after the instructions."""
        observation, info = self._environment.reset(seed=seed)
        self._shown = self._write(observation, info, self._environment.render)
        return self._config.instructions + self._shown

    def step(self, text: str) -> Step:
        """Do what a reply says."""
        action = self._read(text)
        if action is None:
            ends = self._config.invalid_action == "end"
            told = f"There is no action in this reply.{self._known()}\n{self._shown}"
            return Step(told, self._config.invalid_reward, "done" if ends else None, is_valid=False)
        observation, reward, terminated, truncated, info = self._environment.step(action)
        ended: Literal["done", "truncated"] | None = "done" if terminated else "truncated" if truncated else None
        if ended is None:
            self._shown = self._write(observation, info, self._environment.render)
        return Step(self._shown, float(reward), ended)

    def close(self) -> None:
        """Let go of what the environment holds."""
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
            return function_of_file(self._config.read_action, self._base_folder, "function")
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
        function = function_of_file(self._config.observation, self._base_folder, "function")
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
