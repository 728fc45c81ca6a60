"""``weir keys``: API keys in the store; a secret is printed once and kept as a digest."""

import time
from collections.abc import Callable
from typing import Any

import click
from pydantic import TypeAdapter, ValidationError

from proxy.access.admission import LIMITS, create_secret, key_digest, key_limits, limits_said
from proxy.access.budgets import key_budgets
from proxy.cli import Failure
from proxy.cli.output import listing
from proxy.cli.shared import Findings, known_policy, moment, reads, stored, writing
from proxy.config.file import nearest
from proxy.config.values import Config, Seconds, masked_url
from proxy.errors import InvalidRequest
from proxy.store import Store
from proxy.store.records import KeyRow


@click.group()
def keys() -> None:
    """Create, list, limit, rotate and revoke API keys, each with its own policy, models,
    permissions and limits.

    \b
    Example:
      weir keys create --name support-bot --policy balanced --models "gpt-*"
    """


def _limiting(command: Callable[..., Any]) -> Callable[..., Any]:
    counted = "in all processes on one PostgreSQL, or none for no limit of its own."
    said = {
        "--expires": "Until when it holds: 24h, 30d, 2027-01-31, 2027-01-31T18:00Z, or none.",
        "--tokens-per-minute": f"Tokens that its requests may take in any minute, {counted}",
        "--requests-per-minute": f"Requests that it may begin in any minute, {counted}",
        "--concurrency": f"Requests that it may have open at once, {counted}",
    }
    for name, text in said.items():
        command = click.option(name, help=text)(command)
    return command


def _budgeted(command: Callable[..., Any]) -> Callable[..., Any]:
    command = click.option(
        "--budget",
        "budgets",
        multiple=True,
        metavar="BUDGET",
        help=(
            "What it may use in a day, week or month (UTC): day,tokens=1000000, month,dollars=50,"
            " with ,soft only said and not refused; or none. May be repeated."
        ),
    )(command)
    return click.option("--team", help="Its team, a name of the configuration's teams, or none.")(
        command
    )


def _budgets_in(team: str | None, budgets: tuple[str, ...], config: Config) -> dict[str, Any]:
    given: dict[str, object] = {}
    if team is not None:
        given["team"] = team
    if budgets:
        given["budgets"] = list(budgets)
    try:
        return key_budgets(given, config.teams)
    except InvalidRequest as fault:
        hint = "--budget" if fault.param == "budgets" else "--team"
        raise click.BadParameter(fault.message, param_hint=hint) from fault


def _limits_in(given: dict[str, str | None], now: float) -> dict[str, Any]:
    try:
        return key_limits(
            {name: value for name, value in given.items() if value is not None}, now=now
        )
    except InvalidRequest as fault:
        raise click.UsageError(fault.message) from fault


@keys.command()
@click.option("--name", required=True, help="A name for the key.")
@click.option("--policy", help="Its policy; defaults to the default policy.")
@click.option(
    "--models",
    multiple=True,
    metavar="PATTERN",
    help="A model it may use; may be repeated; defaults to all.",
)
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(["policy", "mode", "relay", "shared"]),
    help=(
        "policy, mode: the headers x-weir-policy, x-weir-mode; relay: with --models, also all"
        " routes beside chat completions, responses, messages and embeddings; shared: what other"
        " keys made at the provider. May be repeated."
    ),
)
@_limiting
@_budgeted
@stored
def create(
    config: Config,
    *,
    name: str,
    policy: str | None,
    models: tuple[str, ...],
    allow: tuple[str, ...],
    team: str | None,
    budgets: tuple[str, ...],
    **limits: str | None,
) -> Findings:
    """Create a key. Its secret is printed once and cannot be shown again.

    \b
    Example:
      weir keys create --name support-bot --policy balanced --models "gpt-*" --allow mode
      weir keys create --name nightly --team research --budget month,dollars=50
    """
    if policy is not None:
        known_policy(policy, config)
    if not name.strip():
        raise click.BadParameter("should not be empty", param_hint="--name")
    if not all(pattern.strip() for pattern in models):
        raise click.BadParameter(
            "should not be empty; without it the key may use all models", param_hint="--models"
        )
    if name in [key.name for key in config.keys]:
        raise click.BadParameter(
            f"the configuration has a key {name!r} already", param_hint="--name"
        )
    secret = create_secret()
    now = time.time()
    own = _limits_in(limits, now) | _budgets_in(team, budgets, config)

    async def add(store: Store) -> KeyRow:
        row = KeyRow(
            name=name,
            digest=key_digest(await store.secret(), secret.encode()),
            policy=policy,
            models=models,
            allow=tuple(dict.fromkeys(allow)),
            created=now,
            **own,
        )
        await store.add_key(row)
        return row

    row = writing(config, add, create=True)
    said = "A running Weir accepts it within two seconds, and from then on only known keys."
    if config.auth.mode == "open":
        said = (
            "Weir accepts any key while auth.mode is open; set auth.mode: keys to accept only"
            " these."
        )
    created = f"Created key {name}. The line above is its secret; it cannot be shown again."
    return _new_secret(secret, created, said, value=lambda: {**_public(row), "secret": secret})


def _new_secret(secret: str, *said: str, value: Callable[[], object]) -> Findings:
    def show() -> None:
        click.echo(secret)
        for line in said:
            click.echo(line, err=True)

    return Findings(value, show)


