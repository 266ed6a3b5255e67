"""An update is the same however its batch is split, and says what went wrong."""

from dataclasses import replace

import pytest
import torch

from rlhf_core.batching import masked
from rlhf_core.errors import DivergenceError, OutOfMemoryError
from rlhf_core.training.updater import GAP_KEY, Updater


def run_backward(setup, **options):
    """Metrics and gradients of one update, before the step."""
    updater = Updater(setup.algorithm, setup.strategy, setup.trained, **options)
    meter = updater._run(setup.items, 0, backward=True)
    return meter.result(), setup.gradients()


def same(one, other, rel=1e-6):
    metrics, gradients = one
    others, other_gradients = other
    assert metrics.keys() == others.keys()
    for name, value in metrics.items():
        assert others[name] == pytest.approx(value, rel=rel, abs=1e-7), name
    difference = torch.stack([(other_gradients[name] - gradient).norm() for name, gradient in gradients.items()])
    size = torch.stack([gradient.norm() for gradient in gradients.values()])
    assert difference.norm() <= rel * size.norm()


@pytest.mark.parametrize(
    "options",
    [{"micro_batch_size": 8}, {"micro_batch_size": 1}, {"micro_batch_tokens": 40}, {"micro_batch_tokens": 12}],
    ids=str,
)
@pytest.mark.parametrize(
    "aggregation",
    ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum"],
)
def test_micro_batches_leave_loss_and_gradients_as_they_are(make_setup, options, aggregation):
    whole = make_setup(aggregation=aggregation)
    split = make_setup(aggregation=aggregation)
    same(run_backward(whole), run_backward(split, **options))


def test_masked_stand_ins_and_rows_without_actions_change_nothing(make_setup):
    plain, filled = make_setup(), make_setup()
    filled.items += [masked(filled.items[3]), masked(filled.items[11])]
    same(run_backward(plain), run_backward(filled))


def with_schedule(setup):
    """Every role's rate falls with every step that is made."""
    for role, trained in setup.trained.items():
        schedule = torch.optim.lr_scheduler.LambdaLR(trained.optimizer, lambda step: 1.0 / (1 + step))
        setup.trained[role] = trained._replace(scheduler=schedule)
    return setup


def weights_of(trained):
    return [parameter.detach().clone() for parameter in trained.model.parameters()]


def unmoved(trained, before):
    return all(torch.equal(now, old) for now, old in zip(trained.model.parameters(), before, strict=True))


def test_an_update_in_which_nothing_counts_makes_no_step_and_says_so(make_setup):
    setup = with_schedule(make_setup())
    updater = Updater(setup.algorithm, setup.strategy, setup.trained)
    first = updater.update(setup.items)  # AdamW has moments that would move the weights
    before = {role: weights_of(trained) for role, trained in setup.trained.items()}
    metrics = updater.update([masked(item) for item in setup.items])
    for role, trained in setup.trained.items():
        assert f"{role}/skipped" not in first
        assert (metrics[f"{role}/skipped"], metrics[f"{role}/grad_norm"]) == (1.0, 0.0)
        assert unmoved(trained, before[role])
    after = updater.update(setup.items)
    assert after["policy/lr"] == metrics["policy/lr"] == pytest.approx(5e-4)
    assert "policy/skipped" not in after
    uninterrupted = with_schedule(make_setup())
    other = Updater(uninterrupted.algorithm, uninterrupted.strategy, uninterrupted.trained)
    other.update(uninterrupted.items)
    other.update(uninterrupted.items)
    for role, trained in setup.trained.items():
        assert unmoved(trained, weights_of(uninterrupted.trained[role]))


def test_a_role_for_which_nothing_counts_makes_no_step(make_setup, monkeypatch):
    """As of a critic beside pretraining batches that the policy alone learns from."""
    setup = with_schedule(make_setup())
    updater = Updater(setup.algorithm, setup.strategy, setup.trained)
    updater.update(setup.items)
    before = {role: weights_of(trained) for role, trained in setup.trained.items()}
    counts = setup.algorithm.counts
    monkeypatch.setattr(setup.algorithm, "counts", lambda batch: {**counts(batch), "value": 0.0})
    metrics = updater.update(setup.items)
    assert metrics["critic/skipped"] == 1.0
    assert "policy/skipped" not in metrics
    assert unmoved(setup.trained["critic"], before["critic"])
    assert not unmoved(setup.trained["policy"], before["policy"])
    assert not any(p.grad is not None for p in setup.trained["critic"].model.parameters())
    monkeypatch.undo()
    assert updater.update(setup.items)["critic/lr"] == pytest.approx(5e-4)


