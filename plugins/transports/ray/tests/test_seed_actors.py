"""`DetachedTrainer` and `ExperienceMakerHolder` as actors, each against a stand-in for the other."""

import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import ray
import ray.cloudpickle
import torch
from running import PATIENCE_SECONDS

from rlhf_core.batching import collate
from rlhf_core.types import BufferItem, Experience
from rlhf_ray import DetachedTrainer, ExperienceMakerHolder
from rlhf_ray.calls import collect, get_named_actor, wait_until

pytestmark = pytest.mark.usefixtures("local_ray")
ray.cloudpickle.register_pickle_by_value(sys.modules[__name__])  # workers cannot import a test module

WAIT = PATIENCE_SECONDS


def item(number: int) -> BufferItem:
    return BufferItem(
        sample_id=number,
        group_id=number,
        policy_version=0,
        prompt_ids=torch.full((3,), number % 16),
        response_ids=torch.full((1 + number % 2,), number % 16),
        action_mask=torch.ones(1 + number % 2, dtype=torch.bool),
        action_log_probs=torch.zeros(1 + number % 2),
    )


@ray.remote(concurrency_groups={"buffer_length": 1, "buffer_append": 1, "buffer_sample": 1, "compute": 1})
class MyTrainer(DetachedTrainer):
    def training_step(self, experience: Experience):
        self.seen = [*getattr(self, "seen", []), experience]
        return {"loss": 0.0}

    def _update_remote_makers(self, fully_update=False, **kwargs):
        self.updates = [*getattr(self, "updates", []), fully_update]

    def get_state(self):
        return getattr(self, "seen", []), getattr(self, "updates", [])


