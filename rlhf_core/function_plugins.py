"""Functions that algorithms call by name: `rlhf.advantages` (estimators) and `rlhf.policy_losses`.

An entry point names a plain function of one argument; its keyword-only parameters are its options:

    def my_loss(batch: PolicyLossInput, *, temper: float = 1.0) -> PolicyLoss: ...
    def my_estimator(episode: AdvantageInput, *, scale: float = 1.0) -> Tensor: ...   # [B, A]

and in the run file `algorithm: {name: grpo, policy_loss: {name: my-loss, temper: 0.5}}`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Literal

from pydantic import ValidationError

from .errors import ConfigError, PluginError
from .plugins import find, import_target
from .reward_functions import options_model

FunctionKind = Literal["advantages", "policy_losses"]
FunctionChoice = str | dict[str, Any]
"""As a run file says it: a name, or a mapping with `name` and the function's options."""

_TAKES: Mapping[FunctionKind, str] = {"advantages": "the episode", "policy_losses": "the batch"}


def bind_function(
    kind: FunctionKind, choice: FunctionChoice, *, where: str, shared: Mapping[str, Any] | None = None
) -> Callable[[Any], Any]:
    """The named function, its options checked and bound.

    where: the key of the run file, for errors. shared: options that stand beside the choice rather than in it (by
    their names there); the function must have them, and an option may be given in one of the two places only.
    Raises `PluginError` for what is not installed or no such function, `ConfigError` for wrong options.
    """
    name, options = _split(choice, where)
    ref = find(kind, name)
    function = import_target(ref)
    if not callable(function) or isinstance(function, type):
        raise PluginError(f"{ref.target} is a {type(function).__name__}, not a function", where=ref.label)
    schema = options_model(function, ref.label, takes=_TAKES[kind])
    for key, value in (shared or {}).items():
        if key not in schema.model_fields:
            raise ConfigError(f"{ref.label} has no such option", where=f"algorithm.{key}", hint=_known(schema))
        if key in options:
            raise ConfigError(f"is given in {where}, too", where=f"algorithm.{key}", hint="remove one of them")
        options[key] = value
    try:
        checked = schema.model_validate(options)
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(f"{ref.label}: " + "; ".join(problems), where=where, hint=_known(schema)) from None
    return partial(function, **{field: getattr(checked, field) for field in schema.model_fields})


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
