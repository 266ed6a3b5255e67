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
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial, update_wrapper, wraps
from importlib.metadata import version
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import rlhf_objective as objective  # loads torch when a KL is estimated, not when its name is read
from rlhf_core.components import Component
from rlhf_core.config.problems import Problem, Problems
from rlhf_core.config.section import Section
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins.discovery import SINGULAR
from rlhf_core.plugins.errors_of import errors_of
from rlhf_core.plugins.functions import FunctionOptions
from rlhf_core.plugins.selected import SelectedPlugin, load
from rlhf_core.plugins.trust import EVERY_FILE, FileTrust, is_file_reference, split_reference
from rlhf_core.util.did_you_mean import suggestion

if TYPE_CHECKING:
    from torch import Tensor

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

    def find(self, option: str, problems: Problems, trust: FileTrust = EVERY_FILE) -> tuple[SelectedPlugin, Any]:
        """The function and its checked options, None where `problems` were added; the function must have those beside.

        option: the key that chooses it. A file is run only where `trust` says so. Raises `PluginError` for a missing
        or invalid function, `ConfigError` for a choice without a name.
        """
        name, options = split_choice(self.choice, option)
        found = _find(self.kind, name, trust)
        schema, beside = found.component.config, dict(self.shared)
        for key in self.shared:
            if not found.is_unread and key not in schema.model_fields:
                problems.add(key, f"{found.label} has no such option", f"its options: {_known(schema)}")
                del beside[key]
            elif key in options:
                problems.add(key, f"is given in {option}, too", "remove one of them")
                del beside[key]
        told = Problems()
        checked = told.validate(schema, {**options, **beside}, option, also_known=["name"])
        for each in told:
            own = each.path.removeprefix(f"{option}.")
            problems.add(own if own.partition(".")[0] in beside else each.path, each.message, each.hint)
        return found, checked

    def bind(self, *, where: str) -> Callable[..., Any]:
        """The function with its options bound. A file is run: it was checked with the run's other options.

        where: the key of the run file, for errors. Raises `PluginError` for a missing or invalid function,
        `ConfigError` for wrong options.
        """
        problems = Problems()
        section, _, option = where.rpartition(".")
        found, checked = self.find(option, problems)
        problems.raise_if_any(section or where)
        function = found.function
        assert function is not None, "only functions that are files or installed are bound"

        @wraps(function)  # with what the function declares as its attributes
        def called(*args: Any, **options: Any) -> Any:
            with errors_of(found.label, function.__name__, caller=__name__):
                return function(*args, **options)

        bound = partial(called, **{name: getattr(checked, name) for name in found.component.config.model_fields})
        return update_wrapper(bound, function)


class FunctionSection(Section, ABC):
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
                use.find(option, problems, run.trust)
            except ConfigError as error:
                problems.add(option, error.message, error.hint)
            except PluginError as error:
                problems.add_error(option if isinstance(use.choice, str) else f"{option}.name", error)
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


def _find(kind: FunctionKind, name: str, trust: FileTrust) -> SelectedPlugin:
    """The function, whose component has the schema of its options. Raises `PluginError`."""
    if kind != "kl_estimators" or is_file_reference(name):
        return load(kind, name, trust=trust)
    if name not in KL_ESTIMATORS:
        raise PluginError(
            f'there is no KL estimator "{name}"{suggestion(name, KL_ESTIMATORS)}',
            hint=f"one of {', '.join(KL_ESTIMATORS)}, or FILE.py:NAME",
        )

    def estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
        return objective.kl_estimate(log_probs, reference_log_probs, name)  # type: ignore[arg-type]

    own = "rlhf-objective"
    return SelectedPlugin(kind, name, Component("", FunctionOptions), own, version(own), function=estimate)


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
    return ", ".join(schema.model_fields) or "none"
