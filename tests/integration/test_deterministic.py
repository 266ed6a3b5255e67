"""`train.deterministic` computes with torch's own products, and the manifest records which ones a run used."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
from run_files import start

from rlhf_core.components import HookContext
from rlhf_core.config import Section, resolve
from rlhf_core.runfolder import RunFolder
from rlhf_passes import products
from rlhf_testing.runs import tiny_run
from rlhf_torch.products import ProductsRecord


@pytest.fixture(autouse=True)
def choice(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The choice of a new process on a machine on which oneDNN is faster."""
    monkeypatch.setattr(products, "_cached", lambda *_: {"torch": 2.0, "onednn": 1.0})
    monkeypatch.setattr(products, "_CHOICE", products._Choice())
    return products._CHOICE


def events(folder: Path) -> list[Any]:
    found = json.loads((folder / "manifest.json").read_text())["events"]
    return [each["library"] for each in found if each["kind"] == "products"]


def test_a_run_with_it_and_then_one_without(tmp_path: Path, choice: Any) -> None:
    start({"train": {"deterministic": True}}, tmp_path / "fixed")
    assert choice.is_fixed and events(tmp_path / "fixed") == ["torch"]
    start({}, tmp_path / "free")  # its products are too small for a choice
    assert not choice.is_fixed and events(tmp_path / "free") == []


def test_the_choice_of_a_run_is_recorded_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = RunFolder(tmp_path)
    folder.write_manifest({})
    assert products.uses_onednn()
    for _ in range(2):  # the run, and a resume on the same machine
        record = ProductsRecord(Section(), HookContext(run_folder=tmp_path))
        record.rlhf_episode_end(metrics={})
        record.rlhf_episode_end(metrics={})
    assert events(tmp_path) == ["onednn", "onednn"] and not caplog.records
    products.fix_products(fixed=True)
    with caplog.at_level(logging.WARNING, logger="rlhf"):
        ProductsRecord(Section(), HookContext(run_folder=tmp_path)).rlhf_episode_end(metrics={})
    assert "train.deterministic" in caplog.text and events(tmp_path)[-1] == "torch"


@pytest.mark.parametrize(("value", "active"), [(True, True), (False, False), (None, False)])
def test_the_key_is_a_switch(value: Any, active: bool) -> None:
    assert ("train.deterministic" in resolve(tiny_run({"train": {"deterministic": value}})).sections) is active
