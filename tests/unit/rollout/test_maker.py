"""Whole prompt groups, numbered, scored, completed."""

from types import SimpleNamespace

import pytest
from playing import Says, driven, player, three_digits

from rlhf_core.config.sections import EvalSetOptions, RewardCallOptions
from rlhf_core.errors import RewardError, RlhfError
from rlhf_core.hooks.relay import HookRelay
from rlhf_core.rewards.scorer import RewardScorer, RewardSpec
from rlhf_core.rollout.evaluate import FIRST_SAMPLE_ID, EvaluatedSet, PolicyEvaluator
from rlhf_core.rollout.maker import GREEDY_SAMPLE_ID, PolicyExperienceMaker
from rlhf_core.rollout.player import SingleTurnPlayer
from rlhf_core.rollout.row import Row
from rlhf_core.types import Completion, SamplingParams
from rlhf_episodes import Outcome
from rlhf_testing.engine import FakeEngine
from rlhf_testing.samples import make_prompt

PROMPTS = [make_prompt(position, token_ids=[4 + position % 9, 14]) for position in (3, 0, 77)]


def length(rollouts):
    return [float(len(rollout.completion_ids)) for rollout in rollouts]


def even_only(rollouts):
    return [0.0 if rollout.sample_id % 2 == 0 else float("nan") for rollout in rollouts]


@pytest.fixture
def scorer():
    opened = []

    def make(*functions, **policy):
        specs = [
            RewardSpec(
                name=f.__name__, weight=1.0, call_options=RewardCallOptions(**policy), function=f, plugin="tests 1"
            )
            for f in functions
        ]
        opened.append(RewardScorer(specs))
        return opened[-1]

    yield make
    for each in opened:
        each.close()


@pytest.fixture
def make_maker(tokenizer, scorer):
    def make(engine=None, *, functions=(length,), samples=2, sampling=None, **options):
        policy = options.pop("policy", {})
        return PolicyExperienceMaker(
            player=SingleTurnPlayer(engine or FakeEngine(), tokenizer, sampling or SamplingParams(max_new_tokens=6)),
            samples_per_prompt=samples,
            scorer=scorer(*functions, **policy),
            hooks=options.pop("hooks", HookRelay()),
            **options,
        )

    return make


def test_every_prompt_comes_back_as_one_whole_group(make_maker):
    groups = {group.position: group for group in make_maker(samples=3).make(PROMPTS)}
    assert sorted(groups) == [0, 3, 77]
    for position, group in groups.items():
        assert [rollout.sample_id for rollout in group.rollouts] == [position * 3 + k for k in range(3)]
        assert [item.sample_id for item in group.items] == [rollout.sample_id for rollout in group.rollouts]
        assert {item.group_id for item in group.items} == {position}


def test_items_hold_what_the_engine_said(make_maker, tokenizer):
    (group,) = make_maker(samples=2, kl_coef=0.25).make(PROMPTS[:1])
    for rollout, item in zip(group.rollouts, group.items, strict=True):
        assert tuple(item.response_ids.tolist()) == rollout.completion_ids
        assert item.action_log_probs.tolist() == pytest.approx(list(rollout.logprobs))
        assert item.action_mask.all()
        assert item.truncated == (rollout.finish_reason == "length")
        assert item.rewards == {"length": len(rollout.completion_ids)}
        assert item.kl_coef == 0.25
        assert item.support_ids is None
        text = tokenizer.decode([t for t in rollout.completion_ids if t != 2])
        assert rollout.completion == text
        assert (rollout.prompt, rollout.answer) == ("31>", "13")


def test_an_answer_does_not_depend_on_its_batch(make_maker):
    together = {g.position: g.rollouts for g in make_maker().make(PROMPTS)}
    alone = {p.position: next(iter(make_maker().make([p]))).rollouts for p in PROMPTS}
    assert together == alone


def test_what_truncated_sampling_chose_from_travels_padded(make_maker):
    (group,) = make_maker(sampling=SamplingParams(max_new_tokens=6, top_k=2)).make(PROMPTS[:1])
    for item in group.items:
        assert item.support_ids.shape == (item.num_response_tokens, 2)
        assert item.support_ids[:, 0].tolist() == item.response_ids.tolist()
    from rlhf_core.rollout.samples import _support_tensor

    row = Row(text="", prompt_ids=(1,))
    made = {"sample_id": 0, "finish_reason": "stop", "policy_version": 0}
    row.sample(Completion(token_ids=(5, 6), logprobs=(0.0, 0.0), support_ids=[[5], [6, 7, 8]], **made), "")
    row.give([9], "")
    assert _support_tensor(row).tolist() == [[5, -1, -1], [6, 7, 8], [-1, -1, -1]]


