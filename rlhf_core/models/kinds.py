"""Kinds of models: the interface between core and models, and the choice of the kind for a path.

A kind is a plugin (`rlhf.models`), which may claim paths. A path that no plugin claims is loaded by the kind that the
algorithm names (`Algorithm.model_kind`).
"""

from __future__ import annotations

import json
import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel

from ..columns import Column
from ..config.sections import ModelConfig
from ..errors import PluginError, UserInputError
from ..plugins.discovery import discover
from ..plugins.selected import SelectedPlugin, load, load_ref

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

logger = logging.getLogger(__name__)
_DEFAULT = "causal-lm"
WHERE = "model.path"
MARK = "rlhf_model_kind"
"""Attribute with the kind of a loaded model. Also set on its trunk, which a critic copies."""


class ModelKind(ABC):
    """Checks, loads, feeds and saves the models of one kind.

    A plugin's `build` is a subclass, or returns an instance of one. `rlhf_models.CausalLM` is the base class for models
    that transformers can load. An instance is stored with each loaded model and its copies, so it should contain
    options only. Core calls `check` in the process that checks a run, `load_tokenizer` and `load_policy` in every
    process that needs the tokenizer or the model, `disable_noise` in every process that trains the model, `encode` for
    every prompt, `inputs` before every forward pass, and `save_policy` on rank 0.

    Example:
        kind = model_kind_for(config)
        kind.check()
        tokenizer = kind.load_tokenizer()
        policy = kind.load_policy(dtype=torch.float32, seed=0, tokenizer=tokenizer)  # in every process
        kind.disable_noise(policy, adapters=True)  # in every trainer process
        kind.save_policy(policy, weights, tokenizer, folder, adapter)  # on rank 0
    """

    model_kind: str = _DEFAULT
    """`Algorithm.model_kind` of the algorithms that can train these models."""
    columns: Mapping[str, Column] = {}
    """Columns, each per prompt, that `encode` fills."""

    def __init__(self, options: BaseModel | None = None, model: ModelConfig | None = None) -> None:
        """Store the options.

        Args:
            options: The plugin's options. None for defaults.
            model: The run's section `model`. None for a model that was built otherwise.
        """
        self.model = model or ModelConfig(path="builtin:")

    @property
    def inputs_differ(self) -> bool:
        """Whether `inputs` is overridden. Forward passes then use whole, padded rows."""
        return type(self).inputs is not ModelKind.inputs

    def check(self) -> None:
        """Check the path as far as possible without loading weights. Raises `UserInputError`."""

    def check_tokens(self, tokenizer: Any) -> None:
        """Check that this model, if it is frozen, accepts the ids of the policy's tokenizer. Raises `UserInputError`.

        Args:
            tokenizer: The policy's tokenizer.
        """

    @abstractmethod
    def load_tokenizer(self) -> Any:
        """Load the tokenizer, with the options of `model.chat`. Raises `UserInputError`."""

    @abstractmethod
    def load_policy(self, *, dtype: torch.dtype, seed: int, tokenizer: Any = None) -> nn.Module:
        """Load the model on the CPU, with dropout off, and with a new adapter if `model.lora` is set.

        The result must be the same in every process. An adapter at the path is merged into its base first, so that
        "adapter off" is the start policy.

        Args:
            dtype: Dtype of the weights.
            seed: Seed of weights that the files lack.
            tokenizer: The policy's tokenizer. None for a model that is only run forward.

        Raises:
            UserInputError: The path is not a model of this kind.
        """

    def disable_noise(self, model: nn.Module, *, adapters: bool) -> None:
        """Make the forward pass of a policy deterministic in training mode, before it is prepared for training.

        Args:
            model: The loaded policy, on the CPU.
            adapters: Whether to include adapters, because log-probs of rollout and update are compared.

        Raises:
            UserInputError: The model cannot be deterministic.
        """

    def adapter_off(self, model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
        """Return a function that creates a context in which the model computes without its adapter.

        Args:
            model: The unwrapped model.

        Returns:
            The function, or None for a model without an adapter.
        """
        return getattr(model, "disable_adapter", None)

    def encode(self, record: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[Sequence[int], Mapping[str, Any]]:
        """Return the ids of a record's prompt, and column name -> value for `columns`. Called again after a resume.

        Args:
            record: Key -> value, as the prompt source returns it.
            prompt_ids: Ids from the tokenizer.

        Raises:
            DataError: The record cannot be used.
        """
        return prompt_ids, {}

    def inputs(self, input_ids: Tensor, attention_mask: Tensor, columns: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """Return the forward's keyword arguments other than `input_ids` and `attention_mask`.

        Args:
            input_ids: [B, S] int64, padded on either side.
            attention_mask: [B, S] bool, True = a real token.
            columns: Name -> [B, ...], the prompt columns marked `model_input`. Empty if the caller has only ids.
        """
        return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0), **columns}

    @abstractmethod
    def save_policy(
        self, model: nn.Module, weights: dict[str, Tensor], tokenizer: Any, folder: Path, adapter: Path
    ) -> None:
        """Write the folder of a complete model, with its adapter merged. Called on rank 0.

        Each folder is replaced completely or not at all.

        Args:
            model: The unwrapped model, whose own weights may be sharded.
            weights: Full state of `model`, on the CPU.
            tokenizer: The policy's tokenizer.
            folder: Destination of the model.
            adapter: Destination of the adapter itself, if the model has one.

        Raises:
            CheckpointError: The files cannot be written.
        """


def owner_of(path: str) -> SelectedPlugin | None:
    """Return the plugin that claims a model's path, or None. Raises `PluginError` if two plugins claim it."""
    owners: list[SelectedPlugin] = []
    config = config_of(path)
    for ref in (each for first in discover("models").values() for each in (first, *first.clashes)):
        try:
            selected = load_ref(ref)
            if selected.component.claims is not None and selected.component.claims(path, config):
                owners.append(selected)
        except Exception as error:  # a plugin's code may raise anything
            logger.warning("%s is ignored: %s", ref.label, error)
    if len(owners) > 1:
        raise PluginError(
            f"{path!r} is claimed by {' and by '.join(each.label for each in owners)}",
            where=WHERE,
            hint=f"uninstall one of them: pip uninstall {owners[-1].distribution}",
        )
    return owners[0] if owners else None


def model_kind_for(model: ModelConfig, name: str | None = None) -> ModelKind:
    """Return the kind that loads a model.

    Args:
        model: The section `model` of a run.
        name: The `model_kind` of the algorithm, which the kind must have. None accepts any kind.

    Raises:
        PluginError: Two plugins claim the path.
        UserInputError: The algorithm trains another kind.
    """
    selected = owner_of(model.path) or load("models", name or _DEFAULT)
    kind: ModelKind = selected.build(selected.component.config(), model)
    if name not in (None, kind.model_kind):
        raise UserInputError(
            f"{model.path!r} is of the {selected.label}, but the algorithm trains the kind {name!r}",
            where=WHERE,
            hint="use another algorithm, or another model",
        )
    return kind


def model_kind_of(model: nn.Module) -> ModelKind:
    """Return the kind that loaded a model or its trunk. By default the kind of causal LMs.

    Args:
        model: The innermost model, without wrappers.
    """
    kinds = (vars(part).get(MARK) for part in model.modules())
    return next((kind for kind in kinds if kind is not None), None) or default_kind()


@cache
def default_kind() -> ModelKind:
    """Return the kind of models that were not loaded by a kind."""
    selected = load("models", _DEFAULT)
    kind: ModelKind = selected.build(selected.component.config(), None)
    return kind


def config_of(path: str) -> Mapping[str, Any]:
    """Return the `config.json` of a folder. Empty if it is missing or invalid, which the model's kind reports."""
    try:
        config = json.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
