"""``make audit`` with the real pip-audit: against a service that knows advisories, one that knows none, and none."""

import json
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.functional.harness import ROOT, free_port
from tests.real.environments import Unavailable, clean_environment, environment

pytestmark = [pytest.mark.real, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def pip_audit() -> str:
    try:
        return str(environment("audit") / "bin" / "pip-audit")
    except Unavailable as why:
        pytest.skip(str(why))


@contextmanager
def advisories(*known: tuple[str, str]) -> Iterator[str]:
    """A service that answers as osv.dev does, and knows a hole in these releases."""

    class Service(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["content-length"])))
            release = (asked["package"]["name"], asked["version"])
            hole = {"id": "PYSEC-0000-1", "modified": "2026-01-01T00:00:00Z", "summary": "a hole", "affected": []}
            body = json.dumps({"vulns": [hole]} if release in known else {}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Service) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/v1/query"
        finally:
            server.shutdown()
            thread.join()


def audited(pip_audit: str, service: str, folder: Path) -> tuple[int, str]:
    lock = folder / "some.lock"
    lock.write_text(f"idna==3.10 --hash=sha256:{'0' * 64}\n")
    done = subprocess.run(
        [sys.executable, ROOT / "tools" / "audit.py", "--pip-audit", f"{pip_audit} -s osv --osv-url {service}", lock],
        capture_output=True, text=True, timeout=120, check=False, env=clean_environment(),
    )  # fmt: skip
    return done.returncode, done.stdout


BAD = ("h11", "0.14.0")


@pytest.mark.requirement("S.31")
def test_an_audit_passes_and_fails_only_where_the_known_hole_is_reported(pip_audit: str, tmp_path: Path) -> None:
    with advisories(BAD) as service:
        assert audited(pip_audit, service, tmp_path) == (0, "audit: passed\n")
    with advisories(BAD, ("idna", "3.10")) as service:
        assert audited(pip_audit, service, tmp_path) == (1, "idna 3.10: PYSEC-0000-1\naudit: failed\n")
    with advisories() as service:
        assert audited(pip_audit, service, tmp_path) == (75, "audit: not run: h11==0.14.0 was not reported\n")


@pytest.mark.requirement("S.31")
def test_an_audit_without_a_service_says_that_it_has_not_run(pip_audit: str, tmp_path: Path) -> None:
    code, said = audited(pip_audit, f"http://127.0.0.1:{free_port()}/v1/query", tmp_path)

    assert code == 75
    assert said.startswith("audit: not run: ")
    assert "passed" not in said
