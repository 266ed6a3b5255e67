"""`train`: from a run file, path or mapping, to a run folder. The command and Python share this path."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from datetime import datetime
from importlib import import_module
from pathlib import Path
from typing import Any, cast

from .checkpoint import CheckpointStore, find_damage
from .config_load import Override, load_run
from .config_resolve import ResolvedRun, check_processes, resolve
from .errors import InterruptedRun, UserInputError
from .hook_plugins import load_hook_plugins
from .hooks import HookRelay
from .interrupts import InterruptFlag
from .launch_env import read_launch_env
from .manifest import collect_manifest, full_command
from .models import check_model
from .plugins import resolve_build
from .runfolder import RunFolder, Status, default_path, find_newest
from .transport import FitResult, RunRequest, Transport

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
) -> TrainResult | None:
    """Train as a run file (path) or mapping says.

    Args:
        output: the run folder; default `runs/<algorithm>-<time>`.
        resume: `auto`, or a run or checkpoint folder to continue from.
        num_processes: training processes on this machine (transport `local`).
        dry_run: check everything, load no weights, write nothing; returns None.
        overrides: `"key.path=value"` as `--set` takes them.
        hooks: objects with `rlhf_…` hooks, or `module:attr` of what makes one, beside the installed hook plugins.

    Raises:
        UserInputError: the input is wrong; nothing was written.
        RlhfError: the run failed; its folder says how.
        InterruptedRun: Ctrl-C; a checkpoint was written.
    """
    relay = HookRelay()
    for hook in hooks:
        relay.register(_made(hook))
    resolved = _resolved(run, overrides, relay)
    check_processes(resolved, num_processes)
    check_run(resolved)
    if dry_run:
        return None
    if num_processes > 1:
        return _launch(resolved, _choose_output(output, resume, resolved), resume, num_processes, hooks)
    environment = read_launch_env()
    if environment.world_size > 1 and output is None:
        raise UserInputError(
            "the processes of a launcher must agree on the run folder", where="--output", hint="add --output DIR"
        )
    return _execute(resolved, relay, _choose_output(output, resume, resolved), resume, environment.rank)


def _made(hook: object | str) -> object:
    if not isinstance(hook, str):
        return hook
    module, _, attribute = hook.partition(":")
    return getattr(import_module(module), attribute)()


def _launch(
    resolved: ResolvedRun, output: Path, resume: str | None, num_processes: int, hooks: Sequence[object | str]
) -> TrainResult:
    from .launch import run_in_processes

    unnamed = [hook for hook in hooks if not isinstance(hook, str)]
    if unnamed:
        raise UserInputError(
            f"the hook {type(unnamed[0]).__name__} cannot travel to another process",
            where="num_processes",
            hint='give hooks as "module:attr", or install them as a hook plugin',
        )
    if resume is None:
        RunFolder.create(output).close()
    else:
        find_checkpoint(resume, output)
    run_in_processes(resolved, output, resume, num_processes, [hook for hook in hooks if isinstance(hook, str)])
    return read_result(output)


def _resolved(run: str | Path | Mapping[str, Any], overrides: Sequence[Override], relay: HookRelay) -> ResolvedRun:
    mapping = load_run(run, overrides)
    disabled = (mapping.get("hooks") or {}).get("disable") or []
    load_hook_plugins(relay, disabled if isinstance(disabled, list) else [])
    for changed in relay.fire("transform_config", config=mapping):
        mapping = dict(changed)
    return resolve(mapping, where=str(run) if isinstance(run, (str, Path)) else "run file")


def check_run(resolved: ResolvedRun) -> None:
    """Everything that can be known before weights are loaded: model folder, tokenizer, prompt files, plugin code."""
    from .algorithm import DatasetAlgorithm
    from .build import build_algorithm, build_prompts
    from .models import load_tokenizer

    check_model(resolved.run.model)
    for selected in (resolved.strategy, resolved.engine, resolved.transport, *(r.selected for r in resolved.rewards)):
        resolve_build(selected)
    tokenizer = load_tokenizer(resolved.run.model)
    algorithm = build_algorithm(resolved, tokenizer)
    held_out = 0 if resolved.run.eval is None or resolved.eval_prompts else resolved.run.eval.num_prompts
    stream = build_prompts(resolved, tokenizer, held_out=held_out)
    if isinstance(algorithm, DatasetAlgorithm):
        algorithm.encode(stream.record(0), tokenizer)
    else:
        stream.prompt(0)


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
    resolved: ResolvedRun, relay: HookRelay, output: Path, resume: str | None, rank: int
) -> TrainResult:
    """Run in this process, as the rank it is."""
    checkpoint = None if resume is None else find_checkpoint(resume, output)
    with ExitStack() as stack:
        if rank != 0:
            folder = RunFolder(output)
        else:
            folder = stack.enter_context(RunFolder.create(output) if resume is None else RunFolder.open(output))
            stack.enter_context(folder.logging())
        interrupted = stack.enter_context(InterruptFlag())
        request = RunRequest(resolved=resolved, folder=folder, hooks=relay, resume=checkpoint, interrupted=interrupted)
        if rank != 0:
            _transport(resolved).run(request)
        else:
            run_as_main(request)
    return read_result(output)


def run_as_main(request: RunRequest) -> None:
    """Run, and keep the folder's account of it: config, manifest, log, summary, report."""
    resolved, folder, relay = request.resolved, request.folder, request.hooks
    config = resolved.to_mapping()
    folder.write_config(config)
    seed = resolved.run.train.seed
    folder.write_manifest(collect_manifest(seed=seed, command=full_command(), data_digest=data_digest(resolved)))
    from .run_hooks import register_run_hooks

    register_run_hooks(relay, resolved, folder)
    started = time.perf_counter()
    status: Status = "failed"
    result = FitResult(None, None, 0)
    summary: dict[str, Any] | None = None
    with relay.span("run", run_folder=folder.path, config=config) as span:
        try:
            result = _transport(resolved).run(request)
            status = "done"
        except (InterruptedRun, KeyboardInterrupt):
            status = "interrupted"
            raise
        except Exception as error:
            logger.debug("the run failed", exc_info=error)
            error.run_log = folder.log  # type: ignore[attr-defined]
            raise
        finally:
            wall_s = time.perf_counter() - started
            summary = folder.write_summary(
                status=status, eval_before=result.eval_before, eval_after=result.eval_after, wall_s=wall_s
            )
            span.set("summary", summary)


def _transport(resolved: ResolvedRun) -> Transport:
    return cast(Transport, resolve_build(resolved.transport)(resolved.transport.config, None))


def data_digest(resolved: ResolvedRun) -> str | None:
    """Digest of the prompts: of the file where they are one, else of the options that make them."""
    import hashlib

    from .manifest import digest_file

    options = resolved.prompts.to_mapping()
    path = options.get("path")
    if isinstance(path, str) and Path(path).is_file():
        return digest_file(Path(path))
    return "sha256:" + hashlib.sha256(json.dumps(options, sort_keys=True).encode()).hexdigest()


def read_result(folder: Path) -> TrainResult:
    """What a run folder says of its run."""
    opened = RunFolder.read(folder)
    lines = opened.metrics.read_text(encoding="utf-8").splitlines() if opened.metrics.exists() else []
    return TrainResult(folder, opened.read_json(opened.summary), [json.loads(line) for line in lines])
