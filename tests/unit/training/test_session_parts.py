"""What a session and `PPOTrainer` are made of: publishing, evaluation, completing an episode."""

from types import SimpleNamespace

import pytest

from rlhf_core.errors import SyncError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.hookspecs import hookimpl
from rlhf_core.rollout.weight_sync import CopiedWeights, SharedWeights, build_engine_beside
from rlhf_core.runfolder.metrics import PhaseTimer
from rlhf_core.training.evaluation import HeldOutEvaluation
from rlhf_core.training.publisher import PolicyPublisher
from rlhf_testing.engine import FakeEngine


class Log:
    """Listens to hooks, takes versions, and stands for the channel."""

    def __init__(self):
        self.seen = []

    def publish(self, version):
        self.seen.append(f"publish {version}")
        if version == 3:
            raise SyncError("a maker refused it", where="weight sync")

    def published(self, version):
        self.seen.append(f"published {version}")

    @hookimpl
    def rlhf_sync_start(self, version):
        self.seen.append(f"start {version}")

    @hookimpl
    def rlhf_sync_end(self, version, error):
        self.seen.append(f"end {version} {type(error).__name__}")


def test_a_version_is_published_told_and_timed():
    log, hooks, timer = Log(), HookRelay(), PhaseTimer()
    hooks.register(log)
    publisher = PolicyPublisher(log, hooks, log)
    publisher.publish(2, timer)
    assert log.seen == ["start 2", "publish 2", "end 2 NoneType", "published 2"]
    assert publisher.version == 2
    assert timer.take()["time/sync_s"] > 0


def test_a_refused_version_is_none():
    log, hooks = Log(), HookRelay()
    hooks.register(log)
    publisher = PolicyPublisher(log, hooks, log)
    with pytest.raises(SyncError):
        publisher.publish(3)
    assert log.seen == ["start 3", "publish 3", "end 3 SyncError"]
    assert publisher.version == 0


def test_an_evaluation_says_when_it_was():
    evaluator = SimpleNamespace(evaluate=lambda: {"eval/score": 0.5})
    evaluation = HeldOutEvaluation(None, None, None, HookRelay(), evaluator=evaluator, items=list)
    assert evaluation.last_step is None
    assert evaluation.evaluate(7) == {"eval/score": 0.5}
    assert evaluation.last_step == 7


@pytest.mark.parametrize(("shards_parameters", "sync"), [(False, SharedWeights), (True, CopiedWeights)])
def test_the_engine_is_over_the_policy_where_that_is_whole(shards_parameters, sync):
    import torch

    policy, copy = torch.nn.Linear(1, 1), torch.nn.Linear(1, 1)
    strategy = SimpleNamespace(
        shards_parameters=shards_parameters, device=torch.device("cpu"), unwrap=lambda model: model
    )
    given = []

    def build(module):
        given.append(module)
        return FakeEngine()

    _, made = build_engine_beside(strategy, policy, build=build, copy=lambda: copy)
    assert given == [copy if shards_parameters else policy] and isinstance(made, sync)
    assert all(parameter.requires_grad != shards_parameters for parameter in given[0].parameters())
