"""Episodes as tokens: what stands in the rows, what counts, and where an episode ends."""

from __future__ import annotations

import asyncio
import threading

import pytest
from chat_templates import chat_tokenizer
from playing import EOS, Echo, Reworded, Says, driven, items, play, play_one, rollouts, three_digits

from rlhf_core.errors import EpisodeError
from rlhf_core.prompts.stream import PromptEncoder
from rlhf_core.rewards.values import TurnScores
from rlhf_core.rollout.row import Played
from rlhf_core.types import Prompt
from rlhf_episodes.contract import Outcome
from rlhf_testing.engine import FakeEngine
from rlhf_testing.models import tiny_tokenizer
from rlhf_testing.samples import make_prompt

PROMPT = (7, 5, 14)
"""The ids of "31>"; digit d has id 4 + d."""


def encoded(tokenizer, record):
    return PromptEncoder(tokenizer).prompt(record, 0, "test")


def test_a_row_grows_by_what_was_sampled_and_given():
    engine = Says(three_digits)
    played = play_one(Echo, engine=engine)
    asked = [request for (request,) in engine.calls]
    assert [request.prompt_ids for request in asked] == [
        PROMPT,
        (*PROMPT, 11, 12, EOS, 14, 4),
        (*PROMPT, 11, 12, EOS, 14, 4, 11, 12, EOS, 14, 5),
    ]
    assert [request.offset for request in asked] == [0, 3, 6]
    (rollout,) = rollouts(played)
    assert rollout.prompt_ids == PROMPT
    assert rollout.completion_ids == (11, 12, EOS, 14, 4, 11, 12, EOS, 14, 5, 11, 12, EOS)
    sampled = [True, True, True, False, False] * 2 + [True] * 3
    assert list(rollout.action_mask) == sampled
    said = (-0.11, -0.12, -0.02)
    assert rollout.logprobs == (*said, 0.0, 0.0, *said, 0.0, 0.0, *said)
    assert rollout.sampled_ids == (11, 12, EOS) * 3
    assert rollout.completion == "78\n78\n78"
    assert [(turn.role, turn.text, turn.token_ids) for turn in rollout.turns] == [
        ("policy", "78", (11, 12, EOS)),
        ("environment", ">0", (14, 4)),
        ("policy", "78", (11, 12, EOS)),
        ("environment", ">1", (14, 5)),
        ("policy", "78", (11, 12, EOS)),
    ]
    assert rollout.finish_reason == "stop"


def test_rewards_stand_at_the_last_sampled_token_of_their_turn():
    played = play_one(Echo, engine=Says(three_digits))
    assert played.reward == 6.0
    (item,) = items(played)
    assert item.rewards == {"environment": 6.0}
    rewards = [[0.0]] * 13
    rewards[2], rewards[7], rewards[12] = [1.0], [2.0], [3.0]
    assert item.columns["turn_rewards"].tolist() == rewards
    assert item.columns["turn_number"].tolist() == [0] * 3 + [-1] * 2 + [1] * 3 + [-1] * 2 + [2] * 3
    assert item.action_mask.tolist() == list(rollouts(played)[0].action_mask)
    assert [turn.reward for turn in rollouts(played)[0].turns] == [1.0, 0.0, 2.0, 0.0, 3.0]
    assert item.columns["environment"]["num_turns"] == 3.0
    assert (item.columns["environment"]["observation_tokens"], item.columns["environment"]["response_tokens"]) == (
        4.0,
        13.0,
    )


def test_the_first_observation_is_part_of_the_prompt():
    (rollout,) = rollouts(play_one(lambda: Echo(turns=1, first="12"), engine=Says(three_digits)))
    assert (rollout.prompt, rollout.prompt_ids) == ("31>12", (7, 5, 14, 5, 6))
    assert rollout.completion_ids == (11, 12, EOS)
    assert rollout.action_mask is None


def test_a_turn_that_was_cut_says_so_and_the_episode_goes_on():
    made = []

    def make():
        made.append(Echo(turns=2))
        return made[-1]

    played = play_one(make, engine=Says(lambda *_: [9, 9, 9, 9, 9]), max_new_tokens=2)
    assert [reply.finish_reason for reply in made[0].replies] == ["length", "length"]
    (rollout,) = rollouts(played)
    assert rollout.completion_ids == (9, 9, 14, 4, 9, 9)
    assert rollout.finish_reason == "length"
    assert played.rows[0].columns["environment"]["truncated"] == 0.0


def test_no_observation_lets_the_policy_go_on():
    (rollout,) = rollouts(play_one(lambda: Echo(observations=[None, None, None]), engine=Says(three_digits)))
    assert rollout.completion_ids == (11, 12, EOS) * 3
    assert rollout.action_mask is None
    assert [turn.role for turn in rollout.turns] == ["policy"] * 3


