"""Programs that a model wrote, run where they can do no harm."""
