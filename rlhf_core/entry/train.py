"""`train`: from a run file, path or mapping, to a run folder. The command and Python share this path."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from ..algorithm import Algorithm
from ..config.load import Override, load_run
from ..config.resolve import ResolvedRun, check_processes, resolve
from ..distributed.interrupts import InterruptFlag
from ..distributed.launch_env import read_launch_env
from ..errors import ConfigError, InterruptedRun, UserInputError
from ..hooks.installed import load_hook_plugins
from ..hooks.relay import HookRelay
from ..models.loading import check_model
from ..plugins.discovery import resolve_build
from ..runfolder.checkpoint_state import read_run_state
from ..runfolder.checkpoints import CheckpointStore, find_damage
from ..runfolder.folder import RunFolder, RunStatus, default_path, find_newest
from ..training.guard_runner import ROLLBACK
from ..training.request import RunInputs, RunRequest, Transport
from ..util.host_memory import set_up_host_memory
from .run_record import FirstScore, begin_record, failed_when_refused, register_run_hooks, undone_when_refused

logger = logging.getLogger("rlhf")


@dataclass(frozen=True, slots=True)
class TrainResult:
    """A finished run."""

    run_folder: Path
    summary: dict[str, Any]
    """What `summary.json` says."""
    metrics: list[dict[str, Any]]
    """The lines of `metrics.jsonl`."""


def train(
    run: str | Path | Mapping[str, Any],
    *,
    output: Path | str | None = None,
    resume: str | None = None,
    num_processes: int = 1,
    dry_run: bool = False,
    overrides: Sequence[Override] = (),
    hooks: Sequence[object | str] = (),
    origin: Path | None = None,
) -> TrainResult | None:
    """Train as a run file (path) or mapping says.

    Args:
        output: the run folder; default `runs/<algorithm>-<time>`.
        resume: `auto`, or a run or checkpoint folder to continue from.
        num_processes: training processes on this machine (transport `local`).
        dry_run: check everything, load no weights, write nothing; returns None.
        overrides: `"key.path=value"` as `--set` takes them.
        hooks: objects with `rlhf_…` hooks, or `module:attr` of what makes one, beside the installed hook plugins.
        origin: folder of a run that `run` comes from; what differs from it is said in log and manifest.

    Raises:
        UserInputError: the input is wrong; nothing was written.
        RlhfError: the run failed; its folder says how.
        InterruptedRun: Ctrl-C; a checkpoint was written.
    """
    set_up_host_memory()
    relay = HookRelay()
    for hook in hooks:
        relay.register(_made(hook))
    resolved = _resolved(run, overrides, relay)
    environment = read_launch_env()
    check_processes(resolved, num_processes)
    check_processes(resolved, environment.world_size, f"{environment.launcher}: world size")
    inputs = check_run(resolved)
    if dry_run:
        return None
    if num_processes > 1:
        return _launch(resolved, _choose_output(output, resume, resolved), resume, num_processes, hooks, origin)
    if environment.world_size > 1 and output is None:
        raise UserInputError(
            "the processes of a launcher must agree on the run folder", where="--output", hint="add --output DIR"
        )
    chosen = _choose_output(output, resume, resolved)
    return _execute(resolved, inputs, relay, chosen, resume, environment.rank, origin)


def _made(hook: object | str) -> object:
    if not isinstance(hook, str):
        return hook
    module, _, attribute = hook.partition(":")
    return getattr(import_module(module), attribute)()


def _launch(
    resolved: ResolvedRun,
    output: Path,
    resume: str | None,
    num_processes: int,
    hooks: Sequence[object | str],
    origin: Path | None,
) -> TrainResult:
    from .launch import run_in_processes

    unnamed = [hook for hook in hooks if not isinstance(hook, str)]
    if unnamed:
        raise UserInputError(
            f"the hook {type(unnamed[0]).__name__} cannot travel to another process",
            where="num_processes",
            hint='give hooks as "module:attr", or install them as a hook plugin',
        )
    if resume is not None:
        find_checkpoint(resume, output)
    with undone_when_refused(output) if resume is None else nullcontext():
        if resume is None:
            RunFolder.create(output).close()
        named = [hook for hook in hooks if isinstance(hook, str)]
        run_in_processes(resolved, output, resume, num_processes, named, origin)
    return read_result(output)


def _resolved(run: str | Path | Mapping[str, Any], overrides: Sequence[Override], relay: HookRelay) -> ResolvedRun:
    mapping = load_run(run, overrides)
    disabled = (mapping.get("hooks") or {}).get("disable") or []
    load_hook_plugins(relay, disabled if isinstance(disabled, list) else [])
    return resolve(relay.transform_config(mapping), where=str(run) if isinstance(run, (str, Path)) else "run file")


def check_run(resolved: ResolvedRun) -> RunInputs:
    """Check what can be known before weights are loaded: model folder, tokenizer, prompt files, plugin code.

    Returns what was built on the way.
    """
    from ..algorithm import DatasetAlgorithm
    from ..build import build_algorithm, build_prompts, build_run_prompts
    from ..models.loading import load_tokenizer

    check_model(resolved.run.model)
    for selected in (resolved.strategy, resolved.engine, resolved.transport, *(r.selected for r in resolved.rewards)):
        resolve_build(selected)
    tokenizer = load_tokenizer(resolved.run.model)
    algorithm = build_algorithm(resolved, tokenizer)
    check_algorithm(resolved, algorithm)
    stream = build_run_prompts(resolved, tokenizer)
    own = resolved.eval_prompts
    eval_prompts = None if own is None else build_prompts(resolved, tokenizer, held_out=0, source=own)
    if isinstance(algorithm, DatasetAlgorithm):
        algorithm.encode(stream.record(0), tokenizer)
    else:
        stream.prompt(0)
    return RunInputs(tokenizer=tokenizer, algorithm=algorithm, prompts=stream, eval_prompts=eval_prompts)


def check_algorithm(resolved: ResolvedRun, algorithm: Algorithm[Any, Any]) -> None:
    """Raise `ConfigError` for options that mean nothing to the run's algorithm."""
    name = resolved.algorithm.name
    if resolved.run.optimizer.critic_lr is not None and "critic" not in algorithm.roles:
        raise ConfigError(
            f"{name} has no critic, so no learning rate of one", where="optimizer.critic_lr", hint="remove it"
        )
    if resolved.rewards and algorithm.model_kind != "causal-lm":
        raise ConfigError(
            f"{name} trains a model that gives scores; it writes no answers that a reward could judge",
            where="rewards",
            hint="remove rewards; with eval, the loss and accuracy on held-out records are reported",
        )


