"""Kinds of models: what is done differently for one, and which is responsible for a path.

A kind is a plugin (`rlhf.models`) that claims paths. Core's own two claim none: they load what no one else does.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from ..components import Component
from ..config.section import Section
from ..config.sections import ModelConfig
from ..errors import PluginError, UserInputError
from ..plugins.discovery import discover
from ..plugins.selected import Selected, load, load_ref
from .files import config_of
from .pretrained import WHERE, ModelKind

if TYPE_CHECKING:
    from torch import nn

logger = logging.getLogger(__name__)
KIND = "rlhf_model_kind"
"""Attribute of a model that was loaded by its kind, and of its trunk, of which a critic has a copy."""

causal_lm = Component("Causal LM of transformers", Section, "rlhf_core.models.pretrained:ModelKind")
sequence_classification = Component("Score model of transformers", Section, "rlhf_core.models.pretrained:Classifier")


def owner_of(path: str) -> Selected | None:
    """The plugin that claims a model's path; None if core's own kinds load it. Raises `PluginError` if two claim it."""
    found: list[Selected] = []
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


def kind_for(model: ModelConfig, name: str | None = None) -> ModelKind:
    """The kind that loads a model. name: the algorithm's `model_kind`, which must be the kind's own.

    Raises `PluginError`: two plugins claim the path; `UserInputError`: the algorithm trains another kind.
    """
    selected = owner_of(model.path) or load("models", name or ModelKind.model_kind)
    kind: ModelKind = selected.build(selected.component.config(), model)
    if name not in (None, kind.model_kind):
        raise UserInputError(
            f"{model.path!r} is of the {selected.label}, and the algorithm trains the kind {name!r}",
            where=WHERE,
            hint="take another algorithm, or another model",
        )
    return kind


def kind_of(model: nn.Module) -> ModelKind:
    """The kind that loaded the innermost `model`, or its trunk; a causal LM that was made otherwise is plain."""
    found = (vars(part).get(KIND) for part in model.modules())
    return next((kind for kind in found if kind is not None), PLAIN)


PLAIN = ModelKind()
