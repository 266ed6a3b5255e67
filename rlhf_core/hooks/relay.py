"""Calls the hooks of a run: registration, spans that always close, and errors that name the plugin.

A `HookRelay` is made for one run and passed in; there is no global plugin manager. An event without listeners costs
one set lookup. A hook's exception becomes a `HookError` naming plugin, distribution and hook; an `RlhfError` raised by
a hook keeps its type, since a guard stops a run that way.
"""

from __future__ import annotations

import inspect
import logging
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, cast

import pluggy

from ..config.resolve import check_sections_kept
from ..errors import HookError, PluginError, RlhfError
from ..hookspecs import PREFIX, PROJECT, SPECS, Action
from ..util.did_you_mean import closest
from ..util.error_text import error_text

logger = logging.getLogger("rlhf")

_END = "_end"
_TRANSFORM = f"{PREFIX}transform_config"
_DECIDE = f"{PREFIX}decide"


class Span:
    """A block between a start hook and its end hook; `set` adds arguments that only the end hook gets."""

    __slots__ = ("results",)

    def __init__(self) -> None:
        self.results: dict[str, Any] = {}

    def set(self, name: str, value: Any) -> None:
        """Give the end hook its argument `name` (`metrics`, `groups`, `num_tokens`, `summary`)."""
        self.results[name] = value


class _Manager(pluggy.PluginManager):
    """Plugin manager that treats any function named `rlhf_…` as a hook, with or without `hookimpl`."""

    def parse_hookimpl_opts(self, plugin: object, name: str) -> Any:
        marked = super().parse_hookimpl_opts(plugin, name)
        if marked is not None or not name.startswith(PREFIX):
            return marked
        if not inspect.isroutine(inspect.getattr_static(plugin, name)) and not inspect.isroutine(
            getattr(plugin, name, None)
        ):
            return None
        return {}  # pluggy's defaults