def test_dropped_samples_are_left_out_and_an_empty_group_says_so(make_maker):
    maker = make_maker(functions=(length, even_only), policy={"on_failure": "drop", "retries": 0})
    groups = {group.position: group for group in maker.make(PROMPTS)}
    assert [item.sample_id for item in groups[3].items] == [6]
    assert [rollout.sample_id for rollout in groups[3].rollouts] == [6]
    assert groups[3].items[0].rewards.keys() == {"length", "even_only"}
    single = make_maker(functions=(even_only,), samples=1, policy={"on_failure": "drop", "retries": 0})
    assert [len(group.items) for group in single.make(PROMPTS[:1])] == [0]


def test_a_failing_reward_ends_the_making(make_maker):
    maker = make_maker(functions=(even_only,), policy={"retries": 0})
    with pytest.raises(RewardError, match="even_only"):
        list(maker.make(PROMPTS))


class TestAGreedyAnswer:
    """Beside each group, where an estimator compares with it."""

    def make(self, make_maker, tokenizer, engine, **options):
        greedy = SingleTurnPlayer(engine, tokenizer, SamplingParams(max_new_tokens=6, greedy=True))
        return make_maker(engine, greedy_player=greedy, **options)

    def test_is_scored_with_the_group_and_not_trained_on(self, make_maker, tokenizer):
        asked, engine = [], FakeEngine()

        def seen(rollouts):
            asked.extend(rollouts)
            return [float(len(rollout.completion_ids)) + 10 * (rollout.sample_id >= 1 << 61) for rollout in rollouts]

        maker = self.make(make_maker, tokenizer, engine, functions=(seen,))
        groups = {group.position: group for group in maker.make(PROMPTS)}
        assert [request.sample_id for request in engine.calls[0]] == [GREEDY_SAMPLE_ID + p.position for p in PROMPTS]
        plain = {group.position: group for group in make_maker(functions=(length,)).make(PROMPTS)}
        for position, group in groups.items():
            assert group.rollouts == plain[position].rollouts
            (answer,) = (r for r in asked if r.sample_id == GREEDY_SAMPLE_ID + position)
            assert answer.group_id == position
            for item in group.items:
                assert item.columns["greedy_rewards"] == {"seen": len(answer.completion_ids) + 10.0}
                assert item.rewards == {"seen": float(len(item.response_ids))}

    def test_that_is_dropped_leaves_nothing_to_compare_with(self, make_maker, tokenizer):
        def fails_at_three(rollouts):
            bad = GREEDY_SAMPLE_ID + 3
            return [float("nan") if rollout.sample_id == bad else 1.0 for rollout in rollouts]

        policy = {"on_failure": "drop", "retries": 0}
        maker = self.make(make_maker, tokenizer, FakeEngine(), functions=(fails_at_three,), policy=policy)
        assert {group.position: len(group.items) for group in maker.make(PROMPTS)} == {3: 0, 0: 2, 77: 2}


class BadEngine(FakeEngine):
    def __init__(self, change):
        super().__init__()
        self._change = change

    def generate(self, requests, sampling):
        return iter(self._change(list(super().generate(requests, sampling))))


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda answers: answers[:-1], "left 1 of 6 requests unanswered"),
        (lambda answers: [], "left 6 of 6"),
        (lambda answers: answers + answers[:1], "no longer requested"),
    ],
)
def test_an_engine_that_loses_or_doubles_answers_is_named(make_maker, change, says):
    with pytest.raises(RlhfError, match=says):
        list(make_maker(BadEngine(change)).make(PROMPTS))


def test_rewards_are_asked_while_later_answers_are_generated(make_maker):
    prompts = [make_prompt(position) for position in range(100)]
    calls = []

    def counted(rollouts):
        calls.append(len(rollouts))
        return [0.0] * len(rollouts)

    maker = make_maker(functions=(counted,), samples=2)
    assert len(list(maker.make(prompts))) == 100
    assert sum(calls) == 200
    assert len(calls) == 4


def test_times_are_taken_once(make_maker):
    maker = make_maker()
    groups = list(maker.make(PROMPTS))
    times = maker.take_times()
    assert times.response_tokens == sum(len(r.completion_ids) for g in groups for r in g.rollouts)
    assert maker.take_times().response_tokens == 0


