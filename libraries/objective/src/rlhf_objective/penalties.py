"""Names, in `EpisodeView.rewards`, of penalties that an algorithm adds to the scores."""

LENGTH_PENALTY = "length penalty"
"""Name in `EpisodeView.rewards` of the penalty of long answers."""
KL_PENALTY = "kl penalty"
"""Name in `EpisodeView.rewards` of the KL penalty."""
