"""How a process of its own makes a component: by name, from checked options."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from pydantic import BaseModel

from ..components import Kind
from .discovery import Selected, load, resolve_build


@dataclass(frozen=True)
class Recipe:
    """Finds an installed plugin (or `FILE.py:NAME`) anew, in whichever process it is unpickled."""

    kind: Kind
    name: str
    options: Mapping[str, Any]
    context: object
    """The context that `build` is given beside the options; picklable."""

    @classmethod
    def of(cls, kind: Kind, selected: Selected, config: BaseModel, context: object) -> Recipe:
        """The recipe of a plugin that was selected in this process."""
        return cls(kind, selected.name, config.model_dump(), context)

    def builder(self) -> Callable[[], Any]:
        """Import the plugin and check its options; what is returned builds the component. Raises `PluginError`."""
        selected = load(self.kind, self.name)
        config = selected.component.config.model_validate(dict(self.options))
        return partial(resolve_build(selected), config, self.context)

    def __call__(self) -> Any:
        """The component, built."""
        return self.builder()()
