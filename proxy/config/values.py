"""What a configuration consists of: frozen values, closed and checked one by one, secrets never
shown.
"""

import dataclasses
import datetime as dt
import ipaddress
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, Literal
from urllib.parse import parse_qsl, unquote, urlsplit, urlunsplit

from pydantic import AfterValidator, BeforeValidator, Field, PlainSerializer, SecretStr

from policies.settings import ContextSettings
from proxy.config.budgets import Budgets, TeamSettings
from proxy.config.file import KeyPath, adapter

_UNITS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZES = {"GiB": 2**30, "GB": 10**9, "MiB": 2**20, "MB": 10**6, "KiB": 2**10, "KB": 10**3, "B": 1}
_FACTORS = {"": 1} | {name.lower(): factor for name, factor in _SIZES.items()}

PASS = "pass"  # noqa: S105 - the word in place of a secret
MASK = "***"
AS_WRITTEN = "as written"
"""The context in which a dump has times and sizes with their units."""
_SECRET_PARAMETER = re.compile(
    r"((?:^|&)[^=&]*(?:key|pass|pwd|secret|token|sig|auth)[^=&]*=)[^&]*", re.IGNORECASE
)


def _seconds(value: object) -> object:
    """Seconds of ``30d``, ``12h``, ``5m``, ``10s``, ``200ms``; a bare number is seconds."""
    if isinstance(value, str) and (
        match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*(ms|[smhd])", value.strip())
    ):
        return float(match.group(1)) * _UNITS[match.group(2)]
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError("should be like 30d, 12h, 5m or 10s") from None
    return value


def _moment(value: object) -> object:
    """Seconds since 1970 of a day or a time as ISO 8601 writes it, UTC where it names no zone."""
    if isinstance(value, str):
        try:
            value = dt.datetime.fromisoformat(value.strip())
        except ValueError:
            raise ValueError("should be like 2027-01-31 or 2027-01-31T18:00Z") from None
    if isinstance(value, dt.date) and not isinstance(value, dt.datetime):
        value = dt.datetime.combine(value, dt.time())
    if isinstance(value, dt.datetime):
        return (value if value.tzinfo else value.replace(tzinfo=dt.UTC)).timestamp()
    return value


def _bytes(value: object) -> object:
    if not isinstance(value, str):
        return value
    match = re.fullmatch(r"(\d+)\s*([A-Za-z]*)", value.strip())
    factor = _FACTORS.get(match.group(2).lower()) if match else None
    if match is not None and factor is not None:
        return int(match.group(1)) * factor
    if any(map(str.isalpha, value)):
        raise ValueError("should be like 512KiB or 32MiB")
    return value


def moment_in(given: str, *, now: float) -> float:
    """Seconds since 1970, given so, or as how long before ``now`` (``90m``, ``24h``, ``7d``).
    Raises ValueError.
    """
    if (ago := re.fullmatch(r"([0-9]{1,6})([smhd])", given)) is not None:
        return now - int(ago[1]) * _UNITS[ago[2]]
    if re.fullmatch(r"[0-9]{1,12}(\.[0-9]{1,9})?", given) is None:
        raise ValueError("must be seconds since 1970, or like 90m, 24h or 7d.")
    return float(given)


def in_units(value: float, units: Mapping[str, float]) -> str:
    """A number in the largest of the units that leaves no fraction."""
    for unit, factor in sorted(units.items(), key=lambda each: -each[1]):
        if value and (count := value / factor) == int(count):
            return f"{int(count)}{unit}"
    return f"{value:g}"


def _with_units(units: Mapping[str, float]) -> PlainSerializer:
    """Dumps a number with its unit where the context is ``AS_WRITTEN``."""
    return PlainSerializer(
        lambda value, info: in_units(value, units) if info.context == AS_WRITTEN else value
    )


def _shown(secret: SecretStr) -> str:
    return PASS if secret.get_secret_value() == PASS else MASK


