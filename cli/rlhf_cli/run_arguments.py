"""A run as the command line describes it: a file or the quickstart, flags, and `--set`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .output import echo
from .quickstart import find_quickstart

if TYPE_CHECKING:
    from rlhf_core.config.resolve import ResolvedRun
    from rlhf_core.plugins.trust import FileTrust

_OPTIONS = (
    click.argument("run_file", metavar="[RUN.yaml]", required=False, type=click.Path(dir_okay=False)),
    click.option(
        "--from",
        "origin",
        metavar="RUN_DIR",
        type=click.Path(exists=True, file_okay=False, path_type=Path),
        help="Begin with the config of an earlier run, in place of RUN.yaml.",
    ),
    click.option("--algorithm", metavar="NAME", help="What the update is: ppo, grpo, sft, …"),
    click.option("--strategy", metavar="NAME", help="How the model is trained: single, ddp, gemini, …"),
    click.option("--transport", metavar="NAME", help="Where makers and trainers run: local or ray."),
    click.option("--engine", metavar="NAME", help="How answers are generated: hf or vllm."),
    click.option(
        "--reward",
        "rewards",
        multiple=True,
        metavar="NAME[:WEIGHT]",
        help="A reward, or FILE.py:FUNCTION[:WEIGHT]. Given at all, it replaces the list of the run file. Repeatable.",
    ),
    click.option("--environment", metavar="NAME", help="What answers over several turns: NAME or FILE.py:CLASS."),
    click.option("--model", metavar="PATH", help="Model folder, hub name or builtin:NAME."),
    click.option(
        "--set",
        "overrides",
        multiple=True,
        metavar="KEY.PATH=VALUE",
        help="Set any option of the run file, the value in YAML: --set optimizer.lr=1e-6 --set rewards.0.weight=2.",
    ),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunArguments:
    """A run as asked for on the command line."""

    run_file: str | None = None
    origin: Path | None = None
    """Folder of the run whose config is the base."""
    resumed: Path | None = None
    """Folder of the run that goes on, whose config is the base where no other is given."""
    algorithm: str | None = None
    strategy: str | None = None
    transport: str | None = None
    engine: str | None = None
    rewards: tuple[str, ...] = ()
    environment: str | None = None
    model: str | None = None
    overrides: tuple[str, ...] = ()
    base: Mapping[str, Any] | None = None
    """Base of the run in place of the quickstart, where there is no run file."""

    @property
    def where(self) -> str:
        """How errors call the source of the run."""
        folder = self.origin or self.resumed
        return self.run_file or (f"config of {folder}" if folder is not None else "quickstart")

    def mapping(self, flags: Sequence[tuple[str, Any]] = ()) -> tuple[dict[str, Any], list[str]]:
        """The run as one mapping (file, then flags, then `--set`), and the options that flags dropped.

        flags: further ones, as options of the run and their values.
        """
        from rlhf_core.config.load import PLUGIN_SECTIONS, load_run, parse_reward

        run = load_run(self._base())
        dropped: list[str] = []
        for section, kind in {**PLUGIN_SECTIONS, "environment": "environments"}.items():
            if (name := getattr(self, section, None)) is not None:
                dropped += switch_plugin(run, section, name, option_names(kind, name))
        own: list[tuple[str, Any]] = [] if self.model is None else [("model.path", self.model)]
        if self.rewards:
            own.append(("rewards", [parse_reward(text) for text in self.rewards]))
        return load_run(run, [*own, *flags, *self.overrides]), dropped

    def resolved(self) -> ResolvedRun:
        """The run, checked without running code from files; says on stderr what was dropped, and what was not run."""
        from rlhf_core.config.resolve import resolve
        from rlhf_core.plugins.trust import NO_FILE

        mapping, dropped = self.mapping()
        tell_dropped(dropped)
        run = resolve(mapping, where=self.where, trust=NO_FILE)
        named = [("algorithm", run.algorithm), ("prompts", run.prompts)]
        named += [(f"rewards.{index}", reward) for index, reward in enumerate(run.rewards)]
        named += [("hooks", hook) for hook in run.hooks]
        for place, selected in named:
            if selected.is_unread:
                echo(f"note: {place}: {selected.name} is not run here; train checks it and its options", err=True)
        return run

    def trust(self, *, everything: bool = False) -> FileTrust:
        """Which files of code and programs that the run names are run, and whether all are (`--trust`): SECURITY.md."""
        from rlhf_core.config.load import parse_override
        from rlhf_core.entry.allowed_code import load_allowed_code
        from rlhf_core.plugins.trust import EVERY_FILE, FileTrust, referenced_files

        if everything:
            return EVERY_FILE
        given = [parse_override(text) for text in self.overrides]
        # A reward is FILE.py:FUNCTION, with a weight behind it or without.
        rewards = [*self.rewards, *(text.rpartition(":")[0] for text in self.rewards)]
        plugins = [self.algorithm, self.strategy, self.transport, self.engine, self.environment]
        named = [*rewards, *plugins, [value for _, value in given]]
        files = referenced_files(named)
        models = [self.model, *(value for path, value in given if path == "model.path")]
        if any(path == "model.trust_remote_code" for path, _ in given):
            models.append((self.mapping()[0].get("model") or {}).get("path"))
        files |= {Path(model).resolve() for model in models if isinstance(model, str)}
        if self.run_file is not None:
            return FileTrust(folder=Path(self.run_file).parent, files=files)
        return FileTrust(files=files if self.resumed is None else files | load_allowed_code(self.resumed))

    def _base(self) -> str | dict[str, Any]:
        if self.origin is None and self.run_file is None and self.resumed is not None:
            from rlhf_core.entry.resume import load_run_config

            return load_run_config(self.resumed)
        if self.origin is None:
            if self.run_file is not None:
                return self.run_file
            if self.base is not None:
                return dict(self.base)
            return find_quickstart().base_run(self.algorithm, self.environment)
        if self.run_file is not None:
            raise click.UsageError(f"--from {self.origin} takes the place of {self.run_file}: give one of them")
        from rlhf_core.config.resolve import without_removed
        from rlhf_core.entry.resume import check_owners
        from rlhf_core.runfolder.folder import RunFolder

        folder = RunFolder.read(self.origin)
        check_owners(folder)
        return without_removed(folder.read_config())


def switch_plugin(run: dict[str, Any], section: str, name: str, keeps: Sequence[str]) -> list[str]:
    """Change the plugin that `section` names, in place; returns the dotted options that were dropped.

    Options of the old plugin are kept where the new one has them too (`keeps`), but for null: the old one's default.
    """
    from rlhf_core.util.did_you_mean import fold

    old = run.get(section)
    if not isinstance(old, dict):
        run[section] = {"name": name}
        return []
    if fold(str(old.get("name", ""))) == fold(name):
        return []
    kept = {key: value for key, value in old.items() if key in keeps and value is not None}
    run[section] = {**kept, "name": name}
    return [f"{section}.{key}" for key in old if key not in keeps and key != "name"]


def option_names(kind: str, name: str) -> list[str]:
    """Options of a plugin, with those core reads beside them; no file is run. Raises `PluginError`."""
    from rlhf_core.config.select import shared_options
    from rlhf_core.plugins.selected import load
    from rlhf_core.plugins.trust import NO_FILE

    shared = shared_options(kind)
    own = load(kind, name, check_requires=False, trust=NO_FILE).component.config.model_fields
    return list(dict.fromkeys([*(shared.model_fields if shared else ()), *own]))


def run_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the run file and the flags that change it to a command, which gets them as its `request`."""
    names = [each.name for each in fields(RunArguments) if each.name not in ("resumed", "base")]

    @wraps(function)
    def with_request(**values: Any) -> None:
        request = RunArguments(**{name: values.pop(name) for name in names})
        function(request=request, **values)

    for option in reversed(_OPTIONS):
        with_request = option(with_request)
    return with_request


def tell_dropped(dropped: list[str]) -> None:
    """Say on stderr which options a flag left behind."""
    if dropped:
        echo(f"note: dropped {', '.join(dropped)}, which the plugin chosen by flag does not have", err=True)
