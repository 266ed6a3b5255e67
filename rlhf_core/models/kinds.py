"""Kinds of models: what core has a model do, and which kind is responsible for a path.

A kind is a plugin (`rlhf.models`), which may claim paths. What none claims is loaded by the kind that the algorithm
names (`Algorithm.model_kind`).
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
"""Attribute of a model that was loaded by its kind, and of its trunk, of which a critic has a copy."""


class ModelKind(ABC):
    """How models of a kind are checked, loaded, fed and saved.

    A plugin's `build` is a subclass, or returns an instance of one; `rlhf_models.CausalLM` is the base of those that
    transformers can load. An instance is kept with each loaded model, also in copies of it, so it should hold options
    only.
    """

    model_kind: str = _DEFAULT
    """`Algorithm.model_kind` of the algorithms that it is for."""
    columns: Mapping[str, Column] = {}
    """The columns, each per prompt, that `encode` fills."""

    def __init__(self, options: BaseModel | None = None, model: ModelConfig | None = None) -> None:
        """model: the run's section `model`."""
        self.model = model or ModelConfig(path="builtin:")

    @property
    def inputs_differ(self) -> bool:
        """Whether `inputs` is overridden: forward passes are then made of whole, padded rows."""
        return type(self).inputs is not ModelKind.inputs

    def check(self) -> None:
        """Check the path as far as possible without loading weights. Raises `UserInputError`."""

    def check_tokens(self, tokenizer: Any) -> None:
        """Check that this model can be given the ids of the policy's `tokenizer`. Raises `UserInputError`."""

    @abstractmethod
    def load_tokenizer(self) -> Any:
        """The tokenizer, with the options of `model.chat`. Raises `UserInputError`."""

    @abstractmethod
    def load_policy(self, *, dtype: torch.dtype, seed: int, tokenizer: Any = None) -> nn.Module:
        """The model on the CPU, with dropout off and in a fresh adapter if `model.lora` asks for one.

        The same in every process. A path that is an adapter is merged into its base first, so that "adapter off" is the
        start policy. Raises `UserInputError`.

        seed: of weights that are not in its files. tokenizer: None for a model that is only run forward.
        """

    def disable_noise(self, model: nn.Module, *, adapters: bool) -> None:
        """Have a policy that is to be trained, on the CPU, compute the same in each forward of training mode.

        adapters: those included, since log-probs of rollout and update are compared. Raises `UserInputError` if it
        cannot.
        """

    def adapter_off(self, model: nn.Module) -> Callable[[], AbstractContextManager[Any]] | None:
        """Makes a context in which `model` computes without its adapter; None for a model without one."""
        return getattr(model, "disable_adapter", None)

    def encode(self, record: Mapping[str, Any], prompt_ids: Sequence[int]) -> tuple[Sequence[int], Mapping[str, Any]]:
        """The ids of a record's prompt, which the tokenizer made `prompt_ids`, and the values of `columns` by name.

        Raises `DataError` for a record that it cannot use. It is called again after a resume.
        """
        return prompt_ids, {}

    def inputs(self, input_ids: Tensor, attention_mask: Tensor, columns: Mapping[str, Tensor]) -> Mapping[str, Any]:
        """What the forward takes besides these ids and their mask ([B, S] int64 and bool, padded on either side).

        columns: [B, ...] by name, the prompt columns marked `model_input`; none if a model is tried out.
        """
        return {"position_ids": (attention_mask.long().cumsum(-1) - 1).clamp(min=0), **columns}

    @abstractmethod
    def save_policy(
        self, model: nn.Module, weights: dict[str, Tensor], tokenizer: Any, folder: Path, adapter: Path
    ) -> None:
        """Write `weights`, the full state of `model`, as the folder of a whole model, its adapter merged.

        The adapter itself is written to the folder `adapter`. Each folder is replaced whole or not at all. Raises
        `CheckpointError`: the disk does not take it.
        """


def owner_of(path: str) -> SelectedPlugin | None:
    """The plugin that claims a model's path; None if no one does. Raises `PluginError` if two do."""
    found: list[SelectedPlugin] = []
    config = config_of(path)
    for ref in (each for first in discover("models").values() for each in (first, *first.clashes)):
        try:
            selected = load_ref(ref)
            if selected.component.claims is not None and selected.component.claims(path, config):
                found.append(selected)
        except Exception as error:  # a stranger's code may raise anything
            logger.warning("%s is left out: %s", ref.label, error)
    if len(found) > 1:
        raise PluginError(
            f"{path!r} is claimed by {' and by '.join(each.label for each in found)}",
            where=WHERE,
            hint=f"uninstall one of them: pip uninstall {found[-1].distribution}",
        )
    return found[0] if found else None


def model_kind_for(model: ModelConfig, name: str | None = None) -> ModelKind:
    """The kind that loads a model. name: the algorithm's `model_kind`, which must be the kind's own.

    Raises `PluginError`: two plugins claim the path; `UserInputError`: the algorithm trains another kind.
    """
    selected = owner_of(model.path) or load("models", name or _DEFAULT)
    kind: ModelKind = selected.build(selected.component.config(), model)
    if name not in (None, kind.model_kind):
        raise UserInputError(
            f"{model.path!r} is of the {selected.label}, and the algorithm trains the kind {name!r}",
            where=WHERE,
            hint="take another algorithm, or another model",
        )
    return kind


def model_kind_of(model: nn.Module) -> ModelKind:
    """The kind that loaded the innermost `model`, or its trunk; a model that was made otherwise is a causal LM."""
    found = (vars(part).get(MARK) for part in model.modules())
    return next((kind for kind in found if kind is not None), None) or default_kind()


@cache
def default_kind() -> ModelKind:
    """The kind of models that no kind loaded."""
    selected = load("models", _DEFAULT)
    kind: ModelKind = selected.build(selected.component.config(), None)
    return kind


def config_of(path: str) -> Mapping[str, Any]:
    """The `config.json` of a folder; empty without one, or with one that its kind reports."""
    try:
        config = json.loads((Path(path) / "config.json").read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}
