"""One question to the management API, taken apart, and its answer before it is sent."""

import json
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import TypeVar
from urllib.parse import parse_qs

from proxy.errors import Forbidden, InvalidJSON, InvalidRequest, NotFound
from proxy.intake import Receive, read_body
from proxy.routes.respond import JSON, Headers
from proxy.runtime import Runtime
from proxy.store import Store
from proxy.store.records import ConversationRow

MOST_ROWS = 500
MOST_DIGITS = 15
DIGITS_OF_A_VERSION = 9
MOST_PARAMETERS = 20
LARGEST_BODY = 64 * 1024
LONGEST_NAME = 256
MOST_NAMES = 100_000
NAMES_SHOWN = 5
AGO = re.compile(r"([0-9]{1,6})([smhd])")
MOMENT = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?")
SECONDS: Mapping[str, int] = MappingProxyType({"s": 1, "m": 60, "h": 3_600, "d": 86_400})

Word = TypeVar("Word", bound=str)


@dataclass(frozen=True, slots=True)
class Answer:
    """What goes back to the caller."""

    body: bytes
    status: int = 200
    kind: bytes = JSON
    headers: Headers = ()


def as_json(value: object, *, status: int = 200) -> Answer:
    """A value as JSON; what is no Unicode (half of a surrogate pair) is escaped."""
    try:
        body = json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        body = json.dumps(value).encode()
    return Answer(body, status)


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """One request to the management API.

    Attributes:
        tenant: whose key asked, None for the operator with the admin token.
        path: the parts of the path that the route names.
        query: the parameters behind the question mark.
        rows: how many rows the route gives where no limit is asked for, ``most`` how many at most.
        receive: where the body is read from.
    """

    runtime: Runtime
    tenant: str | None
    path: Mapping[str, str]
    query: Mapping[str, str]
    receive: Receive
    rows: int = MOST_ROWS
    most: int = MOST_ROWS

    @property
    def store(self) -> Store:
        """The store."""
        return self.runtime.store

    def own(self, what: str) -> str:
        """The tenant that asks. Raises Forbidden for the operator, who may not read ``what``."""
        if self.tenant is None:
            raise Forbidden(f"{what} with the key of the caller that sent them.")
        return self.tenant

    def limit(self) -> int:
        """How many rows are asked for, at most ``most``. Raises InvalidRequest for what is no number from 1 on."""
        return limit_in(self.query.get("limit", str(self.rows)), most=self.most)

    def word(self, name: str, known: tuple[Word, ...]) -> Word | None:
        """One of the words of a parameter, None where it is not given. Raises InvalidRequest for other words."""
        given = self.query.get(name)
        for word in known:
            if word == given:
                return word
        if given is not None:
            raise InvalidRequest(f"{name} must be one of {', '.join(known)}.", param=name)
        return None

    def since(self) -> float | None:
        """The moment ``since``, None where it is not given. Raises InvalidRequest for what is none."""
        given = self.query.get("since")
        return None if given is None else moment_in(given, now=self.runtime.planner.clock())

    def flag(self, name: str) -> bool | None:
        """Whether ``true`` or ``false`` is asked for, None where neither is. Raises InvalidRequest for other words."""
        given = self.query.get(name)
        if given is not None and given not in {"true", "false"}:
            raise InvalidRequest(f"{name} must be true or false.", param=name)
        return None if given is None else given == "true"

    def version(self) -> int:
        """The version in the path. Raises InvalidRequest for what is no number."""
        given = self.path["version"]
        if not (given.isascii() and given.isdigit() and len(given) <= DIGITS_OF_A_VERSION):
            raise InvalidRequest("version must be a number.", param="version")
        return int(given)

    async def conversation(self) -> ConversationRow:
        """The conversation in the path, by its name or id; NotFound for one that is not the caller's."""
        return await self.conversation_named(self.path["id"])

    async def conversation_named(self, name: str) -> ConversationRow:
        """The caller's conversation with this name or id; for the operator the one used last. Raises NotFound."""
        row = None
        if len(name) <= LONGEST_NAME and name.isprintable():
            row = await self.store.conversation(self.tenant, name)
        if row is None:
            raise NotFound(f"There is no conversation {name[:80]!r}.")
        return row

    async def only_conversation(self) -> ConversationRow:
        """The conversation in the path, to be changed. Raises InvalidRequest where several callers use the name."""
        row = await self.conversation()
        if self.tenant is not None:
            return row
        name = self.path["id"]
        rows = await self.store.conversations(None, limit=MOST_NAMES)
        ids = sorted(each.id for each in rows if name in (each.name, each.id))
        if len(ids) > 1:
            text = f"{len(ids)} conversations of different keys are called {name[:80]!r}: name one by its id."
            raise InvalidRequest(text, param="id", weir={"ids": ids[:NAMES_SHOWN]})
        return row

    async def fields(self, known: Collection[str]) -> dict[str, object]:
        """The fields of the body, an empty body having none.

        Raises InvalidJSON for what is no JSON, InvalidRequest for what is no object or has other fields than ``known``,
        RequestTooLarge above 64 KiB.
        """
        body = await read_body(self.receive, limit=LARGEST_BODY)
        try:
            value = json.loads(body) if body.strip() else {}
        except (ValueError, RecursionError):
            raise InvalidJSON("The body is not JSON.") from None
        if not isinstance(value, dict):
            raise InvalidRequest("The body must be a JSON object.", param="body")
        for name in value:
            if name not in known:
                there = f"there are {', '.join(known)}" if known else "the body has none here"
                raise InvalidRequest(f"There is no field {name[:40]!r}: {there}.", param=name[:40])
        return value


def query_of(raw: bytes, known: Collection[str]) -> dict[str, str]:
    """The parameters of a query string. Raises InvalidRequest for one that is not ``known`` or comes twice."""
    try:
        given = parse_qs(raw.decode("utf-8", "replace"), keep_blank_values=True, max_num_fields=MOST_PARAMETERS)
    except ValueError:
        raise InvalidRequest(f"There are more than {MOST_PARAMETERS} parameters.") from None
    for name, values in given.items():
        if name not in known:
            there = f"there are {', '.join(known)}" if known else "there are none here"
            raise InvalidRequest(f"There is no parameter {name[:40]!r}: {there}.", param=name[:40])
        if len(values) > 1:
            raise InvalidRequest(f"{name} is given {len(values)} times.", param=name)
    return {name: values[0] for name, values in given.items()}


def moment_in(given: str, *, now: float) -> float:
    """Seconds since 1970, given so, or as how long before ``now`` (``90m``, ``24h``, ``7d``). Raises InvalidRequest."""
    if (ago := AGO.fullmatch(given)) is not None:
        return now - int(ago[1]) * SECONDS[ago[2]]
    if MOMENT.fullmatch(given) is None:
        raise InvalidRequest("since must be seconds since 1970, or like 90m, 24h or 7d.", param="since")
    return float(given)


def limit_in(given: str, *, most: int = MOST_ROWS) -> int:
    """A number of rows, at most ``most``. Raises InvalidRequest for what is no number from 1 on."""
    if not given.isascii() or not given.isdigit() or int(given[:MOST_DIGITS]) < 1:
        raise InvalidRequest("limit must be a number from 1 on.", param="limit")
    return min(most, int(given[:MOST_DIGITS]))
