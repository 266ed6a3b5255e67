"""Contract of plugins of any kind: discoverable, with a strict options schema, and cheap to list."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import pytest
from pydantic import BaseModel, ValidationError

from rlhf_core.components import Kind
from rlhf_core.config.select import check_options
from rlhf_core.plugins.discovery import discover, find
from rlhf_core.plugins.requirements import unmet
from rlhf_core.plugins.selected import SelectedPlugin, load
from rlhf_core.plugins.trust import is_file_reference

MAX_SUMMARY = 160
_UNKNOWN = "no_such_option"
_HEAVY = ("torch", "transformers", "ray", "vllm", "colossalai", "peft")
_LOADED_BY = """
import json, sys
from rlhf_core.plugins.discovery import find
from rlhf_core.plugins.selected import load_ref
load_ref(find(sys.argv[1], sys.argv[2]))
print(json.dumps([name for name in sys.argv[3:] if name in sys.modules]))
"""
_IMPORT_SECONDS = 120


class ComponentContract:
    """Base of the contracts. Subclass the contract of your plugin's kind, name the class `Test…`, and set `plugin`."""

    kind: ClassVar[Kind]
    plugin: ClassVar[str]
    """Name of its entry point, or `FILE.py:NAME`."""
    options: ClassVar[Mapping[str, Any]] = {}
    """Options to build it with, as in a run file."""

    @classmethod
    def make_options(cls, folder: Path) -> Mapping[str, Any]:
        """Return the options to build the plugin with. Override it if options contain files or servers.

        Args:
            folder: Empty folder for files. Relative paths of prompt sources start here. Other plugins need absolute
                paths.
        """
        return cls.options

    @pytest.fixture(scope="class")
    @classmethod
    def folder(cls, tmp_path_factory: pytest.TempPathFactory) -> Path:
        """Empty folder, shared by the tests of the class."""
        return tmp_path_factory.mktemp("contract")

    @pytest.fixture(scope="class")
    @classmethod
    def given(cls, folder: Path) -> dict[str, Any]:
        """The options from `make_options`."""
        return dict(cls.make_options(folder))

    @pytest.fixture(scope="class")
    @classmethod
    def selected(cls) -> SelectedPlugin:
        """The plugin, imported as in a run. Skips the tests if an optional dependency is missing."""
        assert getattr(cls, "plugin", None), f'{cls.__name__}: set the plugin to test: plugin = "its-name"'
        selected = load(cls.kind, cls.plugin, check_requires=False)
        if (missing := unmet(selected.component, selected.distribution)) is not None:
            pytest.skip(f"{selected.label} {': '.join(missing)}")
        return selected

    @pytest.fixture(scope="class")
    @classmethod
    def config(cls, selected: SelectedPlugin, given: dict[str, Any]) -> BaseModel:
        """The validated options."""
        try:
            return selected.component.config.model_validate(given)
        except ValidationError as error:
            pytest.fail(f"{selected.label} rejects the options {given}. Set `options` in the test class.\n{error}")

    def test_one_distribution_gives_the_name(self, selected: SelectedPlugin) -> None:
        if not is_file_reference(self.plugin):
            find(self.kind, self.plugin)

    def test_summary_is_one_line(self, selected: SelectedPlugin) -> None:
        summary = selected.component.summary
        assert summary.strip() or selected.function is not None, "describe the plugin in one line: summary=…"
        assert "\n" not in summary and len(summary) <= MAX_SUMMARY, (
            f"the summary must be one line of at most {MAX_SUMMARY} characters, for `rlhf plugins list`"
        )

    def test_unknown_options_are_refused(self, selected: SelectedPlugin, given: dict[str, Any]) -> None:
        try:
            selected.component.config.model_validate({**given, _UNKNOWN: 1})
            rejected: list[Any] = []
        except ValidationError as error:
            rejected = [problem["loc"] for problem in error.errors()]
        assert (_UNKNOWN,) in rejected, (
            "a misspelled option is not detected. Derive the config from rlhf_core.Section "
            '(or set model_config = ConfigDict(extra="forbid"))'
        )

    def test_options_leave_cores_names_alone(self, selected: SelectedPlugin) -> None:
        check_options(selected)

    def test_options_are_described(self, selected: SelectedPlugin) -> None:
        """A function's options are described by its docstring, a nested section by the docstring of its class."""
        fields = selected.component.config.model_fields if selected.function is None else {}
        parts = {
            name
            for name, field in fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        }
        undescribed = [name for name, field in fields.items() if not field.description and name not in parts]
        assert not undescribed, f"describe the options {', '.join(undescribed)}: Field(…, description=…)"

    def test_options_come_back_from_a_run_folder(self, selected: SelectedPlugin, config: BaseModel) -> None:
        """`config.yaml` of a run contains the resolved options, which a resume reads."""
        written = json.loads(json.dumps(config.model_dump(mode="json")))
        again = json.loads(json.dumps(type(config).model_validate(written).model_dump(mode="json")))
        assert again == written, f"{selected.label}: options change if saved and loaded: {written!r} -> {again!r}"

    def test_importing_it_is_light(self, selected: SelectedPlugin) -> None:
        """`plugins show`, `config check` and `--dry-run` import the component, so it must not import torch."""
        if selected.function is not None:
            return  # a function's module may import heavy packages
        command = [sys.executable, "-c", _LOADED_BY, self.kind, self.plugin, *_HEAVY]
        done = subprocess.run(command, capture_output=True, text=True, timeout=_IMPORT_SECONDS, check=False)
        assert done.returncode == 0, f"{selected.label} cannot be imported in a new process:\n{done.stderr}"
        loaded = json.loads(done.stdout.splitlines()[-1])
        assert not loaded, (
            f"{selected.label}: importing its component imports {', '.join(loaded)}. Define component and config in a "
            'module that imports only pydantic and rlhf_core, and refer to the rest by build="module:attr".'
        )

    def test_component_is_whole(self, selected: SelectedPlugin) -> None:
        if self.kind != "sections":  # sections are not built
            selected.import_build()


ContractT = TypeVar("ContractT")


def contracts_for(
    contract: type[ContractT],
    *,
    options: Mapping[str, Mapping[str, Any]] | None = None,
    skip: Mapping[str, str] | None = None,
) -> dict[str, type[ContractT]]:
    """Create a test class for every installed plugin of the contract's kind.

    Args:
        contract: Contract of the kind.
        options: Attributes of a plugin's test class by plugin name: `options`, `plugin` and others of the contract.
        skip: Reason by plugin name for plugins to leave out.

    Returns:
        Test classes by class name.

    Example:
        globals().update(contracts_for(RewardContract, skip={"judge": "needs a server"}))
    """
    classes: dict[str, type[ContractT]] = {}
    for name, ref in discover(getattr(contract, "kind")).items():  # noqa: B009  # both bases of contracts have it
        if name in (skip or {}):
            continue
        attributes = {"plugin": ref.name, "__module__": __name__, **dict((options or {}).get(name, {}))}
        class_name = "Test" + "".join(part.capitalize() for part in name.replace("+", "-plus").split("-"))
        classes[class_name] = type(class_name, (contract,), attributes)
    return classes
