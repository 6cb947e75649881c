# vit with its exports and its server, on a CPU, as a user who isn't root:
#   docker build -t vit .
#   docker run --rm --shm-size=8g -v "$PWD:/work" --user "$(id -u)" vit train digits --output runs/digits
#   docker run --rm -p 8000:8000 vit serve imagenette --host 0.0.0.0
FROM python:3.12-slim AS build
# of uv's --torch-backend: cpu, or cu130, auto, … for GPUs
ARG TORCH_BACKEND=cpu
WORKDIR /source
COPY . .
RUN pip install --no-cache-dir --constraint constraints.txt uv \
    && uv build --no-cache --wheel --out-dir /wheels \
    && uv venv --no-cache /opt/vit \
    && uv pip install --no-cache --python /opt/vit --torch-backend "$TORCH_BACKEND" \
        --constraint constraints.txt "$(echo /wheels/*.whl)[export,serve]"

FROM python:3.12-slim
COPY --from=build /opt/vit /opt/vit
# a user's own id (--user) has no home: the cache lies where everyone may write
RUN useradd --create-home --uid 1000 vit && mkdir --mode=1777 /work /cache
ENV PATH=/opt/vit/bin:$PATH VIT_CACHE=/cache HOME=/cache
USER 1000
WORKDIR /work
EXPOSE 8000
# asks `vit serve`, on its default port; other commands have nothing to ask
HEALTHCHECK --start-period=60s \
    CMD ! grep --quiet --null-data --line-regexp serve /proc/1/cmdline \
        || python -c "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=5); c.request('GET', '/health'); exit(c.getresponse().status != 200)"
ENTRYPOINT ["vit"]
CMD ["--help"]
