# fscil for recognising and teaching on a CPU: `fscil serve` and `fscil app` (docs/deployment.md).
#
#   docker build -t fscil .
#   docker build -t fscil --build-arg TORCH_INDEX=URL .    # URL: torch's own index of CPU wheels, much smaller

FROM python:3.12-slim AS build
ARG TORCH_INDEX=""
WORKDIR /src
RUN python -m venv /opt/fscil && \
    /opt/fscil/bin/pip install --no-cache-dir ${TORCH_INDEX:+--index-url "$TORCH_INDEX"} "torch>=2.8" "torchvision>=0.23"
COPY pyproject.toml README.md LICENSE ./
COPY src ./src
RUN /opt/fscil/bin/pip install --no-cache-dir ".[serve,app]"

FROM python:3.12-slim
RUN useradd --create-home --uid 10001 fscil && mkdir /models && chown fscil /models
COPY --from=build /opt/fscil /opt/fscil
ENV PATH=/opt/fscil/bin:$PATH PYTHONUNBUFFERED=1 FSCIL_HEALTH=http://127.0.0.1:8000/health
USER 10001
WORKDIR /models
VOLUME /models
EXPOSE 8000 7860
HEALTHCHECK --interval=30s --timeout=5s --start-period=90s \
    CMD ["python", "-c", "import os, urllib.request as web; web.urlopen(os.environ['FSCIL_HEALTH'], timeout=4)"]
ENTRYPOINT ["fscil"]
CMD ["--help"]
