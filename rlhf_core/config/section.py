"""Base classes and option types that core and plugins use to define sections of a run file."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Self

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, SecretStr, ValidationInfo

from ..util.redact import learn_secret
from .problems import Problem

if TYPE_CHECKING:
    from ..plugins.selected import SelectedPlugin
    from ..prompts.stream import PromptStream
    from ..protocols import Sampler
    from ..rollout.player import Player, PlayerContext
    from ..runfolder.checkpoints import CheckpointStore
    from ..wiring.inputs import RunInputs
    from .resolved import ResolvedRun

Count = Annotated[int, Field(ge=1)]


class Section(BaseModel):
    """Base of every section: unknown keys, NaN and infinity are errors. Instances are frozen.

    Core calls `check` on every section of a run, then, if there are no problems, `adapt` on every section. Both receive
    the same run: no section sees changes that another one's `adapt` makes.

    A plugin adds its own section to run files through the entry-point group `rlhf.sections` (docs/sections.md). The
    section may provide a player (docs/players.md), whose rows have the columns that the class variable `columns`
    declares, and a sampler.

    Example:
        class BudgetConfig(Section):
            max_tokens: Count = 1000

            def check(self, run: ResolvedRun) -> Iterable[Problem]:
                if self.max_tokens < run.sampling.max_new_tokens:
                    yield Problem("max_tokens", "is below engine.max_new_tokens")
    """

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    active_when_absent: ClassVar[bool] = False
    """For a section of a plugin: whether a run file without the section gets it with its defaults."""
    selects: ClassVar[str | None] = None
    """For a section of a plugin: a kind of plugin, such as "environments". The section's `name` then selects one. Its
    options are part of the section, and the section's entry in `ResolvedRun.sections` is that plugin, with both.
    """
    short_option: ClassVar[str | None] = None
    """For a section of a plugin: the option that a number or text sets, which a run file has in place of a mapping."""
    needs_no_prompts: ClassVar[bool] = False
    """For a section of a plugin: whether a run with it may omit `prompts`. Its tasks are then empty prompts."""
    removed: ClassVar[Mapping[str, str]] = {}
    """Option of earlier versions -> what to use instead. A run file that sets the option is rejected with this text. A
    resume of an older run drops the option and logs that.
    """
    adapt_reasons: ClassVar[Mapping[str, str]] = {}
    """Option -> why `adapt` changes it. The key "" applies to all other options."""

    def check(self, run: ResolvedRun) -> Iterable[Problem]:
        """Yield the problems of this section in this run, with paths relative to the section.

        They are reported together with all others. Reading an invalid part of the run ends the check.
        """
        return ()

    def adapt(self, run: ResolvedRun) -> Self:
        """Return the section as this run needs it: itself, or a changed copy. The log and `config check` show changes.

        The resolved run file contains the result, so adapting an adapted section must change nothing.
        """
        return self

    def player(self, context: PlayerContext) -> Player | None:
        """Return how the policy answers prompts, usually a wrapper of `context.default`. None changes nothing.

        Called for the sections of plugins, in each process that samples answers.
        """
        return None

    def checkpoint_store(self, store: CheckpointStore) -> CheckpointStore:
        """Return how checkpoints are written, a wrapper of `store` or `store` itself.

        Called for the sections of plugins, in each trainer process.
        """
        return store

    def reward_weight(self) -> float | None:
        """Return the weight of the reward `environment`, which the section's player gives its rows (`Played.reward`).

        None if its player does not give one. At most one section of a run may have a weight.
        """
        return None

    def with_plugin(self, plugin: SelectedPlugin) -> Self:
        """Return the options adapted to the plugin they belong to. Raises `PluginError` if it cannot be used.

        For a section that `selects` a plugin, that is the selected plugin.
        """
        return self

    def check_inputs(self, inputs: RunInputs) -> None:
        """Raise `ConfigError` for a tokenizer or prompts that the section cannot use. No weights are loaded yet.

        Called for the transport and the sections of plugins, in the process of the command.
        """

    def rehearse(self, inputs: RunInputs) -> None:
        """Try the section out for `--dry-run`, without weights, for example on one sample with a made-up answer."""

    def sampler(self, records: PromptStream) -> Sampler | None:
        """Return the sampler of the training `records`. None changes nothing. At most one section may return one.

        Called for the sections of plugins, in the process that owns the prompts and in each one that samples answers.
        """
        return None

    def selections(self) -> Iterable[tuple[str, str, Mapping[str, Any]]]:
        """Return kind, place in this section, and options (with `name`) of each further plugin that options select."""
        return ()

    def with_selections(self, selected: Sequence[Mapping[str, Any]]) -> Self:
        """Return the section with each selection's plugin as found: all options, and a name with an absolute path."""
        return self


def options_of(config: BaseModel) -> dict[str, Any]:
    """Return the options as JSON values, secrets included. The config can be rebuilt from them."""
    dumped: dict[str, Any] = config.model_dump(mode="json")
    for name in dumped:
        value = getattr(config, name)
        if isinstance(value, SecretStr):
            learn_secret(value.get_secret_value())
            dumped[name] = value.get_secret_value()
        elif isinstance(value, BaseModel):
            dumped[name] = options_of(value)
    return dumped


def _may_start(command: list[str], info: ValidationInfo) -> list[str]:
    if info.context is not None:
        info.context.check_command(command)
    return command


Command = Annotated[list[Annotated[str, Field(pattern=r"^[^\x00]+$")]], Field(min_length=1), AfterValidator(_may_start)]
"""Type of an option that is a program and its arguments, started without a shell.

Core rejects a run that may not start the program, before anything is built.
"""
