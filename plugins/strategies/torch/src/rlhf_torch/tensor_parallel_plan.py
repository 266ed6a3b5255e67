"""The tensor-parallel plan of a model: transformers' plan for the model type, checked for support."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from rlhf_core.errors import UserInputError

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn

Style = Literal["rows", "columns", "whole", "added"]
"""Split of a weight: each process holds some rows (outputs), some columns (inputs), or all of it. `added`: a bias that
is added to the sum over the processes."""

WHERE = "strategy.tensor_parallel"
_COLWISE, _ROWWISE, _NORM = "colwise", "rowwise", "replicated_with_grad_allreduce"
_EMBEDDING = ("embedding_rowwise", "embedding_colwise")
"""Plan entries of the embedding, which this plan leaves to `vocabulary_parallel.py`."""
_WITHOUT = "train without tensor parallelism: `--set strategy.tensor_parallel=1`"


@dataclass(frozen=True, slots=True)
class ParallelPlan:
    """The plan of one model."""

    trunk: nn.Module
    """The transformer without heads."""
    styles: dict[int, Style]
    """Split of each parameter in the plan, by its `id`."""
    parents: list[nn.Module]
    """Modules whose inputs go to column-wise weights: the attention and the MLP of each block."""
    rowwise: list[nn.Module]
    """Modules whose outputs are partial sums."""


def plan_of(model: nn.Module, size: int) -> ParallelPlan:
    """Create the plan for `size` processes. Raises `UserInputError` if the model lacks one or cannot be divided."""
    trunk, plan, model_type = _find_plan(model)
    check_heads(trunk.config, size)
    result = ParallelPlan(trunk, {}, [], [])
    parents: dict[int, nn.Module] = {}
    for name, module in trunk.named_modules():
        style = plan.get(re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", name))
        if style is None or style in _EMBEDDING:
            continue
        if style not in (_COLWISE, _ROWWISE, _NORM):
            raise UserInputError(
                f"model type {model_type!r} splits {name} as {style!r}, which is not supported",
                where=WHERE,
                hint=_WITHOUT,
            )
        for inner, parameter in module.named_parameters():
            result.styles[id(parameter)] = _style(style, inner, f"{name}.{inner}", model_type)
            _check_divides(parameter.shape, result.styles[id(parameter)], f"{name}.{inner}", size)
        if style == _COLWISE:
            parent = trunk.get_submodule(name.rpartition(".")[0])
            parents[id(parent)] = parent
        elif style == _ROWWISE:
            result.rowwise.append(module)
    result.parents.extend(parents.values())
    for parent_name, parent in trunk.named_modules():
        for inner, parameter in parent.named_parameters():
            if id(parent) in parents and id(parameter) not in result.styles:
                raise _unknown_weight(model_type, f"{parent_name}.{inner}")
    if not result.styles:
        raise _no_plan(model_type)
    return result


def check_heads(config: Any, size: int) -> None:
    """Raise `UserInputError` if `size` processes cannot share the attention heads equally."""
    heads = int(config.num_attention_heads)
    key_value_heads = int(getattr(config, "num_key_value_heads", None) or heads)
    if heads % size or key_value_heads % size:
        common = math.gcd(heads, key_value_heads)
        raise UserInputError(
            f"{size} processes cannot share {heads} attention heads and {key_value_heads} key-value heads equally",
            where=WHERE,
            hint=f"use a divisor of {common}: `--set strategy.tensor_parallel={_largest_divisor(common, size)}`",
        )


def _largest_divisor(number: int, below: int) -> int:
    return max(each for each in range(1, below) if number % each == 0)


def _find_plan(model: nn.Module) -> tuple[Any, dict[str, str], str]:
    from transformers import PreTrainedModel

    model_type = type(model).__name__
    for module in model.modules():
        if isinstance(module, PreTrainedModel):
            model_type = module.config.model_type
            plan = getattr(module.config, "base_model_tp_plan", None)
            if module.base_model is module and plan:
                return module, plan, model_type
    raise _no_plan(model_type)


def _no_plan(model_type: str) -> UserInputError:
    return UserInputError(
        f"transformers lacks a tensor-parallel plan for model type {model_type!r} (`base_model_tp_plan`)",
        where=WHERE,
        hint=_WITHOUT,
    )


def _style(style: str, inner: str, name: str, model_type: str) -> Style:
    """Split of a parameter inside a module of the plan: the module's own parameter, or one of an adapter around it."""
    *path, last = inner.split(".")
    is_own = path in ([], ["base_layer"])
    if style == _NORM:
        return "whole"
    if is_own and last in ("weight", "bias"):
        if style == _COLWISE:
            return "rows"
        return "columns" if last == "weight" else "added"
    if path[:1] == ["lora_A"] and last == "weight":
        return "columns" if style == _ROWWISE else "whole"
    if path[:1] == ["lora_B"] and last == "weight":
        return "rows" if style == _COLWISE else "whole"
    raise _unknown_weight(model_type, name)


def _unknown_weight(model_type: str, name: str) -> UserInputError:
    return UserInputError(
        f"the tensor-parallel plan of model type {model_type!r} does not specify how to split its weight {name}",
        where=WHERE,
        hint=_WITHOUT,
    )


def _check_divides(shape: Any, style: Style, name: str, size: int) -> None:
    if style not in ("rows", "columns"):
        return
    length = shape[0 if style == "rows" else 1]
    if length % size:
        raise UserInputError(
            f"{size} processes cannot share the {length} {style} of {name} equally",
            where=WHERE,
            hint=f"use a divisor of {length}: `--set strategy.tensor_parallel={_largest_divisor(length, size)}`",
        )


def own_parameters(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Parameter]]:
    """Yield the module, name and value of each parameter. A shared one is yielded for each of its modules."""
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False):
            yield module, name, parameter
