"""Calls the hooks of a run: registration, spans that always close, and errors that name the plugin.

A `HookRelay` is created for one run and passed along, instead of a global plugin manager. pluggy decides on order and
wrappers and makes the calls. A hook's exception becomes a `HookError` that names plugin, distribution and hook. An
`RlhfError` raised by a hook keeps its type, because guards stop a run that way.
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
_REMOVED_DECISIONS = ("rlhf_verdict", "rlhf_episode_verdict")
"""Hooks of an earlier version that decided about a run."""


class Span:
    """A block before an end hook. `set` adds arguments that only the end hook gets."""

    __slots__ = ("results",)

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def set(self, name: str, value: Any) -> None:
        """Set the argument `name` of the end hook (`metrics`, `groups`, `summary`)."""
        self.results[name] = value


class _RegisteredPlugin(NamedTuple):
    """A registered plugin."""

    plugin: object
    label: str
    """Name in errors."""
    is_installed: bool
    """Whether it was installed with a distribution, not passed as an object."""


class _HookFunctions:
    """The hook functions of one plugin, as pluggy gets them."""


class HookRelay:
    """The hooks of one run.

    Example:
        relay = HookRelay()
        relay.register(MyHooks())
        with relay.span("episode", episode=0) as span:
            metrics = ...  # rlhf_episode_start was called before
            span.set("metrics", metrics)  # rlhf_episode_end is called with them, or with the error
    """

    def __init__(self) -> None:
        self._manager = pluggy.PluginManager(PROJECT)
        for spec in SPECS.values():
            self._manager.add_hookspecs(spec)
        self._callers: dict[str, pluggy.HookCaller] = {
            event: getattr(self._manager.hook, PREFIX + event) for part in SPECS for event in events_of(part)
        }
        self._argument_names = {event: caller.spec.argnames for event, caller in self._callers.items() if caller.spec}
        self._registered: dict[str, _RegisteredPlugin] = {}
        self._failures: list[RlhfError] = []
        """Errors of the end event that is being fired."""
        self._config: dict[str, Any] = {}
        """The run file with the changes of the hooks called so far."""
        self._events = self.events
        self._lock = threading.RLock()  # a process may fire events from several threads

    @property
    def events(self) -> frozenset[str]:
        """Names of all events, without the prefix."""
        return frozenset(self._callers)

    @property
    def plugins(self) -> dict[str, object]:
        """Name -> registered plugin, in order of registration."""
        return {name: each.plugin for name, each in self._registered.items()}

    def limit_to(self, part: Part) -> None:
        """From now on call only the hooks of one part of the run, the part of this process."""
        self._events = frozenset(events_of(part))

    def register(self, plugin: object, *, name: str | None = None, distribution: str | None = None) -> str:
        """Add a plugin: an object or module with `rlhf_…` hooks, a class of one, or a logger. Returns its name.

        `name` and `distribution` ("package 1.2") appear in errors.

        Raises:
            PluginError: it does not define a hook, has an unknown hook or argument, or its name is taken.
        """
        title = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        label = f"hook plugin {title!r}" + (f" ({distribution})" if distribution else "")
        try:
            instance = plugin() if inspect.isclass(plugin) else plugin
        except Exception as error:
            hint = "register an instance instead"
            raise PluginError(f"{type(error).__name__}: {error}", where=label, hint=hint) from error
        unique = title if name is not None or title not in self._registered else f"{title}-{id(instance):x}"
        if unique in self._registered:
            raise PluginError(f"the name {unique} is taken", where=label, hint="give each hook plugin its own name")
        hooks = self._hooks_of(instance, label)
        if not vars(hooks) and isinstance(instance, Logger):
            hooks = self._hooks_of(LoggerHook(instance), label)
        if not vars(hooks):
            hint = f"define a function such as {PREFIX}episode_end (rlhf_core.hookspecs lists all hooks)"
            raise PluginError("it does not define a hook", where=label, hint=hint)
        try:
            self._manager.register(hooks, unique)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            if self._manager.is_registered(hooks):
                self._manager.unregister(hooks)
            raise PluginError(" ".join(str(error).split()), where=label, hint=self._hint(hooks)) from error
        self._registered[unique] = _RegisteredPlugin(instance, label, distribution is not None)
        return unique

    def unregister(self, name: str) -> None:
        """Remove a plugin by the name that `register` returned."""
        self._manager.unregister(name=name)
        del self._registered[name]

    def of_this_process(self) -> HookRelay:
        """Return a relay of the plugins that were passed as objects, not installed with a distribution.

        A transport whose loop runs in another process loads the installed plugins there, and replays events for these.
        """
        relay = HookRelay()
        for name, each in self._registered.items():
            if not each.is_installed:
                relay.register(each.plugin, name=name)
        return relay

    def listens(self, event: str) -> bool:
        """Whether any hook receives the event, so that callers can skip work that only the event needs."""
        return event in self._events and bool(self._callers[event].get_hookimpls())

    def fire(self, event: str, **arguments: Any) -> list[Any]:
        """Call the hooks of a single event, all arguments by keyword. Returns the results that are not None.

        All hooks of an end event are called even if one raises. Then the first of their errors is raised, unless the
        event has an `error`, which takes precedence. The other errors are logged.
        """
        if event not in self._callers:
            raise KeyError(f"unknown hook {PREFIX}{event}, see rlhf_core.hookspecs")
        if not self.listens(event):
            return []
        complete = self._complete(event, arguments)
        with self._lock:
            outer, self._failures = self._failures, []
            try:
                results = self._call(event, complete)
            except RlhfError as raised:  # at an end event, from a wrapper: errors of plain hooks were collected
                if not event.endswith(_END):
                    raise
                self._failures.append(raised)
                results = []
            finally:
                failures, self._failures = self._failures, outer
        has_error = complete.get("error") is not None
        for each in failures if has_error else failures[1:]:
            logger.error("%s", each, exc_info=each)
        if failures and not has_error:
            raise failures[0]
        return results

    @contextmanager
    def span(self, event: str, **arguments: Any) -> Iterator[Span]:
        """Fire `<event>_start` (if it exists), run the block, and always fire `<event>_end`.

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
        """Let each plugin change the run file in pluggy's order. Each sees the changes of the plugins before it.

        The `yield` of a wrapper returns the results of the inner hooks, each a complete run file. The last one counts.
        """
        self._config = dict(config)
        results = self.fire(_TRANSFORM, config=self._config)
        return dict(results[-1]) if results else self._config

    def _hooks_of(self, plugin: object, label: str) -> _HookFunctions:
        """Return the hooks of a plugin, marked or named `rlhf_…`."""
        hooks = _HookFunctions()
        for name in dir(plugin):
            marks: Mapping[str, Any] | None = self._manager.parse_hookimpl_opts(plugin, name)
            if marks is None and not (name.startswith(PREFIX) and inspect.isroutine(getattr(plugin, name, None))):
                continue
            marks, function = marks or {}, getattr(plugin, name)
            if not (marks.get("wrapper") or marks.get("hookwrapper")):
                event = (marks.get("specname") or name).removeprefix(PREFIX)
                function = hookimpl(**marks)(wraps(function)(self._name_failing_plugin(function, event, label)))
            setattr(hooks, name, function)
        return hooks

    def _name_failing_plugin(self, function: Callable[..., Any], event: str, label: str) -> Callable[..., Any]:
        """Wrap a hook so that its errors name the plugin. Errors of end events are collected, so that all hooks run."""

        def call(*args: Any, **kwargs: Any) -> Any:
            try:
                result = function(*args, **kwargs)
                _check_result(result, event, label)
                if event == _TRANSFORM and result is not None:  # the hooks called next see these changes
                    result = dict(result)
                    self._config.clear()
                    self._config.update(result)
                return result
            except RlhfError as failure:
                raised = failure
            except Exception as error:
                raised = _hook_error(error, event, label)
            if not event.endswith(_END):
                raise raised
            self._failures.append(raised)
            return None

        return call

    def _call(self, event: str, arguments: Mapping[str, Any]) -> list[Any]:
        """Call the hooks of an event through pluggy, and return their results, in which None is omitted.

        Raises `HookError` with the name of the plugin if a hook wrapper raises an error or changes the results to an
        invalid value. Errors of plain hooks already contain the name.
        """
        caller = self._callers[event]
        try:
            results: Any = caller(**arguments)
        except RlhfError:
            raise
        except Exception as error:
            raise _hook_error(error, event, self._wrappers(caller, error)) from error
        if isinstance(results, list):
            for result in results:
                _check_result(result, event, self._wrappers(caller))
            return results
        if event in (_TRANSFORM, _DECIDE):
            message = f"{caller.name} returned {type(results).__name__}, not the list of results from its yield"
            raise HookError(message, where=self._wrappers(caller))
        return []

    def _wrappers(self, caller: pluggy.HookCaller, error: Exception | None = None) -> str:
        """Return the plugins with wrappers of a hook, or the one whose wrapper raised `error`."""
        wrappers = [impl for impl in caller.get_hookimpls() if impl.wrapper or impl.hookwrapper]
        labels = {impl.function.__code__: self._registered[impl.plugin_name].label for impl in wrappers}
        frames = walk_tb(None if error is None else error.__traceback__)
        raised = [labels[frame.f_code] for frame, _ in frames if frame.f_code in labels]
        return raised[-1] if raised else " or ".join(labels.values())

    def _complete(self, event: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Return exactly the arguments of the spec. Those that only the end hook gets default to None."""
        names = self._argument_names[event]
        unknown = set(arguments) - set(names)
        missing = set() if event.endswith(_END) else set(names) - set(arguments)
        if unknown or missing:
            raise TypeError(f"{PREFIX}{event} takes {names}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        return {name: arguments.get(name) for name in names}

    def _hint(self, hooks: _HookFunctions) -> str:
        """Return a hint that suggests the right name of an unknown hook, or refers to the lists of hooks."""
        known = [PREFIX + event for event in self._callers]
        wrong = [name for name in vars(hooks) if name.startswith(PREFIX) and name not in known]
        if wrong and wrong[0] in _REMOVED_DECISIONS:
            return f"{wrong[0]} was replaced by {PREFIX}{_DECIDE}(moment), which returns an Action: docs/hooks.md"
        close = closest(wrong[0], known) if wrong else None
        hint = "rlhf_core.hookspecs lists the hooks, CHANGELOG.md lists replacements of removed ones"
        return f"did you mean {close}? {hint}" if close else hint


def events_of(part: Part) -> list[str]:
    """Return the events of one part of a run, without the prefix."""
    return [name.removeprefix(PREFIX) for name in vars(SPECS[part]) if name.startswith(PREFIX)]


def _hook_error(error: Exception, event: str, label: str) -> HookError:
    failure = HookError(f"{PREFIX}{event} raised {error_text(error)}", where=label)
    failure.__cause__ = error
    return failure


def _check_result(result: Any, event: str, label: str) -> None:
    """Raise `HookError` if `transform_config` or `decide` returned a value of the wrong type."""
    kind, expected = {_TRANSFORM: (Mapping, "a mapping"), _DECIDE: (Action, "an Action")}.get(event, (object, ""))
    parts = result if event == _DECIDE and isinstance(result, Sequence) else [result]
    wrong = [] if result is None else [part for part in parts if not isinstance(part, kind)]
    if wrong:
        raise HookError(f"{PREFIX}{event} returned {type(wrong[0]).__name__}, not {expected}", where=label)
