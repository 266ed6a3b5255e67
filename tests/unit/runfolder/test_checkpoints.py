"""Checkpoints are whole or not at all, and nothing but a whole one is ever continued from."""

import errno
import json
import shutil
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from rlhf_core.errors import CheckpointError
from rlhf_core.place import LocalPlace
from rlhf_core.runfolder import checkpoints as checkpoint
from rlhf_core.runfolder.checkpoints import CheckpointStore, find_complete_checkpoint, find_damage

PLACE = LocalPlace(torch.device("cpu"), torch.float32)


def write(store, step, text="x", best=None):
    with store.writing(step, PLACE, best=best) as folder:
        (folder / "policy").mkdir()
        (folder / "policy" / "weights").write_text(text * 100)
        (folder / "state.json").write_text(json.dumps({"step": step}))
    return store.path(step)


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=3)


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_a_checkpoint_appears_only_when_it_is_whole(store, tmp_path):
    with store.writing(4, PLACE) as folder:
        (folder / "a").write_text("x")
        assert store.steps() == []
        assert store.newest() is None
    path = tmp_path / "checkpoints" / "step-4"
    assert store.newest() == find_complete_checkpoint(tmp_path) == find_complete_checkpoint(path) == path
    assert find_damage(path) is None
    assert names(tmp_path) == ["last", "step-4"]


def test_the_newest_are_kept_and_last_names_the_newest(store, tmp_path):
    for step in (2, 10, 4, 30):
        write(store, step)
    assert store.steps() == [4, 10, 30]
    assert (tmp_path / "checkpoints/last").read_text().strip() == "step-30"
    assert store.newest().name == "step-30"


def test_the_best_is_kept_however_old_it_is(store, tmp_path):
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2), (5, 2), (6, 6)):
        write(store, step, best=best)
        assert (tmp_path / "checkpoints/best").read_text() == f"step-{best}\n"
        assert best in store.steps()
    assert store.steps() == [4, 5, 6]
    store.discard_after(5)
    assert names(tmp_path) == ["last", "step-4", "step-5"]


@pytest.mark.parametrize("raised", [OSError(28, "No space left on device"), ValueError("wrong")])
def test_one_that_could_not_be_written_leaves_nothing(store, tmp_path, raised):
    expected = CheckpointError if isinstance(raised, OSError) else type(raised)
    with pytest.raises(expected), store.writing(1, PLACE) as partial:
        (partial / "half").write_text("x")
        raise raised
    assert names(tmp_path) == []


def test_the_same_step_written_again_replaces_it(store):
    write(store, 5, "a")
    path = write(store, 5, "b")
    assert (path / "policy/weights").read_text() == "b" * 100
    assert find_damage(path) is None


def test_going_on_from_a_step_removes_what_is_newer_and_half_written(store, tmp_path):
    for step in (1, 2, 3):
        write(store, step)
    (tmp_path / "checkpoints/.partial-step-4/policy").mkdir(parents=True)
    store.discard_after(2)
    assert names(tmp_path) == ["last", "step-1", "step-2"]
    assert (tmp_path / "checkpoints/last").read_text().strip() == "step-2"


def test_strangers_in_the_folder_do_not_matter(store, tmp_path):
    write(store, 1)
    (tmp_path / "checkpoints/step-latest").mkdir()
    (tmp_path / "checkpoints/step-9").write_text("a file")
    (tmp_path / "checkpoints/step-1/.DS_Store").write_text("x")
    assert store.steps() == [1]
    assert store.newest().name == "step-1"


DAMAGE = st.one_of(
    st.tuples(st.just("truncate"), st.integers(0, 3), st.integers(0, 400)),
    st.tuples(st.just("flip"), st.integers(0, 3), st.integers(0, 400)),
    st.tuples(st.just("remove"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("empty listing"), st.just(0), st.just(0)),
)


@settings(max_examples=60)
@given(damage=DAMAGE)
def test_a_damaged_checkpoint_is_skipped(tmp_path_factory, damage):
    folder = tmp_path_factory.mktemp("run")
    store = CheckpointStore(folder, keep=3)
    write(store, 1)
    newest = write(store, 2)
    before = {path: path.read_bytes() for path in newest.rglob("*") if path.is_file()}
    kind, which, place = damage
    files = sorted(path for path in newest.rglob("*") if path.is_file())
    victim = files[which % len(files)]
    data = victim.read_bytes()
    if kind == "truncate":
        victim.write_bytes(data[: place % len(data)])
    elif kind == "flip":
        place %= len(data)
        victim.write_bytes(data[:place] + bytes([data[place] ^ 0x11]) + data[place + 1 :])
    elif kind == "remove":
        victim.unlink()
    else:
        (newest / "files.json").write_text("{}")
    found = store.newest()
    intact = all(path.exists() and path.read_bytes() == old for path, old in before.items())
    if found == newest:  # a flipped blank in the listing, say: what was saved is as it was
        assert intact or victim.name == "files.json"
        assert all(path.read_bytes() == old for path, old in before.items() if path.name != "files.json")
    else:
        assert found == folder / "step-1"
    shutil.rmtree(folder)


@pytest.mark.parametrize("listing", ["[]", "3", "null", "", "{", '"a"'])
def test_a_listing_that_is_none_is_damage(store, listing):
    path = write(store, 1)
    (path / "files.json").write_text(listing)
    assert "files.json" in find_damage(path)


def fail(error_number, when):
    def broken(*args, **kwargs):
        if when(*args):
            raise OSError(error_number, "no")
        return original(*args, **kwargs)

    original = checkpoint.sync
    return broken


@pytest.mark.parametrize(
    ("error_number", "says"),
    [(errno.ENOSPC, "the disk is full"), (errno.EDQUOT, "the disk is full"), (errno.EIO, "no")],
)
@pytest.mark.parametrize("at", ["weights", "files.json", ".partial-step-2"])
def test_a_full_disk_keeps_the_checkpoint_before(store, tmp_path, monkeypatch, error_number, says, at):
    before = write(store, 1)
    monkeypatch.setattr(checkpoint, "sync", fail(error_number, lambda path: at in Path(path).name))
    with pytest.raises(CheckpointError, match=says) as caught:
        write(store, 2)
    monkeypatch.undo()
    assert "the checkpoint before it is intact" in str(caught.value)
    assert store.newest() == before
    assert names(tmp_path) == ["last", "step-1"]
    assert (tmp_path / "checkpoints/last").read_text().strip() == "step-1"


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "checkpoints").write_text("a file")
    with pytest.raises(CheckpointError, match="cannot write"):
        write(CheckpointStore(tmp_path / "checkpoints"), 1)


def test_a_kill_while_an_old_one_is_removed_leaves_none_that_is_half(store, tmp_path, monkeypatch):
    """Those that are to go have lost their names before their first file is removed."""
    for step in (1, 2, 3):
        write(store, step)
    monkeypatch.setattr(shutil, "rmtree", lambda *arguments, **options: None)
    write(store, 4)
    assert store.steps() == [2, 3, 4]
    store.discard_after(2)
    assert store.steps() == [2]
