"""PPOTrainer: the seed's example, its options, and what a subclass may change."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

from rlhf_core.errors import DataError, UserInputError
from rlhf_core.types import Experience, Rollout
from rlhf_ppo import PPOTrainer

SEED_SIGNATURE = {
    "actor_booster": inspect.Parameter.empty,
    "critic_booster": inspect.Parameter.empty,
    "actor": inspect.Parameter.empty,
    "critic": inspect.Parameter.empty,
    "reward_model": inspect.Parameter.empty,
    "initial_model": inspect.Parameter.empty,
    "actor_optim": inspect.Parameter.empty,
    "critic_optim": inspect.Parameter.empty,
    "actor_lr_scheduler": inspect.Parameter.empty,
    "critic_lr_scheduler": inspect.Parameter.empty,
    "tokenizer": inspect.Parameter.empty,
    "kl_coef": 0.1,
    "ptx_coef": 0.9,
    "train_batch_size": 8,
    "buffer_limit": 0,
    "buffer_cpu_offload": True,
    "eps_clip": 0.2,
    "vf_coef": 1.0,
    "value_clip": 0.2,
    "sample_buffer": False,
    "dataloader_pin_memory": True,
    "offload_inference_models": True,
    "apply_loss_mask": True,
    "accumulation_steps": 1,
    "save_interval": 0,
    "save_dir": None,
    "use_tp": False,
    "coordinator": None,
    "callbacks": [],
}


def lines(folder: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "metrics.jsonl").read_text().splitlines()]


def test_the_signature_is_the_seeds() -> None:
    parameters = inspect.signature(PPOTrainer).parameters
    shared = list(parameters)[: len(SEED_SIGNATURE)]
    assert shared == list(SEED_SIGNATURE)
    assert {name: parameters[name].default for name in shared} == SEED_SIGNATURE
    added = [p for name, p in parameters.items() if name not in SEED_SIGNATURE and p.kind is not p.VAR_KEYWORD]
    assert all(p.kind is p.KEYWORD_ONLY and p.default is not p.empty for p in added)
    fit = list(inspect.signature(PPOTrainer.fit).parameters)
    assert fit[1:4] == ["num_episodes", "num_collect_steps", "num_update_steps"]
    assert fit[4:] == ["prompt_dataloader", "pretrain_dataloader", "log_dir", "use_wandb"]


class Master:
    """What is used of ColossalAI's DistCoordinator."""

    def __init__(self) -> None:
        self.said: list[str] = []

    def print_on_master(self, message: str) -> None:
        self.said.append(message)


def test_the_seeds_example(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path) -> None:
    coordinator = Master()
    trainer = make_trainer(
        kl_coef=0.1,
        ptx_coef=0.0,
        train_batch_size=4,
        accumulation_steps=2,
        save_interval=6,
        save_dir=str(tmp_path / "checkpoints"),
        coordinator=coordinator,
    )
    before = {name: tensor.clone() for name, tensor in trainer.actor.state_dict().items()}
    trainer.fit(
        num_episodes=2,
        num_collect_steps=2,
        num_update_steps=3,
        prompt_dataloader=prompt_loader,
        pretrain_dataloader=None,
        log_dir=str(tmp_path / "logs"),
        use_wandb=False,
    )
    rows = lines(str(tmp_path / "logs"))
    assert [row["step"] for row in rows] == list(range(1, 13))  # 16 samples, 4 x 2 a step, 3 passes, 2 episodes
    assert [row["episode"] for row in rows] == [0] * 6 + [1] * 6
    assert {"reward/mean", "kl/mean", "loss/policy", "loss/value", "policy/lr"} <= rows[0].keys()
    assert rows[0]["rollout/logprob_gap_max"] < 1e-4
    assert list((tmp_path / "logs").glob("events.out.tfevents.*"))
    assert any(not torch.equal(tensor, before[name]) for name, tensor in trainer.actor.state_dict().items())
    assert sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*")) == ["step-12", "step-6"]
    assert coordinator.said


