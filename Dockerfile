# The image of the recipes, for machines with GPUs and without:
#   docker build -t accelerate-recipes:0.1.0 .
# torch is the one of uv.lock, which brings its own CUDA libraries: the machine needs only NVIDIA's driver and container
# toolkit. An image of PyTorch or CUDA as base would add a second copy of them, in other versions.
FROM python:3.12-slim-bookworm

# --torch_compile compiles C++.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends g++ && rm -rf /var/lib/apt/lists/*

# Packages first: a change of the code then builds only the last layers.
WORKDIR /recipes
COPY pyproject.toml uv.lock ./
RUN pip install --no-cache-dir uv==0.13.9 && uv sync --frozen --no-cache --extra s3 --no-install-project
COPY README.md LICENSE ./
COPY shared shared
RUN uv sync --frozen --no-cache --extra s3
ENV PATH=/recipes/.venv/bin:$PATH
COPY accelerate_configs accelerate_configs
COPY recipes recipes

# Do not run as root. Another volume than out/ must be writable for this user; in a Job, set fsGroup.
RUN useradd --create-home --uid 1000 trainer && mkdir out && chown 1000 . out
USER 1000
CMD ["python", "-m", "shared.preflight"]
