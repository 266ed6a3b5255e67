"""Training as a service: a server for the tinker SDK, with the strategies, engines and losses of this framework."""