def masked_url(url: str) -> str:
    """A URL whose password, and what its query calls a key or a password, is ``***``."""
    try:
        parts = urlsplit(url)
        password = parts.password
    except ValueError:
        return MASK
    query = _SECRET_PARAMETER.sub(rf"\1{MASK}", parts.query)
    if not password and query == parts.query:
        return url
    netloc = parts.netloc.replace(f":{password}@", f":{MASK}@", 1) if password else parts.netloc
    return urlunsplit(parts._replace(netloc=netloc, query=query))


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in {"http", "https"} and bool(parts.hostname) and (parts.port or 1) > 0
    except ValueError:
        return False


def _base_url(url: str) -> str:
    if not _is_address(url):
        raise ValueError("should be an address like https://api.openai.com/v1")
    parts = urlsplit(url)
    if parts.query or parts.fragment or parts.username or parts.password:
        raise ValueError("should have no user, query or fragment; the key belongs into api_key")
    return url.rstrip("/")


def _webhook(url: SecretStr) -> SecretStr:
    if not _is_address(url.get_secret_value()):
        raise ValueError("should be an address like https://alerts.example.com/weir")
    return url


def _public_url(url: str) -> str:
    if not _is_address(url) or urlsplit(url)._replace(scheme="", netloc="").geturl().strip("/"):
        raise ValueError("should be an address without a path, like https://weir.example.com")
    return url


def _store_url(url: str) -> str:
    if "://" not in url:
        raise ValueError("should look like sqlite+aiosqlite:///weir.db")
    return url


Seconds = Annotated[
    float,
    BeforeValidator(_seconds, json_schema_input_type=float | str),
    Field(gt=0, allow_inf_nan=False),
    _with_units(_UNITS),
]
Wait = Annotated[
    float,
    BeforeValidator(_seconds, json_schema_input_type=float | str),
    Field(ge=0, allow_inf_nan=False),
    _with_units(_UNITS),
]
Size = Annotated[
    int, BeforeValidator(_bytes, json_schema_input_type=int | str), Field(gt=0), _with_units(_SIZES)
]
Count = Annotated[int, Field(gt=0)]
Expiry = Annotated[
    float,
    BeforeValidator(_moment, json_schema_input_type=float | str),
    Field(gt=0, allow_inf_nan=False),
]
Tokens = Annotated[int, Field(gt=0)]
Price = Annotated[float, Field(ge=0)]
Word = Annotated[str, Field(min_length=1)]
Endpoint = Literal["chat", "responses", "messages"]
Permission = Literal["policy", "mode", "relay", "shared"]
Credential = Literal["bearer", "x-api-key", "api-key"]
Secret = Annotated[SecretStr, PlainSerializer(_shown)]
Url = Annotated[str, PlainSerializer(masked_url)]

_CREDENTIAL_AT: tuple[tuple[str, Credential], ...] = (
    (".anthropic.com", "x-api-key"),
    (".openai.azure.com", "api-key"),
    (".cognitiveservices.azure.com", "api-key"),
)
_NO_SECRETS = frozenset({"policies", "places", "models", "limits"})
_PASS_ON = SecretStr(PASS)


@dataclass(frozen=True, slots=True, kw_only=True)
class Listen:
    host: Word = "127.0.0.1"
    port: Annotated[int, Field(ge=0, le=65535)] = 8400

    @property
    def loopback(self) -> bool:
        try:
            return ipaddress.ip_address(self.host.strip("[]")).is_loopback
        except ValueError:
            return self.host == "localhost"


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    connect: Seconds = 5.0
    first_byte: Seconds = 300.0
    idle: Seconds = 120.0


