"""Plain functions and classes as plugins, with their keyword-only parameters as options.

    def brevity(rollouts, *, target_tokens: int = 128) -> list[float]: ...

They do not need to import core. `FILE.py:FUNCTION` names one that is not installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
import typing
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.errors import PydanticUserError

from ..components import Component
from ..errors import PluginError
from ..util.did_you_mean import suggestion
from ..util.error_text import error_text
from .trust import EVERY_FILE, FileTrust, split_reference


class Plain(NamedTuple):
    """Requirements on a plain function or class that is a plugin instead of a `Component`, for one kind."""

    takes: str | None = None
    """The one positional parameter of the function, in words. None allows any."""
    is_class: bool = False

    @property
    def noun(self) -> str:
        return "class" if self.is_class else "function"

    def fits(self, target: object) -> bool:
        return isinstance(target, type) if self.is_class else callable(target) and not isinstance(target, type)


PLAIN: Mapping[str, Plain] = {
    "rewards": Plain("the rollouts"),
    "algorithms": Plain("the context"),
    "prompts": Plain("the context"),
    "advantages": Plain("the episode"),
    "policy_losses": Plain("the batch"),
    "kl_estimators": Plain(),
    "environments": Plain(is_class=True),
    "hooks": Plain(is_class=True),
}
"""Kinds whose plugins may be plain functions or classes, installed or in a file."""


class FunctionOptions(BaseModel):
    """Base of the options schema made from a function's parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class UnreadOptions(FunctionOptions):
    """Options of a file that is not executed. Any option is accepted."""

    model_config = ConfigDict(extra="allow")


def load_function_file(
    reference: str, trust: FileTrust = EVERY_FILE, *, where: str, is_class: bool = False
) -> tuple[Path, Callable[..., Any]]:
    """Run the file of `FILE.py:NAME` and return its absolute path and the function or class of that name.

    Raises:
        PluginError: the file is missing or not trusted, fails to run, or does not define that name.
    """
    path, name = split_reference(reference, where)
    trust.check(path, where)
    module = run_file(path, where)
    target = getattr(module, name, None)
    fits = inspect.isclass if is_class else inspect.isroutine
    if not fits(target):
        candidates = [each for each, value in vars(module).items() if fits(value)]
        noun, plural = ("class", "classes") if is_class else ("function", "functions")
        raise PluginError(
            f'{path.name} does not define a {noun} "{name}"{suggestion(name, candidates)}',
            where=where,
            hint=f"{plural} in it: {', '.join(candidates) or 'none'}",
        )
    return path, target  # type: ignore[return-value]


@cache
def function_from_file(reference: str, base_folder: Path, spoken: str) -> Callable[..., Any]:
    """Return the function that a plugin's option names. Its file is run once per process.

    The trust of the file was checked with the run's options. Raises the errors of `load_function_file`.

    Args:
        reference: `FILE.py:FUNCTION`.
        base_folder: folder that a relative path starts from.
        spoken: role of the function in errors, such as `prompts.filter`.

    Returns:
        The function, not checked or wrapped.
    """
    path, _, name = reference.rpartition(":")
    absolute = f"{base_folder / Path(path).expanduser()}:{name}"
    return load_function_file(absolute, where=f'{spoken} "{absolute}"')[1]


def run_file(path: Path, where: str) -> ModuleType:
    """Run a file as a new module. Raises `PluginError` if it fails or tries to exit."""
    from hashlib import sha256

    # It is in sys.modules under a unique name, so that dataclasses, type hints and pickling work in it.
    module_name = f"rlhf_reward_file_{sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"cannot read {path} as Python", where=where)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # the user's file may raise anything
        sys.modules.pop(module_name, None)
        raise PluginError(f"{path.name} fails to run: {error_text(error)}", where=where, hint="fix the file") from error
    return module


def component_of(target: Any, kind: str, *, where: str, build: str = "") -> Component:
    """Return a component for a plain function or class of a kind, with its keyword-only parameters as options.

    The parameters of a class are its constructor's. Raises `PluginError` for another signature: each option needs a
    type and a default.
    """
    summary = (inspect.getdoc(target) or "").strip().partition("\n")[0]
    plain = PLAIN[kind]
    takes, function = plain.takes, target
    if plain.is_class:
        takes, function = "itself", vars(target).get("__init__", target.__init__)
    has_options = function is not object.__init__
    config = options_model(function, where, takes=takes) if has_options else FunctionOptions
    return Component(summary=summary, config=config, build=build)


def options_model(function: Callable[..., Any], where: str, *, takes: str | None) -> type[FunctionOptions]:
    """Return the strict schema of a function's keyword-only parameters.

    takes: its one positional parameter, in words. None allows any. Raises `PluginError` for another signature.

    Example:
        >>> def brevity(rollouts, *, target_tokens: int = 128): ...
        >>> options_model(brevity, "brevity", takes="the rollouts")(target_tokens=64)
        brevity_options(target_tokens=64)
    """
    try:
        parameters = inspect.signature(function).parameters
        hints = _option_types(function, parameters)
    except Exception as error:  # a third party's annotations may contain anything
        raise PluginError(f"its signature cannot be read: {error}", where=where) from error
    _check_positional(list(parameters.values()), where, takes)
    fields: dict[str, Any] = {}
    for name, parameter in parameters.items():
        if parameter.kind is not parameter.KEYWORD_ONLY:
            continue
        checks = {"type": name in hints, "default": parameter.default is not parameter.empty}
        lacking = [part for part, exists in checks.items() if not exists]
        if lacking:
            raise PluginError(
                f'its option "{name}" lacks a {" and a ".join(lacking)}',
                where=where,
                hint=f"write `{name}: int = 1`, with its own type and default",
            )
        fields[name] = (hints[name], parameter.default)
    try:
        name = f"{getattr(function, '__name__', type(function).__name__)}_options"
        return create_model(name, __base__=FunctionOptions, **fields)
    except (PydanticUserError, NameError, TypeError) as error:
        raise PluginError(f"its options do not form a valid schema: {error}", where=where) from error


def _option_types(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Return the types of the keyword-only parameters. Annotations of others may exist for type checkers only."""
    written = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation is not parameter.empty
    }
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return typing.get_type_hints(SimpleNamespace(__annotations__=written), globalns=names, include_extras=True)


def _check_positional(parameters: list[inspect.Parameter], where: str, takes: str | None) -> None:
    """Raise `PluginError` for **kwargs and for positional parameters other than the expected one."""
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise PluginError("it takes **kwargs, which would hide a misspelled option", where=where, hint="name each one")
    if takes is None:
        return
    if len(positional) > 1:
        names = ", ".join(each.name for each in positional[1:])
        raise PluginError(
            f"it takes more positional parameters than {takes}: {names}", where=where, hint=f"put `*,` before {names}"
        )
    if not positional and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise PluginError(
            f"it does not take {takes}",
            where=where,
            hint=f"write def name({takes.removeprefix('the ')}, *, option: type = default)",
        )
