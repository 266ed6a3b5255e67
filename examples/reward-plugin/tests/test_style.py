"""The contract of rewards, and a few scores."""

from rlhf_example_style.config import KeywordCoverageConfig
from rlhf_example_style.keyword_coverage import KeywordCoverage
from rlhf_example_style.no_filler import no_filler

from rlhf_testing.contracts import RewardContract
from rlhf_testing.rollouts import make_rollout


class TestNoFiller(RewardContract):
    plugin = "no-filler"


class TestKeywordCoverage(RewardContract):
    plugin = "keyword-coverage"
    options = {"case_sensitive": True}


def test_filler_costs():
    answers = ["It is 4.", "Basically, it is 4.", "actually " * 9]
    assert no_filler([make_rollout(answer) for answer in answers]) == [0.0, -0.25, -1.0]


def test_words_are_counted():
    asked = {"keywords": ["Paris", "France"]}
    answers = [make_rollout("paris!", metadata=asked), make_rollout("Rome", metadata=asked), make_rollout("Paris")]
    assert KeywordCoverage(KeywordCoverageConfig())(answers) == [0.5, 0.0, 0.0]
    assert KeywordCoverage(KeywordCoverageConfig(case_sensitive=True))(answers) == [0.0, 0.0, 0.0]