@dataclass(frozen=True, kw_only=True)
class UpstreamSettings:
    """One provider.

    Attributes:
        base_url: for ``openai``: what precedes ``/chat/completions``, without a slash at the end.
        api_key: the operator's key, or ``pass`` for the client's own.
        auth: the header that a key goes up in; None for the one that the host is known to want,
            else ``bearer``.
        provider: for ``litellm``: its name of the provider, put before the model (``anthropic/…``);
            else the provider at the address, where that does not say it.
        speaks: the endpoints that it has, ``chat``, ``responses``, ``messages``; requests to others
            are relayed.
        api_base: for ``litellm``: another address than the provider's usual one.
        forward_trace: whether ``traceparent`` and ``tracestate`` go upstream; baggage never does.
    """

    name: Word = field(default="", metadata={"validation_alias": ""})  # the key of the whole
    kind: Literal["openai", "litellm"] = "openai"
    base_url: Annotated[Url, AfterValidator(_base_url)] | None = None
    api_key: Secret = _PASS_ON
    auth: Credential | None = None
    timeout: Timeouts = Timeouts()
    provider: Word | None = None
    speaks: tuple[Endpoint, ...] = ("chat", "responses", "messages")
    api_base: Url | None = None
    forward_trace: bool = True

    @cached_property
    def endpoints(self) -> tuple[Endpoint, ...]:
        return self.speaks if self.kind == "openai" else ("chat",)

    @cached_property
    def passes_key(self) -> bool:
        return self.api_key.get_secret_value() == PASS

    @cached_property
    def own_key(self) -> str | None:
        """The operator's key, None where the client's own goes up. Raises ValueError where no
        header may hold it.
        """
        key = self.api_key.get_secret_value()
        if not key.isprintable():
            raise ValueError(
                f"the api_key of upstream {self.name!r} holds a character that no header may hold"
            )
        return None if self.passes_key else key

    @cached_property
    def credential(self) -> Credential:
        if self.auth is not None:
            return self.auth
        host = f".{urlsplit(self.base_url or '').hostname}"
        return next((how for domain, how in _CREDENTIAL_AT if host.endswith(domain)), "bearer")

    @cached_property
    def has_deployments(self) -> bool:
        """Whether models are in its paths: Azure OpenAI before its ``/openai/v1``."""
        return (self.base_url or "").endswith(".azure.com/openai")

    @cached_property
    def address(self) -> str:
        return self.base_url or self.api_base or ""

    @cached_property
    def origin(self) -> str:
        """``https://host:port`` of the base URL; ``litellm:provider`` where there is none."""
        if not self.address:
            return f"litellm:{self.provider}"
        parts = urlsplit(self.address)
        port = parts.port or (443 if parts.scheme == "https" else 80)
        return f"{parts.scheme}://{parts.hostname}:{port}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Prices:
    input: Price | None = None
    output: Price | None = None
    cache_read: Price | None = None
    cache_write: Price | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRule:
    match: Word
    upstream: str | None = None
    window: Tokens | None = None
    max_input: Tokens | None = None
    max_output: Tokens | None = None
    tokenizer: Word | None = None
    prices: Prices = Prices()


TenantSource = Annotated[
    str, Field(pattern=r"^(?:key|single|header:[A-Za-z0-9!#$%&'*+.^_`|~-]{1,100})$")
]


@dataclass(frozen=True, slots=True, kw_only=True)
class AuthSettings:
    """Who may call: ``keys`` only the known keys, ``open`` anybody, ``auto`` by whether keys exist.

    ``tenant`` says whose conversations a request's are: ``key`` each key's own, ``single``
    everybody's in common, ``header:NAME`` by what that header says. None: in common among those who
    send no known key where Weir is open on loopback only, else each key's own.
    """

    mode: Literal["auto", "open", "keys"] = "auto"
    tenant: TenantSource | None = None
    admin_token: Secret | None = None
    open_beyond_loopback: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KeySettings:
    """One key of the file; ``upstream_key`` goes upstream in its place where the upstream says
    ``pass``.

    ``concurrency``, ``requests_per_minute``, ``tokens_per_minute`` and ``budgets`` hold in all
    processes together that share a PostgreSQL; None for what all keys have, and for none. ``team``
    is a name of ``teams``, whose limits all its keys have together.
    """

    name: Word
    secret: Annotated[Secret, Field(min_length=8)]
    policy: Word | None = None
    models: tuple[Word, ...] = ()
    allow: tuple[Permission, ...] = ()
    concurrency: Count | None = None
    requests_per_minute: Count | None = None
    tokens_per_minute: Count | None = None
    expires: Expiry | None = None
    team: Word | None = None
    budgets: Budgets = ()
    upstream_key: Secret | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreSettings:
    """Where state lives; ``digest`` keeps no message text; ``retention`` in seconds, None for ever.

    ``timeout`` is what a request waits at most for one answer of the database, ``pool`` how many
    connections a process has to a database server, ``max_size`` bytes of the database, None for as
    many as there are. ``usage_retention`` is the same as ``retention`` for what each key's requests
    took by day, which outlives conversations.
    """

    url: Annotated[Url, AfterValidator(_store_url)] = field(
        default="sqlite+aiosqlite:///weir.db", repr=False
    )
    content: Literal["full", "digest"] = "full"
    retention: Seconds | None = 30 * _UNITS["d"]
    usage_retention: Seconds | None = 400 * _UNITS["d"]
    timeout: Seconds = 2.0
    pool: Annotated[int, Field(ge=1, le=1000)] = 8
    max_size: Size | None = 10 * 10**9