@keys.command("list")
@reads
async def list_keys(store: Store, config: Config) -> Findings:
    """List the keys in the database, including revoked ones.

    \b
    Example:
      weir keys list
    """
    rows = [_public(row) for row in await store.list_keys()]
    others = f"; {len(config.keys)} in the configuration" if config.keys else ""
    fields = (
        "name policy team models allow concurrency requests_per_minute tokens_per_minute budgets"
        " created expires revoked"
    )
    return listing(
        rows,
        fields,
        empty=(
            f"No keys in {masked_url(config.store.url)}{others}; weir keys create --name me makes"
            " one."
        ),
    )


@keys.command()
@click.argument("name")
@_limiting
@stored
def limit(config: Config, name: str, **limits: str | None) -> Findings:
    """Set what a key may take and until when; what is not given stays, and none lifts a limit.

    \b
    Example:
      weir keys limit support-bot --requests-per-minute 60 --expires 30d
    """
    now = time.time()
    own = _limits_in(limits, now)
    if not own:
        raise click.UsageError(
            "give --concurrency, --requests-per-minute, --tokens-per-minute or --expires"
        )

    async def change(store: Store) -> KeyRow:
        if not await store.change_key(name, own, now):
            raise await _no_key(store, name)
        return next(row for row in await store.list_keys() if row.name == name)

    row = writing(config, change)
    until = "" if row.expires is None else f", until {_minute(row.expires)} UTC"
    said = f"{name} may have {limits_said(row) or 'what every key may'}{until}."
    return Findings(lambda: _public(row), lambda: click.echo(said))


@keys.command("set")
@click.argument("name")
@click.option("--policy", help="Its policy from its next request on; none for the default policy.")
@_budgeted
@stored
def set_key(
    config: Config, name: str, *, policy: str | None, team: str | None, budgets: tuple[str, ...]
) -> Findings:
    """Give a key another policy, team or budgets; its secret, limits, conversations and usage stay.

    The budgets that are given take the place of those that it has.

    \b
    Example:
      weir keys set support-bot --policy balanced
      weir keys set support-bot --team support --budget day,tokens=1000000
    """
    values = _budgets_in(team, budgets, config)
    said = []
    if policy is not None:
        values["policy"] = None if policy == "none" else known_policy(policy, config)
        said.append(f"the policy {values['policy'] or config.default_policy}")
    if "team" in values:
        said.append(f"the team {team}" if values["team"] is not None else "no team")
    if "budgets" in values:
        said.append(
            f"the budget {' and '.join(values['budgets'])}" if values["budgets"] else "no budget"
        )
    if not values:
        raise click.UsageError("give --policy, --team or --budget")
    now = time.time()
    kind = "policy" if values.keys() == {"policy"} else "budgets"

    async def change(store: Store) -> KeyRow:
        if not await store.change_key(name, values, now, change=kind):
            raise await _no_key(store, name)
        return next(row for row in await store.list_keys() if row.name == name)

    row = writing(config, change)
    text = f"{name} has {', '.join(said)} from its next request on."
    return Findings(lambda: _public(row), lambda: click.echo(text))


@keys.command()
@click.argument("name")
@click.option("--grace", default="1h", help="How long the old secret holds: 0s, 30m, 24h, 7d.")
@stored
def rotate(config: Config, name: str, *, grace: str) -> Findings:
    """Give a key a new secret, printed once; the old one holds for a grace. Policy, models and
    conversations stay.

    \b
    Example:
      weir keys rotate support-bot --grace 24h
    """
    now = time.time()
    until = _moment_after(grace, now)
    if any(key.name == name for key in config.keys):
        raise Failure(
            f"{name} stands in the configuration: change its secret there, Weir reads the file anew"
        )
    secret = create_secret()

    async def change(store: Store) -> str:
        digest = key_digest(await store.secret(), secret.encode())
        former = await store.rotate_key(name, digest, at=now, until=until)
        if former is None:
            raise await _no_key(store, name)
        return former

    former = writing(config, change)
    old = (
        f"The old one holds until {_minute(until)} UTC as {former}; weir keys revoke {former} ends"
        " it now."
    )
    rotated = {"name": name, "secret": secret, "former": former, "until": until}
    return _new_secret(
        secret,
        f"The line above is the new secret of {name}; it cannot be shown again.",
        old if until > now else "The old one no longer holds.",
        value=lambda: rotated,
    )


def _moment_after(grace: str, now: float) -> float:
    seconds = TypeAdapter(Seconds)
    try:
        return now if grace in ("0", "0s") else now + seconds.validate_python(grace)
    except ValidationError as fault:
        raise click.BadParameter(
            "should be like 0s, 30m, 24h or 7d", param_hint="--grace"
        ) from fault


@keys.command()
@click.argument("name")
@stored
def revoke(config: Config, name: str) -> Findings:
    """Revoke a key.

    \b
    Example:
      weir keys revoke support-bot
    """

    async def refuse(store: Store) -> None:
        if not await store.revoke_key(name, time.time()):
            raise await _no_key(store, name)

    writing(config, refuse)
    return Findings(
        lambda: {"name": name, "revoked": True}, lambda: click.echo(f"Revoked key {name}.")
    )


async def _no_key(store: Store, name: str) -> Failure:
    known = sorted(row.name for row in await store.list_keys() if row.revoked is None)
    return Failure(f"no key {name}{nearest(name, known) or '; see weir keys list'}")


def _public(row: KeyRow) -> dict[str, object]:
    return {
        "name": row.name,
        "policy": row.policy,
        "models": list(row.models),
        "allow": list(row.allow),
        "created": row.created,
        "revoked": row.revoked,
        **{name: getattr(row, name) for name in LIMITS},
        "team": row.team,
        "budgets": list(row.budgets or ()),
    }


def _minute(at: float) -> str:
    return moment(at)[:16]
