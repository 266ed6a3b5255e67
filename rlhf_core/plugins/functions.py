"""Plain functions and classes as plugins: their keyword-only parameters are their options.

    def brevity(rollouts, *, target_tokens: int = 128) -> list[float]: ...

needs no import of core; `FILE.py:FUNCTION` names one that is not installed.
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
    """What a plain function or class of a kind is, which may stand in place of a `Component`."""

    takes: str | None = None
    """The one positional parameter of the function, in words; None allows any."""
    is_class: bool = False

    @property
    def noun(self) -> str:
        return "class" if self.is_class else "function"

    def fits(self, found: object) -> bool:
        return isinstance(found, type) if self.is_class else callable(found) and not isinstance(found, type)


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
"""Kinds whose plugin may be a plain function or class, of a file too."""


class FunctionOptions(BaseModel):
    """Base of the options schema made from a function's parameters."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class UnreadOptions(FunctionOptions):
    """Options of a file that is not run: any are accepted."""

    model_config = ConfigDict(extra="allow")


def load_function_file(
    reference: str, trust: FileTrust = EVERY_FILE, *, where: str, is_class: bool = False
) -> tuple[Path, Callable[..., Any]]:
    """Run the file of `FILE.py:NAME` and return its absolute path and the function, or class, of that name.

    Raises `PluginError`, as `where`: no such file, it is not trusted or fails to run, or it does not define that name.
    """
    path, name = split_reference(reference, where)
    trust.check(path, where)
    module = run_file(path, where)
    found = getattr(module, name, None)
    fits = inspect.isclass if is_class else inspect.isroutine
    if not fits(found):
        offered = [each for each, value in vars(module).items() if fits(value)]
        noun, plural = ("class", "classes") if is_class else ("function", "functions")
        raise PluginError(
            f'{path.name} has no {noun} "{name}"{suggestion(name, offered)}',
            where=where,
            hint=f"{plural} in it: {', '.join(offered) or 'none'}",
        )
    return path, found  # type: ignore[return-value]


@cache
def function_from_file(reference: str, base_folder: Path, spoken: str) -> Callable[..., Any]:
    """The function that an option of a plugin names (`FILE.py:FUNCTION`, relative to `base_folder`).

    The file is run once per process; its trust was checked with the run's options. spoken: its role, for errors, which
    are those of `load_function_file`.
    """
    path, _, name = reference.rpartition(":")
    whole = f"{base_folder / Path(path).expanduser()}:{name}"
    return load_function_file(whole, where=f'{spoken} "{whole}"')[1]


def run_file(path: Path, where: str) -> ModuleType:
    """Run a file as a new module. Raises `PluginError`, as `where`, if it fails or tries to exit."""
    from hashlib import sha256

    # In sys.modules under a unique name, so that dataclasses, type hints and pickling work in it.
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
        raise PluginError(f"{path.name} fails to run: {error_text(error)}", where=where, hint="mend it") from error
    return module


def component_of(found: Any, kind: str, *, where: str, build: str = "") -> Component:
    """A component for a plain function or class of a kind; its options are the keyword-only parameters.

    Those of a class are its constructor's. Raises `PluginError` for another signature: each option needs a type and a
    default.
    """
    summary = (inspect.getdoc(found) or "").strip().partition("\n")[0]
    plain = PLAIN[kind]
    takes, function = plain.takes, found
    if plain.is_class:
        takes, function = "itself", vars(found).get("__init__", found.__init__)
    has_options = function is not object.__init__
    config = options_model(function, where, takes=takes) if has_options else FunctionOptions
    return Component(summary=summary, config=config, build=build)


def options_model(function: Callable[..., Any], where: str, *, takes: str | None) -> type[FunctionOptions]:
    """The strict schema of a function's keyword-only parameters.

    takes: its one positional parameter, in words; None allows any. Raises `PluginError`, as `where`, for another
    signature.
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
        lacking = [what for what, given in checks.items() if not given]
        if lacking:
            raise PluginError(
                f'its option "{name}" has no {" and no ".join(lacking)}',
                where=where,
                hint=f"write it as `{name}: int = 1`, with its own type and default",
            )
        fields[name] = (hints[name], parameter.default)
    try:
        name = f"{getattr(function, '__name__', type(function).__name__)}_options"
        return create_model(name, __base__=FunctionOptions, **fields)
    except (PydanticUserError, NameError, TypeError) as error:
        raise PluginError(f"its options make no schema: {error}", where=where) from error


def _option_types(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Types of the keyword-only parameters; annotations of others may exist for type checkers only."""
    written = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation is not parameter.empty
    }
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return typing.get_type_hints(SimpleNamespace(__annotations__=written), globalns=names, include_extras=True)


def _check_positional(parameters: list[inspect.Parameter], where: str, takes: str | None) -> None:
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise PluginError("it takes **kwargs, which would hide a misspelled option", where=where, hint="name them")
    if takes is None:
        return
    if len(positional) > 1:
        names = ", ".join(each.name for each in positional[1:])
        raise PluginError(
            f"it takes more than {takes} by position: {names}", where=where, hint=f"put `*,` before {names}"
        )
    if not positional and not any(each.kind is each.VAR_POSITIONAL for each in parameters):
        raise PluginError(
            f"it takes no {takes.removeprefix('the ')}",
            where=where,
            hint=f"write def name({takes.removeprefix('the ')}, *, option: type = default)",
        )