def test_an_environment_may_bring_the_whole_prompt():
    empty = Prompt(position=0, text="", prompt_ids=())
    (rollout,) = rollouts(play_one(lambda: Echo(turns=1, first="31>"), prompt=empty))
    assert (rollout.prompt, rollout.prompt_ids) == ("31>", PROMPT)
    with pytest.raises(EpisodeError, match="nothing to continue"):
        play_one(Echo, prompt=empty)


@pytest.mark.parametrize("family", ["chatml", "qwen2"])
def test_chat_turns_are_as_the_template_writes_them_and_sampled_ids_stay(family):
    tokenizer = chat_tokenizer(family)
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = encoded(tokenizer, {"prompt": [{"role": "user", "content": "hello"}]})
    odd = [tokenizer.convert_tokens_to_ids(char) for char in "hello"]  # text that would be encoded otherwise
    engine = FakeEngine(answer=lambda request, version: [*odd, end] if request.offset == 0 else [*odd[:3]])
    (rollout,) = rollouts(
        play_one(
            lambda: Echo(turns=3, first="now"), engine=engine, tokenizer=tokenizer, prompt=prompt, max_new_tokens=8
        )
    )
    text = tokenizer.decode(rollout.prompt_ids + rollout.completion_ids)
    start, sep = "<|im_start|>", "<|im_end|>\n"
    system = f"{start}system\nYou are a helpful assistant.{sep}" if family == "qwen2" else ""
    assert text == (
        f"{system}{start}user\nhello{sep}{start}user\nnow{sep}{start}assistant\nhello{sep}"
        f"{start}user\n>0{sep}{start}assistant\nhel{sep}{start}user\n>1{sep}{start}assistant\nhel"
    )
    # A sampled end of turn is sampled, and one that the template adds after a cut turn is not.
    ends = [mask for token, mask in zip(rollout.completion_ids, rollout.action_mask, strict=True) if token == end]
    assert ends == [True, False, False, False]
    assert rollout.sampled_ids == (*odd, end, *odd[:3], *odd[:3])
    assert [turn.text for turn in rollout.turns if turn.role == "environment"] == [">0", ">1"]


def test_forks_are_rows_that_share_what_came_before():
    async def run(task, policy):
        await policy.turn(">")
        other = policy.fork()
        first = await policy.turn(">1")
        second = await other.turn(">2")
        third = await other.fork().turn(">3")
        return Outcome(reward=1.0, turn_rewards={first.turn: 10.0, second.turn: 20.0, third.turn: 30.0, 0: 5.0})

    engine = Says(three_digits)
    played = play_one(driven(run), engine=engine)
    asked = [request for (request,) in engine.calls]
    assert [(request.branch, request.offset) for request in asked] == [(0, 0), (0, 3), (1, 3), (2, 6)]
    found = rollouts(played)
    assert [rollout.branch for rollout in found] == [0, 1, 2]
    assert played.reward == 66.0
    shared = (11, 12, EOS)
    assert [rollout.completion_ids for rollout in found] == [
        (*shared, 14, 5, 11, 12, EOS),
        (*shared, 14, 6, 11, 12, EOS),
        (*shared, 14, 6, 11, 12, EOS, 14, 7, 11, 12, EOS),
    ]
    assert sum(len(rollout.sampled_ids) for rollout in found) == 4 * 3
    assert found[1].action_mask == (False,) * 5 + (True,) * 3
    assert found[2].action_mask == (False,) * 10 + (True,) * 3
    assert found[1].logprobs[:5] == (0.0,) * 5
    assert [[turn.reward for turn in rollout.turns if turn.role == "policy"] for rollout in found] == [
        [5.0, 10.0],
        [0.0, 20.0],
        [0.0, 0.0, 30.0],
    ]
    ends = [item.columns["turn_rewards"][:, 0].nonzero().flatten().tolist() for item in items(played)]
    assert ends == [[2, 7], [7], [12]]
    # A reward is shown the last row: the first turn, the one of the branch it came from, and its own.
    given = {"even": 4.0, "by turn": TurnScores({0: 0.5, 1: 0.25, 2: 7.0})}
    columns = [item.columns["turn_rewards"][:, 1:] for item in items(played, given)]
    assert [[each.nonzero().tolist(), each.sum().item()] for each in columns] == [
        [[[2, 1]], 0.5],
        [[[7, 1]], 0.25],
        [[[12, 1]], 7.0],
    ]
    assert items(played, given)[0].rewards == {"environment": 66.0, "even": 4.0, "by turn": 7.75}
    measured = played.rows[0].columns["environment"]
    assert (measured["response_tokens"], measured["observation_tokens"]) == (3 * 4 + 6, 6)
    assert [bool(item.columns["environment"]) for item in items(played)] == [True, False, False]