def _choose_output(output: Path | str | None, resume: str | None, resolved: ResolvedRun) -> Path:
    if output is not None:
        return Path(output)
    if resume is None:
        return default_path(resolved.algorithm.name, datetime.now())
    if resume != "auto":
        path = Path(resume)
        return path.parent.parent if path.parent.name == "checkpoints" else path
    newest = find_newest()
    if newest is None:
        raise UserInputError("there is no run in runs/ to continue", where="--resume auto", hint="give --output DIR")
    return newest


def find_checkpoint(resume: str, output: Path) -> Path:
    """The checkpoint that `--resume` means: the newest good one of the run, or the named folder."""
    folder = output if resume == "auto" else Path(resume)
    if (folder / "files.json").exists():
        if problem := find_damage(folder):
            raise UserInputError(problem, where=str(folder), hint="--resume auto takes the newest good one")
        return folder
    found = CheckpointStore(folder / "checkpoints", keep=1).newest()
    if found is None:
        raise UserInputError(
            "there is no checkpoint to continue from", where=str(folder), hint="start anew without --resume"
        )
    return found


def _execute(
    resolved: ResolvedRun,
    inputs: RunInputs,
    relay: HookRelay,
    output: Path,
    resume: str | None,
    rank: int,
    origin: Path | None,
) -> TrainResult:
    """Run in this process, as the rank it is."""
    checkpoint = None if resume is None else find_checkpoint(resume, output)
    with ExitStack() as stack:
        if rank != 0:
            folder = RunFolder(output)
        else:
            folder = _opened(output, resume, stack)
            stack.enter_context(folder.logging())
        interrupted = stack.enter_context(InterruptFlag())
        request = RunRequest(
            resolved=resolved,
            folder=folder,
            hooks=relay,
            inputs=inputs,
            resume=checkpoint,
            interrupted=interrupted,
        )
        if rank != 0:
            _transport(resolved).run(request)
        else:
            run_as_main(request, origin)
    return read_result(output)


def _opened(output: Path, resume: str | None, stack: ExitStack) -> RunFolder:
    """The run folder, locked; `stack` guards it against input that turns out to be wrong."""
    if resume is None:
        stack.enter_context(undone_when_refused(output))
        return stack.enter_context(RunFolder.create(output))
    folder = stack.enter_context(RunFolder.open(output))
    stack.enter_context(failed_when_refused())
    return folder


def run_as_main(request: RunRequest, origin: Path | None = None) -> None:
    """Run, and keep the folder's account of it: config, manifest, log, summary, report."""
    resolved, folder, relay = request.resolved, request.folder, request.hooks
    begin_record(request, origin)
    register_run_hooks(relay, resolved)
    earlier = read_run_state(request.resume) if request.resume is not None else None
    first = FirstScore(None if earlier is None else earlier.eval_before)
    relay.register(first, name="first-score")
    started = time.perf_counter()
    wall_before = 0.0 if earlier is None else earlier.wall_s
    status: RunStatus = "failed"
    eval_after: float | None = None
    with relay.span("run", run_folder=folder.path, config=resolved.to_mapping()) as span:
        try:
            result = _transport(resolved).run(request)
            first.score, eval_after, status = result.eval_before, result.eval_after, "done"
        except (InterruptedRun, KeyboardInterrupt):
            status = "interrupted"
            raise
        except Exception as error:
            status = "rolled-back-and-failed" if folder.events(ROLLBACK) else "failed"
            logger.debug("the run failed", exc_info=error)
            error.run_log = folder.log  # type: ignore[attr-defined]
            raise
        finally:
            wall_s = wall_before + time.perf_counter() - started
            summary = folder.write_summary(
                status=status,
                eval_before=first.score,
                eval_after=eval_after,
                wall_s=wall_s,
                extra={"rollbacks": len(folder.events(ROLLBACK))},
            )
            span.set("summary", summary)


def _transport(resolved: ResolvedRun) -> Transport:
    return cast(Transport, resolve_build(resolved.transport)(resolved.transport.config, None))


def read_result(folder: Path) -> TrainResult:
    """What a run folder says of its run."""
    opened = RunFolder.read(folder)
    lines = opened.metrics.read_text(encoding="utf-8").splitlines() if opened.metrics.exists() else []
    return TrainResult(folder, opened.read_json(opened.summary), [json.loads(line) for line in lines])
