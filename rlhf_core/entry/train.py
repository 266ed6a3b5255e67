"""`train`: runs a run file or mapping into a run folder. The command and Python callers share this function."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from pkgutil import resolve_name
from typing import Any, cast

from ..algorithm import Algorithm, DatasetAlgorithm
from ..components import HookContext
from ..config.load import LoadedRun, Override, load_run, parse_override
from ..config.processes import check_processes
from ..config.resolve import ResolvedRun, resolve
from ..config.section import Section
from ..config.sections import OptimizerConfig
from ..distributed.interrupts import InterruptFlag
from ..distributed.launch_env import LaunchEnv, read_launch_env
from ..errors import ConfigError, InterruptedRun, PluginError, UserInputError
from ..hooks.installed import load_hook_plugins, register_listed
from ..hooks.relay import HookRelay
from ..models.kinds import model_kind_for
from ..plugins.errors_of import errors_of
from ..plugins.trust import EVERY_FILE, FileTrust, referenced_files
from ..runfolder.checkpoint_state import read_run_state
from ..runfolder.checkpoints import CheckpointStore
from ..runfolder.folder import FileWatch, RunFolder, default_path
from ..training.request import FitResult, RunRequest, Transport
from ..util.host_memory import set_up_host_memory
from ..util.jsonl import read_lines
from ..util.redact import redact_mapping
from ..wiring.inputs import RunInputs
from .ledger import RunLedger
from .resume import find_checkpoint, find_resumed_run, plan_resume
from .run_record import begin_record, check_output, log_resume

logger = logging.getLogger("rlhf")

_MEASURED = 1000
"""Prompts of each source whose length a check measures."""


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished run."""

    run_folder: Path
    summary: dict[str, Any]
    """Content of `summary.json`."""
    metrics: list[dict[str, Any]]
    """Lines of `metrics.jsonl`."""


def train(
    run: str | Path | Mapping[str, Any],
    *,
    output: Path | str | None = None,
    resume: str | None = None,
    restart: bool = False,
    num_processes: int = 1,
    dry_run: bool = False,
    overrides: Sequence[Override] = (),
    hooks: Sequence[object | str] = (),
    rewards: Sequence[Callable[..., Any]] = (),
    origin: Path | None = None,
    trust: FileTrust | bool = False,
    on_check: Callable[[RunInputs], None] | None = None,
) -> TrainResult | None:
    """Train a run and write its run folder.

    Args:
        run: run file (path) or mapping.
        output: the run folder, by default `runs/<algorithm>-<time>`.
        resume: `auto` (which starts a run in a folder without one), or a run or checkpoint folder to continue from.
        restart: with `auto`, discard the updates of a run without a checkpoint and start again, instead of failing.
        num_processes: training processes on this machine (transport `local`).
        dry_run: check everything without loading weights or writing. An environment plays a turn with a fake answer.
        overrides: `"key.path=value"`, as for `--set`.
        hooks: objects with `rlhf_…` hooks, or `module:attr` of a factory, besides the installed hook plugins.
        rewards: functions of this process that score answers, as in a reward file: `rewards=[brevity]` in a
            notebook. Added to the run's `rewards`, without the default reward. Only for one process.
        origin: folder of a run that `run` comes from. Log and manifest list the differences.
        trust: which code files named by `run` may be executed. False: of a run file, those in and below its folder
            and those in `overrides`. Of a mapping, all. True: all.
        on_check: with `dry_run`, called with the inputs that were built for the check.

    Returns:
        The finished run, or None after `dry_run`.

    Raises:
        UserInputError: the input is wrong. Nothing was written.
        RlhfError: the run failed. Its folder records how.
        InterruptedRun: Ctrl-C. A checkpoint was written.
    """
    path = None if output is None else Path(output)
    if (existing := find_resumed_run(resume, path)) is None:
        resume = None
        if dry_run and path is not None:
            check_output(path)
    prepared = prepare(run, overrides, hooks, num_processes, trust, is_check=dry_run, rewards=rewards)
    environment = prepared.environment
    if dry_run:
        if existing is not None and resume is not None:
            log_resume(prepared.resolved, plan_resume(resume, RunFolder(existing), prepared.inputs, restart=restart))
        if environment.rank == 0:
            for section in prepared.resolved.sections.values():
                section.typed(Section).rehearse(prepared.inputs)
        if on_check is not None:
            on_check(prepared.inputs)
        return None
    if environment.world_size > 1 and output is None:
        raise UserInputError(
            "the processes of a launcher need the same run folder", where="--output", hint="add --output DIR"
        )
    folder = existing or path or default_path(prepared.resolved.algorithm.name, datetime.now())
    if environment.rank != 0:
        checkpoint = None if resume is None else find_checkpoint(resume, folder, restart=restart)
        run_rank(prepared, RunLedger(RunFolder(folder)), checkpoint)
        return read_result(folder)
    with RunLedger.take(folder, resume) as ledger:
        return train_in(ledger, prepared, resume, restart, origin)


