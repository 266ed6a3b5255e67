"""With the library itself: problems, their own answers, and answers that are hostile."""

from types import SimpleNamespace

import pytest

from rlhf_containment.sandbox import missing
from rlhf_core.components import TaskContext
from rlhf_reasoning_gym.config import ReasoningGymPrompts
from rlhf_reasoning_gym.library import make_dataset, runs_answers, score
from rlhf_reasoning_gym.prompts import build
from rlhf_reasoning_gym.reward import ReasoningGym
from rlhf_testing.contracts import PromptsContract

pytest.importorskip("reasoning_gym", reason="needs Reasoning Gym: make setup-extras")

pytestmark = [
    pytest.mark.slow,
    # The library leaves files of its own open.
    pytest.mark.filterwarnings("ignore::ResourceWarning", "ignore::pytest.PytestUnraisableExceptionWarning"),
]
in_the_sandbox = pytest.mark.skipif(missing() is not None, reason=f"{missing()}")

TASKS = (
    "arc_1d", "basic_arithmetic", "chain_sum", "knights_knaves", "letter_counting", "polynomial_multiplication",
    "rearc", "simple_equations", "spiral_matrix", "syllogism", "word_ladder",
)  # fmt: skip
EVALUATED = {
    "basic_arithmetic", "bf", "binary_matrix", "bitwise_arithmetic", "codeio", "countdown", "intermediate_integration",
    "n_queens", "number_sorting", "polynomial_multiplication", "propositional_logic", "puzzle24", "rubiks_cube",
    "simple_integration", "spiral_matrix", "string_insertion",
}  # fmt: skip


class TestReasoningGymPrompts(PromptsContract):
    plugin = "reasoning-gym"
    options = {"task": "word_ladder", "size": 4}


def problems(task, size=3, **options):
    context = TaskContext(seed=0, base_folder=None)
    found = build(ReasoningGymPrompts(task=task, size=size, task_options=options), context)
    return [found[index] for index in range(size)]


def rewarded(pairs, seconds=5.0):
    reward = ReasoningGym(answer_tag=None, seconds_per_answer=seconds, sandbox="namespaces")
    rollouts = [
        SimpleNamespace(sample_id=i, completion=answer, metadata={"reasoning_gym": record["reasoning_gym"]})
        for i, (record, answer) in enumerate(pairs)
    ]
    return reward(rollouts)


@in_the_sandbox
def test_the_own_answer_of_every_problem_scores_1():
    records = [record for task in TASKS for record in problems(task)]
    assert rewarded([(record, record["answer"]) for record in records]) == [1.0] * len(records)
    wrong = rewarded([(record, "no answer at all") for record in records])
    assert max(wrong) < 0.1


def test_which_verifiers_run_the_answer():
    from reasoning_gym.factory import DATASETS

    assert {task for task in DATASETS if task != "composite" and runs_answers(task, {})} == EVALUATED
    assert runs_answers("composite", {"datasets": [{"name": "chain_sum"}, {"name": "countdown"}]})


@in_the_sandbox
def test_a_mixture_of_tasks():
    records = problems("composite", datasets=[{"name": "chain_sum"}, {"name": "spiral_matrix"}])
    assert rewarded([(record, record["answer"]) for record in records]) == [1.0] * 3


def test_no_other_verifier_runs_the_answer(tmp_path):
    """Of every task: what a model wrote leaves nothing behind where it is not shut in."""
    from reasoning_gym.factory import DATASETS

    written = tmp_path / "intruder"
    attack = f"open({str(written)!r}, 'w')"
    slow = {"futoshiki", "intermediate_integration", "knight_swap", "zebra_puzzles"}
    for task in sorted(set(DATASETS) - EVALUATED - slow - {"composite"}):
        dataset = make_dataset(task, {})
        for answer in (attack, f"[{attack}]", f'{{"a": {attack}}}', f"({attack})"):
            score(dataset, task, dataset[0], answer)
        assert not written.exists(), task


@in_the_sandbox
def test_hostile_answers_score_nothing_and_hang_nothing(tmp_path):
    written = tmp_path / "intruder"
    (record,) = problems("spiral_matrix", size=1)
    hostile = [
        f"[open({str(written)!r}, 'w')]",
        "[9 ** 9 ** 9 ** 9]",
        "[print('[1.0, 1.0, 1.0, 1.0, 1.0]')]",
        "[x for x in iter(int, 1)]",
        "__import__('os').kill(1, 9)",
    ]
    answers = [*hostile, record["answer"]]
    assert rewarded([(record, answer) for answer in answers], seconds=1.0) == [0.0] * len(hostile) + [1.0]
    assert not written.exists()