def test_an_update_moves_every_role_and_clears_gradients(setup):
    before = {role: [p.detach().clone() for p in t.model.parameters()] for role, t in setup.trained.items()}
    metrics = Updater(setup.algorithm, setup.strategy, setup.trained).update(setup.items, gap_version=0)
    for role, trained in setup.trained.items():
        now = list(trained.model.parameters())
        assert any(not torch.equal(p, old) for p, old in zip(now, before[role], strict=True))
        assert metrics[f"{role}/grad_norm"] > 0
        assert all(p.grad is None or not p.grad.any() for p in trained.model.parameters())
    assert metrics.keys() >= {"loss/policy", "loss/value", "policy/clip_fraction", GAP_KEY}


def test_the_rate_on_the_line_is_the_one_that_was_used(make_setup):
    setup = make_setup()
    trained = setup.trained["policy"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(trained.optimizer, lambda step: 1.0 / (1 + step))
    setup.trained["policy"] = trained._replace(scheduler=scheduler)
    updater = Updater(setup.algorithm, setup.strategy, setup.trained)
    assert [updater.update(setup.items)["policy/lr"] for _ in range(3)] == pytest.approx([1e-3, 5e-4, 1e-3 / 3])


def test_the_gap_is_that_of_samples_of_the_version_only(setup):
    updater = Updater(setup.algorithm, setup.strategy, setup.trained)
    old = [replace(item, policy_version=3) for item in setup.items]
    assert GAP_KEY not in updater._run(setup.items, None, backward=False).result()
    assert GAP_KEY not in updater._run(old, 4, backward=False).result()
    mixed = [*old[:-1], replace(old[-1], policy_version=4)]
    alone = updater._run(mixed[-1:], 4, backward=False).result()[GAP_KEY]
    assert updater._run(mixed, 4, backward=False).result()[GAP_KEY] == pytest.approx(alone, rel=1e-5)


def test_evaluating_trains_nothing(setup):
    before = {name: p.detach().clone() for name, p in setup.trained["policy"].model.named_parameters()}
    updater = Updater(setup.algorithm, setup.strategy, setup.trained, micro_batch_size=5)
    metrics = updater.evaluate(setup.items)
    assert metrics["loss/policy"] == pytest.approx(run_backward(setup)[0]["loss/policy"], rel=1e-5)
    for name, parameter in setup.trained["policy"].model.named_parameters():
        assert torch.equal(parameter, before[name])


def test_a_loss_that_is_no_number_stops_before_the_step_and_names_the_key(setup):
    setup.items[5] = replace(setup.items[5], advantages=torch.full_like(setup.items[5].advantages, torch.nan))
    before = next(setup.trained["critic"].model.parameters()).detach().clone()
    with pytest.raises(DivergenceError, match="loss/policy is not a finite number") as caught:
        Updater(setup.algorithm, setup.strategy, setup.trained).update(setup.items)
    assert "optimizer.lr" in str(caught.value)
    assert torch.equal(next(setup.trained["critic"].model.parameters()), before)


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB"),
        RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory: you tried to allocate"),
    ],
)
def test_too_little_memory_names_the_key_to_lower(setup, monkeypatch, error):
    def loss(models, batch):
        raise error

    monkeypatch.setattr(setup.algorithm, "loss", loss)
    with pytest.raises(OutOfMemoryError, match="does not fit into memory") as caught:
        Updater(setup.algorithm, setup.strategy, setup.trained).update(setup.items)
    assert "train.micro_batch_tokens" in str(caught.value)


def test_other_errors_stay_themselves(setup, monkeypatch):
    def loss(models, batch):
        raise RuntimeError("shape mismatch")

    monkeypatch.setattr(setup.algorithm, "loss", loss)
    with pytest.raises(RuntimeError, match="shape mismatch"):
        Updater(setup.algorithm, setup.strategy, setup.trained).update(setup.items)
