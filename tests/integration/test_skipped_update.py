"""An update in which nothing counts, on two processes under every strategy: all of them decide alike."""

import datetime
import json
import warnings

import pytest
import torch
import torch.distributed as dist
from running import PATIENCE_SECONDS, Forked, ranks, run_all

from rlhf_core.batching import masked
from rlhf_core.plugins.selected import load
from rlhf_core.training.updater import Updater
from rlhf_testing.models import tiny_model
from rlhf_testing.samples import make_item

STRATEGIES = ["torch-ddp", "ddp", "fsdp", "low-level-zero", "gemini"]


def item(index):
    made = make_item(index, num_prompt_tokens=2, num_actions=3)
    ones = torch.linspace(-1, 1, made.num_response_tokens)
    return type(made)(
        **{
            **{name: getattr(made, name) for name in made.__slots__},
            **dict.fromkeys(("values", "advantages", "returns"), ones),
            "action_log_probs": -torch.ones(made.num_response_tokens),
        }
    )


def observe(name, rank):
    """Metrics of four updates: all count, nothing counts, one rank's samples count, all count; and what moved."""
    from rlhf_core.components import StrategyContext
    from rlhf_ppo.algorithm import PPO
    from rlhf_ppo.config import PPOConfig

    selected = load("strategies", name)
    strategy = selected.build(selected.component.config(), StrategyContext(device="cpu"))
    strategy.setup()
    algorithm = PPO(PPOConfig(kl_coef=0.0))
    policy = tiny_model(seed=1)
    trained = {}
    for role, model in {"policy": policy, "critic": algorithm.build_critic(policy)}.items():
        optimizer = strategy.make_optimizer([p for p in model.parameters() if p.requires_grad], lr=1e-3)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (1 + step))
        trained[role] = strategy.prepare(model, optimizer, schedule, max_grad_norm=1.0)
    updater = Updater(algorithm, strategy, trained, micro_batch_size=2)

    def weights():
        shards = strategy.state_dict_shards(trained["policy"].model, 1 << 20)
        return {key: tensor.detach().clone() for shard in shards for key, tensor in shard.items()}

    lines = []
    for counting in ([0, 1], [], [1], [0, 1]):
        items = [item(4 * rank + index) for index in range(3)]
        before = weights()
        metrics = updater.update(items if rank in counting else [masked(each) for each in items])
        moved = any(not tensor.equal(before[key]) for key, tensor in weights().items())
        lines.append({**metrics, "moved": moved})
    strategy.teardown()
    return lines


def worker(rank, folder):
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=datetime.timedelta(seconds=PATIENCE_SECONDS))
    seen = {name: observe(name, rank) for name in STRATEGIES}
    (folder / f"{rank}.json").write_text(json.dumps(seen))
    dist.destroy_process_group()


@pytest.fixture(scope="module")
def seen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("skipped")
    run_all(*(Forked(worker, rank, folder, env=place) for rank, place in enumerate(ranks(2))))
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


@pytest.mark.parametrize("name", STRATEGIES)
@pytest.mark.slow
def test_every_process_skips_or_none(seen, name):
    for rank in range(2):
        full, nothing, half, after = seen[rank][name]
        for role in ("policy", "critic"):
            assert nothing[f"{role}/skipped"] == 1.0
            assert nothing[f"{role}/grad_norm"] == 0.0
            assert all(f"{role}/skipped" not in line for line in (full, half, after))
            assert all(line[f"{role}/grad_norm"] > 0 for line in (full, half, after))
        assert [line["moved"] for line in (full, nothing, half, after)] == [True, False, True, True]
        rates = [line["policy/lr"] for line in (full, nothing, half, after)]
        assert rates == pytest.approx([1e-3, 5e-4, 5e-4, 1e-3 / 3])
