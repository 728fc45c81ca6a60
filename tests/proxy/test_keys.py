import hashlib
import hmac

import pytest
from pydantic import SecretStr

from proxy.access.admission import Keyring, create_secret, key_digest, presented, same_secret
from proxy.access.destination import Caller
from proxy.config.values import KeySettings
from proxy.errors import InvalidAPIKey, ModelNotAllowed
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


@pytest.mark.requirement("P7", "A1.4")
def test_a_key_of_the_file_brings_its_policy_models_and_permissions():
    caller = ring(SUPPORT).identify(bearer("support-secret"))

    assert (caller.name, caller.policy, caller.allow) == ("support", "audit", frozenset({"mode"}))
    assert caller.credential == b"support-secret"
    assert caller.allows("gpt-4o")
    assert caller.allows("o3")
    assert not caller.allows("o30")
    assert not caller.allows("GPT-4o")
    assert not caller.allows("my-gpt-4o")


@pytest.mark.requirement("P7")
def test_a_key_that_names_no_models_may_use_all():
    caller = ring(KeySettings(name="a", secret=SecretStr("secret-of-a"))).identify(bearer("secret-of-a"))

    assert caller.allows("anything/at:all")


def test_a_model_that_is_not_allowed_is_refused_by_name():
    caller = ring(SUPPORT).identify(bearer("support-secret"))

    caller.require("gpt-4o")
    with pytest.raises(ModelNotAllowed, match="claude-9"):
        caller.require("claude-9")


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


@pytest.mark.parametrize("headers", [{}, bearer(""), bearer("wrong"), bearer("support-secre"), {"cookie": "x"}])
def test_without_a_known_key_there_is_no_way_in(headers):
    with pytest.raises(InvalidAPIKey) as raised:
        ring(SUPPORT).identify(headers)

    assert raised.value.status == 401
    assert "wrong" not in raised.value.message


@pytest.mark.requirement("S.2")
def test_the_tenant_is_the_hmac_of_the_credential_and_nothing_else():
    expected = hmac.new(SERVER, b"support-secret", hashlib.sha256).hexdigest()

    assert ring(SUPPORT).identify(bearer("support-secret")).tenant == expected[:32]
    assert key_digest(SERVER, b"support-secret") == expected


@pytest.mark.requirement("S.2")
def test_another_server_gives_another_tenant():
    keys = Keyring([SUPPORT], (), secret=b"another server", mode="keys")

    here = ring(SUPPORT).identify(bearer("support-secret"))

    assert keys.identify(bearer("support-secret")).tenant != here.tenant


@pytest.mark.requirement("S.2", "S.17")
def test_no_repr_holds_a_credential():
    caller = ring(SUPPORT).identify(bearer("support-secret"))

    assert "support-secret" not in repr(caller)
    assert "support-secret" not in repr(SUPPORT)


def test_open_makes_every_key_its_own_tenant_and_no_key_one_too():
    keys = ring(mode="open")

    callers = [keys.identify(headers) for headers in (bearer("a"), bearer("b"), {}, {"authorization": "Basic a"})]

    assert len({caller.tenant for caller in callers}) == 4
    assert callers[0] == keys.identify({"x-api-key": "a"})
    assert [caller.credential for caller in callers] == [b"a", b"b", b"", b"Basic a"]
    assert all(caller.allow == {"policy", "mode", "relay"} and caller.policy is None for caller in callers)


def test_open_still_knows_the_keys_it_was_given():
    caller = ring(SUPPORT, mode="open").identify(bearer("support-secret"))

    assert (caller.policy, caller.allow) == ("audit", frozenset({"mode"}))


def test_a_key_of_the_store_is_known_by_its_digest_and_never_goes_upstream():
    secret = create_secret()
    keys = ring(rows=(row(secret, name="team", policy="off", models=("gpt-*",), allow=("policy",)),))

    caller = keys.identify(bearer(secret))

    assert (caller.name, caller.policy, caller.models, caller.allow) == ("team", "off", ("gpt-*",), {"policy"})
    assert caller.credential == b""


@pytest.mark.parametrize("mode", ["keys", "open"])
def test_a_revoked_key_is_refused_even_where_the_door_is_open(mode):
    keys = ring(rows=(row("secret-of-a", revoked=1.0),), mode=mode)

    with pytest.raises(InvalidAPIKey):
        keys.identify(bearer("secret-of-a"))


def test_an_unknown_key_that_weir_made_is_no_stranger_with_every_freedom():
    with pytest.raises(InvalidAPIKey):
        ring(mode="open").identify(bearer(create_secret()))


def test_a_key_of_the_file_stands_above_its_revoked_twin_in_the_store():
    keys = ring(SUPPORT, rows=(row("support-secret", revoked=1.0),))

    assert keys.identify(bearer("support-secret")).name == "support"


@pytest.mark.requirement("P7")
def test_a_key_may_stand_for_another_one_upstream():
    settings = KeySettings(name="a", secret=SecretStr("secret-of-a"), upstream_key=SecretStr("sk-real"))

    assert ring(settings).identify(bearer("secret-of-a")).credential == b"sk-real"


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


def test_presented_is_empty_without_a_key():
    assert presented({}) == ""
    assert presented({"authorization": "Bearer"}) == ""


def test_a_caller_is_a_value():
    assert Caller(tenant="t") == Caller(tenant="t")
