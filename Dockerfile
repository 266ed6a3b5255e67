# Targets: `cpu` and `cuda` hold the command and everything the first hour uses; `dev` is for work on this repository.
#
#   docker build --target cpu  -t rlhf:cpu  --build-arg TORCH_INDEX_URL=<index of PyTorch's CPU builds> .
#   docker build --target cuda -t rlhf:cuda .
#   docker run --rm -v "$PWD/runs:/work/runs" rlhf:cpu train
#
# A run in the container writes to /work as the user `rlhf` (uid 1000).

ARG PYTHON=3.11
ARG CUDA_IMAGE=nvidia/cuda:12.8.1-runtime-ubuntu24.04

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 rlhf && mkdir /work && chown rlhf /work

# Wheels of every distribution, from the sources.
FROM base AS wheels
COPY . /src
WORKDIR /src
RUN pip install --no-deps --require-hashes -r requirements/start.txt && python release/build.py /wheels

FROM base AS cpu
ARG TORCH_INDEX_URL=""
COPY requirements/start.txt /tmp/start.txt
RUN pip install --no-deps --require-hashes -r /tmp/start.txt
RUN pip install ${TORCH_INDEX_URL:+--index-url "$TORCH_INDEX_URL"} torch==2.13.0
COPY --from=wheels /wheels /wheels
RUN pip install --find-links /wheels rlhf-start
USER rlhf
WORKDIR /work
ENTRYPOINT ["rlhf"]
CMD ["--help"]

FROM ${CUDA_IMAGE} AS cuda
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/rlhf/bin:$PATH
RUN apt-get update \
  && apt-get install -y --no-install-recommends python3 python3-venv \
  && rm -rf /var/lib/apt/lists/* \
  && userdel --remove ubuntu \
  && useradd --create-home --uid 1000 rlhf && mkdir /work && chown rlhf /work \
  && python3 -m venv /opt/rlhf
COPY requirements/start.txt /tmp/start.txt
RUN pip install --no-deps --require-hashes -r /tmp/start.txt && pip install torch==2.13.0
COPY --from=wheels /wheels /wheels
RUN pip install --find-links /wheels rlhf-start
USER rlhf
WORKDIR /work
ENTRYPOINT ["rlhf"]
CMD ["--help"]

FROM base AS dev
RUN apt-get update \
  && apt-get install -y --no-install-recommends git make gcc libc6-dev \
  && rm -rf /var/lib/apt/lists/*
USER rlhf
WORKDIR /work
