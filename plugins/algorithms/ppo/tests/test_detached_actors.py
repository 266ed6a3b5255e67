"""`DetachedPPOTrainer` and `ExperienceMakerHolder` together, as the seed's pages use them."""

import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle
import torch
from quick_ray import quick_workers
from running import PATIENCE_SECONDS

from rlhf_ppo import Critic, DetachedPPOTrainer
from rlhf_ray import ExperienceMakerHolder
from rlhf_ray.calls import collect, wait_until

ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

WAIT = PATIENCE_SECONDS
ONE = 5
"""Token of the character 1."""
BEST = 5.0
"""Score of an answer of ones."""


@pytest.fixture(scope="module", autouse=True)
def ray_with_gpus(ray_worker_source: None) -> Iterator[None]:
    """A Ray that says it has GPUs, on whatever machine this is; one that other tests started is used as it is."""
    if ray.is_initialized():
        yield
        return
    before = os.environ.get("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO")
    os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"] = "0"
    with quick_workers():
        ray.init(
            address="local",
            num_cpus=4,
            num_gpus=4,
            include_dashboard=False,
            log_to_driver=False,
            runtime_env={"env_vars": {"OMP_NUM_THREADS": "1"}},
        )
    yield
    ray.shutdown()
    if before is None:
        del os.environ["RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO"]


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """start(class, name, …) -> actor, killed when the test ends."""
    started: list[Any] = []

    def begin(kind: Any, name: str, *arguments: Any, **options: Any) -> Any:
        actor = kind.options(name=name, num_cpus=0).remote(*arguments, **options)
        started.append(actor)
        return actor

    yield begin
    for actor in started:
        ray.kill(actor)


def get(reference: Any, doing: str = "to answer") -> Any:
    return collect([("actor", reference)], timeout_seconds=WAIT, doing=doing)[0]


def my_strategy() -> Any:
    from rlhf_core.components import StrategyContext
    from rlhf_core.plugins.selected import load

    selected = load("strategies", "single")
    return selected.build(selected.component.config(), StrategyContext(device="cpu"))


def my_actor() -> Any:
    from rlhf_testing.models import tiny_model, tiny_tokenizer

    return tiny_model(tiny_tokenizer("0123456789>,"), hidden_size=32, num_layers=1, num_heads=2, seed=0)


def my_lora_actor() -> Any:
    from rlhf_core.config.sections import LoraConfig
    from rlhf_models import CausalLM

    return CausalLM().add_adapter(my_actor(), LoraConfig(r=2), seed=0)


def my_critic() -> Any:
    from rlhf_ppo import Critic

    return Critic.from_pretrained(my_actor())


def my_reward_model() -> Any:
    return fraction_of_ones


def fraction_of_ones(rollouts: Any) -> list[float]:
    return [BEST * rollout.completion_ids.count(ONE) / len(rollout.completion_ids) for rollout in rollouts]


