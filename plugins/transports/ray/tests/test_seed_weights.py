"""Weights on their way into a maker: whole versions, swapped in between two batches."""

import threading
import time
from collections.abc import Mapping

import pytest
import torch
from torch import Tensor, nn

from rlhf_core.errors import DeadlineError, SyncError
from rlhf_core.rollout.weight_sync import named_weights
from rlhf_ray.checksum import Checksum
from rlhf_ray.holder_weights import StagedWeights


def weights_of(module: nn.Module, value: float) -> dict[str, Tensor]:
    return {name: torch.full_like(tensor, value) for name, tensor in named_weights(module).items()}


@pytest.fixture
def module() -> nn.Module:
    return nn.Linear(2, 2)


@pytest.fixture
def staged(module: nn.Module) -> StagedWeights:
    return StagedWeights({"policy": module}, {"policy": frozenset({"bias"})})


def send(staged: StagedWeights, version: int, weights: Mapping[str, Tensor], sender: str = "") -> None:
    staged.begin(version, sender=sender)
    staged.stage(version, "policy", weights, sender=sender)
    staged.commit(version, sender=sender)


def test_an_idle_maker_swaps_at_once(staged: StagedWeights, module: nn.Module) -> None:
    send(staged, 1, weights_of(module, 1.0))
    assert staged.newest == 1
    assert bool((module.weight == 1.0).all() and (module.bias == 1.0).all())


def test_nothing_changes_while_a_batch_is_made(staged: StagedWeights, module: nn.Module) -> None:
    send(staged, 1, weights_of(module, 1.0))
    with staged.making():
        send(staged, 2, weights_of(module, 2.0))
        assert staged.newest == 1
        assert bool((module.weight == 1.0).all())
    assert staged.newest == 2
    assert bool((module.weight == 2.0).all())


def test_the_newest_of_two_that_wait_counts(staged: StagedWeights, module: nn.Module) -> None:
    with staged.making():
        send(staged, 1, weights_of(module, 1.0), "a")
        send(staged, 2, weights_of(module, 2.0), "b")
    assert bool((module.weight == 2.0).all())
    assert staged.newest == 2


def test_a_new_version_replaces_a_half_sent_one(staged: StagedWeights, module: nn.Module) -> None:
    staged.begin(1)
    staged.stage(1, "policy", {"bias": torch.full((2,), 1.0)})
    staged.begin(2)
    with pytest.raises(SyncError, match="part of version 1 arrived from a sender, but version 2 is open"):
        staged.stage(1, "policy", {"weight": torch.full((2, 2), 1.0)})
    staged.stage(2, "policy", weights_of(module, 2.0))
    staged.commit(2)
    assert bool((module.weight == 2.0).all() and (module.bias == 2.0).all())


def test_an_adapter_waits_on_top_of_a_full_version(staged: StagedWeights, module: nn.Module) -> None:
    with staged.making():
        send(staged, 1, weights_of(module, 1.0))
        staged.begin(2, adapter_only=True)
        staged.stage(2, "policy", {"bias": torch.full((2,), 5.0)})
        staged.commit(2)
    assert bool((module.weight == 1.0).all() and (module.bias == 5.0).all())


def test_two_senders_do_not_disturb_each_other(staged: StagedWeights, module: nn.Module) -> None:
    for sender in ("a", "b"):
        staged.begin(1, sender=sender)
    staged.stage(1, "policy", weights_of(module, 1.0), sender="a")
    staged.stage(1, "policy", weights_of(module, 2.0), sender="b")
    staged.commit(1, sender="a")
    assert bool((module.weight == 1.0).all())
    staged.commit(1, sender="b")
    assert bool((module.weight == 2.0).all())


@pytest.mark.parametrize("broken", ["missing", "unknown", "shape"])
def test_a_version_that_does_not_match_is_refused(staged: StagedWeights, module: nn.Module, broken: str) -> None:
    send(staged, 1, weights_of(module, 1.0))
    weights = weights_of(module, 2.0)
    if broken == "missing":
        del weights["bias"]
    elif broken == "unknown":
        weights["other"] = torch.zeros(1)
    else:
        weights["bias"] = torch.zeros(3)
    with pytest.raises(SyncError):
        send(staged, 2, weights)
    assert staged.newest == 1
    assert bool((module.weight == 1.0).all())
    send(staged, 3, weights_of(module, 3.0))
    assert staged.newest == 3


def test_a_checksum_tells_what_changed_on_the_way(staged: StagedWeights, module: nn.Module) -> None:
    sent = Checksum()
    sent.add(weights_of(module, 1.0))
    staged.begin(1)
    staged.stage(1, "policy", weights_of(module, 1.5))
    with pytest.raises(SyncError, match="checksum"):
        staged.commit(1, {"policy": sent.hexdigest()})
    assert staged.newest is None


def test_a_role_that_never_came_is_noticed(staged: StagedWeights, module: nn.Module) -> None:
    staged.begin(1)
    staged.stage(1, "policy", weights_of(module, 1.0))
    with pytest.raises(SyncError, match="critic"):
        staged.commit(1, {"policy": "", "critic": ""})


def test_what_a_dead_sender_left_is_dropped(module: nn.Module) -> None:
    staged = StagedWeights({"policy": module}, idle_seconds=0.01)
    staged.begin(1, sender="dead")
    staged.stage(1, "policy", weights_of(module, 1.0), sender="dead")
    time.sleep(0.05)
    with staged.making():
        assert not staged._incoming
    with pytest.raises(SyncError, match="no version is open"):
        staged.commit(1, sender="dead")


def test_a_wait_for_a_version_ends(staged: StagedWeights, module: nn.Module) -> None:
    with pytest.raises(DeadlineError, match="policy version 4"):
        staged.wait_live(4, timeout_seconds=0.01)
    sender = threading.Thread(target=send, args=(staged, 4, weights_of(module, 4.0)))
    sender.start()
    staged.wait_live(4, timeout_seconds=30.0)
    sender.join()


def test_an_adapter_for_a_model_without_one_is_refused(module: nn.Module) -> None:
    staged = StagedWeights({"policy": module})
    staged.begin(1, adapter_only=True)
    staged.stage(1, "policy", {"bias": torch.zeros(2)})
    with pytest.raises(SyncError, match="does not have one"):
        staged.commit(1)
