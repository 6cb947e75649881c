# vit on a CPU, as a user who isn't root:
#   docker build -t vit .
#   docker run --rm --shm-size=8g -v "$PWD:/work" --user "$(id -u)" vit train digits --output runs/digits
FROM python:3.12-slim

# pip's address of CPU wheels, as pytorch.org shows it; empty for the larger torch with CUDA
ARG PYTORCH_CPU_WHEELS=""

COPY . /source
# torch first, where it has an address of its own
RUN if [ -n "$PYTORCH_CPU_WHEELS" ]; then \
        pip install --no-cache-dir torch torchvision --index-url "$PYTORCH_CPU_WHEELS"; \
    fi \
    && pip install --no-cache-dir /source \
    && rm -r /source

# a user's own id (--user) has no home: the cache lies where everyone may write
RUN useradd --create-home vit && mkdir --mode=1777 /work /cache
ENV VIT_CACHE=/cache HOME=/cache
USER vit
WORKDIR /work
ENTRYPOINT ["vit"]
CMD ["--help"]
