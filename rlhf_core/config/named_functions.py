"""Functions that algorithms call by name: `rlhf.advantages` (estimators) and `rlhf.policy_losses`.

An entry point names a plain function of one argument; its keyword-only parameters are its options:

    def my_loss(batch: PolicyLossInput, *, temper: float = 1.0) -> PolicyLoss: ...
    def my_estimator(episode: AdvantageInput, *, scale: float = 1.0) -> Tensor: ...   # [B, A]

and in the run file `algorithm: {name: grpo, policy_loss: {name: my-loss, temper: 0.5}}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, update_wrapper
from typing import Any, Literal

from pydantic import BaseModel, ValidationError

from ..errors import ConfigError, PluginError
from ..plugins.discovery import find, import_target
from ..plugins.functions import options_model
from .problems import Problems

FunctionKind = Literal["advantages", "policy_losses"]
FunctionChoice = str | dict[str, Any]
"""A function in a run file: a name, or a mapping with `name` and the function's options."""

_TAKES: Mapping[FunctionKind, str] = {"advantages": "the episode", "policy_losses": "the batch"}


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """A function chosen by an option, and those of its options that are set beside the choice."""

    kind: FunctionKind
    choice: FunctionChoice
    shared: Mapping[str, Any] = field(default_factory=dict)


class NamesFunctions(ABC):
    """Base of a section whose options may name functions, so that a check of the run file covers them."""

    @abstractmethod
    def functions(self) -> Mapping[str, FunctionUse]:
        """Option -> the function it chooses, with options set beside it."""


def check_functions(section: NamesFunctions, path: str, problems: Problems) -> None:
    """Add a problem for each missing function and each unknown option; `path` is the section's."""
    for option, use in section.functions().items():
        where = f"{path}.{option}"
        try:
            name, options = _split(use.choice, where)
            label, _, schema = _load(use.kind, name)
        except ConfigError as error:
            problems.add(where, error.message, error.hint)
            continue
        except PluginError as error:
            problems.add_error(where if isinstance(use.choice, str) else f"{where}.name", error)
            continue
        problems.validate(schema, options, where, also_known=["name"])
        beside = dict(use.shared)
        for misplaced in _misplaced(use.shared, options, schema, label, where):
            problems.add(str(misplaced.where), misplaced.message, misplaced.hint)
            beside.pop(str(misplaced.where).rpartition(".")[2])
        problems.validate(schema, beside, path)


def bind_function(
    kind: FunctionKind, choice: FunctionChoice, *, where: str, shared: Mapping[str, Any] | None = None
) -> Callable[[Any], Any]:
    """The named function with its options checked and bound.

    where: the key of the run file, for errors. shared: options set beside the choice rather than in it (by their
    names there); the function must have them, and an option may be given in one of the two places only.

    Raises `PluginError` for a missing or invalid function, `ConfigError` for wrong options.
    """
    name, options = _split(choice, where)
    label, function, schema = _load(kind, name)
    for misplaced in _misplaced(shared or {}, options, schema, label, where):
        raise misplaced
    try:
        checked = schema.model_validate({**options, **(shared or {})})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(f"{label}: " + "; ".join(problems), where=where, hint=_known(schema)) from None
    bound = partial(function, **{name: getattr(checked, name) for name in schema.model_fields})
    return update_wrapper(bound, function)  # with what the function declares as its attributes


def bind_use(use: FunctionUse, *, where: str) -> Callable[[Any], Any]:
    """`bind_function` for a section's `FunctionUse`."""
    return bind_function(use.kind, use.choice, where=where, shared=use.shared)


def _load(kind: FunctionKind, name: str) -> tuple[str, Callable[..., Any], type[BaseModel]]:
    """Label, function and schema of its options. Raises `PluginError`."""
    ref = find(kind, name)
    function = import_target(ref)
    if not callable(function) or isinstance(function, type):
        raise PluginError(f"{ref.target} is a {type(function).__name__}, not a function", where=ref.label)
    return ref.label, function, options_model(function, ref.label, takes=_TAKES[kind])


def _misplaced(
    shared: Mapping[str, Any], options: Mapping[str, Any], schema: type[BaseModel], label: str, where: str
) -> Iterator[ConfigError]:
    """An error for each option set beside the choice that the function lacks, or that is given in both places."""
    section = where.rpartition(".")[0]
    for key in shared:
        place = f"{section}.{key}" if section else key
        if key not in schema.model_fields:
            yield ConfigError(f"{label} has no such option", where=place, hint=_known(schema))
        elif key in options:
            yield ConfigError(f"is given in {where}, too", where=place, hint="remove one of them")


def _split(choice: FunctionChoice, where: str) -> tuple[str, dict[str, Any]]:
    if isinstance(choice, str):
        return choice, {}
    options = dict(choice)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError("needs a `name`", where=where, hint="write NAME, or {name: NAME, option: value}")
    return name, options


def _known(schema: Any) -> str:
    return f"its options: {', '.join(schema.model_fields) or 'none'}"
