"""Estimates what a run needs in the layout it asks for, and the smallest layout that fits the memory at hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any

import psutil

from rlhf_core.algorithm import Algorithm, FrozenModel, RolloutAlgorithm
from rlhf_core.config import ModelConfig, PromptsConfig, ResolvedRun, StrategyConfig
from rlhf_core.prompts import PromptStream
from rlhf_core.strategy import StateBytes
from rlhf_core.wiring import RunInputs, build_strategy, model_dtype

from .layouts import Layout, smallest_layout
from .machine import GPU_ELSEWHERE, measure
from .meta import meta_model
from .shape import model_shape
from .work import ProcessPlan, Work

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

_PROMPTS_LOOKED_AT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Estimated memory and time of a run. Times are upper bounds where answers end early.

    There are none for a GPU where there is no GPU to measure.
    """

    num_parameters: int
    num_trainable: int
    device: str
    tokens_per_sample: float
    """Mean length of the inspected prompts plus the longest answer."""
    processes: Sequence[ProcessPlan]
    seconds_per_episode: dict[str, float] = field(default_factory=dict)
    tokens_per_second: dict[str, float] = field(default_factory=dict)
    total_seconds: float = 0.0
    layout: Layout | None = None
    """The smallest that fits the memory that was asked about."""

    def to_json(self) -> dict[str, Any]:
        """The plan as JSON, for `--json`."""
        layout = None if self.layout is None else {**asdict(self.layout), "processes": _totals(self.layout.processes)}
        return {**asdict(self), "processes": _totals(self.processes), "layout": layout}


def _totals(processes: Sequence[ProcessPlan]) -> list[dict[str, Any]]:
    return [{**asdict(each), "total_bytes": each.total_bytes} for each in processes]


def plan_run(
    resolved: ResolvedRun, inputs: RunInputs, num_processes: int = 1, *, memory_bytes: int | None = None
) -> Plan:
    """Estimate a checked run. Loads only the weights of built-in models.

    Args:
        resolved: the run.
        inputs: what checking it has built.
        num_processes: training processes, unless the transport starts its own.
        memory_bytes: memory of one process; the plan then includes the smallest layout that fits.
    """
    import torch

    algorithm = inputs.algorithm
    model = meta_model(resolved.run.model)
    shape = model_shape(resolved.run.model, model)
    wanted = resolved.run.model.device
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu") if wanted == "auto" else torch.device(wanted)
    machine = measure(device)
    prompt_tokens, answer_tokens = _lengths(resolved, algorithm, inputs.prompts, inputs.tokenizer)
    own = resolved.own_processes
    trainers, makers = (num_processes, 0) if own is None else (own.trainers, own.makers)
    base = _own_bytes(device)
    is_measured = machine is not GPU_ELSEWHERE
    frozen = algorithm.frozen_models if isinstance(algorithm, RolloutAlgorithm) else {}
    sizes = {role: model_shape(ModelConfig(path=each.path)).num_parameters for role, each in frozen.items()}

    def work_of(changed: ResolvedRun, trainers: int) -> Work:
        strategy = build_strategy(changed if is_measured else _on_cpu(changed))
        strategy.check_model(model)
        dtype = model_dtype(changed, strategy)
        state = strategy.state_bytes(trainers, dtype)
        share = changed.optimizer.component.optimizer_bytes / StateBytes().optimizer
        state = state._replace(optimizer=state.optimizer * share)
        return Work(
            resolved=changed,
            algorithm=algorithm,
            shape=shape,
            machine=machine,
            state=state,
            gathered_bytes=strategy.gathered_bytes(model),
            weight_bytes=dtype.itemsize,
            frozen={
                role: (sizes[role], _bytes_of(each, state.reference if own is None else dtype.itemsize))
                for role, each in frozen.items()
            },
            copies_policy=strategy.shards_parameters,
            prompt_tokens=prompt_tokens,
            answer_tokens=answer_tokens,
            trainers=trainers,
            ranks=trainers // changed.strategy.typed(StrategyConfig).processes_per_rank(),
            makers=makers,
        )

    work = work_of(resolved, trainers)
    layout = None
    if memory_bytes is not None:
        layout = smallest_layout(resolved, memory_bytes, lambda changed, count: work_of(changed, count).processes(base))
    return Plan(
        num_parameters=shape.num_parameters,
        num_trainable=shape.num_trainable,
        device=machine.device,
        tokens_per_sample=prompt_tokens + answer_tokens,
        processes=work.processes(base),
        seconds_per_episode=work.seconds() if is_measured else {},
        tokens_per_second=work.rates() if is_measured else {},
        total_seconds=sum(work.seconds().values()) * resolved.run.train.episodes if is_measured else 0.0,
        layout=layout,
    )


def _bytes_of(frozen: FrozenModel, each: float) -> float:
    """Bytes of each of the model's parameters, which are `each` in the type of the run."""
    import torch

    return each if frozen.dtype == "auto" else float(getattr(torch, frozen.dtype).itemsize)


def _own_bytes(device: torch.device) -> int:
    """Memory of interpreter and libraries, measured in this process, which has loaded them. 0 on a GPU."""
    return 0 if device.type == "cuda" else psutil.Process().memory_info().rss


def _on_cpu(resolved: ResolvedRun) -> ResolvedRun:
    """The run, for a strategy that is asked about GPUs where there is none: in the precision that it has on one."""
    config = resolved.strategy.config
    if getattr(config, "precision", None) == "auto":
        config = config.model_copy(update={"precision": "bf16"})
    model = resolved.run.model.model_copy(update={"device": "cpu"})
    run = resolved.run.model_copy(update={"model": model})
    return replace(resolved, run=run, strategy=replace(resolved.strategy, config=config))


def _lengths(
    resolved: ResolvedRun, algorithm: Algorithm[Any, Any], prompts: PromptStream, tokenizer: PreTrainedTokenizerBase
) -> tuple[float, int]:
    """Mean tokens of the first prompts (or records), and the most tokens of an answer."""
    positions = range(_PROMPTS_LOOKED_AT)
    if isinstance(algorithm, RolloutAlgorithm):
        lengths = [len(prompts.prompt(position).prompt_ids) for position in positions]
        return sum(lengths) / len(lengths), resolved.sampling.max_new_tokens
    encode: Any = getattr(algorithm, "encode")  # noqa: B009  # DatasetAlgorithm's
    items = [encode(prompts.record(position), tokenizer) for position in positions]
    known = [item.num_tokens for item in items if item is not None]
    return (sum(known) / len(known) if known else float(resolved.prompts.typed(PromptsConfig).max_prompt_tokens)), 0