@dataclass(frozen=True, slots=True, kw_only=True)
class AlertSettings:
    """Where alerts go in addition to the log and the metrics.

    Attributes:
        webhook: address that gets a POST for each; it may hold a credential, and is never shown.
        secret: signs what is sent.
        level: the least that is sent: ``info``, ``warning`` or ``critical``.
        seconds: longest wait for an answer.
    """

    webhook: Annotated[Secret, AfterValidator(_webhook)] | None = None
    secret: Secret | None = None
    level: Literal["info", "warning", "critical"] = "warning"
    seconds: Seconds = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class TelemetrySettings:
    """OpenTelemetry; ``otlp_endpoint`` None exports nothing, ``capture_content`` puts text into
    spans.

    Attributes:
        environment: where this Weir runs, for example ``production``.
        trace_url: address of one trace, with ``{trace_id}`` in it, for links of the dashboard.
        read_baggage: takes ``session.id`` and ``user.id`` from the baggage that clients send.
    """

    service_name: Word = "weir"
    environment: Word | None = None
    otlp_endpoint: Url | None = None
    otlp_protocol: Literal["http/protobuf", "grpc"] = "http/protobuf"
    capture_content: bool = False
    read_baggage: bool = False
    trace_url: str | None = None
    alerts: AlertSettings = AlertSettings()


