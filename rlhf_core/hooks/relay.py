"""Calls the hooks of a run: registration, spans that always close, and errors that name the plugin.

A `HookRelay` is made for one run and passed in; there is no global plugin manager. An event without listeners costs
one set lookup. A hook's exception becomes a `HookError` naming plugin, distribution and hook; an `RlhfError` raised by
a hook keeps its type, since a guard stops a run that way. Order and wrappers are pluggy's.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any

import pluggy

from ..config.resolve import check_sections_kept
from ..errors import HookError, PluginError, RlhfError
from ..hookspecs import PREFIX, PROJECT, SPECS, Action, Part, hookimpl
from ..protocols import Logger
from ..util.did_you_mean import closest
from ..util.error_text import error_text
from .logger_hook import LoggerHook

logger = logging.getLogger("rlhf")

_END = "_end"
_TRANSFORM = f"{PREFIX}transform_config"
_DECIDE = f"{PREFIX}decide"
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
        self._plugins: dict[str, object] = {}
        self._installed: set[str] = set()
        self._listening: set[str] = set()
        self._failures: list[RlhfError] = []
        self._config: dict[str, Any] = {}
        self._events = self.events
        self._one_at_a_time = threading.RLock()  # a process may have events on several threads

    @property
    def events(self) -> frozenset[str]:
        """Every event's name, without the prefix."""
        return frozenset(self._callers)

    @property
    def plugins(self) -> dict[str, object]:
        """Name -> registered plugin, in order of registration."""
        return dict(self._plugins)

    def limit_to(self, part: Part) -> None:
        """Call from now on the hooks of one part of the run only: that of this process."""
        self._events = frozenset(events_of(part))
        self._refresh()

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
        unique = shown if name is not None or shown not in self._plugins else f"{shown}-{id(instance):x}"
        if unique in self._plugins:
            raise PluginError(f"the name {unique} is taken", where=who, hint="give each hook plugin its own name")
        hooks = self._named_hooks(instance, who)
        if not vars(hooks) and isinstance(instance, Logger):
            hooks = self._named_hooks(LoggerHook(instance), who)
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
        self._plugins[unique] = instance
        if distribution is not None:
            self._installed.add(unique)
        self._refresh()
        return unique

    def unregister(self, name: str) -> None:
        """Remove a plugin by the name that `register` returned."""
        self._manager.unregister(name=name)
        del self._plugins[name]
        self._refresh()

    def of_this_process(self) -> HookRelay:
        """A relay of only those plugins that were given as objects, not installed with a distribution.

        A transport whose loop runs elsewhere loads the installed ones there, and replays events for these here.
        """
        relay = HookRelay()
        for name, plugin in self._plugins.items():
            if name not in self._installed:
                relay.register(plugin, name=name)
        return relay

    def listens(self, event: str) -> bool:
        """Whether any hook receives the event; lets callers skip work needed only for it."""
        return event in self._listening

    def fire(self, event: str, **arguments: Any) -> list[Any]:
        """Call the hooks of a single event, all arguments by keyword. Returns the results that are not None.

        Every listener of an end is called even when another raises. The first of their errors is raised then, unless
        the event has an `error`, which takes precedence; the others are logged.
        """
        if event not in self._listening:
            if event not in self._callers:
                raise KeyError(f"no hook {PREFIX}{event}; see rlhf_core.hookspecs")
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
        for failure in failures if has_error else failures[1:]:
            logger.error("%s", failure, exc_info=failure)
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

    def transform_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Let each plugin change the run file in turn, in pluggy's order; each sees the changes of those before it.

        The `yield` of a wrapper gives the answers of those inside it, each a whole run file; the last one counts.
        """
        before = tuple(config)
        self._config = dict(config)
        answers = self.fire("transform_config", config=self._config)
        changed = dict(answers[-1]) if answers else self._config
        check_sections_kept(before, changed, "a hook wrapper")
        return changed

    def _call(self, event: str, complete: dict[str, Any]) -> list[Any]:
        caller = self._callers[event]
        try:
            answers: Any = caller(**complete)
        except RuntimeError as error:  # pluggy's own: those of hooks are named
            raise HookError("it did not yield exactly once", where=_wrappers(caller)) from error
        if isinstance(answers, list):
            return answers
        if caller.name in (_TRANSFORM, _DECIDE):
            what = f"it returned {type(answers).__name__}, not a list of answers, as its yield gave it"
            raise HookError(what, where=_wrappers(caller))
        return []

    def _named_hooks(self, plugin: object, who: str) -> _Hooks:
        """The hooks of a plugin, marked or named `rlhf_…`, with errors that name it."""
        hooks = _Hooks()
        for name in dir(plugin):
            marks: Mapping[str, Any] | None = self._manager.parse_hookimpl_opts(plugin, name)
            if marks is None and not (name.startswith(PREFIX) and inspect.isroutine(getattr(plugin, name, None))):
                continue
            marks = marks or {}
            function, hook = getattr(plugin, name), marks.get("specname") or name
            named = _named_wrapper if inspect.isgeneratorfunction(function) else self._named
            setattr(hooks, name, hookimpl(**marks)(wraps(function)(named(function, hook, who))))
        return hooks

    def _named(self, function: Callable[..., Any], hook: str, who: str) -> Callable[..., Any]:
        """The function with errors that name its plugin; those of an end are collected, so that all of them run."""

        def named(*args: Any, **kwargs: Any) -> Any:
            before = tuple(self._config)
            try:
                with _naming(hook, who):
                    answer = function(*args, **kwargs)
                    _check_answer(answer, hook, who)
                    return self._take_config(before, answer, who) if hook == _TRANSFORM else answer
            except RlhfError as failure:
                if not hook.endswith(_END):
                    raise
                self._failures.append(failure)
                return None

        return named

    def _take_config(self, before: Sequence[str], answer: Mapping[str, Any] | None, who: str) -> dict[str, Any] | None:
        """Give those that are called next the run file as this hook left it."""
        if answer is not None:
            changed = dict(answer)
            self._config.clear()
            self._config.update(changed)
        check_sections_kept(before, self._config, who)
        return None if answer is None else dict(self._config)

    def _complete(self, event: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Exactly the arguments of the spec; those that only the end hook gets default to None."""
        names = self._argument_names[event]
        unknown = set(arguments) - set(names)
        missing = set() if event.endswith(_END) else set(names) - set(arguments)
        if unknown or missing:
            raise TypeError(f"{PREFIX}{event} takes {names}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        return {name: arguments.get(name) for name in names}

    def _refresh(self) -> None:
        heard = {event for event, caller in self._callers.items() if caller.get_hookimpls()}
        self._listening = heard & self._events

    def _hint(self, hooks: _Hooks) -> str:
        known = [PREFIX + event for event in self._callers]
        wrong = [name for name in vars(hooks) if name.startswith(PREFIX) and name not in known]
        if wrong and wrong[0] in _DECIDED_BEFORE:
            return f"{wrong[0]} no longer exists; use {_DECIDE}(moment), which returns an Action: docs/hooks.md"
        close = closest(wrong[0], known) if wrong else None
        told = "rlhf_core.hookspecs lists the hooks; CHANGELOG.md says what took the place of one that is gone"
        return f"did you mean {close}? {told}" if close else told


class _Hooks:
    """The hook functions of one plugin, as pluggy gets them."""


def events_of(part: Part) -> list[str]:
    """The events of one part of a run, without the prefix."""
    return [name.removeprefix(PREFIX) for name in vars(SPECS[part]) if name.startswith(PREFIX)]


def _named_wrapper(function: Callable[..., Any], hook: str, who: str) -> Callable[..., Any]:
    """The wrapper with errors that name its plugin."""

    def named(*args: Any, **kwargs: Any) -> Generator[None, Any, Any]:
        with _naming(hook, who):
            answers = yield from function(*args, **kwargs)
            for answer in answers if isinstance(answers, list) else ():
                _check_answer(answer, hook, who)
            return answers

    return named


@contextmanager
def _naming(hook: str, who: str) -> Iterator[None]:
    """An `Exception` of the block that is no `RlhfError` becomes a `HookError` that names hook and plugin."""
    try:
        yield
    except RlhfError:
        raise
    except Exception as error:
        raise HookError(f"{hook} raised {error_text(error)}", where=who) from error


def _wrappers(caller: pluggy.HookCaller) -> str:
    names = [impl.plugin_name for impl in caller.get_hookimpls() if impl.wrapper or impl.hookwrapper]
    return f"the wrapper of {caller.name} in {' or '.join(names)}"


def _check_answer(answer: Any, hook: str, who: str) -> None:
    """Raise `HookError` if `transform_config` or `decide` returned a value of another type than theirs."""
    kind, expected = {_TRANSFORM: (Mapping, "a mapping"), _DECIDE: (Action, "an Action")}.get(hook, (object, ""))
    parts = answer if hook == _DECIDE and isinstance(answer, Sequence) else [answer]
    wrong = [] if answer is None else [part for part in parts if not isinstance(part, kind)]
    if wrong:
        raise HookError(f"{hook} returned {type(wrong[0]).__name__}, not {expected}", where=who)
