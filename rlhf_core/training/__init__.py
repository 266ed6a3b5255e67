"""The one training loop and the session around it."""
