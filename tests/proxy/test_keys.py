import hashlib
import hmac

import pytest
from pydantic import SecretStr

from proxy.access.admission import Keyring, key_digest
from proxy.config.values import KeySettings
from proxy.store.records import KeyRow

SERVER = b"server secret of thirty-two bytes"


def ring(*keys: KeySettings, rows: tuple[KeyRow, ...] = (), mode: str = "keys") -> Keyring:
    return Keyring(keys, rows, secret=SERVER, mode=mode)


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


SUPPORT = KeySettings(
    name="support", secret=SecretStr("support-secret"), policy="audit", models=("gpt-*", "o?"), allow=("mode",)
)


@pytest.mark.requirement("S.2")
def test_the_tenant_is_the_hmac_of_the_credential_and_nothing_else():
    expected = hmac.new(SERVER, b"support-secret", hashlib.sha256).hexdigest()

    assert ring(SUPPORT).identify(bearer("support-secret")).tenant == expected[:32]
    assert key_digest(SERVER, b"support-secret") == expected
