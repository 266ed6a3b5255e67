"""The half of isolated environments that runs in their process; it loads neither torch nor transformers."""
