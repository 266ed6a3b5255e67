"""Commands that control a run in progress."""
