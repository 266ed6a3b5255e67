"""Calls the hooks of a run: registration, spans that always close, and errors that name the plugin.

A `HookRelay` is made for one run and passed in; there is no global plugin manager. Which hooks there are, their
arguments and their order are pluggy's; the relay calls them, one after the other. A hook's exception becomes a
`HookError` naming plugin, distribution and hook; an `RlhfError` raised by a hook keeps its type, since a guard stops a
run that way.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pluggy

from ..config.resolve import check_sections_kept
from ..errors import HookError, PluginError, RlhfError
from ..hookspecs import PREFIX, PROJECT, SPECS, Action, Part
from ..protocols import Logger
from ..util.did_you_mean import closest
from ..util.error_text import error_text
from .logger_hook import LoggerHook

logger = logging.getLogger("rlhf")

_END = "_end"
_TRANSFORM = "transform_config"
_DECIDE = "decide"
_DECIDED_BEFORE = ("rlhf_verdict", "rlhf_episode_verdict")
"""Hooks of an earlier version that decided about a run."""


class Span:
    """A block before an end hook; `set` adds arguments that only the end hook gets."""

    __slots__ = ("results",)

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def set(self, name: str, value: Any) -> None:
        """Give the end hook its argument `name` (`metrics`, `groups`, `summary`)."""
        self.results[name] = value


class _Registered(NamedTuple):
    """A registered plugin."""

    plugin: object
    label: str
    """How errors call it."""
    is_installed: bool
    """Whether it was installed with a distribution, not given as an object."""


class _Manager(pluggy.PluginManager):
    """Takes unmarked functions by their names, too, and no wrappers."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        marks = super().parse_hookimpl_opts(plugin, name)
        if marks is not None and (marks["wrapper"] or marks["hookwrapper"]):
            told = f"{name} is a wrapper, which is not called: write {PREFIX}…_start and {PREFIX}…_end"
            raise pluggy.PluginValidationError(plugin, told)
        is_named = marks is None and name.startswith(PREFIX) and _is_function(getattr(plugin, name, None))
        return {} if is_named else marks

    def has_hook(self, plugin: object) -> bool:
        return any(self.parse_hookimpl_opts(plugin, name) is not None for name in dir(plugin))


