"""ColossalChat's trainer classes: `PPOTrainer` in `trainer.py`, `DetachedPPOTrainer` in `detached.py`."""
