# Targets: `cpu` and `cuda` hold the command and everything the first hour uses; `dev` is for work on this repository.
#
#   docker build --target cpu  -t rlhf:cpu  --build-arg TORCH_INDEX=<index of PyTorch's CPU builds> .
#   docker build --target cuda -t rlhf:cuda .
#   docker run --rm -v "$PWD:/data" rlhf:cpu train
#
# The command runs as the user `rlhf` (uid 1000) in the folder `/data`.

ARG PYTHON=3.11
ARG TORCH=torch==2.13.0
ARG CUDA_IMAGE=nvidia/cuda:12.8.1-runtime-ubuntu24.04

FROM python:${PYTHON}-slim AS base
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1
RUN useradd --create-home --uid 1000 rlhf && mkdir /data && chown rlhf /data

# Wheels of every distribution, from the sources.
FROM base AS wheels
COPY . /src
WORKDIR /src
RUN pip install --no-deps --require-hashes -r requirements/start.txt && python release/build.py /wheels

FROM base AS cpu
ARG TORCH
ARG TORCH_INDEX=""
COPY --from=wheels /wheels /wheels
COPY requirements/start.txt /wheels/start.txt
RUN PIP_INDEX_URL="$TORCH_INDEX" pip install "$TORCH"
RUN pip install --no-deps --require-hashes -r /wheels/start.txt && pip install --no-deps /wheels/*.whl
USER rlhf
WORKDIR /data
ENTRYPOINT ["rlhf"]
CMD ["--help"]

FROM ${CUDA_IMAGE} AS cuda
ARG TORCH
ENV PIP_NO_CACHE_DIR=1 PIP_DISABLE_PIP_VERSION_CHECK=1 PATH=/opt/rlhf/bin:$PATH
RUN apt-get update \
  && apt-get install -y --no-install-recommends python3 python3-venv \
  && rm -rf /var/lib/apt/lists/* \
  && userdel --remove ubuntu \
  && useradd --create-home --uid 1000 rlhf && mkdir /data && chown rlhf /data \
  && python3 -m venv /opt/rlhf
COPY --from=wheels /wheels /wheels
COPY requirements/start.txt /wheels/start.txt
RUN pip install "$TORCH"
RUN pip install --no-deps --require-hashes -r /wheels/start.txt && pip install --no-deps /wheels/*.whl
USER rlhf
WORKDIR /data
ENTRYPOINT ["rlhf"]
CMD ["--help"]

FROM base AS dev
RUN apt-get update \
  && apt-get install -y --no-install-recommends git make gcc libc6-dev \
  && rm -rf /var/lib/apt/lists/*
USER rlhf
WORKDIR /data