@dataclass(frozen=True, slots=True, kw_only=True)
class PreparedRun:
    """A checked run, before it has a folder."""

    resolved: ResolvedRun
    inputs: RunInputs
    relay: HookRelay
    hooks: Sequence[object | str]
    """Hooks passed by the caller, which `relay` includes."""
    num_processes: int
    environment: LaunchEnv


def prepare(
    run: str | Path | Mapping[str, Any],
    overrides: Sequence[Override] = (),
    hooks: Sequence[object | str] = (),
    num_processes: int = 1,
    trust: FileTrust | bool = False,
    is_check: bool = False,
    rewards: Sequence[Callable[..., Any]] = (),
) -> PreparedRun:
    """Resolve a run and check it as far as possible without weights. Arguments as for `train` and `check_run`."""
    set_up_host_memory()
    relay = HookRelay()
    for hook in hooks:
        relay.register(resolve_name(hook)() if isinstance(hook, str) else hook)
    resolved = _resolved(run, overrides, relay, _trusted(run, overrides, trust), rewards)
    if rewards and (num_processes > 1 or resolved.transport.name != "local"):
        raise UserInputError(
            f"the reward {resolved.rewards[-1].name} cannot be sent to another process",
            where="rewards",
            hint="write it into a file and name it in the run's rewards: FILE.py:FUNCTION",
        )
    environment = read_launch_env()
    if "RANK" not in os.environ and (tasks := os.environ.get("SLURM_STEP_NUM_TASKS", "1")) != "1":
        raise UserInputError(
            f"srun started {tasks} processes, each of which would be a separate run",
            where="SLURM_STEP_NUM_TASKS",
            hint="have srun start one torchrun per machine, or unset this variable to start separate runs",
        )
    if environment.world_size > 1:
        check_processes(resolved, environment.world_size, "WORLD_SIZE")
    else:
        check_processes(resolved, num_processes)
    if num_processes > 1:
        _launcher(resolved)
    return PreparedRun(
        resolved=resolved,
        inputs=check_run(resolved, is_check=is_check),
        relay=relay,
        hooks=hooks,
        num_processes=num_processes,
        environment=environment,
    )


def train_in(
    ledger: RunLedger,
    prepared: PreparedRun,
    resume: str | None = None,
    restart: bool = False,
    origin: Path | None = None,
) -> TrainResult:
    """Train in a run folder that this process owns. The other arguments are those of `train`."""
    folder, resolved = ledger.folder, prepared.resolved
    resumed = None if resume is None else plan_resume(resume, folder, prepared.inputs, restart=restart)
    checkpoint = None if resumed is None else resumed.checkpoint
    ledger.start(None if checkpoint is None else read_run_state(checkpoint))
    with folder.logging():
        if resumed is not None:
            log_resume(resolved, resumed)
        num_processes = max(prepared.num_processes, prepared.environment.world_size)
        begin_record(folder, prepared.inputs, num_processes, resumed=resumed, origin=origin)
        CheckpointStore(folder.checkpoints).discard_partial()
        if prepared.num_processes > 1:
            _launch(folder, prepared, checkpoint)
        else:
            run_rank(prepared, ledger, checkpoint)
        return read_result(folder.path)


def _launch(folder: RunFolder, prepared: PreparedRun, checkpoint: Path | None) -> None:
    """Start the processes of the run on this machine and wait for them."""
    if unnamed := [hook for hook in prepared.hooks if not isinstance(hook, str)]:
        raise UserInputError(
            f"the hook {type(unnamed[0]).__name__} cannot be sent to another process",
            where="num_processes",
            hint='pass hooks as "module:attr", or install them as a hook plugin',
        )
    named = [hook for hook in prepared.hooks if isinstance(hook, str)]
    _launcher(prepared.resolved)(prepared.resolved, folder.path, checkpoint, prepared.num_processes, named)


def _launcher(resolved: ResolvedRun) -> Callable[..., None]:
    """Return the function that starts the processes of a run. Raises `PluginError` if it is not installed."""
    target = resolved.strategy.component.launch
    try:
        return cast(Callable[..., None], resolve_name(target))
    except (ImportError, AttributeError, ValueError) as error:
        hint = f"pip install {target.partition('.')[0].replace('_', '-')}, or start the processes with torchrun"
        raise PluginError(f"cannot import {target}: {error}", where=resolved.strategy.label, hint=hint) from error


def _trusted(run: str | Path | Mapping[str, Any], overrides: Sequence[Override], trust: FileTrust | bool) -> FileTrust:
    """Return the trust in files that `train` documents."""
    if isinstance(trust, FileTrust):
        return trust
    if trust or isinstance(run, Mapping):
        return EVERY_FILE
    values = [parse_override(each)[1] if isinstance(each, str) else each[1] for each in overrides]
    return FileTrust(folder=Path(run).parent, files=referenced_files(values))


