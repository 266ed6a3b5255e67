"""The slot of a strategy whose optimizer owns the parameters: Gemini's chunks, and the master weights of ZeRO.

Nothing but this optimizer can hold the state of an adapter, so there is one adapter, and it stays in the slot. Its
gradients are those that the strategy accumulates.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from rlhf_strategies import put_state, whole_optimizer_state, whole_weights

from .adapters import ALPHA, MOMENTS, Adapter, Slot, cut


class OwnedSlot(Slot):
    """A slot that is the only place of its adapter's state.

    Until the slot holds an adapter, the adapter has full tensors on the CPU.
    """

    def hold(self, adapter: Adapter | None) -> None:
        """Put an adapter into the slot, instead of the one before it, whose state is lost. Collective.

        Args:
            adapter: the adapter. Does nothing if the slot holds it already.
        """
        if adapter is self._held and adapter is not None:
            return
        if adapter is None or not adapter.weights:
            raise RuntimeError("the state of this adapter is not in the slot any more")
        self._held = None
        put_state(self.strategy, self.trained, adapter.weights, adapter.moments)
        self._set_scale(ALPHA / adapter.spec.rank)
        adapter.weights, adapter.moments = {}, {}
        self._held = adapter

    def take_gradients(self, adapter: Adapter) -> None:
        """Note that the strategy has gradients of an adapter."""
        adapter.has_gradients = True

    def drop(self, adapter: Adapter) -> None:
        """Discard all gradients after an error. The adapter must be restored, since earlier ones are among them.

        Args:
            adapter: the adapter in the slot.
        """
        super().drop(adapter)
        self._held = None

    def step(self, adapter: Adapter, options: Mapping[str, float]) -> float:
        """Make one step of Adam, as `Slot.step`."""
        self.hold(adapter)
        self._set_options(options)
        adapter.has_gradients = False
        norm = self.strategy.step(self.trained)
        adapter.steps += 1
        return norm

    def _own_parts(self, full: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Full tensors in the slot's shapes, in full precision."""
        parts = {}
        for name, parameter in self.parameters.items():
            parts[name] = torch.zeros(parameter.shape)
            parts[name][tuple(slice(size) for size in full[name].shape)] = full[name]
        return parts

    def _contents(self, adapter: Adapter, with_optimizer: bool) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        self.hold(adapter)
        rank = adapter.spec.rank
        weights = whole_weights(self.strategy, self.trained, self.parameters)
        state = whole_optimizer_state(self.strategy, self.trained) if with_optimizer else {}
        moments = {f"{key}:{name}": cut(name, values[key], rank) for name, values in state.items() for key in MOMENTS}
        return {name: cut(name, value, rank) for name, value in weights.items()}, moments
