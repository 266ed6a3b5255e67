"""New answers: an example of every kind of part that a plugin can provide."""