class HookRelay:
    """The hooks of one run."""

    def __init__(self) -> None:
        self._manager = _Manager(PROJECT)
        for spec in SPECS.values():
            self._manager.add_hookspecs(spec)
        self._callers: dict[str, pluggy.HookCaller] = {
            event: getattr(self._manager.hook, PREFIX + event) for part in SPECS for event in events_of(part)
        }
        self._argument_names = {event: caller.spec.argnames for event, caller in self._callers.items() if caller.spec}
        self._registered: dict[str, _Registered] = {}
        self._events = self.events
        self._one_at_a_time = threading.RLock()  # a process may have events on several threads

    @property
    def events(self) -> frozenset[str]:
        """Every event's name, without the prefix."""
        return frozenset(self._callers)

    @property
    def plugins(self) -> dict[str, object]:
        """Name -> registered plugin, in order of registration."""
        return {name: each.plugin for name, each in self._registered.items()}

    def limit_to(self, part: Part) -> None:
        """Call from now on the hooks of one part of the run only: that of this process."""
        self._events = frozenset(events_of(part))

    def register(self, plugin: object, *, name: str | None = None, distribution: str | None = None) -> str:
        """Add a plugin: an object or module with `rlhf_…` hooks, a class of one, or a logger.

        `name` and `distribution` ("package 1.2") appear in errors. Returns the name.

        Raises:
            PluginError: it has no hook, an unknown hook or argument, or its name is taken.
        """
        shown = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        who = f"hook plugin {shown!r}" + (f" ({distribution})" if distribution else "")
        try:
            instance = plugin() if inspect.isclass(plugin) else plugin
        except Exception as error:
            hint = "register an instance instead"
            raise PluginError(f"{type(error).__name__}: {error}", where=who, hint=hint) from error
        unique = shown if name is not None or shown not in self._registered else f"{shown}-{id(instance):x}"
        if unique in self._registered:
            raise PluginError(f"the name {unique} is taken", where=who, hint="give each hook plugin its own name")
        try:
            has_hook = self._manager.has_hook(instance)
            if not has_hook and not isinstance(instance, Logger):
                hint = f"name a function {PREFIX}episode_end, say; rlhf_core.hookspecs lists them"
                raise PluginError("it has no hook", where=who, hint=hint)
            self._manager.register(instance if has_hook else LoggerHook(instance), unique)  # type: ignore[arg-type]
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.has_plugin(unique):
                self._manager.unregister(name=unique)
            raise PluginError(" ".join(str(error).split()), where=who, hint=self._hint(instance)) from error
        self._registered[unique] = _Registered(instance, who, distribution is not None)
        return unique

    def of_this_process(self) -> HookRelay:
        """A relay of only those plugins that were given as objects, not installed with a distribution.

        A transport whose loop runs elsewhere loads the installed ones there, and replays events for these here.
        """
        relay = HookRelay()
        for name, each in self._registered.items():
            if not each.is_installed:
                relay.register(each.plugin, name=name)
        return relay

    def listens(self, event: str) -> bool:
        """Whether any hook receives the event; lets callers skip work needed only for it."""
        return bool(self._hooks_of(event))

    def fire(self, event: str, **arguments: Any) -> list[Any]:
        """Call the hooks of a single event, all arguments by keyword. Returns the results that are not None.

        Every listener of an end is called even when another raises. The first of their errors is raised then, unless
        the event has an `error`, which takes precedence; the others are logged.
        """
        if event not in self._callers:
            raise KeyError(f"no hook {PREFIX}{event}; see rlhf_core.hookspecs")
        if not self.listens(event):
            return []
        complete = self._complete(event, arguments)
        answers: list[Any] = []
        failures: list[RlhfError] = []
        with self._one_at_a_time:
            for hook in self._hooks_of(event):
                try:
                    answers.append(self._answer(event, hook, complete))
                except RlhfError as failure:
                    if not event.endswith(_END):
                        raise
                    failures.append(failure)
        has_error = complete.get("error") is not None
        for each in failures if has_error else failures[1:]:
            logger.error("%s", each, exc_info=each)
        if failures and not has_error:
            raise failures[0]
        return [answer for answer in answers if answer is not None]

    @contextmanager
    def span(self, event: str, **arguments: Any) -> Iterator[Span]:
        """Fire `<event>_start` (if there is one), run the block, fire `<event>_end`, whatever happened.

        The end hook gets the same arguments, the values passed to `Span.set`, and `error`.
        """
        span = Span()
        error: BaseException | None = None
        try:
            if f"{event}_start" in self._callers:
                self.fire(f"{event}_start", **arguments)
            yield span
        except BaseException as caught:
            error = caught
            raise
        finally:
            self.fire(f"{event}{_END}", **{**arguments, **span.results, "error": error})

    def transform_config(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Let each plugin change the run file in turn, in pluggy's order; each sees the changes of those before it."""
        changed = dict(config)
        for hook in self._hooks_of(_TRANSFORM):
            before = tuple(changed)
            answer = self._answer(_TRANSFORM, hook, {"config": changed})
            changed = changed if answer is None else dict(answer)
            check_sections_kept(before, changed, self._label(hook))
        return changed

    def _hooks_of(self, event: str) -> list[pluggy.HookImpl]:
        """In the order in which they are called."""
        return self._callers[event].get_hookimpls()[::-1] if event in self._events else []

    def _label(self, hook: pluggy.HookImpl) -> str:
        return self._registered[hook.plugin_name].label

    def _answer(self, event: str, hook: pluggy.HookImpl, arguments: Mapping[str, Any]) -> Any:
        """What a hook returns. Raises `HookError`, which names it, for an `Exception` that is no `RlhfError`."""
        name, who = PREFIX + event, self._label(hook)
        try:
            answer: Any = hook.function(*(arguments[each] for each in hook.argnames))
        except RlhfError:
            raise
        except Exception as error:
            raise HookError(f"{name} raised {error_text(error)}", where=who) from error
        kind, expected = {_TRANSFORM: (Mapping, "a mapping"), _DECIDE: (Action, "an Action")}.get(event, (object, ""))
        parts = answer if event == _DECIDE and isinstance(answer, Sequence) else [answer]
        wrong = [] if answer is None else [part for part in parts if not isinstance(part, kind)]
        if wrong:
            raise HookError(f"{name} returned {type(wrong[0]).__name__}, not {expected}", where=who)
        return answer

    def _complete(self, event: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Exactly the arguments of the spec; those that only the end hook gets default to None."""
        names = self._argument_names[event]
        unknown = set(arguments) - set(names)
        missing = set() if event.endswith(_END) else set(names) - set(arguments)
        if unknown or missing:
            raise TypeError(f"{PREFIX}{event} takes {names}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        return {name: arguments.get(name) for name in names}

    def _hint(self, plugin: object) -> str:
        known = [PREFIX + event for event in self._callers]
        wrong = [name for name in dir(plugin) if name.startswith(PREFIX) and name not in known]
        if wrong and wrong[0] in _DECIDED_BEFORE:
            return f"{wrong[0]} no longer exists; use {PREFIX}{_DECIDE}(moment), which returns an Action: docs/hooks.md"
        close = closest(wrong[0], known) if wrong else None
        told = "rlhf_core.hookspecs lists the hooks; CHANGELOG.md says what took the place of one that is gone"
        return f"did you mean {close}? {told}" if close else told


def events_of(part: Part) -> list[str]:
    """The events of one part of a run, without the prefix."""
    return [name.removeprefix(PREFIX) for name in vars(SPECS[part]) if name.startswith(PREFIX)]


def _is_function(value: object) -> bool:
    return inspect.isfunction(value) or inspect.ismethod(value)
