"""Everything that the README and the first hour use, in one installation."""