@pytest.mark.slow
def test_it_learns(make_trainer: Callable[..., PPOTrainer], make_batches: Any, folder: str) -> None:
    prompts = make_batches([f"{a}{b}>" for a in range(8) for b in range(8)], 64)
    make_trainer(lr=1e-2, kl_coef=0.0, train_batch_size=32).fit(20, 1, 2, prompts, log_dir=folder)
    rewards = [row["reward/mean"] for row in lines(folder)]
    assert rewards[0] < 0.2
    assert rewards[-1] > 0.7


@pytest.mark.slow
def test_it_does_not_learn_from_a_reward_that_knows_nothing(
    make_trainer: Callable[..., PPOTrainer], make_batches: Any, folder: str, sevens: Any
) -> None:
    def shuffled(rollouts: Sequence[Rollout]) -> list[float]:
        return [float(hash(("noise", rollout.sample_id)) % 2) for rollout in rollouts]

    seen: list[float] = []

    class Watch:
        def on_make_experience_end(self, experience: Experience) -> None:
            seen.append(float((experience.sequences[:, experience.prompt_length :] == 11).float().mean()))

    prompts = make_batches([f"{a}{b}>" for a in range(8) for b in range(8)], 64)
    trainer = make_trainer(lr=1e-2, kl_coef=0.0, train_batch_size=32, reward_model=shuffled, callbacks=[Watch()])
    trainer.fit(10, 1, 2, prompts)
    assert max(seen) < 0.5


def test_the_same_seed_gives_the_same_run(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path
) -> None:
    for name in ("one", "two"):
        make_trainer().fit(2, 1, 2, prompt_loader, log_dir=str(tmp_path / name))
    make_trainer(seed=1).fit(2, 1, 2, prompt_loader, log_dir=str(tmp_path / "other"))
    one, two, other = ([clean(row) for row in lines(str(tmp_path / n))] for n in ("one", "two", "other"))
    assert one == two
    assert one != other


def clean(row: dict[str, Any]) -> dict[str, Any]:
    """Without what the clock and the machine decide."""
    measured = ("time/", "tokens_per_second/", "memory/", "reward_calls/")
    return {k: v for k, v in row.items() if not k.startswith(measured)}


