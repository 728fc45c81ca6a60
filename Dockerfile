FROM python:3.11-slim

# The lock names every file by its hash; nothing is compiled, nothing is resolved anew.
WORKDIR /app
COPY requirements.lock ./
RUN pip install --no-cache-dir --require-hashes --only-binary :all: --no-deps -r requirements.lock

COPY pyproject.toml README.md LICENSE ./
COPY policies policies
COPY proxy proxy
COPY config config
RUN pip install --no-cache-dir --no-deps --no-build-isolation . \
    && useradd --create-home weir && mkdir /data && chown weir /data

USER weir
ENV WEIR_STORE=sqlite+aiosqlite:////data/weir.db
VOLUME /data
EXPOSE 8400
HEALTHCHECK CMD ["python", "-c", "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8400/healthz')"]

# Nobody may call before there is a key: docker exec CONTAINER weir keys create --name me, or WEIR_KEYS=name=secret.
ENTRYPOINT ["weir"]
CMD ["serve", "--host", "0.0.0.0"]
