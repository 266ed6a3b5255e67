"""`python -m rlhf_cli`, for launchers: `torchrun --nproc-per-node 2 -m rlhf_cli train RUN.yaml --output DIR`."""

from .main import main

if __name__ == "__main__":
    main()
