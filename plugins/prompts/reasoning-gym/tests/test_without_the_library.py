"""Prompts and reward over a small library of the same form; selecting them where the real one is missing."""

from importlib.util import find_spec
from types import SimpleNamespace

import pytest
from pydantic import ValidationError

from rlhf_core.components import TaskContext
from rlhf_core.errors import ConfigError, PluginError
from rlhf_core.plugins import load
from rlhf_reasoning_gym.config import ReasoningGymPrompts, ReasoningGymReward
from rlhf_reasoning_gym.library import _runs_text
from rlhf_reasoning_gym.prompts import build
from rlhf_reasoning_gym.reward import ReasoningGym
from rlhf_testing.episodes import episode_tokenizer, prompt_stream


def source(tmp_path, *, has_chat_template=False, task="sum", **options):
    context = TaskContext(seed=0, base_folder=tmp_path, has_chat_template=has_chat_template)
    return build(ReasoningGymPrompts(task=task, **options), context)


def score(completion, record, **options):
    reward = ReasoningGym(answer_tag=options.get("answer_tag"), seconds_per_answer=1.0, sandbox="namespaces")
    metadata = {key: value for key, value in record.items() if key not in ("prompt", "answer")}
    return reward([SimpleNamespace(sample_id=7, completion=completion, metadata=metadata)])[0]


def test_problems_and_their_verifier(fake_library, tmp_path):
    problems = source(tmp_path, size=5, seed=3, task_options={"most": 4})
    assert len(problems) == 5
    for index in range(5):
        record = problems[index]
        assert record["prompt"] == record["reasoning_gym"]["entry"]["question"]
        assert score(f" {record['answer']}\n", record) == 1.0
        assert score("99", record) == 0.0
        assert score("not even a number", record) == 0.0
    again = source(tmp_path, size=5, seed=3, task_options={"most": 4})
    assert [again[index] for index in range(5)] == [problems[index] for index in range(5)]
    assert source(tmp_path, size=5, seed=4)[0] != problems[0]


def test_problems_that_repeat_an_earlier_one_are_left_out_where_wanted(fake_library, tmp_path):
    every = source(tmp_path, size=30, task_options={"most": 1})
    stream = prompt_stream(every, episode_tokenizer(chat=False), skip_duplicates=True)
    asked = {every[index]["prompt"] for index in range(30)}
    assert 1 < len(stream) == len(asked) < len(every)
    assert {stream.prompt(position).text for position in range(len(stream))} == asked


def test_a_run_that_began_with_unique_has_the_same_problems(fake_library, tmp_path):
    every = source(tmp_path, size=30, task_options={"most": 1})
    unique = source(tmp_path, size=30, task_options={"most": 1}, unique=True)
    asked = [every[index]["prompt"] for index in range(30)]
    assert [unique[index]["prompt"] for index in range(len(unique))] == list(dict.fromkeys(asked))
    assert 1 < len(unique) < len(every)


def test_the_answer_in_a_tag(fake_library, tmp_path):
    record = source(tmp_path, size=1)[0]
    right = record["answer"]
    assert score(f"<answer>99</answer> no, <answer> {right} </answer>.", record, answer_tag="answer") == 1.0
    assert score(right, record, answer_tag="answer") == 0.0
    assert score(f"<answer>{right}", record, answer_tag="answer") == 0.0


def test_chat_messages_where_the_model_has_a_template(fake_library, tmp_path):
    text = source(tmp_path, size=1)[0]["prompt"]
    messages = [{"role": "user", "content": text}]
    assert source(tmp_path, size=1, has_chat_template=True)[0]["prompt"] == messages
    assert source(tmp_path, size=1, chat=True)[0]["prompt"] == messages
    assert source(tmp_path, size=1, chat=False, has_chat_template=True)[0]["prompt"] == text


def test_an_unknown_task_is_told_with_the_known_ones(fake_library, tmp_path):
    with pytest.raises(ConfigError, match=r'task "sums" does not exist; did you mean "sum"\?') as raised:
        source(tmp_path, task="sums")
    assert raised.value.hint == "tasks: sum, sum_more"


@pytest.mark.parametrize(("options", "said"), [({"most": 0}, "most must be positive"), ({"least": 1}, "least")])
def test_options_that_the_task_refuses(fake_library, tmp_path, options, said):
    with pytest.raises(ConfigError, match=f"sum rejects its options: .*{said}"):
        source(tmp_path, task_options=options)


def test_a_task_that_breaks_off_is_told(fake_library, tmp_path):
    with pytest.raises(PluginError, match="the generator of sum ended after 0 of 3 problems"):
        source(tmp_path, size=3, task_options={"most": 13})


def test_a_sample_of_other_prompts_is_named():
    with pytest.raises(ValueError, match="sample 7 is not from reasoning-gym"):
        score("1", {})


@pytest.mark.parametrize(
    ("source_text", "runs"),
    [("eval(answer)", True), ("sympy.parse_expr(x)", True), ("parse_expr(x)", True), ("re.search('eval', x)", False)],
)
def test_verifiers_that_run_the_answer_are_known_by_their_calls(source_text, runs):
    assert _runs_text(f"def score_answer(self, answer):\n    return {source_text}") is runs


@pytest.mark.parametrize("options", [{}, {"task": ""}, {"task": "a", "size": 0}, {"task": "a", "chat": "auto"}])
def test_options_of_the_prompts_that_are_refused(options):
    with pytest.raises(ValidationError):
        ReasoningGymPrompts(**options)


@pytest.mark.parametrize("options", [{"answer_tag": "a b"}, {"sandbox": "none"}, {"seconds_per_answer": 0}])
def test_options_of_the_reward_that_are_refused(options):
    with pytest.raises(ValidationError):
        ReasoningGymReward(**options)


@pytest.mark.skipif(find_spec("reasoning_gym") is not None, reason="the library is installed here")
@pytest.mark.parametrize("kind", ["prompts", "rewards"])
def test_without_the_library_it_says_what_to_install(kind):
    with pytest.raises(PluginError) as raised:
        load(kind, "reasoning-gym")
    assert raised.value.hint == "pip install 'rlhf-reasoning-gym[reasoning-gym]'"
