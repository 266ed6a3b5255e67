"""The state that hook plugins and rewards keep in checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ..hooks.relay import HookRelay
from ..protocols import RewardStates
from ..strategy import Strategy
from ..util.kept_state import load_state_of, state_of


class PluginState:
    """The state of rank 0's hook plugins, and of the rewards wherever they are. Its methods are collective."""

    def __init__(self, hooks: HookRelay, rewards: RewardStates | None, strategy: Strategy) -> None:
        self._hooks = hooks
        self._rewards = rewards
        self._strategy = strategy

    def state_dict(self) -> dict[str, Any]:
        """States by name; what is empty is left out. A hook's error on rank 0 is raised on all ranks."""
        found: dict[str, Any] = {}
        self._strategy.run_on_main(lambda: found.update(hooks=state_of(self._hooks.plugins)))
        found["rewards"] = [] if self._rewards is None else self._rewards.states()
        return {name: each for name, each in found.items() if each}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Give them back what they kept."""
        self._strategy.run_on_main(lambda: load_state_of(self._hooks.plugins, state.get("hooks", {})))
        if self._rewards is not None and state.get("rewards"):
            self._rewards.load_states(state["rewards"])