class Record:
    """A callback in the seed's style, in the trainer's process; what was called is read from a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, line: str) -> None:
        with self.path.open("a") as file:
            print(line, file=file)

    def on_fit_start(self) -> None:
        self.write("fit")

    def on_episode_start(self, episode: int) -> None:
        self.write(f"episode {episode}")

    def on_epoch_start(self, epoch: int) -> None:
        self.write(f"epoch {epoch}")

    def on_batch_end(self, metrics: dict[str, Any], experience: Experience) -> None:
        self.write(f"batch of {len(experience)} {metrics}")

    def on_update_start(self) -> None:
        self.write("update")

    def on_fit_end(self) -> None:
        self.write("end")


def shorten_grace(trainer: Any) -> None:
    """Let the trainer give up half a second after all makers have ended, instead of ten seconds."""
    from rlhf_ray import maker_presence

    maker_presence._GRACE_SECONDS = 0.5


@pytest.fixture
def start() -> Iterator[Callable[..., Any]]:
    """start(class, name, …) -> actor, killed when the test ends."""
    started: list[Any] = []

    def begin(kind: Any, name: str, *arguments: Any, **options: Any) -> Any:
        started.append(kind.options(name=name, num_cpus=0).remote(*arguments, **options))
        if kind is MyTrainer:
            get(started[-1].__ray_call__.remote(shorten_grace))
        return started[-1]

    yield begin
    for actor in started:
        ray.kill(actor)


def get(reference: Any, doing: str = "to answer") -> Any:
    return collect([("actor", reference)], timeout_seconds=WAIT, doing=doing)[0]


def test_the_pages_example(start: Callable[..., Any]) -> None:
    trainer = start(
        MyTrainer, "trainer_0", experience_maker_holder_name_list=["maker_0"], train_batch_size=8, debug=True
    )
    fit = trainer.fit.remote(total_steps=10, update_steps=4, train_epochs=2)
    get(trainer.buffer_append.remote(collate([item(n) for n in range(30)])))
    get(trainer.buffer_extend.remote([item(n) for n in range(30, 85)]))
    assert get(fit) is None
    seen, updates = get(trainer.get_state.remote())
    first = [seen[i].sample_ids.tolist() for i in (*range(4), *range(8, 12), *range(16, 18))]
    assert first == [list(range(start, start + 8)) for start in range(0, 80, 8)]
    assert len(seen) == 20
    assert updates == [False, False, False]  # after 4, 8 and 10 batches
    assert get(trainer.buffer_get_length.remote()) == 0
    get(trainer.sync_models_to_remote_makers.remote())
    assert get(trainer.get_state.remote())[1][-1] is True


def test_callbacks_of_the_seed_are_called_in_order(start: Callable[..., Any], tmp_path: Path) -> None:
    trainer = start(MyTrainer, "trainer_0", ["maker_0"], train_batch_size=2, callbacks=[Record(tmp_path / "calls")])
    get(trainer.buffer_extend.remote([item(n) for n in range(4)]))
    get(trainer.fit.remote(2, 1))
    batch = "batch of 2 {'loss': 0.0}"
    episodes = [line for n in range(2) for line in (f"episode {n}", "epoch 0", batch, "update")]
    assert (tmp_path / "calls").read_text().splitlines() == ["fit", *episodes, "end"]


@pytest.mark.slow
def test_a_shortfall_ends_the_fit_with_what_the_makers_said(start: Callable[..., Any]) -> None:
    trainer = start(MyTrainer, "trainer_0", ["maker_0", "maker_1"], train_batch_size=4)
    fit = trainer.fit.remote(total_steps=5, update_steps=5)
    for maker in ("maker_0", "maker_1"):
        get(trainer.maker_started.remote(maker))
    get(trainer.buffer_extend.remote([item(n) for n in range(10)]))
    get(trainer.maker_done.remote("maker_0"))
    get(trainer.maker_done.remote("maker_1", "RewardError: no score"))
    with pytest.raises(Exception, match=r"after 2 of 5 batches: maker_0 is done, maker_1 failed: RewardError"):
        get(fit)
    assert len(get(trainer.get_state.remote())[0]) == 2  # whole batches were trained on


@pytest.mark.slow
def test_a_maker_that_dies_ends_the_fit(start: Callable[..., Any]) -> None:
    @ray.remote
    class Maker:
        def pid(self) -> int:
            return 1

    maker = start(Maker, "maker_0")
    get(maker.pid.remote())
    trainer = start(MyTrainer, "trainer_0", ["maker_0"], train_batch_size=4)
    fit = trainer.fit.remote(total_steps=1, update_steps=1)
    get(trainer.maker_started.remote("maker_0"))
    ray.kill(maker)
    assert wait_until(lambda: get_named_actor("maker_0") is None, WAIT)
    with pytest.raises(Exception, match="after 0 of 1 batches: maker_0 failed: its actor was lost"):
        get(fit)


@pytest.mark.slow
def test_a_maker_that_is_frozen_ends_the_fit(start: Callable[..., Any]) -> None:
    @ray.remote
    class Maker:
        """It is there, and says nothing."""

    def be_impatient(trainer: Any) -> None:
        trainer._presence._registry._heartbeat_seconds = 0.2

    start(Maker, "maker_0")
    trainer = start(MyTrainer, "trainer_0", ["maker_0"], train_batch_size=4)
    get(trainer.__ray_call__.remote(be_impatient))
    get(trainer.maker_started.remote("maker_0"))
    get(trainer.maker_alive.remote("maker_0"))
    with pytest.raises(Exception, match="after 0 of 1 batches: maker_0 failed: it sent no heartbeat for"):
        get(trainer.fit.remote(total_steps=1, update_steps=1))


@pytest.mark.slow
def test_a_wait_for_a_batch_has_a_deadline(start: Callable[..., Any]) -> None:
    trainer = start(MyTrainer, "trainer_0", ["nobody"], train_batch_size=4, batch_timeout_seconds=0.5)
    with pytest.raises(Exception, match=r"no batch came in 0.5 s .*0 of 4 entries"):
        get(trainer.fit.remote(total_steps=1, update_steps=1))


@pytest.mark.slow
def test_a_full_buffer_holds_up_who_appends_but_not_who_asks(start: Callable[..., Any]) -> None:
    trainer = start(MyTrainer, "trainer_0", ["maker_0"], train_batch_size=2, buffer_limit=1)
    appending = trainer.buffer_extend.remote([item(n) for n in range(10)])
    assert wait_until(lambda: get(trainer.buffer_get_length.remote()) == 1, WAIT)
    ready, _ = ray.wait([appending], timeout=0.2)
    assert ready == []
    assert get(trainer.buffer_get_length.remote()) == 1
    get(trainer.fit.remote(total_steps=5, update_steps=5))
    get(appending)
    seen, _ = get(trainer.get_state.remote())
    assert [number for batch in seen for number in batch.sample_ids.tolist()] == list(range(10))


def my_strategy() -> Any:
    from rlhf_core.components import StrategyContext
    from rlhf_core.plugins.selected import load

    selected = load("strategies", "single")
    return selected.build(selected.component.config(), StrategyContext(device="auto"))


def my_actor() -> Any:
    from rlhf_testing.models import tiny_model, tiny_tokenizer

    return tiny_model(tiny_tokenizer("0123456789>,"), hidden_size=32, num_layers=1, num_heads=2, seed=0)


def length(rollouts: Any) -> list[float]:
    return [float(len(rollout.completion_ids)) for rollout in rollouts]


def prompts() -> list[Any]:
    padded = {"input_ids": torch.tensor([[0, 6, 7]]), "attention_mask": torch.tensor([[0, 1, 1]])}
    return [torch.full((4, 3), 5), padded]


@pytest.fixture(scope="module")
def maker(local_ray: None) -> Iterator[Any]:
    """One for all tests below: starting it takes seconds."""
    actor = ExperienceMakerHolder.options(name="maker_0", num_cpus=0).remote(
        detached_trainer_name_list=["trainer_0", "trainer_1"],
        strategy_fn=my_strategy,
        model_fn=lambda: (my_actor(), None, length, my_actor()),
        sync_models_from_trainers=True,
        kl_coef=0.25,
        max_length=9,
        temperature=0.5,
        eos_token_id=2,
        first_sync_timeout_seconds=0.2,
    )
    yield actor
    ray.kill(actor)


def named_weights_of(model: Any) -> dict[str, torch.Tensor]:
    from rlhf_core.rollout.weight_sync import named_weights

    return {name: tensor.detach() for name, tensor in named_weights(model).items()}


@pytest.mark.slow
def test_a_maker_waits_for_whole_first_weights(maker: Any) -> None:
    with pytest.raises(Exception, match=r"waited 0.2 s for a trainer's weights"):
        get(maker.workingloop.remote(dataloader_fn=prompts))
    update = maker.update_experience_maker
    weights = named_weights_of(my_actor())
    names = list(weights)
    halves = [{n: weights[n] for n in names[:3]}, {n: weights[n] + 1.0 for n in names[3:]}]
    get(update.remote(chunk_start=True))
    get(update.remote(new_actor_state_dict=halves[0]))
    with pytest.raises(Exception, match="missing"):
        get(update.remote(chunk_end=True))
    assert get(maker.get_policy_version.remote()) == 0
    get(update.remote(chunk_start=True))
    for half in halves:
        get(update.remote(new_actor_state_dict=half))
    get(update.remote(chunk_end=True))
    assert get(maker.get_policy_version.remote()) == 1
    live = get(maker.__ray_call__.remote(lambda self: self._worker.weights._models["policy"].state_dict()))
    assert all(torch.equal(live[name], value) for half in halves for name, value in half.items())


def give_first_weights(maker: Any) -> None:
    """A whole version in one call, equal to the reference."""
    get(maker.update_experience_maker.remote(new_actor_state_dict=named_weights_of(my_actor()), fully_update=True))


def test_samples_reach_all_trainers_in_turn(start: Callable[..., Any], maker: Any) -> None:
    give_first_weights(maker)
    trainers = [start(MyTrainer, f"trainer_{i}", ["maker_0"], train_batch_size=1) for i in range(2)]
    fits = [trainer.fit.remote(total_steps=6, update_steps=6) for trainer in trainers]
    get(maker.workingloop.remote(dataloader_fn=prompts, num_epochs=2))
    for fit in fits:
        with pytest.raises(Exception, match="after 5 of 6 batches: maker_0 is done"):
            get(fit)
    taken = [each for trainer in trainers for each in get(trainer.get_state.remote())[0]]
    numbers = [int(each.sample_ids) for each in taken]
    assert len(set(numbers)) == 10
    assert sorted({number >> 16 & 0xFFFFFF for number in numbers}) == [0, 1, 2, 3]
    for each in taken:
        prompt = each.sequences[each.attention_mask][: -int(each.action_mask.sum())]
        assert prompt.tolist() in ([5, 5, 5], [6, 7])
        assert len(prompt) + each.num_actions <= 9
        assert each.kl_coef is not None and each.kl_coef.tolist() == [0.25]
        assert each.rewards["reward"].tolist() == [float(each.num_actions)]
        assert each.reference_log_probs is not None
        assert each.columns["temperature"][each.action_mask].unique().tolist() == [0.5]
        # The actor is its own reference here, on the same distribution: the KL is 0.
        assert torch.allclose(each.reference_log_probs, each.action_log_probs, atol=1e-4)


@pytest.mark.slow
def test_a_failing_loop_tells_the_trainers(start: Callable[..., Any], maker: Any) -> None:
    give_first_weights(maker)
    trainers = [start(MyTrainer, f"trainer_{i}", ["maker_0"], train_batch_size=1) for i in range(2)]
    fits = [trainer.fit.remote(total_steps=1, update_steps=1) for trainer in trainers]
    with pytest.raises(Exception, match="batch 0|data loader"):
        get(maker.workingloop.remote(dataloader_fn=lambda: [{"text": ["no ids"]}]))
    for fit in fits:
        with pytest.raises(Exception, match="maker_0 failed: DataError"):
            get(fit)


def test_the_reference_must_not_be_what_is_trained() -> None:
    from rlhf_core.errors import UserInputError
    from rlhf_ray.maker_parts import _reference

    actor = my_actor()
    with pytest.raises(UserInputError, match="the initial model is the actor itself"):
        _reference(actor, actor, my_strategy(), kl_coef=0.1)
    assert _reference(actor, actor, my_strategy(), kl_coef=0.0)[0] is None


def test_an_actor_that_never_comes_is_named() -> None:
    from rlhf_core.errors import DeadlineError
    from rlhf_ray.calls import NamedActors

    before = time.monotonic()
    with pytest.raises(DeadlineError, match="an actor named 'nobody'"):
        NamedActors(["nobody"], timeout_seconds=0.2).handle("nobody")
    assert time.monotonic() >= before + 0.2
