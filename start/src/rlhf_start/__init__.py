"""The quickstart, as one distribution with everything that the README and the first hour use."""
