"""Checkpoints that a thread writes: the same files, and complete or absent whatever happens meanwhile."""

from __future__ import annotations

import errno
import logging
import threading

import pytest
import torch
from running import PATIENCE_SECONDS

from rlhf_core.components import StrategyContext
from rlhf_core.config import StrategyConfig
from rlhf_core.errors import CheckpointError, GuardStop, LostRankError
from rlhf_core.place import LocalPlace
from rlhf_core.runfolder import CheckpointStore, find_complete_checkpoint
from rlhf_core.runfolder.checkpoints import OnlyModelError
from rlhf_strategies import BackgroundConfig, BackgroundStore, DeferredFiles, StrategyBase
from rlhf_testing.tiny_training import Training


@pytest.fixture
def training():
    made = Training(StrategyBase(StrategyConfig(), StrategyContext(device="cpu")))
    made.update()
    return made


@pytest.fixture
def store(tmp_path):
    return background(tmp_path / "checkpoints")


@pytest.fixture
def gate(monkeypatch):
    """Keeps the thread from writing until it is set."""
    opened, run = threading.Event(), DeferredFiles.run

    def held(files):
        assert opened.wait(PATIENCE_SECONDS)
        run(files)

    monkeypatch.setattr(DeferredFiles, "run", held)
    yield opened
    opened.set()


def background(folder, timeout_seconds=PATIENCE_SECONDS, keep=3):
    return BackgroundConfig(timeout_seconds=timeout_seconds).checkpoint_store(CheckpointStore(folder, keep=keep))


def save(store, training, step, best=None):
    strategy, trained = training.strategy, training.trained
    with store.writing(step, strategy, best=best) as folder:
        strategy.save_model(trained.model, folder / "policy")
        strategy.save_optimizer(trained.optimizer, folder / "policy-optimizer")
        strategy.run_on_main(lambda: (folder / "state.json").write_text("{}"))


def names(store):
    return sorted(path.name for path in store.folder.iterdir())