@dataclass(frozen=True, slots=True, kw_only=True)
class LimitSettings:
    body: Size = 64 * 2**20
    headers: Size = 64 * 2**10
    header_fields: Count = 100
    messages: Count = 20_000
    depth: Annotated[int, Field(gt=0, le=900)] = 128
    header_timeout: Seconds = 10.0
    body_timeout: Seconds = 60.0
    stall_timeout: Seconds = 60.0
    concurrency: Count = 1024
    concurrency_per_key: Count | None = None
    bytes_in_flight: Size = 128 * 2**20
    bytes_in_flight_per_key: Size | None = None
    drain: Wait = 12.0
    grace: Seconds = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Flags:
    """What the command line said; None where it said nothing."""

    upstream: str | None = None
    window: int | None = None
    policy: str | None = None
    store: str | None = None
    summarizer: str | None = None
    host: str | None = None
    port: int | None = None
    auth_mode: str | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class FileValues:
    """What a file may say."""

    listen: Listen = Listen()
    public_url: Annotated[str, AfterValidator(_public_url)] | None = None
    upstreams: Mapping[str, UpstreamSettings] = field(default_factory=dict)
    models: tuple[ModelRule, ...] = ()
    auth: AuthSettings = AuthSettings()
    keys: tuple[KeySettings, ...] = ()
    teams: Mapping[Word, TeamSettings] = field(default_factory=dict)
    policies: Mapping[str, Mapping[str, object] | None] = field(default_factory=dict)
    default_policy: Word = "balanced"
    summarizer: Word | None = None
    window: Tokens | None = None
    store: StoreSettings = StoreSettings()
    telemetry: TelemetrySettings = TelemetrySettings()
    limits: LimitSettings = LimitSettings()
    dashboard: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class Config(FileValues):
    """The effective whole; every policy has all its values.

    ``auth.mode`` is ``auto`` only where the store decides: whether a running Weir is open, its key
    ring knows.

    Attributes:
        path: the file that was read, None without one.
        simulate: nothing names an upstream, so Weir is in front of its own simulator.
        upstreams: by name; the first one takes the models that no rule sends elsewhere.
        policies: presets and the file's own, by name.
        window: tokens from ``--window``; it overrides every policy's.
        from_files: the same without those that were set over HTTP since.
        warnings: what is allowed but probably not meant, one line each.
        places: where a value came from, by its path; absent for a default.
    """

    path: Path | None
    simulate: bool
    policies: Mapping[str, ContextSettings]  # type: ignore[assignment] # what was made of them
    from_files: Mapping[str, ContextSettings] = field(
        default_factory=dict, repr=False, compare=False, metadata={"exclude": True}
    )
    warnings: tuple[str, ...] = ()
    places: Mapping[KeyPath, str] = field(
        default_factory=dict, repr=False, compare=False, metadata={"exclude": True}
    )

    @property
    def admin_token(self) -> Secret | None:
        return self.auth.admin_token

    @property
    def public_origin(self) -> str | None:
        """The ``Origin`` that browsers send for a page of Weir's at ``public_url``."""
        return None if self.public_url is None else origin_of(self.public_url)

    def policy(self, name: str | None = None) -> ContextSettings:
        """The policy of that name, else the default one, with ``--window`` and ``--summarizer`` put
        in; KeyError.
        """
        settings = self.policies[name if name is not None else self.default_policy]
        return dataclasses.replace(
            settings,
            window=self.window if self.window is not None else settings.window,
            summarizer=settings.summarizer if settings.summarizer is not None else self.summarizer,
        )

    def soft_shares(self, policy: str) -> dict[str, float]:
        """The shares of their caps at which a policy's buckets warn; none for a policy that is
        gone.
        """
        if policy not in self.policies:
            return {}
        return {name: rule.soft for name, rule in self.policy(policy).buckets.items()}

    def with_upstream(self, base_url: str) -> "Config":
        """This config in front of one other upstream, which gets the client's own credential."""
        upstream = UpstreamSettings(name="default", base_url=base_url.rstrip("/"))
        rules = tuple(dataclasses.replace(rule, upstream=None) for rule in self.models)
        return dataclasses.replace(
            self, upstreams={"default": upstream}, models=rules, simulate=False
        )


def origin_of(url: str) -> str:
    """``scheme://host[:port]`` as browsers write it. Raises ValueError for an address that cannot
    be read.
    """
    parts = urlsplit(url.lower())
    usual = {"http": 80, "https": 443}.get(parts.scheme)
    netloc = parts.netloc.rpartition("@")[2]
    return f"{parts.scheme}://{netloc.removesuffix(f':{usual}')}"


def public(value: Any, *, as_written: bool = False) -> dict[str, Any]:
    """A dataclass of the configuration as plain data for people: every secret is ``***``."""
    context = AS_WRITTEN if as_written else None
    kind: type = type(value)
    (plain,) = adapter(kind).dump_python((value,), mode="json", by_alias=True, context=context)
    # where it comes from
    first = {"path": None, "simulate": None} if isinstance(value, Config) else {}
    return {**first, **plain}


def secrets_of(value: object) -> Iterator[str]:
    """Every secret in a value of the configuration, those inside addresses too, as texts that no
    log may show.
    """
    if isinstance(value, SecretStr):
        text = value.get_secret_value()
        if text != PASS:
            yield text
            yield from _secrets_in(text)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for each in dataclasses.fields(value):
            if each.name not in _NO_SECRETS:
                yield from secrets_of(getattr(value, each.name))
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from secrets_of(inner)
    elif isinstance(value, tuple | list):
        for inner in value:
            yield from secrets_of(inner)
    elif isinstance(value, str):
        yield from _secrets_in(value)


def _secrets_in(text: str) -> Iterator[str]:
    if "://" not in text:
        return
    try:
        parts = urlsplit(text)
        found = [parts.password or "", *(text for _, text in parse_qsl(parts.query))]
    except ValueError:
        return
    raw = (pair.partition("=")[2] for pair in parts.query.split("&"))
    yield from (each for secret in (*found, *raw) for each in {secret, unquote(secret)} if each)
