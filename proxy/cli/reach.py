"""One GET at a time, for commands that ask a Weir or an upstream something, with the standard library alone."""

import http.client
import json
import socket
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

MAX_BODY = 8 << 20
SECONDS = 5.0
HEALTH_SECONDS = 2.0


class Unreached(Exception): ...


@dataclass(frozen=True, slots=True)
class Reached:
    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        try:
            return json.loads(self.body)
        except ValueError:
            return None


def get(url: str, headers: Mapping[str, str] = {}, *, body: bytes | None = None, seconds: float = SECONDS) -> Reached:
    """What is answered to a GET, or with a body to a POST; no proxy is used, no redirect followed. Raises Unreached."""
    parts = urlsplit(url)
    kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
    path = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    with closing(kind(parts.hostname or "", parts.port, timeout=seconds)) as connection:
        try:
            connection.request("GET" if body is None else "POST", path, body, dict(headers))
            answer = connection.getresponse()
            said = {name.lower(): value for name, value in answer.getheaders()}
            return Reached(answer.status, said, answer.read(MAX_BODY))
        except TimeoutError:
            raise Unreached(f"no answer within {seconds:g} s") from None
        except socket.gaierror:
            raise Unreached(f"the name {parts.hostname} is not known") from None
        except (OSError, http.client.HTTPException, ValueError) as fault:
            raise Unreached(str(getattr(fault, "strerror", None) or fault or type(fault).__name__)) from None


def bearer(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {key}"} if key else {}


def is_weir(root: str) -> bool | None:
    """Whether a Weir answers at ``http://host:port``, None where nobody does."""
    try:
        answer = get(f"{root}/healthz", seconds=HEALTH_SECONDS)
    except Unreached:
        return None
    return answer.status == 200 and answer.json() == {"status": "ok"}
