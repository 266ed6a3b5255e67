"""Saves and restores a trainer process's part of a run's checkpoints, including the state of plugins."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from ..hooks.relay import HookRelay
from ..protocols import ExperienceChannel
from ..rewards.scorer import RewardCombiner
from ..runfolder.checkpoint_state import (
    RunState,
    load_channel_state,
    load_plugin_state,
    load_run_state,
    read_run_state,
    save_run_state,
)
from ..runfolder.checkpoints import CheckpointStore
from ..util.kept_state import load_state_of, state_of
from ..wiring.parts import TrainerParts


class CheckpointSaver:
    """Saves and restores models, optimizers, schedules, algorithm, reward normalizer, channel and plugins. Collective.

    The state of plugins is that of rank 0's hooks, and of rewards and players in all processes.
    """

    def __init__(
        self,
        run: TrainerParts,
        store: CheckpointStore,
        combiner: RewardCombiner,
        *,
        hooks: HookRelay,
        makers: ExperienceChannel | None,
    ) -> None:
        self.store = store
        self._config = run.resolved.run.checkpoint
        self._best: tuple[int, float] | None = None
        self._strategy = run.strategy
        self._trained = run.trained
        self._algorithm = run.inputs.algorithm
        self._combiner = combiner
        self._hooks = hooks
        self._makers = makers
        self._channel = makers if run.resolved.rolls_out else None
        """Channel whose groups are saved. None if the run does not train on sampled answers."""

    def improves(self, metrics: Mapping[str, float]) -> float | None:
        """Return the metric `checkpoint.best` if it is the best so far, else None. Rank 0's value is used."""
        if self._config.best is None:
            return None
        value: float | None = self._strategy.broadcast_object(metrics.get(self._config.best))
        if value is None or not math.isfinite(value):
            return None
        sign = 1.0 if self._config.best_is == "highest" else -1.0
        return value if self._best is None or sign * value > sign * self._best[1] else None

    def save(self, state: RunState, best_value: float | None = None) -> None:
        """Write checkpoint `state.step` atomically. `best_value`: the result of `improves`."""
        best = self._best if best_value is None else (state.step, best_value)
        if best is not None:
            state = replace(state, best_step=best[0], best_value=best[1])
        channel = None if self._channel is None else self._channel.state_dict()
        plugins = self.plugin_state()
        with self.store.writing(state.step, self._strategy, best=state.best_step) as partial:
            save_run_state(partial, state, channel, self._trained, self._strategy, plugins)
        self._best = best

    def load(self, path: Path) -> RunState:
        """Restore everything and remove later checkpoints. Collective."""
        state = load_run_state(path, self._trained, self._strategy)
        self._algorithm.load_state_dict(state.algorithm)
        self._combiner.load_state_dict(state.combiner)
        if self._channel is not None and (channel_state := load_channel_state(path)) is not None:
            self._channel.load_state_dict(channel_state)
        self.load_plugin_state(load_plugin_state(path))
        self._best = self._strategy.broadcast_object(self._find_best(state) if self._strategy.is_main else None)
        if self._strategy.is_main:
            self.store.discard_after(state.step, best=None if self._best is None else self._best[0])
        return state

    def plugin_state(self) -> dict[str, Any]:
        """Return states by name, without empty ones. A hook's error on rank 0 is raised on all ranks."""
        states: dict[str, Any] = {}
        self._strategy.run_on_main(lambda: states.update(hooks=state_of(self._hooks.plugins)))
        states["makers"] = [] if self._makers is None else self._makers.states()
        return {name: each for name, each in states.items() if each}

    def load_plugin_state(self, state: Mapping[str, Any]) -> None:
        """Restore the states of plugins."""
        self._strategy.run_on_main(lambda: load_state_of(self._hooks.plugins, state.get("hooks", {})))
        makers = state.get("makers") or [{"rewards": each} for each in state.get("rewards", ())]  # of older checkpoints
        if self._makers is not None and makers:
            self._makers.load_states(makers)

    def _find_best(self, state: RunState) -> tuple[int, float] | None:
        """Step and value of the best checkpoint up to `state` that is still complete.

        The one that `state` names no longer exists if a better one replaced it, even if that one was damaged later.
        """
        if state.best_step is None:
            return None
        for path in self.store.whole(up_to=state.step):
            saved = read_run_state(path)
            if saved.best_step == saved.step and saved.best_value is not None:
                return saved.step, saved.best_value
        return None

    def last_good(self, episode: int) -> Path | None:
        """Return the complete checkpoint to roll back to after a problem in `episode`, or None if there are none.

        The checkpoint written directly before `episode` has the weights that sampled the bad answers, so the newest
        earlier one is chosen, or the oldest if there are no earlier ones.
        """
        self.store.settle(self._strategy)
        chosen: Path | None = None
        if self._strategy.is_main:
            for chosen in self.store.whole():
                if read_run_state(chosen).next_episode < episode:
                    break
        return cast("Path | None", self._strategy.broadcast_object(chosen))
