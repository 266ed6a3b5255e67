"""Adapt callbacks in ColossalChat's style (`on_episode_start(episode)` and others) to hook plugins.

ColossalChat has three interfaces: the callbacks of its trainer (`on_learn_epoch_…`, `on_learn_batch_…`), and, in the
detached pipeline, those of the trainer (`on_epoch_…`, `on_batch_…`, `on_update_…`) and of the maker (`on_loop_…`,
`on_send_…`). The detached trainer's `update` sends weights to the makers, so it maps to `rlhf_sync_…`. Arguments are
passed by position, in ColossalChat's order.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from rlhf_core.hookspecs import Metrics

if TYPE_CHECKING:
    from rlhf_core.types import RolloutGroup

_BOTH = ("fit", "episode", "make_experience")
SEED_METHODS: tuple[str, ...] = tuple(
    f"on_{event}_{edge}"
    for event in (*_BOTH, "epoch", "learn_epoch", "batch", "learn_batch", "update", "loop", "send")
    for edge in ("start", "end")
)


def adapt_callback(plugin: object) -> object:
    """Return a hook plugin that calls the `on_…` methods of a ColossalChat callback.

    Args:
        plugin: Callback or hook plugin. Returned as it is if it has `rlhf_…` hooks, or no `on_…` method either.

    Returns:
        An object to register as a hook plugin.

    Example:
        >>> class Printer:
        ...     def on_episode_start(self, episode):
        ...         print("episode", episode)
        >>> adapt_callback(Printer()).rlhf_episode_start(3)
        episode 3
    """
    if any(name.startswith("rlhf_") for name in dir(plugin)):
        return plugin
    methods = {name: getattr(plugin, name) for name in SEED_METHODS if callable(getattr(plugin, name, None))}
    return SeedCallback(methods) if methods else plugin


def _calls(*names: str) -> Callable[[SeedCallback], None]:
    """Return a hook method for `SeedCallback` that calls the callback's methods `names` in order, without arguments.

    Methods that the callback lacks are skipped.
    """

    def hook(self: SeedCallback) -> None:
        for name in names:
            self._call(name)

    return hook


class SeedCallback:
    """Hook plugin that calls the methods of a ColossalChat callback. End methods are called after an error too."""

    def __init__(self, methods: dict[str, Callable[..., Any]]) -> None:
        self._methods = methods

    def _call(self, name: str, *arguments: Any) -> None:
        method = self._methods.get(name)
        if method is not None:
            method(*arguments)

    rlhf_fit_start = _calls("on_fit_start")
    rlhf_fit_end = _calls("on_fit_end")
    rlhf_batch_start = _calls("on_batch_start", "on_learn_batch_start")
    rlhf_sync_start = _calls("on_update_start")
    rlhf_sync_end = _calls("on_update_end")
    rlhf_maker_loop_start = _calls("on_loop_start")
    rlhf_maker_loop_end = _calls("on_loop_end")
    rlhf_make_experience_start = _calls("on_make_experience_start")
    rlhf_send_start = _calls("on_send_start")
    rlhf_send_end = _calls("on_send_end")

    def rlhf_episode_start(self, episode: int) -> None:
        self._call("on_episode_start", episode)

    def rlhf_episode_end(self, episode: int) -> None:
        self._call("on_episode_end", episode)

    def rlhf_epoch_start(self, epoch: int) -> None:
        self._call("on_epoch_start", epoch)
        self._call("on_learn_epoch_start", epoch)

    def rlhf_epoch_end(self, epoch: int) -> None:
        self._call("on_epoch_end", epoch)
        self._call("on_learn_epoch_end", epoch)

    def rlhf_batch_end(self, metrics: Metrics | None, experience: Any) -> None:
        values = dict(metrics or {})
        self._call("on_batch_end", values, experience)
        learn = self._methods.get("on_learn_batch_end")
        if learn is not None:  # older releases pass the metrics too
            learn(*((values, experience) if _positional_count(learn) > 1 else (experience,)))

    def rlhf_make_experience_end(self, groups: Sequence[RolloutGroup] | None) -> None:
        if "on_make_experience_end" in self._methods:
            self._call("on_make_experience_end", _experience(groups))


def _experience(groups: Sequence[RolloutGroup] | None) -> Any:
    """All new experience as one batch, ColossalChat's argument. None if making it failed."""
    items = [item for group in groups or () for item in group.items]
    if not items:
        return None
    from rlhf_core.batching import collate

    return collate(items)


def _positional_count(method: Callable[..., Any]) -> int:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return sum(parameter.kind in kinds for parameter in inspect.signature(method).parameters.values())
