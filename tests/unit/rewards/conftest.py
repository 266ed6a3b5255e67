"""Rollouts and scorers for tests of rewards."""

from reward_scores import rollouts as rollouts
from reward_scores import score as score