def _resolved(
    run: str | Path | Mapping[str, Any],
    overrides: Sequence[Override],
    relay: HookRelay,
    trust: FileTrust,
    rewards: Sequence[Callable[..., Any]],
) -> ResolvedRun:
    """Load the run, let hook plugins change it, and resolve it."""
    mapping = load_run(run, overrides)
    hooks = mapping.get("hooks")
    disabled = hooks.get("disable") if isinstance(hooks, dict) else None  # `resolve` reports invalid ones
    load_hook_plugins(relay, [each for each in disabled if isinstance(each, str)] if isinstance(disabled, list) else [])
    # A section that a hook removed is null, so that an unknown one is rejected, as by `config check`.
    mapping = LoadedRun({**dict.fromkeys(mapping), **relay.transform_config(mapping)}, mapping.overrides)
    return resolve(mapping, where="run file" if isinstance(run, Mapping) else str(run), trust=trust, functions=rewards)


def check_run(resolved: ResolvedRun, *, is_check: bool = False) -> RunInputs:
    """Check everything that does not need weights: model folder, tokenizer, every prompt, plugin code.

    Returns the inputs built for the check. is_check: no run follows, so it measures the lengths of only some prompts.
    """
    from ..models.passes import planned_passes
    from ..rollout.samples import check_columns
    from ..wiring.models import check_frozen

    model_kind_for(resolved.run.model).check()
    for selected in resolved.selected:
        if not selected.is_unread and selected.kind != "sections":
            selected.import_build()
    inputs = RunInputs(resolved, checks_records=True, measured=_MEASURED if is_check else None)
    tokenizer = inputs.tokenizer
    for name, section in {**resolved.sections, "transport": resolved.transport}.items():
        with errors_of(section.label, f"checking the section {name}", kind=PluginError):
            section.typed(Section).check_inputs(inputs)
        for file in sorted(referenced_files(section.to_mapping())):
            if not file.is_file():
                raise ConfigError(f"no such file: {file}", where=name, hint="paths start at the current folder")
    algorithm = inputs.algorithm
    check_algorithm(resolved, algorithm)
    check_frozen(algorithm, tokenizer)
    stream = inputs.prompts
    passes = planned_passes(algorithm, resolved.algorithm.label, resolved.sampling.temperature)
    check_columns(resolved, algorithm, passes, stream.encoder.columns)
    inputs.eval_prompts  # noqa: B018  # built here to find problems with them
    inputs.sampler()
    if isinstance(algorithm, DatasetAlgorithm):
        algorithm.encode(stream.record(0), tokenizer)
    else:
        stream.prompt(0)
    return inputs


def check_algorithm(resolved: ResolvedRun, algorithm: Algorithm[Any, Any]) -> None:
    """Raise `ConfigError` for options that the run's algorithm does not use."""
    name = resolved.algorithm.name
    if resolved.optimizer.typed(OptimizerConfig).critic_lr is not None and "critic" not in algorithm.roles:
        raise ConfigError(f"{name} does not train a critic", where="optimizer.critic_lr", hint="remove the option")
    if resolved.rewards and algorithm.model_kind != "causal-lm":
        raise ConfigError(
            f"{name} trains a model that returns scores, not answers that a reward could judge",
            where="rewards",
            hint="remove rewards. With eval, loss and accuracy on held-out records are reported",
        )


def run_rank(prepared: PreparedRun, ledger: RunLedger, checkpoint: Path | None) -> None:
    """Run this process's rank. Rank 0 records in the ledger how the run ended."""
    resolved, relay, folder = prepared.resolved, prepared.relay, ledger.folder
    register_listed(relay, resolved, folder.path)
    with InterruptFlag() as interrupted:
        request = RunRequest(
            resolved=resolved,
            folder=folder,
            hooks=relay,
            inputs=prepared.inputs,
            resume=checkpoint,
            interrupted=interrupted,
        )
        if prepared.environment.rank != 0:
            relay.limit_to("maker")
            _run(request, interrupted)
            return
        config = resolved.to_mapping()
        context = HookContext(run_folder=folder.path, run=redact_mapping(config))
        for each in resolved.loggers:
            relay.register(each.build(each.config, context), name=f"logger {each.name}")
        relay.register(ledger, name="ledger")
        with relay.span("run", run_folder=folder.path, config=config) as span:
            failure: BaseException | None = None
            result: FitResult | None = None
            watch = FileWatch(folder)
            try:
                result = _run(request, interrupted)
                watch.check()
            except BaseException as error:
                failure, result = error, None
                if isinstance(error, Exception) and not isinstance(error, InterruptedRun):
                    logger.debug("the run failed", exc_info=error)
                    error.run_log = folder.log  # type: ignore[attr-defined]
                raise
            finally:
                if (summary := ledger.end(failure, result)) is not None:
                    span.set("summary", summary)


def _run(request: RunRequest, interrupted: InterruptFlag) -> FitResult:
    selected = request.resolved.transport
    with interrupted.unswallowed():
        return cast(Transport, selected.build(selected.config, None)).run(request)


def read_result(folder: Path) -> TrainResult:
    """Read the result that a run folder records."""
    run_folder = RunFolder.read(folder)
    return TrainResult(folder, run_folder.read_json(run_folder.summary), list(read_lines(run_folder.metrics)))
