"""What sections of a run file are made of, core's and plugins': their bases, and options of some kinds."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Literal, get_args
from urllib.parse import SplitResult, urlsplit

from pydantic import BaseModel, ConfigDict, Field, SecretStr, StringConstraints

from ..errors import ConfigError
from ..util.redact import ENVIRONMENT, learn_secret

Count = Annotated[int, Field(ge=1)]

LATE_SAMPLES_CAP = 2.0
"""`importance_cap` of a run whose samples may come from older weights."""


class Section(BaseModel):
    """Base of every section: unknown keys, NaN and infinity are errors; instances are frozen."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SelectsPlugins(ABC):
    """Base for a plugin's config whose options select further plugins, so that these are checked with the run."""

    @abstractmethod
    def selections(self) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
        """Kind, place in this section, and options (with `name`) of each."""

    @abstractmethod
    def with_selected(self, selected: Sequence[Mapping[str, Any]]) -> BaseModel:
        """The section with what was found for each selection: all its options, and a name with an absolute path."""


class PolicyLossSection(Section):
    """Options common to all policy losses; base for algorithms that learn from sampled answers."""

    aggregation: Literal[
        "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "sequence-mean-token-sum-norm"
    ] = Field("token-mean", description="How token losses become one number, over the global batch.")
    norm_length: int | None = Field(
        None, ge=1, description="Divisor of sequence-mean-token-sum-norm, in tokens; null takes engine.max_new_tokens."
    )
    entropy_coef: float = Field(0.0, ge=0, description="Factor of the entropy bonus.")
    kl_coef: float = Field(0.05, ge=0, description="Factor of the KL penalty; 0 builds no reference model.")
    kl_estimator: Literal["k1", "k2", "k3", "abs", "k1+", "k3+"] = Field(
        "k1", description="Estimator of the KL per token."
    )
    kl_in: Literal["reward", "loss"] = Field("reward", description="Penalise the KL in the reward or in the loss.")
    importance_cap: float | None = Field(
        None,
        gt=0,
        description="Weight tokens by min(trainer / engine probability, this), for an engine or version that lags; "
        "null is off.",
    )

    def weighing_late_samples(self) -> PolicyLossSection:
        """The options for samples from older weights: truncated importance sampling, unless the run sets
        `importance_cap`."""
        if "importance_cap" in self.model_fields_set:
            return self
        return self.model_copy(update={"importance_cap": LATE_SAMPLES_CAP})


@dataclass(frozen=True, slots=True)
class OwnProcesses:
    """The processes that a transport starts itself."""

    trainers: int
    makers: int
    """0 where the trainers make the rollouts."""
    option: str
    """The transport's option for the number of trainers."""


class StrategyConfig(Section):
    """Base of the options of a strategy with capabilities that depend on them."""

    def processes_per_rank(self) -> int:
        """Processes that compute the same rows together; their number divides that of all training processes."""
        return 1

    def layouts(self, num_processes: int) -> Iterator[dict[str, Any]]:
        """Values of these options that lay a model out over so many processes, those that communicate least first.

        `rlhf plan` takes the first that fits the memory at hand.
        """
        yield {}


class TransportConfig(Section):
    """Base of a transport's options; core asks about the transport's capabilities through these methods."""

    def own_processes(self) -> OwnProcesses | None:
        """The processes it starts; None where it uses the existing ones (`--num-processes`, or a launcher's)."""
        return None

    def staleness_bound(self) -> int:
        """Most policy versions by which a sample may lag behind the trainer."""
        return 0

    def updates_in_flight(self) -> bool:
        """Whether new weights come while answers are sampled, which the engine has to be made for."""
        return False


def secret_value(secret: SecretStr, where: str) -> str:
    """The secret in an option of type `SecretStr`: its text, or for `env:NAME` the environment variable's value.

    Raises `ConfigError`, as `where`, for a variable that is not set.
    """
    text = secret.get_secret_value()
    if not text.startswith(ENVIRONMENT):
        return text
    name = text.removeprefix(ENVIRONMENT)
    value = os.environ.get(name)
    if not value:
        raise ConfigError(f"the environment variable {name} is not set", where=where, hint=f"export {name}=…")
    return value


def options_of(config: BaseModel) -> dict[str, Any]:
    """The options as JSON values, secrets as they were given; the config can be rebuilt from them."""
    dumped: dict[str, Any] = config.model_dump(mode="json")
    for name in dumped:
        value = getattr(config, name)
        if isinstance(value, SecretStr):
            learn_secret(value.get_secret_value())
            dumped[name] = value.get_secret_value()
        elif isinstance(value, BaseModel):
            dumped[name] = options_of(value)
    return dumped


def address_parts(
    url: str, *, form: str = "http://HOST[:PORT]/PATH", schemes: Collection[str] = ("http", "https")
) -> SplitResult:
    """The parts of a server's address, for a field's validator. Raises `ValueError` where it is none of this form."""
    try:
        parts = urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise ValueError(f"no address: {error}") from None
    if parts.scheme not in schemes or not parts.hostname or port == 0:
        raise ValueError(f"should be {form} or https://…")
    return parts


class _IsCommand:
    """Marks the type of such an option."""


Command = Annotated[list[Annotated[str, StringConstraints(pattern=r"^[^\x00]+$")]], Field(min_length=1), _IsCommand()]
"""The type of an option that is a program and its arguments, to start without a shell. Core refuses a run that may not
start it, before anything is built."""


def commands_of(config: BaseModel) -> Iterator[tuple[str, list[str]]]:
    """Dotted key and value of each option that is a `Command`, or is made of them."""
    for name, field in type(config).model_fields.items():
        is_command = _names_command(field.metadata, field.annotation)
        yield from _in_value(name, getattr(config, name), is_command)


def _names_command(metadata: Any, annotation: Any) -> bool:
    if any(isinstance(each, _IsCommand) for each in metadata):
        return True
    return any(_names_command(getattr(part, "__metadata__", ()), part) for part in get_args(annotation))


def _in_value(path: str, value: Any, is_command: bool) -> Iterator[tuple[str, list[str]]]:
    if isinstance(value, BaseModel):
        yield from ((f"{path}.{key}", command) for key, command in commands_of(value))
    elif is_command and isinstance(value, list) and value and all(isinstance(part, str) for part in value):
        yield path, value
    elif isinstance(value, list | Mapping):
        for key, part in value.items() if isinstance(value, Mapping) else enumerate(value):
            yield from _in_value(f"{path}.{key}", part, is_command)