def my_dataloader(batch_size: int = 8) -> list[dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(4, 14, (4, batch_size, 3), generator=generator)
    return [{"input_ids": batch, "attention_mask": torch.ones_like(batch)} for batch in ids]


def policy_of(actor: Any, which: str) -> dict[str, torch.Tensor]:
    """Weights of a live actor: `maker` or `trainer`."""
    if which == "maker":
        return get(actor.__ray_call__.remote(lambda self: self._worker.weights._models["policy"].state_dict()))
    return get(actor.__ray_call__.remote(lambda self: self._learner.unwrapped("policy").state_dict()))


class RewardLog:
    """Writes down the mean reward of every batch."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_batch_end(self, metrics: dict[str, float], experience: Any) -> None:
        with self.path.open("a") as file:
            print(float(experience.rewards["reward"].mean()), file=file)


@pytest.fixture(scope="module")
def reward_log(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("log") / "rewards"


@pytest.fixture(scope="module")
def pair(reward_log: Path) -> Iterator[tuple[Any, Any]]:
    """The maker and the trainer of the pages, for several tests: starting them takes seconds."""
    gpus = 1 if ray.cluster_resources().get("GPU", 0) >= 2 else 0
    maker = ExperienceMakerHolder.options(name="page_maker", num_gpus=gpus).remote(
        detached_trainer_name_list=["page_trainer"],
        strategy_fn=lambda: my_strategy(),
        model_fn=lambda: (my_actor(), my_critic(), my_reward_model(), my_actor()),
        kl_coef=0.1,
        buffer_cpu_offload=True,
        eval_performance=True,
        max_length=9,
        top_k=50,
    )
    trainer = DetachedPPOTrainer.options(name="page_trainer", num_gpus=gpus).remote(
        experience_maker_holder_name_list=["page_maker"],
        strategy_fn=lambda: my_strategy(),
        model_fn=lambda: (my_actor(), my_critic()),
        train_batch_size=8,
        eps_clip=0.2,
        value_clip=0.4,
        eval_performance=True,
        buffer_limit=1,
        callbacks=[RewardLog(reward_log)],
        actor_lr=1e-2,
        critic_lr=1e-2,
        max_shard_bytes=4096,
    )
    yield maker, trainer
    ray.kill(maker)
    ray.kill(trainer)


@pytest.mark.slow
def test_the_pages_examples(pair: tuple[Any, Any], tmp_path: Path) -> None:
    maker, trainer = pair
    get(trainer.sync_models_to_remote_makers.remote())
    loop = maker.workingloop.remote(dataloader_fn=lambda: my_dataloader(), num_epochs=2)
    get(trainer.fit.remote(total_steps=8, update_steps=4, train_epochs=2))
    get(loop)
    assert get(maker.get_policy_version.remote()) == 3
    trained, received = policy_of(trainer, "trainer"), policy_of(maker, "maker")
    assert all(torch.equal(trained[name], received[name]) for name in trained)
    assert not torch.equal(trained["lm_head.weight"], my_actor().state_dict()["lm_head.weight"])
    report = get(trainer.get_sync_report.remote())
    assert report.num_chunks > 5
    sizes = [p.numel() * 4 for model in (my_actor(), my_critic()) for p in model.state_dict().values()]
    assert report.num_bytes == sum(sizes)

    for what in ("actor", "critic"):
        get(getattr(trainer, f"strategy_save_{what}").remote(str(tmp_path / what), only_rank0=True))
        assert any((tmp_path / what).iterdir())
    from transformers import AutoModelForCausalLM

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "actor").state_dict()
    assert all(torch.equal(saved[name], trained[name]) for name in trained)
    critic = get(trainer.__ray_call__.remote(lambda self: self._learner.unwrapped("critic").state_dict()))
    loaded = Critic.from_pretrained(tmp_path / "critic").state_dict()
    assert all(torch.equal(loaded[name], critic[name]) for name in critic)


@pytest.mark.slow
def test_after_twenty_adapter_syncs_the_makers_policy_is_the_trainers(start: Callable[..., Any]) -> None:
    maker = start(
        ExperienceMakerHolder,
        "maker_0",
        ["trainer_0"],
        my_strategy,
        lambda: (my_lora_actor(), Critic.from_pretrained(my_lora_actor()), fraction_of_ones, None),
        update_lora_weights=True,
        max_length=8,
    )
    trainer = start(
        DetachedPPOTrainer,
        "trainer_0",
        ["maker_0"],
        my_strategy,
        lambda: (my_lora_actor(), Critic.from_pretrained(my_lora_actor())),
        update_lora_weights=True,
        actor_lr=1e-2,
    )
    get(trainer.sync_models_to_remote_makers.remote())
    full = get(trainer.get_sync_report.remote()).num_bytes
    loop = maker.workingloop.remote(dataloader_fn=my_dataloader, num_steps=20)
    get(trainer.fit.remote(total_steps=20, update_steps=1))
    get(loop)
    assert get(maker.get_policy_version.remote()) == 21
    trained, received = policy_of(trainer, "trainer"), policy_of(maker, "maker")
    assert trained.keys() == received.keys()
    assert all(torch.allclose(trained[name], received[name], atol=1e-6, rtol=0) for name in trained)
    assert any("lora_B" in name and bool(tensor.any()) for name, tensor in trained.items())
    assert get(trainer.get_sync_report.remote()).num_bytes < full / 2


@pytest.mark.slow
def test_two_trainers_and_two_makers_do_not_deadlock(start: Callable[..., Any]) -> None:
    makers = [
        start(
            ExperienceMakerHolder,
            f"maker_{i}",
            ["trainer_0", "trainer_1"],
            my_strategy,
            lambda: (my_actor(), my_critic(), fraction_of_ones, my_actor()),
            sync_models_from_trainers=True,
            max_length=8,
        )
        for i in range(2)
    ]
    trainers = [
        start(
            DetachedPPOTrainer,
            f"trainer_{i}",
            ["maker_0", "maker_1"],
            my_strategy,
            lambda: (my_actor(), my_critic()),
            buffer_limit=1,
            max_shard_bytes=2048,
        )
        for i in range(2)
    ]
    loops = [maker.workingloop.remote(dataloader_fn=my_dataloader, num_epochs=2) for maker in makers]
    for sync in [trainer.sync_models_to_remote_makers.remote() for trainer in trainers]:
        get(sync)
    # 2 makers x 8 batches of 8 are 8 batches for each trainer.
    for fit in [trainer.fit.remote(total_steps=8, update_steps=1) for trainer in trainers]:
        get(fit)
    for loop in loops:
        get(loop)
    for maker in makers:
        assert get(maker.get_policy_version.remote()) == 9


@pytest.mark.slow
def test_a_trainer_killed_inside_a_sync_leaves_the_maker_usable(
    pair: tuple[Any, Any], start: Callable[..., Any]
) -> None:
    def stuck_strategy() -> Any:
        import threading

        strategy = my_strategy()
        whole = strategy.state_dict_shards

        def stop_half_way(*arguments: Any) -> Any:
            shards = whole(*arguments)
            yield next(shards)
            threading.Event().wait()

        strategy.state_dict_shards = stop_half_way
        return strategy

    maker, trainer = pair
    version = get(maker.get_policy_version.remote())
    stuck = start(
        DetachedPPOTrainer,
        "stuck_trainer",
        ["page_maker"],
        stuck_strategy,
        lambda: (my_actor(), my_critic()),
        max_shard_bytes=2048,
    )
    stuck.sync_models_to_remote_makers.remote()

    def half_sent() -> bool:
        return bool(get(maker.__ray_call__.remote(lambda self: self._worker.weights._incoming)))

    assert wait_until(half_sent, WAIT)
    ray.kill(stuck)
    loop = maker.workingloop.remote(dataloader_fn=my_dataloader, num_epochs=1)
    get(trainer.fit.remote(total_steps=4, update_steps=2))
    get(loop)
    assert get(maker.get_policy_version.remote()) == version + 2
    trained, received = policy_of(trainer, "trainer"), policy_of(maker, "maker")
    assert all(torch.equal(trained[name], received[name]) for name in trained)


@pytest.mark.slow
def test_it_learns(pair: tuple[Any, Any], reward_log: Path) -> None:
    """On from where the tests above left it."""
    maker, trainer = pair
    get(trainer.sync_models_to_remote_makers.remote())
    loop = maker.workingloop.remote(dataloader_fn=lambda: my_dataloader(), num_steps=60)
    get(trainer.fit.remote(total_steps=60, update_steps=1))
    get(loop)
    rewards = [float(line) for line in reward_log.read_text().splitlines()]
    assert len(rewards) >= 60
    assert sum(rewards[:8]) / 8 < 0.2 * BEST
    assert sum(rewards[-8:]) / 8 > 0.5 * BEST


@pytest.mark.slow
def test_trainers_of_one_process_group_train_one_policy(start: Callable[..., Any]) -> None:
    import socket

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]

    def ddp() -> Any:
        from rlhf_core.components import StrategyContext
        from rlhf_core.plugins.selected import load

        selected = load("strategies", "ddp")
        return selected.build(selected.component.config(), StrategyContext(device="cpu"))

    maker = start(
        ExperienceMakerHolder,
        "maker_0",
        ["trainer_0", "trainer_1"],
        my_strategy,
        lambda: (my_actor(), my_critic(), fraction_of_ones, my_actor()),
        max_length=8,
    )
    place = {"world_size": "2", "master_addr": "127.0.0.1", "master_port": str(port)}
    trainers = [
        start(
            DetachedPPOTrainer,
            f"trainer_{rank}",
            ["maker_0"],
            ddp,
            lambda: (my_actor(), my_critic()),
            {**place, "rank": str(rank), "local_rank": str(rank)},
            train_batch_size=4,
            actor_lr=1e-2,
        )
        for rank in range(2)
    ]
    for sync in [trainer.sync_models_to_remote_makers.remote() for trainer in trainers]:
        get(sync)
    loop = maker.workingloop.remote(dataloader_fn=my_dataloader, num_epochs=1)
    for fit in [trainer.fit.remote(total_steps=4, update_steps=2) for trainer in trainers]:
        get(fit)
    get(loop)
    first, second = (policy_of(trainer, "trainer") for trainer in trainers)
    received = policy_of(maker, "maker")
    assert all(torch.equal(first[name], second[name]) for name in first)
    assert all(torch.equal(first[name], received[name]) for name in first)
    assert get(maker.get_policy_version.remote()) == 3
    shortfalls = [trainer.fit.remote(total_steps=1, update_steps=1) for trainer in trainers]
    get(trainers[0].buffer_extend.remote(items_of_one_batch()))
    for fit in shortfalls:
        with pytest.raises(Exception, match="maker_0 is done"):
            get(fit)


def items_of_one_batch() -> list[Any]:
    """Four samples, as a maker would send them."""
    from rlhf_core.types import BufferItem

    return [
        BufferItem(
            sample_id=n,
            group_id=n,
            policy_version=0,
            prompt_ids=torch.tensor([4, 5]),
            response_ids=torch.tensor([6, 7]),
            action_mask=torch.ones(2, dtype=torch.bool),
            action_log_probs=torch.full((2,), -2.7),
            rewards={"reward": 1.0},
            values=torch.zeros(2),
        )
        for n in range(4)
    ]
