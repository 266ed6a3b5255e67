"""Calls the hooks of a run: registration, spans that always close, and errors that name the plugin.

A `HookRelay` is made for one run and passed in; there is no global plugin manager. Order, wrappers and calls are
pluggy's. A hook's exception becomes a `HookError` naming plugin, distribution and hook; an `RlhfError` raised by a hook
keeps its type, since a guard stops a run that way.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from traceback import walk_tb
from typing import Any, NamedTuple

import pluggy

from ..errors import HookError, PluginError, RlhfError
from ..hookspecs import PREFIX, PROJECT, SPECS, Action, Part, hookimpl
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


class _Hooks:
    """The hook functions of one plugin, as pluggy gets them."""


class HookRelay:
    """The hooks of one run."""

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        for spec in SPECS.values():
            self._manager.add_hookspecs(spec)
        self._callers: dict[str, pluggy.HookCaller] = {
            event: getattr(self._manager.hook, PREFIX + event) for part in SPECS for event in events_of(part)
        }
        self._argument_names = {event: caller.spec.argnames for event, caller in self._callers.items() if caller.spec}
        self._registered: dict[str, _Registered] = {}
        self._failures: list[RlhfError] = []
        """Of the end that is being fired."""
        self._config: dict[str, Any] = {}
        """The run file as the hooks that were called left it."""
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
        hooks = self._hooks_of(instance, who)
        if not vars(hooks) and isinstance(instance, Logger):
            hooks = self._hooks_of(LoggerHook(instance), who)
        if not vars(hooks):
            hint = f"name a function {PREFIX}episode_end, say; rlhf_core.hookspecs lists them"
            raise PluginError("it has no hook", where=who, hint=hint)
        try:
            self._manager.register(hooks, unique)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(hooks):
                self._manager.unregister(hooks)
            raise PluginError(" ".join(str(error).split()), where=who, hint=self._hint(hooks)) from error
        self._registered[unique] = _Registered(instance, who, distribution is not None)
        return unique

    def unregister(self, name: str) -> None:
        """Remove a plugin by the name that `register` returned."""
        self._manager.unregister(name=name)
        del self._registered[name]

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
        return event in self._events and bool(self._callers[event].get_hookimpls())

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
        with self._one_at_a_time:
            outer, self._failures = self._failures, []
            try:
                answers = self._call(event, complete)
            except RlhfError as raised:  # at an end from a wrapper: errors of plain hooks were collected
                if not event.endswith(_END):
                    raise
                self._failures.append(raised)
                answers = []
            finally:
                failures, self._failures = self._failures, outer
        has_error = complete.get("error") is not None
        for each in failures if has_error else failures[1:]:
            logger.error("%s", each, exc_info=each)
        if failures and not has_error:
            raise failures[0]
        return answers

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
        """Let each plugin change the run file in turn, in pluggy's order; each sees the changes of those before it.

        The `yield` of a wrapper gives the answers of those inside it, each a whole run file; the last one counts.
        """
        self._config = dict(config)
        answers = self.fire(_TRANSFORM, config=self._config)
        return dict(answers[-1]) if answers else self._config

    def _hooks_of(self, plugin: object, who: str) -> _Hooks:
        """The hooks of a plugin, marked or named `rlhf_…`."""
        hooks = _Hooks()
        for name in dir(plugin):
            marks: Mapping[str, Any] | None = self._manager.parse_hookimpl_opts(plugin, name)
            if marks is None and not (name.startswith(PREFIX) and inspect.isroutine(getattr(plugin, name, None))):
                continue
            marks, function = marks or {}, getattr(plugin, name)
            if not (marks.get("wrapper") or marks.get("hookwrapper")):
                event = (marks.get("specname") or name).removeprefix(PREFIX)
                function = hookimpl(**marks)(wraps(function)(self._named(function, event, who)))
            setattr(hooks, name, function)
        return hooks

    def _named(self, function: Callable[..., Any], event: str, who: str) -> Callable[..., Any]:
        """The function with errors that name its plugin; those of an end are collected, so that all of them run."""

        def named(*args: Any, **kwargs: Any) -> Any:
            try:
                answer = function(*args, **kwargs)
                _check_answer(answer, event, who)
                if event == _TRANSFORM and answer is not None:  # those that are called next see what this one changed
                    answer = dict(answer)
                    self._config.clear()
                    self._config.update(answer)
                return answer
            except RlhfError as failure:
                raised = failure
            except Exception as error:
                raised = _raised(error, event, who)
            if not event.endswith(_END):
                raise raised
            self._failures.append(raised)
            return None

        return named

    def _call(self, event: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Have pluggy call the hooks. Plain ones name themselves; the rest is about wrappers."""
        caller = self._callers[event]
        try:
            answers: Any = caller(**arguments)
        except RlhfError:
            raise
        except Exception as error:
            raise _raised(error, event, self._wrappers(caller, error)) from error
        if isinstance(answers, list):
            for answer in answers:
                _check_answer(answer, event, self._wrappers(caller))
            return answers
        if event in (_TRANSFORM, _DECIDE):
            told = f"{caller.name} returned {type(answers).__name__}, not a list of answers, as its yield gave it"
            raise HookError(told, where=self._wrappers(caller))
        return []

    def _wrappers(self, caller: pluggy.HookCaller, error: Exception | None = None) -> str:
        """The plugins with wrappers of a hook, or that one of them that raised an error."""
        wrappers = [impl for impl in caller.get_hookimpls() if impl.wrapper or impl.hookwrapper]
        labels = {impl.function.__code__: self._registered[impl.plugin_name].label for impl in wrappers}
        frames = walk_tb(None if error is None else error.__traceback__)
        raised = [labels[frame.f_code] for frame, _ in frames if frame.f_code in labels]
        return raised[-1] if raised else " or ".join(labels.values())

    def _complete(self, event: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Exactly the arguments of the spec; those that only the end hook gets default to None."""
        names = self._argument_names[event]
        unknown = set(arguments) - set(names)
        missing = set() if event.endswith(_END) else set(names) - set(arguments)
        if unknown or missing:
            raise TypeError(f"{PREFIX}{event} takes {names}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        return {name: arguments.get(name) for name in names}

    def _hint(self, hooks: _Hooks) -> str:
        known = [PREFIX + event for event in self._callers]
        wrong = [name for name in vars(hooks) if name.startswith(PREFIX) and name not in known]
        if wrong and wrong[0] in _DECIDED_BEFORE:
            return f"{wrong[0]} no longer exists; use {PREFIX}{_DECIDE}(moment), which returns an Action: docs/hooks.md"
        close = closest(wrong[0], known) if wrong else None
        told = "rlhf_core.hookspecs lists the hooks; CHANGELOG.md says what took the place of one that is gone"
        return f"did you mean {close}? {told}" if close else told


def events_of(part: Part) -> list[str]:
    """The events of one part of a run, without the prefix."""
    return [name.removeprefix(PREFIX) for name in vars(SPECS[part]) if name.startswith(PREFIX)]


def _raised(error: Exception, event: str, who: str) -> HookError:
    failure = HookError(f"{PREFIX}{event} raised {error_text(error)}", where=who)
    failure.__cause__ = error
    return failure


def _check_answer(answer: Any, event: str, who: str) -> None:
    """Raise `HookError` if `transform_config` or `decide` returned a value of another type than theirs."""
    kind, expected = {_TRANSFORM: (Mapping, "a mapping"), _DECIDE: (Action, "an Action")}.get(event, (object, ""))
    parts = answer if event == _DECIDE and isinstance(answer, Sequence) else [answer]
    wrong = [] if answer is None else [part for part in parts if not isinstance(part, kind)]
    if wrong:
        raise HookError(f"{PREFIX}{event} returned {type(wrong[0]).__name__}, not {expected}", where=who)
