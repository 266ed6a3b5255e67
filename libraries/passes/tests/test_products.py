"""The library of matrix products is measured once per machine, or fixed by the run file."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
import torch

from rlhf_passes import products
from rlhf_passes.deterministic import DeterministicConfig
from rlhf_passes.products import chosen_products, fix_products, measure_products, multiplies_bfloat16_fast, uses_onednn


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder and no choice yet."""
    file = tmp_path / "cache" / "products.json"
    monkeypatch.setattr(products, "_cache_file", lambda: file)
    monkeypatch.setattr(products, "_CHOICE", products._Choice())
    return file


def measured(torch_ms: float, onednn_ms: float, monkeypatch: pytest.MonkeyPatch, bfloat16_ms: float = 9.0) -> list[int]:
    """Replace the measurement. Return the list of its calls."""
    calls: list[int] = []

    def measure() -> dict[str, float]:
        calls.append(1)
        return {"torch": torch_ms, "onednn": onednn_ms, "bfloat16": bfloat16_ms}

    monkeypatch.setattr(products, "measure_products", measure)
    return calls


@pytest.mark.parametrize(
    ("torch_ms", "onednn_ms", "expected"), [(9.0, 4.5, True), (4.0, 9.0, False), (5.0, 4.5, False)]
)
def test_the_faster_one_is_used_and_measured_once(
    torch_ms: float, onednn_ms: float, expected: bool, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measured(torch_ms, onednn_ms, monkeypatch)
    assert chosen_products() is None
    assert uses_onednn() is uses_onednn() is expected
    monkeypatch.setattr(products, "_CHOICE", products._Choice())  # another process
    assert uses_onednn() is expected
    assert len(calls) == 1
    found = {"torch": torch_ms, "onednn": onednn_ms, "bfloat16": 9.0}
    assert list(json.loads(cache.read_text()).values()) == [found]
    assert chosen_products() == {"library": "onednn" if expected else "torch", "measured_ms": found}


@pytest.mark.parametrize(("bfloat16_ms", "expected"), [(1.0, True), (3.0, False)])
def test_bfloat16_is_fast_if_it_takes_half_the_time(
    bfloat16_ms: float, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = measured(9.0, 4.5, monkeypatch, bfloat16_ms)
    assert multiplies_bfloat16_fast() is expected and len(calls) == 1
    fix_products(fixed=True)
    assert not multiplies_bfloat16_fast()


def test_another_torch_or_number_of_threads_is_measured_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measured(2.0, 1.0, monkeypatch)
    for version in ("3.0", "3.1"):
        monkeypatch.setattr(torch, "__version__", version)
        monkeypatch.setattr(products, "_CHOICE", products._Choice())
        assert uses_onednn()
    assert len(calls) == len(json.loads(cache.read_text())) == 2


def test_the_file_keeps_the_newest_results(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each container has a new host name."""
    measured(2.0, 1.0, monkeypatch)
    for number in range(products._MAX_RESULTS + 3):
        monkeypatch.setattr("platform.node", lambda number=number: f"host-{number}")
        monkeypatch.setattr(products, "_CHOICE", products._Choice())
        assert uses_onednn()
    names = list(json.loads(cache.read_text()))
    assert len(names) == products._MAX_RESULTS
    assert f" host-{number} " in names[-1] and not any(" host-2 " in name for name in names)


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"MACHINE": {"torch": "fast"}}'])
def test_a_damaged_file_is_replaced(content: str, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measured(2.0, 1.0, monkeypatch)
    cache.parent.mkdir()
    cache.write_text(content.replace("MACHINE", products._machine()))
    assert uses_onednn() and len(calls) == 1
    assert json.loads(cache.read_text())[products._machine()]["onednn"] == 1.0


def test_a_folder_that_cannot_be_written_is_no_error(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured(2.0, 1.0, monkeypatch)
    cache.parent.write_text("a file")
    assert uses_onednn()


def test_a_user_without_a_home_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    def home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.undo()  # the real `_cache_file`
    monkeypatch.setattr(products, "_CHOICE", products._Choice())
    monkeypatch.setattr(Path, "home", home)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    measured(2.0, 1.0, monkeypatch)
    assert uses_onednn()


def test_processes_agree_on_the_first_result(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def measure() -> dict[str, float]:
        cache.parent.mkdir()
        cache.write_text(
            json.dumps({products._machine(): {"torch": 1.0, "onednn": 9.0, "bfloat16": 9.0}})
        )  # another process was first
        return {"torch": 9.0, "onednn": 1.0, "bfloat16": 9.0}

    monkeypatch.setattr(products, "measure_products", measure)
    assert not uses_onednn()


def test_a_run_file_fixes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = measured(2.0, 1.0, monkeypatch)
    store = object()
    assert DeterministicConfig().checkpoint_store(store) is store  # type: ignore[arg-type, comparison-overlap]
    assert not uses_onednn() and not calls
    assert chosen_products() == {"library": "torch", "measured_ms": {}}
    fix_products(fixed=False)
    assert uses_onednn()


def test_a_torch_without_the_operation(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.ops.mkldnn, "_linear_pointwise", None)
    assert not uses_onednn()


def test_the_measurement_takes_less_than_a_second() -> None:
    started = time.process_time()
    found = measure_products()
    assert time.process_time() - started < 1.0 * torch.get_num_threads()
    assert found.keys() == {"torch", "onednn", "bfloat16"}
    assert all(0 < found[name] < 1000 for name in ("torch", "onednn"))