class Steps(PPOTrainer):
    """Overrides every step as a subclass of the seed's would: nothing is returned but experience."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[Any] = []
        super().__init__(*args, **kwargs)

    def _before_fit(self, *args: Any, **kwargs: Any) -> None:
        self.calls.append("before_fit")
        super()._before_fit(*args, **kwargs)

    def _make_experience(self, collect_step: int) -> Experience:
        self.calls.append(("make", collect_step))
        return super()._make_experience(collect_step)

    def _learn(self, update_step: int) -> None:
        self.calls.append(("learn", update_step))
        super()._learn(update_step)

    def _training_step(self, experience: Experience) -> None:
        self.calls.append(("step", len(experience)))
        super()._training_step(experience)

    def _save_checkpoint(self, episode: int = 0) -> None:
        self.calls.append(("save", episode))


def test_every_step_can_be_overridden(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str) -> None:
    trainer = make_trainer(Steps, train_batch_size=16, save_interval=2, save_dir=folder)
    trainer.fit(1, 2, 2, prompt_loader)
    assert isinstance(trainer, Steps)
    assert trainer.calls == [
        "before_fit",
        ("make", 0),
        ("make", 1),
        ("learn", 0),
        ("step", 16),
        ("learn", 1),
        ("step", 16),
        ("save", 1),
    ]
    assert not list(Path(folder).glob("step-*"))


class NeverTrains(PPOTrainer):
    """Replaces the training step."""

    def _training_step(self, experience: Experience) -> None:
        assert experience.advantages is not None


class PaysForSevens(PPOTrainer):
    """Changes the experience."""

    def _make_experience(self, collect_step: int) -> Experience:
        from dataclasses import replace

        made = super()._make_experience(collect_step)
        return replace(made, rewards={name: score + 100.0 for name, score in made.rewards.items()})


def test_an_override_takes_effect(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str) -> None:
    trainer = make_trainer(NeverTrains)
    before = [parameter.detach().clone() for parameter in trainer.actor.parameters()]
    trainer.fit(1, 1, 1, prompt_loader)
    assert all(torch.equal(a, b) for a, b in zip(before, trainer.actor.parameters(), strict=True))
    make_trainer(PaysForSevens).fit(1, 1, 1, prompt_loader, log_dir=folder)
    assert lines(folder)[0]["reward/mean"] > 100


def test_sample_buffer_draws_one_random_batch_an_update_step(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any
) -> None:
    drawn: list[list[int]] = []

    class Watch:
        def on_learn_batch_end(self, experience: Experience) -> None:
            drawn.append(experience.sample_ids.tolist())

    make_trainer(sample_buffer=True, train_batch_size=4, callbacks=[Watch()]).fit(1, 2, 3, prompt_loader)
    assert [len(set(batch)) for batch in drawn] == [4, 4, 4]
    assert len(set(map(tuple, drawn))) > 1
    in_order: list[list[int]] = drawn.copy()
    drawn.clear()
    make_trainer(train_batch_size=4, callbacks=[Watch()]).fit(1, 2, 1, prompt_loader)
    everything = [sample for batch in drawn for sample in batch]
    assert everything == sorted(everything) and len(everything) == 16
    assert {sample for batch in in_order for sample in batch} <= set(everything)


def test_accumulation_makes_one_step_of_several_batches(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any
) -> None:
    whole = make_trainer(train_batch_size=16, lr=1e-3)
    parts = make_trainer(train_batch_size=4, accumulation_steps=4, lr=1e-3)
    for trainer in (whole, parts):
        trainer.fit(1, 2, 1, prompt_loader)
        assert trainer.num_train_step == 1
    for ours, theirs in zip(parts.actor.parameters(), whole.actor.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)


def test_apply_loss_mask_off_divides_by_the_longest_answer(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path
) -> None:
    losses = {}
    for applied in (True, False):
        folder = str(tmp_path / str(applied))
        trainer = make_trainer(apply_loss_mask=applied, train_batch_size=8, max_new_tokens=6)
        trainer.fit(1, 2, 1, prompt_loader, log_dir=folder)
        losses[applied] = lines(folder)[0]
    assert losses[True]["response/length_mean"] < 6  # some answers end by themselves
    assert losses[True]["loss/policy"] != pytest.approx(losses[False]["loss/policy"])
    assert losses[True]["loss/value"] == pytest.approx(losses[False]["loss/value"], rel=1e-6)


@pytest.mark.parametrize("options", [{"buffer_cpu_offload": False}, {"offload_inference_models": False}])
def test_where_things_lie_does_not_change_the_result(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, tmp_path: Path, options: dict[str, bool]
) -> None:
    for name, given in (("plain", {}), ("moved", options)):
        make_trainer(**given).fit(1, 1, 2, prompt_loader, log_dir=str(tmp_path / name))
    plain, moved = ([clean(row) for row in lines(str(tmp_path / name))] for name in ("plain", "moved"))
    assert plain == moved


def test_pretraining_text_is_learnt(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str) -> None:
    ids = torch.tensor([[5, 6, 7, 8, 9]] * 4)
    loader = DataLoader([{"input_ids": row, "attention_mask": torch.ones_like(row), "labels": row} for row in ids], 2)
    trainer = make_trainer(ptx_coef=0.9, lr=1e-2)
    trainer.fit(4, 1, 2, prompt_loader, loader, log_dir=folder)
    rows = lines(folder)
    assert rows[-1]["loss/ptx"] < rows[0]["loss/ptx"] - 0.3


def test_callbacks_of_both_kinds(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any) -> None:
    calls: list[str] = []

    class Seed:
        def __getattr__(self, name: str) -> Any:
            if not name.startswith("on_"):
                raise AttributeError(name)
            return lambda *arguments: calls.append(name)

    class Ours:
        def rlhf_update_end(self, step: int, metrics: dict[str, float]) -> None:
            calls.append(f"step {step} {'loss/policy' in metrics}")

    make_trainer(callbacks=[Seed(), Ours()]).fit(1, 1, 1, prompt_loader)
    in_order = [
        "on_fit_start",
        "on_episode_start",
        "on_make_experience_start",
        "on_make_experience_end",
        "on_learn_epoch_start",
        "on_learn_batch_start",
        "step 1 True",
        "on_learn_batch_end",
        "on_learn_epoch_end",
        "on_episode_end",
        "on_fit_end",
    ]
    assert [call for call in calls if call in in_order] == in_order


def test_two_fits_go_on_and_do_not_overwrite(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str
) -> None:
    trainer = make_trainer()
    trainer.fit(1, 1, 1, prompt_loader, log_dir=folder)
    trainer.fit(1, 1, 1, prompt_loader, log_dir=folder)
    assert [row["step"] for row in lines(folder)] == [1, 2]
    make_trainer().fit(1, 1, 1, prompt_loader, log_dir=folder)
    assert [row["step"] for row in lines(folder)] == [1, 2]
    assert [row["step"] for row in lines(f"{folder}/fit-2")] == [1]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"use_tp": True}, "use_tp"),
        ({"reference": None}, "initial_model"),
        ({"max_tokens": 3}, "max_new_tokens"),
        ({"temperature": 0.0}, "temperature"),
        ({"eps_clip": 0.0}, "eps_clip"),
        ({"ptx_coef": 1.0}, "ptx_coef"),
        ({"save_interval": 1}, "save_dir"),
        ({"train_batch_size": 0}, "train_batch_size"),
        ({"actor_booster": object()}, "actor_booster"),
    ],
)
def test_wrong_options_are_named(make_trainer: Callable[..., PPOTrainer], changes: dict[str, Any], named: str) -> None:
    with pytest.raises(UserInputError, match=named):
        make_trainer(**changes)


def test_wrong_fits_are_named(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any) -> None:
    with pytest.raises(UserInputError, match="pretrain_dataloader"):
        make_trainer(ptx_coef=0.9).fit(1, 1, 1, prompt_loader)
    with pytest.raises(UserInputError, match="log_dir"):
        make_trainer().fit(1, 1, 1, prompt_loader, use_wandb=True)
    with pytest.raises(UserInputError, match="num_update_steps"):
        make_trainer().fit(1, 1, 0, prompt_loader)
    with pytest.raises(DataError, match="yields no batches"):
        make_trainer().fit(1, 1, 1, [])
    with pytest.raises(UserInputError, match="cannot score"):
        make_trainer(reward_model=3).fit(1, 1, 1, prompt_loader)


def test_max_length_counts_prompt_and_answer(make_trainer: Callable[..., PPOTrainer], prompt_loader: Any) -> None:
    lengths: list[int] = []

    class Watch:
        def on_make_experience_end(self, experience: Experience) -> None:
            lengths.extend(experience.attention_mask.sum(1).tolist())

    make_trainer(max_new_tokens=None, max_length=8, callbacks=[Watch()]).fit(1, 1, 1, prompt_loader)
    assert max(lengths) == 8


@pytest.mark.parametrize("sampling", [{"temperature": 0.7, "top_k": 5}, {"top_p": 0.8}, {"do_sample": False}])
def test_log_probs_are_of_what_was_sampled(
    make_trainer: Callable[..., PPOTrainer], prompt_loader: Any, folder: str, sampling: dict[str, Any]
) -> None:
    make_trainer(**sampling).fit(1, 1, 1, prompt_loader, log_dir=folder)
    first = lines(folder)[0]
    assert first["rollout/logprob_gap_max"] < 1e-4
    assert first["policy/ratio_mean"] == pytest.approx(1.0, abs=1e-4)
    assert first["kl/mean"] == pytest.approx(0.0, abs=1e-4)  # the reference is compared on the same distribution
