"""Saves and restores a trainer process's part of a run's checkpoints, with the state that plugins keep."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

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
    """Saves and restores models, optimizers, schedules, algorithm, reward normaliser, channel, and plugins. Collective.

    Of plugins: the state of rank 0's hooks, and of rewards and players wherever they are.
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
        self._store = store
        self._config = run.resolved.run.checkpoint
        self._best: tuple[int, float] | None = None
        self._strategy = run.strategy
        self._trained = run.trained
        self._algorithm = run.inputs.algorithm
        self._combiner = combiner
        self._hooks = hooks
        self._makers = makers
        self._channel = makers if run.resolved.rolls_out else None
        """Where there are groups to train on, which are saved too."""

    def improves(self, metrics: Mapping[str, float]) -> float | None:
        """The value of `checkpoint.best` if it is the best so far, else None; rank 0's values decide."""
        if self._config.best is None:
            return None
        value: float | None = self._strategy.broadcast_object(metrics.get(self._config.best))
        if value is None or not math.isfinite(value):
            return None
        sign = 1.0 if self._config.best_is == "highest" else -1.0
        return value if self._best is None or sign * value > sign * self._best[1] else None

    def save(self, state: RunState, best_value: float | None = None) -> None:
        """Write checkpoint `state.step` atomically. `best_value`: its metric, if it is the best so far."""
        step = state.step
        best = self._best if best_value is None else (step, best_value)
        if best is not None:
            state = replace(state, best_step=best[0], best_value=best[1])
        channel = None if self._channel is None else self._channel.state_dict()
        plugins = self.plugin_state()
        with self._store.writing(step, self._strategy, best=state.best_step) as partial:
            save_run_state(partial, state, channel, self._trained, self._strategy, plugins)
        self._best = best

    def load(self, path: Path) -> RunState:
        """Restore everything; removes later checkpoints. Collective."""
        state = load_run_state(path, self._trained, self._strategy)
        self._algorithm.load_state_dict(state.algorithm)
        self._combiner.load_state_dict(state.combiner)
        channel_state = load_channel_state(path)
        if self._channel is not None and channel_state is not None:
            self._channel.load_state_dict(channel_state)
        self.load_plugin_state(load_plugin_state(path))
        best = self._best_left(state) if self._strategy.is_main else None
        self._best = self._strategy.broadcast_object(best)
        if self._strategy.is_main:
            self._store.discard_after(state.step, best=None if best is None else best[0])
        return state

    def plugin_state(self) -> dict[str, Any]:
        """States by name; what is empty is left out. A hook's error on rank 0 is raised on all ranks."""
        found: dict[str, Any] = {}
        self._strategy.run_on_main(lambda: found.update(hooks=state_of(self._hooks.plugins)))
        found["makers"] = [] if self._makers is None else self._makers.states()
        return {name: each for name, each in found.items() if each}

    def load_plugin_state(self, state: Mapping[str, Any]) -> None:
        """Give plugins back what they kept."""
        self._strategy.run_on_main(lambda: load_state_of(self._hooks.plugins, state.get("hooks", {})))
        makers = state.get("makers") or [{"rewards": each} for each in state.get("rewards", ())]  # of older checkpoints
        if self._makers is not None and makers:
            self._makers.load_states(makers)

    def _best_left(self, state: RunState) -> tuple[int, float] | None:
        """Step and value of the best checkpoint up to `state` that is still complete.

        The one that `state` names is gone if a better one replaced it and was then damaged itself.
        """
        if state.best_step is None:
            return None
        for path in self._store.whole(up_to=state.step):
            found = read_run_state(path)
            if found.best_step == found.step and found.best_value is not None:
                return found.step, found.best_value
        return None

    def last_good(self, episode: int) -> Path | None:
        """The checkpoint to roll back to after a problem in `episode`: a complete one from before it began.

        The one written just before it holds the weights that produced the bad samples, so the newest earlier one is
        taken, or the oldest if none is earlier. None where there is no checkpoint.
        """
        chosen: Path | None = None
        if self._strategy.is_main:
            for chosen in self._store.whole():
                if read_run_state(chosen).next_episode < episode:
                    break
        agreed: Path | None = self._strategy.broadcast_object(chosen)
        return agreed
