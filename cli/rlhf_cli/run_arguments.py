"""The run that a command line describes: a file or the quickstart, flags, and `--set`."""

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
        help="Use the config of an earlier run instead of RUN.yaml.",
    ),
    click.option("--algorithm", metavar="NAME", help="Learning algorithm: ppo, grpo, sft, …"),
    click.option("--strategy", metavar="NAME", help="Strategy that trains the model: single, torch-ddp, fsdp, …"),
    click.option("--transport", metavar="NAME", help="Transport that runs makers and trainers: local or ray."),
    click.option("--engine", metavar="NAME", help="Engine that generates answers: hf, vllm or http."),
    click.option(
        "--reward",
        "rewards",
        multiple=True,
        metavar="NAME[:WEIGHT]",
        help="A reward, or FILE.py:FUNCTION[:WEIGHT]. Replaces the rewards of the run file. Repeatable.",
    ),
    click.option("--environment", metavar="NAME", help="Environment to play episodes in: NAME or FILE.py:CLASS."),
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
    """A run as described on the command line."""

    run_file: str | None = None
    origin: Path | None = None
    """Folder of the run whose config is the base."""
    resumed: Path | None = None
    """Folder of the resumed run. Its config is the base if no other is specified."""
    algorithm: str | None = None
    strategy: str | None = None
    transport: str | None = None
    engine: str | None = None
    rewards: tuple[str, ...] = ()
    environment: str | None = None
    model: str | None = None
    overrides: tuple[str, ...] = ()
    base: Mapping[str, Any] | None = None
    """Base that replaces the quickstart if no run file is specified."""

    @property
    def where(self) -> str:
        """Name of the run's source in errors."""
        folder = self.origin or self.resumed
        return self.run_file or (f"config of {folder}" if folder is not None else "quickstart")

    def mapping(self, flags: Sequence[tuple[str, Any]] = ()) -> tuple[dict[str, Any], list[str]]:
        """Return the run as one mapping (file, then flags, then `--set`), and the options that flags dropped.

        Args:
            flags: Other flags, as dotted options of the run with their values.
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
        """Check the run without executing code from files. Report dropped options and skipped files on stderr."""
        from rlhf_core.config.resolve import resolve
        from rlhf_core.plugins.trust import NO_FILE

        mapping, dropped = self.mapping()
        report_dropped(dropped)
        run = resolve(mapping, where=self.where, trust=NO_FILE)
        plugins = [("algorithm", run.algorithm), ("prompts", run.prompts)]
        plugins += [(f"rewards.{index}", reward) for index, reward in enumerate(run.rewards)]
        plugins += [("hooks", hook) for hook in run.hooks]
        for place, selected in plugins:
            if selected.is_unread:
                echo(f"note: {place}: {selected.name} is not executed here: train checks it and its options", err=True)
        return run

    def trust(self, *, everything: bool = False) -> FileTrust:
        """Return which code files and programs of the run are trusted (SECURITY.md). everything: `--trust`."""
        from rlhf_core.config.load import parse_override
        from rlhf_core.entry.allowed_code import load_allowed_code
        from rlhf_core.plugins.trust import EVERY_FILE, FileTrust, referenced_files

        if everything:
            return EVERY_FILE
        overrides = [parse_override(text) for text in self.overrides]
        # A reward is FILE.py:FUNCTION, with or without a weight.
        rewards = [*self.rewards, *(text.rpartition(":")[0] for text in self.rewards)]
        plugins = [self.algorithm, self.strategy, self.transport, self.engine, self.environment]
        files = referenced_files([*rewards, *plugins, [value for _, value in overrides]])
        models = [self.model, *(value for path, value in overrides if path == "model.path")]
        if any(path == "model.trust_remote_code" for path, _ in overrides):
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
            raise click.UsageError(f"--from {self.origin} replaces {self.run_file}: specify only one of them")
        from rlhf_core.config.resolve import without_removed
        from rlhf_core.entry.resume import check_owners
        from rlhf_core.runfolder.folder import RunFolder

        folder = RunFolder.read(self.origin)
        check_owners(folder)
        return without_removed(folder.read_config())


def switch_plugin(run: dict[str, Any], section: str, name: str, keeps: Sequence[str]) -> list[str]:
    """Change the plugin of a section in place, and return the dotted options that were dropped.

    Args:
        run: The run. Its section is modified.
        section: Name of the section.
        name: Name of the new plugin.
        keeps: Options of the new plugin, which are kept unless they are null (the old plugin's default).

    Example:
        >>> run = {"algorithm": {"name": "ppo", "kl_coef": 0.1, "gamma": 1.0}}
        >>> switch_plugin(run, "algorithm", "grpo", keeps=["kl_coef"]), run
        (['algorithm.gamma'], {'algorithm': {'kl_coef': 0.1, 'name': 'grpo'}})
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
    """Return the options of a plugin, including those that core reads. Does not execute files. Raises `PluginError`."""
    from rlhf_core.config.select import shared_options
    from rlhf_core.plugins.selected import load
    from rlhf_core.plugins.trust import NO_FILE

    shared = shared_options(kind)
    own = load(kind, name, check_requires=False, trust=NO_FILE).component.config.model_fields
    return list(dict.fromkeys([*(shared.model_fields if shared else ()), *own]))


def run_options(function: Callable[..., None]) -> Callable[..., None]:
    """Add the run file and the flags that change it to a command, which receives them as `request`."""
    names = [each.name for each in fields(RunArguments) if each.name not in ("resumed", "base")]

    @wraps(function)
    def with_request(**values: Any) -> None:
        request = RunArguments(**{name: values.pop(name) for name in names})
        function(request=request, **values)

    for option in reversed(_OPTIONS):
        with_request = option(with_request)
    return with_request


def report_dropped(dropped: list[str]) -> None:
    """Report on stderr the options that a flag dropped."""
    if dropped:
        echo(f"note: dropped {', '.join(dropped)}, which the plugin chosen by flag does not have", err=True)