class HookRelay:
    """The hooks of one run."""

    def __init__(self) -> None:
        self._manager = _Manager(PROJECT)
        for spec in SPECS:
            self._manager.add_hookspecs(spec)
        self._callers: dict[str, pluggy.HookCaller] = {
            name.removeprefix(PREFIX): getattr(self._manager.hook, name)
            for spec in SPECS
            for name in vars(spec)
            if name.startswith(PREFIX)
        }
        self._argument_names = {event: caller.spec.argnames for event, caller in self._callers.items() if caller.spec}
        self._listening: set[str] = set()
        self._failures: list[HookError | RlhfError] = []
        self._installed: set[str] = set()
        self._config: Mapping[str, Any] = {}
        self._tap: Callable[[str, dict[str, Any]], None] | None = None
        self._tapped: frozenset[str] = frozenset()
        self._events = frozenset(self._callers)
        self._one_at_a_time = threading.RLock()  # a process may have events on several threads

    @property
    def events(self) -> frozenset[str]:
        """Every event's name, without the prefix."""
        return frozenset(self._callers)

    @property
    def plugins(self) -> dict[str, object]:
        """Name -> registered plugin, in order of registration."""
        return {name: plugin for name, plugin in self._manager.list_name_plugin() if plugin is not None}

    def limit_to(self, spec: type) -> None:
        """Call from now on the hooks of one class of `hookspecs` only: those of this process's part in the run."""
        self._events = frozenset(name.removeprefix(PREFIX) for name in vars(spec) if name.startswith(PREFIX))
        self._refresh()

    def register(self, plugin: object, *, name: str | None = None, distribution: str | None = None) -> str:
        """Add a plugin: an object or module with `rlhf_…` hooks, a class of one, or a seed-style callback.

        `name` and `distribution` ("package 1.2") appear in errors. Returns the name.

        Raises:
            PluginError: it has no hook, an unknown hook or argument, or its name is taken.
        """
        shown = name or getattr(plugin, "__name__", None) or type(plugin).__name__
        who = f"hook plugin {shown!r}" + (f" ({distribution})" if distribution else "")
        instance = _instantiate(plugin, who)
        unique = self._free_name(shown, instance, named=name is not None)
        try:
            self._manager.register(instance, unique)
            self._manager.check_pending()
        except pluggy.PluginValidationError as error:
            self._remove(instance)
            raise PluginError(" ".join(str(error).split()), where=who, hint=self._did_you_mean(instance)) from error
        except ValueError as error:
            raise PluginError(str(error), where=who, hint="give each hook plugin its own name") from error
        callers = self._manager.get_hookcallers(instance) or []
        if not callers:
            self._remove(instance)
            hint = f"name a function {PREFIX}episode_end, say; rlhf_core.hookspecs lists them"
            raise PluginError("it has no hook", where=who, hint=hint)
        for caller in callers:
            for impl in caller.get_hookimpls():
                if impl.plugin is instance:
                    # Final for type checkers, a plain slot in fact: the only place that knows the plugin.
                    setattr(impl, "function", self._guard(impl, caller.name, who))  # noqa: B010
        if distribution is not None:
            self._installed.add(unique)
        self._refresh()
        return unique

    def unregister(self, name: str) -> None:
        """Remove a plugin by the name `register` returned."""
        self._manager.unregister(name=name)
        self._refresh()

    def of_this_process(self) -> HookRelay:
        """A relay of only those plugins that were given as objects, not installed with a distribution.

        A transport whose loop runs elsewhere loads the installed ones there, and replays events for these here.
        """
        relay = HookRelay()
        for name, plugin in self.plugins.items():
            if name not in self._installed:
                relay.register(plugin, name=name)
        return relay

    def tap(self, receive: Callable[[str, dict[str, Any]], None], events: Iterable[str]) -> None:
        """Also pass these events, with all arguments, to `receive`, after the hooks of this process."""
        self._tap = receive
        self._tapped = frozenset(events) & self.events
        self._refresh()

    def replay(self, event: str, arguments: Mapping[str, Any]) -> None:
        """Fire an event that happened in another process; for an end hook, raises the first error."""
        if event.endswith(_END):
            self._check(event)
            self._close(event, arguments, arguments.get("error"))
        else:
            self.fire(event, **arguments)

    def listens(self, event: str) -> bool:
        """Whether any hook or tap receives the event; lets callers skip work needed only for it."""
        return event in self._listening

    def fire(self, event: str, **arguments: Any) -> list[Any]:
        """Call the hooks of a single event, all arguments by keyword. Returns the results that are not None."""
        if event not in self._listening:
            self._check(event)
            return []
        complete = self._complete(event, arguments)
        with self._one_at_a_time:
            answers = cast("list[Any]", self._callers[event](**complete))
            self._tell(event, complete)
        return answers

    @contextmanager
    def span(self, event: str, **arguments: Any) -> Iterator[Span]:
        """Fire `<event>_start`, run the block, fire `<event>_end` with the same arguments, whatever happened.

        The end hook also gets the values passed to `Span.set`, and `error`. Every listener's end runs even when
        another's raises. An error of the block takes precedence over an end hook's, which is then logged.
        """
        span = Span()
        start, end = f"{event}_start", f"{event}{_END}"
        if start not in self._listening and end not in self._listening:
            self._check(start)
            yield span
            return
        error: BaseException | None = None
        try:
            self.fire(start, **arguments)
            yield span
        except BaseException as caught:
            error = caught
            raise
        finally:
            with self._one_at_a_time:
                self._close(end, {**arguments, **span.results, "error": error}, error)

    def transform_config(self, config: dict[str, Any]) -> dict[str, Any]:
        """Let each plugin change the run file in turn; each sees the changes of those before it.

        Order and wrappers are pluggy's. A wrapper's `yield` gives the results of the inner plugins in call order: each
        is a whole run file, the last one their final result.
        """
        self._config = config
        before = tuple(config)
        answers = _checked(self.fire("transform_config", config=config), "a hookwrapper")
        changed = dict(answers[-1]) if answers else config
        check_sections_kept(before, changed, "a hookwrapper")
        return changed

    def _close(self, event: str, arguments: Mapping[str, Any], error: BaseException | None) -> None:
        if event not in self._listening:
            return
        outer, self._failures = self._failures, []
        complete = self._complete(event, arguments)
        try:
            self._callers[event](**complete)
        except RlhfError as raised:  # from a wrapper; errors of plain hooks were collected, so that all of them ran
            self._failures.append(raised)
        finally:
            failures, self._failures = self._failures, outer
            self._tell(event, complete)
        unraised = failures if error is not None else failures[1:]
        for failure in unraised:
            logger.error("%s", failure, exc_info=failure)
        if error is None and failures:
            raise failures[0]

    def _guard(self, impl: Any, hook: str, who: str) -> Callable[..., Any]:
        """The hook function with errors that name its plugin; an end hook's errors are collected for `_close`."""
        function: Callable[..., Any] = impl.function
        collect = (lambda failure: self._failures.append(failure)) if hook.endswith(_END) else None
        if impl.wrapper or impl.hookwrapper:
            return _named_wrapper(function, hook, who, collect)
        if hook == _TRANSFORM:
            function = self._chained(function, impl.argnames, who)
        return _named(function, hook, who, collect)

    def _chained(self, function: Callable[..., Any], names: Sequence[str], who: str) -> Callable[..., Any]:
        """A `transform_config` hook that receives the run file as changed by those before it."""

        @wraps(function)
        def chained(*args: Any, **kwargs: Any) -> Any:
            given = {**dict(zip(names, args, strict=True)), **kwargs}
            before = tuple(self._config)
            changed = function(**dict.fromkeys(given, self._config))
            if changed is not None:
                self._config = dict(_checked([changed], who)[0])
            check_sections_kept(before, self._config, who)
            return None if changed is None else self._config

        return chained

    def _complete(self, event: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """Exactly the arguments of the spec; those that only the end hook gets default to None."""
        names = self._argument_names[event]
        unknown = set(arguments) - set(names)
        missing = set() if event.endswith(_END) else set(names) - set(arguments)
        if unknown or missing:
            raise TypeError(f"{PREFIX}{event} takes {names}: unknown {sorted(unknown)}, missing {sorted(missing)}")
        return {name: arguments.get(name) for name in names}

    def _tell(self, event: str, complete: dict[str, Any]) -> None:
        if self._tap is not None and event in self._tapped:
            self._tap(event, complete)

    def _check(self, event: str) -> None:
        if event not in self._callers:
            raise KeyError(f"no hook {PREFIX}{event}; see rlhf_core.hookspecs")

    def _refresh(self) -> None:
        heard = {event for event, caller in self._callers.items() if caller.get_hookimpls()}
        self._listening = (heard & self._events) | self._tapped

    def _remove(self, plugin: object) -> None:
        """Undo a registration that failed half-way."""
        if self._manager.is_registered(plugin):
            self._manager.unregister(plugin)

    def _free_name(self, shown: str, plugin: object, *, named: bool) -> str:
        if named or not self._manager.has_plugin(shown):
            return shown
        return f"{shown}-{id(plugin):x}"

    def _did_you_mean(self, plugin: object) -> str | None:
        known = [f"{PREFIX}{event}" for event in self._callers]
        wrong = [name for name in dir(plugin) if name.startswith(PREFIX) and name not in known]
        if wrong and wrong[0] in (f"{PREFIX}verdict", f"{PREFIX}episode_verdict"):  # of earlier versions
            return f"{_DECIDE}(moment) is in its place, and returns an Action: docs/hooks.md"
        close = closest(wrong[0], known) if wrong else None
        return f"did you mean {close}?" if close else None


Collect = Callable[[RlhfError], None]


def _named(function: Callable[..., Any], hook: str, who: str, collect: Collect | None) -> Callable[..., Any]:
    """The function with errors that name its plugin; they go to `collect` where it is given."""

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Any:
        try:
            answer = function(*args, **kwargs)
            if hook == _DECIDE and answer is not None:
                _checked([*answer] if isinstance(answer, Sequence) else [answer], who, Action)
            return answer
        except Exception as error:
            named = _name_error(error, hook, who)
            if collect is None:
                raise named from named.__cause__
            collect(named)
            return None

    return guarded


def _named_wrapper(function: Callable[..., Any], hook: str, who: str, collect: Collect | None) -> Callable[..., Any]:
    """The wrapper; with `collect`, the inner hooks are called even if it fails before its yield.

    It may return the list of results that its yield gave it, its own result, or None to leave them.
    """

    @wraps(function)
    def guarded(*args: Any, **kwargs: Any) -> Generator[None, Any, Any]:
        named: RlhfError | None = None
        try:
            inner = function(*args, **kwargs)
            next(inner)
        except StopIteration:
            named = _name_error(RuntimeError("did not yield"), hook, who)
        except Exception as error:
            named = _name_error(error, hook, who)
        if named is not None:
            if collect is None:
                raise named from named.__cause__
            collect(named)
            return (yield)
        answers: Any = []
        try:
            try:
                answers = yield
            except BaseException as error:
                inner.throw(error)
            else:
                inner.send(answers)
            inner.close()
            raise RuntimeError("yielded twice")
        except StopIteration as done:
            if isinstance(answers, pluggy.Result):  # a hookwrapper changes this in place and returns nothing
                return None
            if done.value is not None:
                answers = done.value if isinstance(done.value, list) else [done.value]
            return _checked(answers, who) if hook == _TRANSFORM else answers
        except Exception as error:
            named = _name_error(error, hook, who)
            raise named from named.__cause__

    return guarded


def _name_error(error: Exception, hook: str, who: str) -> RlhfError:
    if isinstance(error, RlhfError):
        return error
    named = HookError(f"{hook} raised {error_text(error)}", where=who)
    named.__cause__ = error
    return named


def _checked(answers: Any, who: str, kind: type[Any] = Mapping) -> Sequence[Any]:
    """Validate the results of `transform_config`, which a hookwrapper may have replaced by anything, or of `decide`."""
    wrong = [each for each in answers if not isinstance(each, kind)] if isinstance(answers, list) else [answers]
    if wrong:
        hook, expected = (_DECIDE, "an Action") if kind is Action else (_TRANSFORM, "a mapping")
        raise HookError(f"{hook} returned {type(wrong[0]).__name__}, not {expected}", where=who)
    return cast("Sequence[Any]", answers)


def _instantiate(plugin: object, who: str) -> object:
    if not inspect.isclass(plugin):
        return plugin
    try:
        return plugin()
    except Exception as error:
        raise PluginError(f"{type(error).__name__}: {error}", where=who, hint="register an instance instead") from error