class CountingPass:
    """A pass that counts the samples so far."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_passes_keep_state_in_checkpoints(make_maker):
    passes, later = SimpleNamespace(passes=[CountingPass(), object()]), SimpleNamespace(passes=[CountingPass()])
    passes.passes[0].count = 5
    state = make_maker(passes=passes).state_dict()
    assert state == {"CountingPass": {"count": 5}}
    make_maker(passes=later).load_state_dict(state)
    assert later.passes[0].count == 5
    assert make_maker().state_dict() == {}


def test_hooks_see_the_making(make_maker):
    seen = []

    class Hook:
        def rlhf_make_experience_start(self, num_prompts, num_samples):
            seen.append(("start", num_prompts, num_samples))

        def rlhf_make_experience_end(self, num_prompts, groups, error):
            seen.append(("end", len(groups), error))

    hooks = HookRelay()
    hooks.register(Hook())
    list(make_maker(hooks=hooks).make(PROMPTS))
    assert seen == [("start", 3, 6), ("end", 3, None)]


class Rank:
    def __init__(self, rank, world_size, others=()):
        self.rank, self.world_size, self.others = rank, world_size, others

    def all_gather_objects(self, value):
        self.mine = value
        return [value, *self.others]


class TestEvaluation:
    def evaluator(self, tokenizer, scorer, ranks, *, engine=None, functions=(length,), prompts=7, batch=3, **options):
        answering = engine or FakeEngine()
        play = options.pop("player", lambda sampling: SingleTurnPlayer(answering, tokenizer, sampling))
        held_out = EvaluatedSet(
            scorer=scorer(*functions, **options.pop("policy", {})),
            prompts=[make_prompt(100 + i) for i in range(prompts)],
            options=EvalSetOptions(**options),
        )
        sampling = SamplingParams(max_new_tokens=6, temperature=0.7, top_k=3, top_p=0.9)
        return PolicyEvaluator([held_out], player=play, sampling=sampling, batch_size=batch, place=ranks)

    def test_means_over_all_prompts_whatever_the_batch(self, tokenizer, scorer):
        found = [self.evaluator(tokenizer, scorer, Rank(0, 1), batch=b).evaluate() for b in (1, 3, 7, 50)]
        assert all(each == found[0] for each in found)
        assert found[0]["eval/num_prompts"] == 7
        assert found[0]["eval/score"] == found[0]["eval/length"] == found[0]["eval/length_mean"]

    def test_ranks_share_the_prompts_and_agree(self, tokenizer, scorer):
        alone = self.evaluator(tokenizer, scorer, Rank(0, 1)).evaluate()
        second = Rank(1, 2)
        self.evaluator(tokenizer, scorer, second).evaluate()
        together = self.evaluator(tokenizer, scorer, Rank(0, 2, [second.mine])).evaluate()
        assert together == pytest.approx(alone)

    def test_evaluation_has_noise_of_its_own(self, tokenizer, scorer):
        engine = FakeEngine()
        self.evaluator(tokenizer, scorer, Rank(0, 1), engine=engine).evaluate()
        ids = [request.sample_id for call in engine.calls for request in call]
        assert ids == [FIRST_SAMPLE_ID + i for i in range(7)]

    def test_an_episode_is_one_answer_with_all_its_branches(self, tokenizer, scorer):
        async def run(task, policy):
            first = await policy.turn(">")
            last = await policy.fork().turn(">")
            return Outcome(reward=1.0, turn_rewards={first.turn: 2.0, last.turn: 4.0}, status="truncated")

        def branches(rollouts):
            return [float(rollout.branch) for rollout in rollouts]

        episodes = player(driven(run), engine=Says(three_digits), tokenizer=tokenizer)
        evaluator = self.evaluator(tokenizer, scorer, Rank(0, 1), functions=(branches,), player=lambda _: episodes)
        found = evaluator.evaluate()
        assert (found["eval/score"], found["eval/environment"], found["eval/branches"]) == (7.0, 7.0, 1.0)
        assert (found["eval/length_mean"], found["eval/truncated_fraction"]) == (6.0, 1.0)
        assert found["eval/num_prompts"] == 7

    def test_dropped_samples_count_as_0(self, tokenizer, scorer):
        policy = {"on_failure": "drop", "retries": 0}

        def one_in_two(rollouts):
            return [1.0 if rollout.sample_id % 2 == 0 else float("nan") for rollout in rollouts]

        found = self.evaluator(tokenizer, scorer, Rank(0, 1), functions=(one_in_two,), policy=policy).evaluate()
        assert found["eval/one_in_two"] == pytest.approx(4 / 7)

    def test_the_named_reward_is_the_score(self, tokenizer, scorer):
        def tenth(rollouts):
            return [0.1] * len(rollouts)

        found = self.evaluator(tokenizer, scorer, Rank(0, 1), functions=(length, tenth), score="tenth").evaluate()
        assert found["eval/score"] == pytest.approx(0.1)
