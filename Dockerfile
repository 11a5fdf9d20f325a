# docker build -t vocagnolm .
# docker run --rm --gpus all -v "$PWD":/work vocagnolm demo
# docker run --rm --gpus all -v "$PWD":/work --entrypoint accelerate vocagnolm launch -m vocagnolm train ...
FROM nvidia/cuda:13.0.1-base-ubuntu24.04

# PyTorch's wheels bring CUDA's libraries; a compiler is for torch.compile.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc g++ python3-dev python3-venv \
    && rm -rf /var/lib/apt/lists/*
ENV PATH=/opt/venv/bin:$PATH
WORKDIR /source
COPY pyproject.toml setup.py constraints.txt README.md LICENSE ./
COPY vocagnolm vocagnolm
RUN python3 -m venv /opt/venv \
    && pip install --no-cache-dir --constraint constraints.txt ".[peft,wandb]"
WORKDIR /work
ENTRYPOINT ["vocagnolm"]
CMD ["--help"]
