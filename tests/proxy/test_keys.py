import hashlib
import hmac

import pytest
from pydantic import SecretStr

from proxy.access.admission import Keyring, create_secret, key_digest, same_secret
from proxy.config.values import KeySettings
from proxy.errors import InvalidAPIKey
from proxy.store.records import KeyRow

SERVER = b"server secret of thirty-two bytes"


def row(secret: str, *, name: str = "made", revoked: float | None = None, **rest: object) -> KeyRow:
    digest = key_digest(SERVER, secret.encode())
    fields = {"policy": None, "models": (), "allow": (), **rest}
    return KeyRow(name=name, digest=digest, created=0.0, revoked=revoked, **fields)


def ring(*keys: KeySettings, rows: tuple[KeyRow, ...] = (), mode: str = "keys") -> Keyring:
    return Keyring(keys, rows, secret=SERVER, mode=mode)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


SUPPORT = KeySettings(
    name="support", secret=SecretStr("support-secret"), policy="audit", models=("gpt-*", "o?"), allow=("mode",)
)


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer support-secret"},
        {"authorization": "bearer   support-secret "},
        {"x-api-key": "support-secret"},
        {"api-key": "support-secret"},
        {"authorization": "", "x-api-key": "support-secret"},
        {"authorization": "Bearer support-secret", "x-api-key": "other"},
    ],
)
def test_a_key_is_read_from_every_header_that_clients_use(headers):
    assert ring(SUPPORT).identify(headers).name == "support"


@pytest.mark.requirement("S.2")
def test_the_tenant_is_the_hmac_of_the_credential_and_nothing_else():
    expected = hmac.new(SERVER, b"support-secret", hashlib.sha256).hexdigest()

    assert ring(SUPPORT).identify(bearer("support-secret")).tenant == expected[:32]
    assert key_digest(SERVER, b"support-secret") == expected


@pytest.mark.requirement("S.2", "S.17")
def test_no_repr_holds_a_credential():
    caller = ring(SUPPORT).identify(bearer("support-secret"))

    assert "support-secret" not in repr(caller)
    assert "support-secret" not in repr(SUPPORT)


def test_a_key_of_the_store_is_known_by_its_digest_and_never_goes_upstream():
    secret = create_secret()
    keys = ring(rows=(row(secret, name="team", policy="off", models=("gpt-*",), allow=("policy",)),))

    caller = keys.identify(bearer(secret))

    assert (caller.name, caller.policy, caller.models, caller.allow) == ("team", "off", ("gpt-*",), {"policy"})
    assert caller.credential == b""


def test_an_unknown_key_that_weir_made_is_no_stranger_with_every_freedom():
    with pytest.raises(InvalidAPIKey):
        ring(mode="open").identify(bearer(create_secret()))


def test_identifying_twice_is_one_lookup_and_memory_is_bounded():
    keys = ring(mode="open")
    first = keys.identify(bearer("a"))
    assert keys.identify(bearer("a")) is first

    for number in range(5000):
        keys.identify(bearer(f"key-{number}"))
    keys.identify(bearer("x" * 60_000))

    assert keys._remembered.cache_info().currsize == 4096
    assert keys.identify(bearer("a")) == first


def test_strange_bytes_in_a_header_are_just_another_key():
    caller = ring(mode="open").identify({"authorization": "Bearer caf\u00e9\udcff"})

    assert caller.credential == "caf\u00e9".encode() + b"\xff"


def test_secrets_are_256_random_bits_behind_a_known_prefix():
    made = {create_secret() for _ in range(100)}

    assert len(made) == 100
    assert all(secret.startswith("weir-sk-") and len(secret) == 8 + 43 for secret in made)


def test_a_secret_is_compared_whole_and_an_absent_one_never_matches():
    assert same_secret("admin", "admin")
    assert not same_secret("admi", "admin")
    assert not same_secret("", "")
    assert not same_secret("", None)
