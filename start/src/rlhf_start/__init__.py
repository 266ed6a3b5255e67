"""The quickstart, in one installation with everything that the README and the first hour use."""