def content(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_it_holds_what_was_trained_when_it_was_taken(store, training, tmp_path, gate):
    at_once = CheckpointStore(tmp_path / "at-once")
    save(at_once, training, 1)
    with store.finishing(training.strategy):
        save(store, training, 1)
        training.update()  # in place, in the same memory
        assert store.steps() == []
        gate.set()
    assert content(store.path(1)) == content(at_once.path(1))
    assert find_complete_checkpoint(store.path(1)) == store.path(1)
    assert names(store) == ["last", "step-1"]


def test_the_newest_and_the_best_are_kept(tmp_path, training):
    store = background(tmp_path / "checkpoints", keep=1)
    with store.finishing(training.strategy):
        for step in (1, 2, 3):
            save(store, training, step, best=1)
    assert names(store) == ["best", "last", "step-1", "step-3"]


def test_looking_for_checkpoints_waits_for_the_one_in_progress(store, training, gate):
    save(store, training, 1)
    timer = threading.Timer(0.2, gate.set)
    timer.start()
    assert store.newest() == store.path(1)
    timer.join()


def test_the_next_one_waits_and_says_so(store, training, gate, caplog):
    save(store, training, 1)
    timer = threading.Timer(1.5, gate.set)
    timer.start()
    with caplog.at_level(logging.INFO, "rlhf"), store.finishing(training.strategy):
        save(store, training, 2)
    timer.join()
    assert "waiting for checkpoint step-1, which is still being written" in caplog.text
    assert store.steps() == [1, 2]


def test_a_wait_has_a_deadline(tmp_path, training, gate, caplog):
    store = background(tmp_path / "checkpoints", timeout_seconds=0.1)
    save(store, training, 1)
    with pytest.raises(CheckpointError, match=r"(?s)step-1 is not written after 0.1 s.*checkpoint.background.timeout"):
        save(store, training, 2)
    assert store.has_failed
    assert "step-1 is not written after 0.1 s" in caplog.text
    assert_abandoned(store, gate)


def test_nobody_waits_after_the_second_interrupt(store, training, gate, caplog):
    with pytest.raises(KeyboardInterrupt), store.finishing(training.strategy):
        save(store, training, 1)
        raise KeyboardInterrupt
    assert_abandoned(store, gate)
    assert not caplog.text


def assert_abandoned(store, gate):
    """What is not yet written never is, since another session may have taken the folder."""
    (thread,) = (each for each in threading.enumerate() if each.name == "rlhf-checkpoint")
    gate.set()
    thread.join(PATIENCE_SECONDS)
    assert names(store) == []


@pytest.fixture
def full_disk(monkeypatch):
    def full(files):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(DeferredFiles, "run", full)


def test_a_full_disk_is_raised_by_name_by_the_next_one(store, training, request, caplog):
    save(store, training, 1)
    assert store.newest() == store.path(1)
    request.getfixturevalue("full_disk")
    save(store, training, 2)
    with pytest.raises(CheckpointError, match="cannot write step-2: the disk is full"):
        save(store, training, 3)
    assert store.has_failed
    assert "checkpoint step-2 cannot be written" in caplog.text
    assert names(store) == ["last", "step-1"]
    assert store.newest() == store.path(1)


def test_the_end_of_a_fit_raises_it(store, training, full_disk):
    text = r"step-1: the disk is full\. The model is written"
    with pytest.raises(OnlyModelError, match=text), store.finishing(training.strategy):
        save(store, training, 1)


def test_settling_raises_it_too(store, training, full_disk):
    save(store, training, 1)
    with pytest.raises(CheckpointError, match="step-1: the disk is full"):
        store.settle(training.strategy)


def test_a_rank_lost_at_its_start_leaves_it_whole(store, training, gate, monkeypatch):
    broadcast, strategy = training.strategy.broadcast_object, training.strategy

    def lose(value):
        if store._thread is not None and store._thread.is_alive():
            raise LostRankError("rank 1 exited", where="process group")
        return broadcast(value)

    monkeypatch.setattr(strategy, "broadcast_object", lose)
    timer = threading.Timer(0.2, gate.set)
    with pytest.raises(LostRankError), store.finishing(strategy):
        timer.start()
        save(store, training, 1)
    timer.join()
    assert find_complete_checkpoint(store.path(1)) == store.path(1)
    assert set(content(store.path(1))) == {
        "files.json",
        "state.json",
        "policy/model.safetensors",
        "policy-optimizer/optimizer.safetensors",
    }


def test_a_guard_that_stops_the_run_waits_too(store, training, gate):
    timer = threading.Timer(0.2, gate.set)
    with pytest.raises(GuardStop), store.finishing(training.strategy):
        save(store, training, 1)
        timer.start()
        raise GuardStop("stopped")
    timer.join()
    assert store.steps() == [1]


def test_a_guard_is_not_hidden_by_a_full_disk(store, training, full_disk, caplog):
    with pytest.raises(GuardStop), store.finishing(training.strategy):
        save(store, training, 1)
        raise GuardStop("stopped")
    assert "step-1 cannot be written" in caplog.text


def test_another_error_is_not_hidden(store, training, full_disk, caplog):
    with pytest.raises(ZeroDivisionError), store.finishing(training.strategy):
        save(store, training, 1)
        raise ZeroDivisionError
    assert "step-1 cannot be written" in caplog.text


def test_an_error_while_copying_leaves_nothing(store, training):
    with pytest.raises(ZeroDivisionError), store.writing(1, training.strategy):
        raise ZeroDivisionError
    assert names(store) == []
    assert not store.has_failed
    save(store, training, 2)
    assert store.newest() == store.path(2)


def test_a_strategy_that_writes_itself_is_completed_in_the_background(store):
    place = LocalPlace(torch.device("cpu"), torch.float32)
    with store.finishing(place), store.writing(1, place) as folder:
        (folder / "weights").write_text("x")
    assert (store.path(1) / "weights").read_text() == "x"


def test_copies_share_no_memory():
    tree = {"a": [torch.ones(2), (torch.zeros(1), 3)], "b": None}
    copied = DeferredFiles().snapshot(tree)
    tree["a"][0].add_(1)
    assert copied["a"][0].tolist() == [1, 1]
    assert copied["a"][1][1] == 3
    assert copied["b"] is None


def test_it_is_a_wrapper(store):
    assert isinstance(store, BackgroundStore)
    assert store.keep == 3
