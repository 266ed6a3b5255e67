"""Names, among `EpisodeView.rewards`, of what an algorithm takes off the scores."""

LENGTH_PENALTY = "length penalty"
"""Name among `EpisodeView.rewards` of what an algorithm takes off the scores of long answers."""
KL_PENALTY = "kl penalty"
"""Name among `EpisodeView.rewards` of a KL that is penalised in the reward."""
