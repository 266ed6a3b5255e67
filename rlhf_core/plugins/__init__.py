"""Finding plugins by metadata, importing the selected one, and plain functions as plugins."""
