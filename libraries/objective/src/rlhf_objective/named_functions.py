"""Functions that algorithms call by name: advantage estimators, policy losses and KL estimators.

An entry point (`rlhf.advantages`, `rlhf.policy_losses`), or `FILE.py:NAME`, names a plain function. Its keyword-only
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
"""Estimators of `rlhf_objective.functional.kl`, which do not have options."""


@dataclass(frozen=True, slots=True)
class FunctionUse:
    """A function chosen by an option, and those of its options that are separate options of the section."""

    kind: FunctionKind
    """Kind of the function."""
    choice: FunctionChoice
    """Value of the option in the run file."""
    shared: Mapping[str, Any] = field(default_factory=dict)
    """Option of the function -> its value, set by an option of the section with the same name."""

    def find(self, option: str, problems: Problems, trust: FileTrust = EVERY_FILE) -> tuple[SelectedPlugin, Any]:
        """Load the function and validate its options. The function must have the options in `shared`.

        Args:
            option: Key of the option that chooses the function.
            problems: Receives the problems of options.
            trust: Whether a file may be executed.

        Returns:
            The function, and its options, or None if there are problems.

        Raises:
            PluginError: The function is missing or invalid.
            ConfigError: The choice lacks a name.
        """
        name, options = split_choice(self.choice, option)
        selected = _find(self.kind, name, trust)
        schema, shared = selected.component.config, dict(self.shared)
        for key in self.shared:
            if not selected.is_unread and key not in schema.model_fields:
                problems.add(key, f"{selected.label} does not have this option", f"its options: {_known(schema)}")
                del shared[key]
            elif key in options:
                problems.add(key, f"is set in {option}, too", "remove one of them")
                del shared[key]
        invalid = Problems()
        checked = invalid.validate(schema, {**options, **shared}, option, also_known=["name"])
        for each in invalid:
            key = each.path.removeprefix(f"{option}.")
            problems.add(key if key.partition(".")[0] in shared else each.path, each.message, each.hint)
        return selected, checked

    def bind(self, *, where: str) -> Callable[..., Any]:
        """Return the function with its options bound. A file is executed, since the run was checked before.

        Args:
            where: Key in the run file, for errors.

        Raises:
            PluginError: The function is missing or invalid.
            ConfigError: Its options are wrong.
        """
        problems = Problems()
        section, _, option = where.rpartition(".")
        selected, checked = self.find(option, problems)
        problems.raise_if_any(section or where)
        function = selected.function
        assert function is not None, "only functions that are files or installed are bound"

        @wraps(function)  # copies the attributes that declare its needs
        def called(*args: Any, **options: Any) -> Any:
            with errors_of(selected.label, function.__name__, caller=__name__):
                return function(*args, **options)

        bound = partial(called, **{name: getattr(checked, name) for name in selected.component.config.model_fields})
        return update_wrapper(bound, function)


class FunctionSection(Section, ABC):
    """Base of a section whose options may name functions, which are checked with the run file.

    Core calls `check` and `adapt` in the process that checks a run. The algorithm binds the functions in each process
    that builds it.

    Example:
        class MyConfig(FunctionSection):
            policy_loss: FunctionChoice = "clip"

            def functions(self) -> dict[str, FunctionUse]:
                return {"policy_loss": FunctionUse("policy_losses", self.policy_loss)}

        loss = config.functions()["policy_loss"].bind(where="algorithm.policy_loss")  # in the algorithm
    """

    adapt_reasons: ClassVar[Mapping[str, str]] = {"": "other processes and a resume need an absolute path"}

    @abstractmethod
    def functions(self) -> Mapping[str, FunctionUse]:
        """Option -> the function that it chooses."""

    def check(self, run: ResolvedRun) -> Iterable[Problem]:
        """Yield each missing function and each unknown option. Files are only checked if `run.trust` executes them.

        Args:
            run: The resolved run.
        """
        problems, found = Problems(), {}
        for option, use in self.functions().items():
            try:
                found[option], _ = use.find(option, problems, run.trust)
            except ConfigError as error:
                problems.add(option, error.message, error.hint)
            except PluginError as error:
                problems.add_error(option if isinstance(use.choice, str) else f"{option}.name", error)
        yield from super().check(run)
        yield from problems
        yield from self.check_functions(run, found)

    def check_functions(self, run: ResolvedRun, found: Mapping[str, SelectedPlugin]) -> Iterable[Problem]:
        """Return the problems of functions that exist but do not fit the run. None by default.

        Args:
            run: The resolved run.
            found: Option -> the function that it chooses.
        """
        return ()

    def adapt(self, run: ResolvedRun) -> Self:
        """Replace the files of functions with their absolute paths, for other processes and for a resume.

        Args:
            run: The resolved run.
        """
        absolute: dict[str, FunctionChoice] = {}
        for option, use in self.functions().items():
            name, options = split_choice(use.choice, option)
            if is_file_reference(name) and option in type(self).model_fields:
                path, attribute = split_reference(name, f'{SINGULAR[use.kind]} "{name}"')
                absolute[option] = {"name": f"{path}:{attribute}", **options} if options else f"{path}:{attribute}"
        return super().adapt(run).model_copy(update=absolute)


def _find(kind: FunctionKind, name: str, trust: FileTrust) -> SelectedPlugin:
    """Load a function by its name or `FILE.py:NAME`. Raises `PluginError` if it is missing or invalid.

    The schema of its options is `component.config` of the result. Names of KL estimators are built in, all others are
    names of plugins.
    """
    if kind != "kl_estimators" or is_file_reference(name):
        return load(kind, name, trust=trust)
    if name not in KL_ESTIMATORS:
        raise PluginError(
            f'there is no KL estimator "{name}"{suggestion(name, KL_ESTIMATORS)}',
            hint=f"use one of {', '.join(KL_ESTIMATORS)}, or FILE.py:NAME",
        )

    def estimate(log_probs: Tensor, reference_log_probs: Tensor) -> Tensor:
        return objective.kl_estimate(log_probs, reference_log_probs, name)  # type: ignore[arg-type]

    owner = "rlhf-objective"
    return SelectedPlugin(kind, name, Component("", FunctionOptions), owner, version(owner), function=estimate)


def split_choice(choice: FunctionChoice, where: str) -> tuple[str, dict[str, Any]]:
    """Split a choice into name and options. Raises `ConfigError` at `where` if it lacks a name.

    Example:
        >>> split_choice({"name": "clip", "clip_eps": 0.1}, where="algorithm.policy_loss")
        ('clip', {'clip_eps': 0.1})
    """
    if isinstance(choice, str):
        return choice, {}
    options = dict(choice)
    name = options.pop("name", None)
    if not isinstance(name, str):
        raise ConfigError("needs a `name`", where=where, hint="write NAME, or {name: NAME, option: value}")
    return name, options


def _known(schema: Any) -> str:
    return ", ".join(schema.model_fields) or "none"
