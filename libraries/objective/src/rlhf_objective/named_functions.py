"""Functions that algorithms call by name: advantage estimators, policy losses and KL estimators.

An entry point (`rlhf.advantages`, `rlhf.policy_losses`), or `FILE.py:NAME`, names a plain function; its keyword-only
parameters are its options:

    def my_loss(batch: PolicyLossInput, *, temper: float = 1.0) -> PolicyLoss: ...
    def my_estimator(episode: AdvantageInput, *, scale: float = 1.0) -> Tensor: ...   # [B, A]
    def my_kl(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor: ...          # nats a token

and in the run file `algorithm: {name: grpo, policy_loss: {name: my-loss, temper: 0.5}, kl_estimator: ./kl.py:my_kl}`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial, update_wrapper, wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from pydantic import ValidationError

from rlhf_core.components import Component
from rlhf_core.config.problems import Problem, Problems
from rlhf_core.config.section import Section
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins.discovery import SINGULAR
from rlhf_core.plugins.errors_of import errors_of
from rlhf_core.plugins.functions import FunctionOptions
from rlhf_core.plugins.selected import Selected, load
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust, is_file_reference, split_reference
from rlhf_core.util.did_you_mean import suggestion

if TYPE_CHECKING:
    from rlhf_core.config.resolved import ResolvedRun

FunctionKind = Literal["advantages", "policy_losses", "kl_estimators"]
FunctionChoice = str | dict[str, Any]
"""A function in a run file: a name or `FILE.py:NAME`, or a mapping with `name` and the function's options."""

KL_ESTIMATORS = ("k1", "k2", "k3", "abs", "k1+", "k3+")
"""Those of `rlhf_objective.functional.kl`; they have no options."""


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """A function chosen by an option, and those of its options that are set beside the choice."""

    kind: FunctionKind
    choice: FunctionChoice
    shared: Mapping[str, Any] = field(default_factory=dict)


class NamesFunctions(Section, ABC):
    """Base of a section whose options may name functions, so that a check of the run file covers them."""

    adapt_reasons: ClassVar[Mapping[str, str]] = {"": "other processes and a resume need an absolute path"}

    @abstractmethod
    def functions(self) -> Mapping[str, FunctionUse]:
        """Option -> the function it chooses, with options set beside it."""

    def check(self, run: ResolvedRun) -> Iterable[Problem]:
        """Yield each missing function and each unknown option; of a file only where `run.trust` runs it."""
        problems = Problems()
        for option, use in self.functions().items():
            try:
                name, options = split_choice(use.choice, option)
                found = _find(use.kind, name, run.trust)
            except ConfigError as error:
                problems.add(option, error.message, error.hint)
                continue
            except PluginError as error:
                problems.add_error(option if isinstance(use.choice, str) else f"{option}.name", error)
                continue
            schema = found.component.config
            problems.validate(schema, options, option, also_known=["name"])
            beside = dict(use.shared)
            for misplaced in _misplaced(use.shared, options, found, option):
                problems.add(str(misplaced.where), misplaced.message, misplaced.hint)
                beside.pop(str(misplaced.where))
            problems.validate(schema, beside)
        return [*super().check(run), *problems]

    def adapt(self, run: ResolvedRun) -> Self:
        """Replace the files of functions with their absolute paths, for other processes and for a resume."""
        found: dict[str, FunctionChoice] = {}
        for option, use in self.functions().items():
            name, options = split_choice(use.choice, option)
            if is_file_reference(name) and option in type(self).model_fields:
                path, attribute = split_reference(name, f'{SINGULAR[use.kind]} "{name}"')
                found[option] = {"name": f"{path}:{attribute}", **options} if options else f"{path}:{attribute}"
        return super().adapt(run).model_copy(update=found)


def bind_function(
    kind: FunctionKind, choice: FunctionChoice, *, where: str, shared: Mapping[str, Any] | None = None
) -> Callable[..., Any]:
    """The named function with its options checked and bound.

    where: the key of the run file, for errors. shared: options set beside the choice rather than in it (by their
    names there); the function must have them, and an option may be given in one of the two places only.

    A file is run: it was checked with the run's other options. Raises `PluginError` for a missing or invalid
    function, `ConfigError` for wrong options.
    """
    name, options = split_choice(choice, where)
    found = _find(kind, name)
    label, schema = found.label, found.component.config
    for misplaced in _misplaced(shared or {}, options, found, where):
        raise misplaced
    try:
        checked = schema.model_validate({**options, **(shared or {})})
    except ValidationError as error:
        problems = [f"{'.'.join(map(str, each['loc']))}: {each['msg']}" for each in error.errors()]
        raise ConfigError(f"{label}: " + "; ".join(problems), where=where, hint=_known(schema)) from None
    function = found.function
    assert function is not None, "only functions that are files or installed are bound"

    @wraps(function)  # with what the function declares as its attributes
    def called(*args: Any, **options: Any) -> Any:
        with errors_of(label, function.__name__, caller=__name__):
            return function(*args, **options)

    bound = partial(called, **{name: getattr(checked, name) for name in schema.model_fields})
    return update_wrapper(bound, function)


def bind_use(use: FunctionUse, *, where: str) -> Callable[..., Any]:
    """`bind_function` for a section's `FunctionUse`."""
    return bind_function(use.kind, use.choice, where=where, shared=use.shared)


def _find(kind: FunctionKind, name: str, trust: FileTrust = EVERY_FILE) -> Selected:
    """The function, whose component has the schema of its options. Raises `PluginError`."""
    if kind == "kl_estimators" and not is_file_reference(name):
        _check_kl_estimator(name)
        return Selected(kind, name, Component("", FunctionOptions), "rlhf-objective", version("rlhf-objective"))
    return load(kind, name, trust=trust)


def _check_kl_estimator(name: str) -> None:
    if name not in KL_ESTIMATORS:
        raise PluginError(
            f'there is no KL estimator "{name}"{suggestion(name, KL_ESTIMATORS)}',
            hint=f"one of {', '.join(KL_ESTIMATORS)}, or FILE.py:NAME",
        )


def _misplaced(
    shared: Mapping[str, Any], options: Mapping[str, Any], found: Selected, where: str
) -> Iterator[ConfigError]:
    """An error for each option set beside the choice that the function lacks, or that is given in both places."""
    section = where.rpartition(".")[0]
    for key in shared:
        place = f"{section}.{key}" if section else key
        schema = found.component.config
        if not found.is_unread and key not in schema.model_fields:
            yield ConfigError(f"{found.label} has no such option", where=place, hint=_known(schema))
        elif key in options:
            yield ConfigError(f"is given in {where}, too", where=place, hint="remove one of them")


def split_choice(choice: FunctionChoice, where: str) -> tuple[str, dict[str, Any]]:
    """Name and options of a choice. Raises `ConfigError`, as `where`, where it has no name."""
    if isinstance(choice, str):
        return choice, {}
    options = dict(choice)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError("needs a `name`", where=where, hint="write NAME, or {name: NAME, option: value}")
    return name, options


def _known(schema: Any) -> str:
    return f"its options: {', '.join(schema.model_fields) or 'none'}"