def test_branches_at_the_same_time_are_sampled_in_one_round():
    async def run(task, policy):
        await policy.turn()
        branches = [policy, policy.fork(), policy.fork()]
        await asyncio.gather(*(branch.turn(">") for branch in branches))
        await asyncio.gather(*(branch.turn(">") for branch in branches))
        return Outcome()

    engine = Says(three_digits)
    played = play(driven(run), engine=engine, samples=3)
    rounds = [[(request.sample_id, request.branch) for request in call] for call in engine.calls]
    everyone = [(sample, branch) for sample in range(3) for branch in range(3)]
    assert rounds == [[(sample, 0) for sample in range(3)], everyone, everyone]
    assert [len(each.rows) for each in played] == [3, 3, 3]


def test_a_branch_has_one_turn_at_a_time():
    async def run(task, policy):
        await asyncio.gather(policy.turn(), policy.turn())
        return Outcome()

    with pytest.raises(EpisodeError, match="this branch has an unfinished turn"):
        play_one(driven(run))


def test_history_that_the_template_cuts_makes_branches():
    tokenizer = chat_tokenizer("qwen3")
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    prompt = encoded(tokenizer, {"prompt": [{"role": "user", "content": "hello"}]})
    texts = ["<think>\nhe\n</think>\n\nhello", "hell", "her"]
    options = {"tokenizer": tokenizer, "prompt": prompt, "max_new_tokens": 60}
    played = play_one(Echo, engine=Reworded(tokenizer, texts, end), history="branch", **options)
    first, second = rollouts(played)
    assert (first.branch, second.branch) == (0, 1)
    assert tokenizer.decode(first.completion_ids) == f"{texts[0]}<|im_end|>"
    assert "<think>" not in second.prompt
    assert second.prompt.endswith("assistant\nhello<|im_end|>\n<|im_start|>user\n>0<|im_end|>\n<|im_start|>assistant\n")
    assert second.completion == "hell\nher"
    kept = play_one(Echo, engine=Reworded(tokenizer, texts, end), history="append", **options)
    assert len(kept.rows) == 1


def test_all_samples_of_a_prompt_face_one_task_each_with_a_seed_of_its_own():
    tasks = []

    class Keeps(Echo):
        def reset(self, task):
            tasks.append(task)

    play(lambda: Keeps(turns=1), samples=3, seed=4)
    assert len({task.seed for task in tasks}) == 1
    assert len({task.sample_seed for task in tasks}) == 3
    again, tasks = tasks, []
    play(lambda: Keeps(turns=1), samples=3, seed=4)
    assert sorted(map(repr, tasks)) == sorted(map(repr, again))
    assert tasks[0].prompt.answer == "13"


class Counts(Echo):
    """How many of it are open at once."""

    open, most = set(), 0
    lock = threading.Lock()

    def reset(self, task):
        with Counts.lock:
            Counts.open.add(self)
            Counts.most = max(Counts.most, len(Counts.open))

    def step(self, reply):
        found = super().step(reply)
        if found[2]:
            with Counts.lock:
                Counts.open.discard(self)
        return found


@pytest.mark.parametrize("concurrency", [1, 3, 64])
def test_so_many_episodes_are_open_at_once(concurrency):
    Counts.open, Counts.most = set(), 0
    assert [played.sample_id for played in play(Counts, samples=10, concurrency=concurrency)] == list(range(10))
    assert Counts.most == min(concurrency, 10)


def test_nothing_depends_on_which_answer_comes_first():
    def found(engine, **options):
        def make():
            return Echo(turns=4)

        return [(each.reward, rollouts(each)) for each in play(make, samples=9, engine=engine, **options)]

    class InOrder(FakeEngine):
        def generate(self, requests, sampling):
            return reversed(list(super().generate(requests, sampling)))

    assert found(FakeEngine()) == found(InOrder()) == found(FakeEngine(), concurrency=2)


def test_turns_end_by_their_own_texts_too():
    async def run(task, policy):
        await policy.turn(stop=("5", "7") if task.sample_id else ())
        return Outcome()

    seen = []

    class Engine(FakeEngine):
        def generate(self, requests, sampling):
            seen.append(([request.sample_id for request in requests], sampling.stop))
            return super().generate(requests, sampling)

    play(driven(run), samples=3, engine=Engine(), stop=("7",))
    assert seen == [([0], ("7",)), ([1, 2], ("7", "5"))]


def test_an_engine_that_mixes_up_or_forgets_turns_is_told_so():
    class Mixes(FakeEngine):
        def generate(self, requests, sampling):
            from dataclasses import replace

            for completion in super().generate(requests, sampling):
                yield replace(completion, branch=7)

    class Forgets(FakeEngine):
        def generate(self, requests, sampling):
            return iter(())

    from rlhf_core.errors import RlhfError

    with pytest.raises(RlhfError, match="answered branch 7 of sample 0, which is not or no longer requested"):
        play_one(Echo, engine=Mixes())
    with pytest.raises(RlhfError, match="left 1 of 1 requests"):
        play_one(Echo, engine=Forgets())


def test_the_tiny_tokenizer_is_what_these_tests_count_on():
    assert tuple(tiny_tokenizer()("31>")["input_ids"]) == PROMPT == make_prompt(0).prompt_ids
    assert isinstance(play_one(Echo), Played)
