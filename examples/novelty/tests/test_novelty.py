"""The contracts of the algorithm, the engine and the hook, and some numbers of each part."""

from types import SimpleNamespace

import pytest
import torch
from rlhf_example_novelty import optimizer, schedule
from rlhf_example_novelty.algorithm import Novel
from rlhf_example_novelty.answer import begin
from rlhf_example_novelty.config import VARIED_PATH, NovelConfig, RestartsConfig, SignumConfig
from rlhf_example_novelty.kind import Varied
from rlhf_example_novelty.player import NewAnswers
from rlhf_example_novelty.plugin import is_varied
from rlhf_example_novelty.section import NoveltyConfig

from rlhf_core import Completion, DataError, GenerationRequest, SamplingParams
from rlhf_core.components import ScheduleContext
from rlhf_core.config import ModelConfig
from rlhf_core.models import model_kind_of
from rlhf_core.rollout import Played, Row
from rlhf_models import load_policy
from rlhf_testing.contracts import AlgorithmContract, EngineContract, HooksContract
from rlhf_testing.samples import make_prompt

WITNESS = {"path": "builtin:tiny-digits"}


class TestNovel(AlgorithmContract):
    plugin = "novel"
    options = {"witness": WITNESS, "goal": 2.0}


class TestHotStart(EngineContract):
    plugin = "hot-start"
    option_values = {"first_temperature": 3.0}


class TestNoveltyGoal(HooksContract):
    plugin = "novelty-goal"
    options = {"goal": 2.0, "patience": 1}


def test_new_tokens_weigh_more_up_to_the_goal():
    config = NovelConfig(witness=WITNESS, goal=2.0, bonus=0.5)
    algorithm = Novel(config, SimpleNamespace(sampling=SimpleNamespace(temperature=1.0)))
    assert algorithm.weights(torch.tensor([0.0, 1.0, 2.0, 9.0])).tolist() == [1.0, 1.25, 1.5, 1.5]


def test_a_step_is_the_sign_of_the_mean_gradient():
    weight = torch.nn.Parameter(torch.zeros(2))
    context = SimpleNamespace(parameters={"weight": weight}, lr=0.5)
    made = optimizer.build(SignumConfig(momentum=0.5), context)
    for gradient in ([3.0, -1.0], [-1.0, -1.0]):
        weight.grad = torch.tensor(gradient)
        made.step()
    assert weight.tolist() == [-1.0, 1.0]


def test_the_rate_restarts():
    factor = schedule.build(RestartsConfig(cycles=2), ScheduleContext(warmup_updates=0, total_updates=4))
    assert [factor(update) for update in range(4)] == pytest.approx([1.0, 0.5, 1.0, 0.5])


class Repeats:
    """Answers the draw of a sample with the next of `answers`, a token each."""

    def __init__(self, answers):
        self.answers = iter(answers)
        self.asked = []

    def play(self, samples):
        self.asked.append([sample_id for _, sample_id in samples])
        for prompt, sample_id in samples:
            row = Row(text=prompt.text, prompt_ids=prompt.prompt_ids)
            ids = (next(self.answers),)
            told = {"logprobs": (0.0,), "finish_reason": "stop", "policy_version": 0}
            row.sample(Completion(sample_id=sample_id, token_ids=ids, **told), "")
            yield Played(prompt, sample_id, (row,))


def played(player, num_samples):
    """Sample id -> its token, and the number of answers drawn for it."""
    found = player.play([(make_prompt(0), sample_id) for sample_id in range(num_samples)])
    return {each.sample_id: (each.rows[0].ids[0], int(each.rows[0].columns["draws"])) for each in found}


def player_over(answers, **options):
    default = Repeats(answers)
    return NewAnswers(NoveltyConfig(**options), SimpleNamespace(default=default)), default


def test_an_answer_that_its_prompt_had_is_drawn_again():
    player, default = player_over([5, 5, 6, 5, 6, 7, 6], tries=3)  # draws of samples 0 to 3, of 1 and 3, of 1
    assert played(player, 4) == {0: (5, 1), 2: (6, 1), 3: (7, 2), 1: (6, 3)}, "the last draw is taken as it is"
    assert [len(asked) for asked in default.asked] == [4, 2, 1]


def test_the_player_keeps_what_it_knows():
    player, _ = player_over([5, 6])
    played(player, 2)
    other, default = player_over([5, 7])
    other.load_state_dict(player.state_dict())
    assert played(other, 1) == {0: (7, 2)}
    assert default.asked == [[0], [1 << 40]], "further draws have sample ids of their own, so other noise"


def test_the_player_forgets_the_oldest():
    player, _ = player_over([5, 6, 5], memory=1)
    assert played(player, 3) == {0: (5, 1), 1: (6, 1), 2: (5, 1)}


def test_the_first_token_has_the_temperature_of_the_request():
    request = GenerationRequest(sample_id=0, prompt_ids=(5, 6), options={"first_temperature": 2.5})
    answer = begin(request, SamplingParams(temperature=0.5, max_new_tokens=3), 16)
    seen = []
    for token in (7, 8, 2):
        seen.append(answer.temperature)
        answer.extend(token, -1.0, [], frozenset({2}), None)
    assert seen == list(answer.completion(0).columns["temperature"]) == [2.5, 0.5, 0.5]
    assert answer.finish == "stop"
    assert begin(request, SamplingParams(greedy=True), 16).completion(0).columns == {}


@pytest.mark.parametrize("value", [0, -1.0, "hot", True, float("inf")])
def test_a_wrong_temperature_names_the_sample(value):
    request = GenerationRequest(sample_id=3, prompt_ids=(5,), options={"first_temperature": value})
    with pytest.raises(DataError, match="sample 3: first_temperature"):
        begin(request, SamplingParams(), 16)


def test_a_prompt_without_room_for_an_answer_names_the_sample():
    with pytest.raises(DataError, match="sample 3: a prompt of 4 tokens"):
        begin(GenerationRequest(sample_id=3, prompt_ids=(5,) * 4), SamplingParams(), 4)


def test_the_kind_claims_its_path_and_what_it_saved():
    assert is_varied(VARIED_PATH, {}) and is_varied("runs/a/model", {"model_type": "rlhf-example-varied"})
    assert not is_varied("builtin:tiny-digits", {}) and not is_varied("llama", {"model_type": "llama"})


def test_the_model_sees_the_variety_of_its_prompt():
    model = load_policy(ModelConfig(path=VARIED_PATH), dtype=torch.float32, seed=0)
    assert isinstance(model_kind_of(model), Varied)
    ids, columns = model_kind_of(model).encode({}, [5, 5, 6, 14])
    assert (ids, columns) == ([5, 5, 6, 14], {"variety": 0.75})
    sequence = torch.tensor([[5, 6, 14]])
    few, many = (model(sequence, variety=torch.tensor([share])).logits for share in (0.5, 1.0))
    assert not torch.equal(few, many)
