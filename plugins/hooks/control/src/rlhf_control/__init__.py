"""Commands to a run that is going on."""
