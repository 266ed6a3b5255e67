"""Plain functions as rewards: their keyword-only parameters are their options.

    def brevity(rollouts, *, target_tokens: int = 128) -> list[float]: ...

needs no import from here; `FILE.py:FUNCTION` names one that is not installed.
"""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import typing
from collections.abc import Callable, Mapping
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, create_model
from pydantic.errors import PydanticUserError

from ..components import Component
from ..errors import PluginError
from ..util.did_you_mean import suggestion
from .environment_shape import check_shape

_FILE_REWARD = re.compile(r"^(?P<path>.+\.py):(?P<function>[A-Za-z_]\w*)$")


def is_file_reward(name: str) -> bool:
    """True for `FILE.py:FUNCTION`; also for a `.py` path whose function is missing or misspelled."""
    return ".py:" in name or name.endswith(".py")


def load_function_file(
    name: str, *, spoken: str = "reward", takes: Literal["function", "class"] = "function"
) -> tuple[Path, Callable[..., Any]]:
    """Run the file of `FILE.py:NAME` and return its absolute path and the function, or class, of that name.

    spoken: what it is wanted as. Raises `PluginError`: no such file, it fails to run, or it has nothing of that name.
    """
    match = _FILE_REWARD.match(name)
    if match is None:
        raise PluginError(f'"{name}" names no {takes}', where=spoken, hint=f"write FILE.py:{takes.upper()}")
    path = Path(match["path"]).expanduser().absolute()
    where = f'{spoken} "{name}"'
    if not path.is_file():
        raise PluginError(f"no such file: {path}", where=where, hint="paths start at the current folder")
    module = _run_file(path, where)
    found = getattr(module, match["function"], None)
    fits = inspect.isclass if takes == "class" else inspect.isroutine
    if not fits(found):
        own = [each for each, value in vars(module).items() if fits(value) and not each.startswith("_")]
        raise PluginError(
            f'{path.name} has no {takes} "{match["function"]}"{suggestion(match["function"], own)}',
            where=where,
            hint=f"there {'is' if len(own) == 1 else 'are'} in it: {', '.join(own) or 'none'}",
        )
    return path, found  # type: ignore[return-value]


def _run_file(path: Path, where: str) -> Any:
    # In sys.modules under a name of its own, so that dataclasses, type hints and pickling work in it.
    module_name = f"rlhf_reward_file_{sha256(str(path).encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(module_name, path)
    if spec is None or spec.loader is None:
        raise PluginError(f"cannot read {path} as Python", where=where)
    module = importlib.util.module_from_spec(spec)
    sys.modules[module_name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # the user's file may raise anything
        del sys.modules[module_name]
        raise PluginError(f"{path.name} fails to run: {type(error).__name__}: {error}", where=where) from error
    return module


def function_component(function: Callable[..., Any], *, where: str, build: str = "") -> Component:
    """A component for a reward function; its config model comes from the keyword-only parameters.

    Raises `PluginError` for a signature that is no reward: each option needs a type and a default, and the
    rollouts are the one positional parameter.
    """
    summary = (inspect.getdoc(function) or "").strip().partition("\n")[0]
    return Component(summary=summary, config=options_model(function, where), build=build)


def class_component(kind: type, *, where: str, build: str = "") -> Component:
    """A component for the class of an environment; its options are the constructor's keyword-only parameters.

    Raises `PluginError` where it is no environment of any form.
    """
    check_shape(kind, where)
    summary = (inspect.getdoc(kind) or "").strip().partition("\n")[0]
    config = _NoOptions if kind.__init__ is object.__init__ else options_model(kind.__init__, where, takes="itself")  # type: ignore[misc]
    return Component(summary=summary, config=config, build=build)


class _NoOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


def options_model(function: Callable[..., Any], where: str, *, takes: str = "the rollouts") -> type[BaseModel]:
    """The strict schema of a function's keyword-only parameters; `takes` is its one positional parameter, in words.

    Raises `PluginError`, as `where`, for a signature that is something else.
    """
    try:
        parameters = inspect.signature(function).parameters
        hints = _option_types(function, parameters)
    except Exception as error:  # annotations of strangers may name anything
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
        return create_model(
            f"{getattr(function, '__name__', type(function).__name__)}_options",
            __config__=ConfigDict(extra="forbid", frozen=True, protected_namespaces=()),
            **fields,
        )
    except (PydanticUserError, NameError, TypeError) as error:
        raise PluginError(f"its options make no schema: {error}", where=where) from error


def _option_types(function: Callable[..., Any], parameters: Mapping[str, inspect.Parameter]) -> dict[str, Any]:
    """Types of the keyword-only parameters; what the others name may be there for type checkers only."""
    written = {
        name: parameter.annotation
        for name, parameter in parameters.items()
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.annotation is not parameter.empty
    }
    names = getattr(inspect.unwrap(function), "__globals__", {})
    return typing.get_type_hints(SimpleNamespace(__annotations__=written), globalns=names, include_extras=True)


def _check_positional(parameters: list[inspect.Parameter], where: str, takes: str) -> None:
    positional = [each for each in parameters if each.kind in (each.POSITIONAL_ONLY, each.POSITIONAL_OR_KEYWORD)]
    if any(each.kind is each.VAR_KEYWORD for each in parameters):
        raise PluginError("it takes **kwargs, which would hide a misspelled option", where=where, hint="name them")
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
