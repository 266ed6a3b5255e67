"""`--plan`: the memory and disk that the service needs, from the model's config alone."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from rlhf_core.components import StrategyContext
from rlhf_core.models import model_kind_for

from .limits import GIB, Limits
from .options import WorkerOptions, model_config, plugin_of
from .worker import MAX_LOADED_SAMPLERS


def plan_lines(options: WorkerOptions, num_processes: int, limits: Mapping[str, Any]) -> list[str]:
    """Return lines about the memory of a process and the disk of a tenant.

    Args:
        options: options of the ranks.
        num_processes: number of ranks.
        limits: changed limits.
    """
    kind = model_kind_for(model_config(options), "causal-lm")
    kind.check()
    model = kind.load_policy(dtype=torch.float32, seed=0)
    adapter = sum(each.numel() for each in model.parameters() if each.requires_grad)
    base = sum(each.numel() for each in model.parameters()) - adapter
    selected, config = plugin_of("strategies", "strategy", options.strategy, options.strategy_options)
    strategy = selected.build(config, StrategyContext("cpu"))
    dtype = torch.float32 if options.dtype == "auto" else getattr(torch, options.dtype)
    state, bounds = strategy.state_bytes(num_processes, dtype), Limits(**limits)
    copies = state.reference * base if options.is_owning else dtype.itemsize * base if strategy.shards_parameters else 0
    # The slot, its gradients and moments, and the weights, gradients and moments of each adapter outside of it.
    per_adapter = (state.weights + state.gradients + state.optimizer) * adapter
    parts = {
        f"base model ({base:,} parameters)": state.reference * base,
        "second copy of it for sampling": copies,
        f"slot of rank {options.max_rank} ({adapter:,} parameters)": per_adapter,
        f"{options.max_adapters} adapters": 0 if options.is_owning else options.max_adapters * per_adapter,
        f"{MAX_LOADED_SAMPLERS} saved adapters for sampling": MAX_LOADED_SAMPLERS * state.weights * adapter,
    }
    lines = [f"memory of one of {num_processes} processes, without activations and keys and values of sampling:"]
    lines += [f"  {name}: {size / GIB:.3f} GiB" for name, size in parts.items() if size]
    lines.append(f"  together: {sum(parts.values()) / GIB:.3f} GiB")
    lines.append("disk:")
    lines.append(f"  one training checkpoint of rank {options.max_rank}: {12 * adapter / GIB:.3f} GiB")
    lines.append(f"  states of a tenant's models (limits.models): {bounds.models * 12 * adapter / GIB:.1f} GiB")
    lines.append(f"  limit of a tenant (limits.disk_bytes): {bounds.disk_bytes / GIB:.1f} GiB")
    return lines
