# The nightly's runner (docs/nightly.md): GitHub's runner, CUDA's compilers, and the wheels that `make` would install.
# No secret is in it: the token that registers a runner is given to `docker run`, and is good for an hour.

# The latest, since GitHub gives no work to a runner that is a month old; one that runs updates itself.
# hadolint ignore=DL3007
FROM ghcr.io/actions/actions-runner:latest AS actions

FROM nvidia/cuda:13.0.2-devel-ubuntu24.04
COPY --from=actions --chown=1001:1001 /home/runner /home/runner
# hadolint ignore=DL3008
RUN apt-get update \
 && apt-get install -y --no-install-recommends build-essential ca-certificates curl git make python3-dev python3-venv zstd \
 && /home/runner/bin/installdependencies.sh \
 && rm -rf /var/lib/apt/lists/* \
 && useradd --uid 1001 --home-dir /home/runner --shell /bin/bash runner \
 && install -d -o 1001 -g 1001 /home/runner /home/runner/.cache /opt/unfix

USER 1001
WORKDIR /home/runner
# Where the workflows' `make` finds its environment; and all that is compiled or fetched at night is in one volume.
ENV HOME=/home/runner RUNNER_MANUALLY_TRAP_SIG=1 VENV=/opt/unfix TRITON_CACHE_DIR=/home/runner/.cache/triton
COPY pyproject.toml /tmp/
RUN python3 -m venv "$VENV" \
 && python3 -c 'import tomllib; project = tomllib.load(open("/tmp/pyproject.toml", "rb"))["project"]; more = project["optional-dependencies"]; print(*project["dependencies"], *more["dev"], *more["gpu"], sep="\n")' > /tmp/wheels.txt \
 && "$VENV/bin/pip" install --no-cache-dir -r /tmp/wheels.txt
VOLUME /home/runner/.cache

CMD ["bash", "-c", "{ test -e .runner || ./config.sh --unattended --labels gpu --url \"$URL\" --token \"$TOKEN\"; } && exec env -u TOKEN ./run.sh"]
