"""What could choose another model behind a judged one: fields at any depth, headers, trailers, names with commas, paths."""

import asyncio
import json
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from proxy.access.destination import Caller
from proxy.errors import ModelNotAllowed
from tests.functional.test_destinations import FREE, LIMITED, MINE, ONE, OTHER, TWO, Scene, said, scene

FIELDS = (
    b'"Models":["gpt-4"]',
    '"model\u017f":["gpt-4"]'.encode(),
    b'"context_window_fallbacks":[{"gpt-mini":["gpt-4"]}]',
    b'"content_policy_fallbacks":["gpt-4"]',
    b'"deployment_id":"gpt-4"',
    b'"extra_body":{"model":"gpt-4"}',
    b'"router_settings_override":{"fallbacks":["gpt-4"]}',
    b'"providerOptions":{"gateway":{"models":["gpt-4"]}}',
    b'"provider_options":[[{"x":{"fallback_models":["gpt-4"]}}]]',
    b'"tools":[{"type":"x","model":"gpt-4","model":"gpt-mini"}]',
    b'"tools":[{"type":"x","Mod\\u0065l":"gpt-4"}]',
    b'"tools":[{"type":"namespace","tools":[{"type":"x","model":"gpt-4"}]}]',
    b'"models":["gpt-4","\xff"]',
    b'"models":["gpt-4",' + b"1" * 5000 + b"]",
    b'"tools":[{"model":"gpt-4","x":"\xff"}]',
    b'"models":[["gpt-4"]]',
)
FINE = (
    b'"tools":[{"type":"function","function":{"name":"f","parameters":{"properties":{"model":{"type":"string"}}}}}]',
    b'"tools":[{"name":"f","input_schema":{"type":"object","properties":{"models":{"type":"array"}}}}]',
    b'"response_format":{"type":"json_schema","json_schema":{"schema":{"properties":{"model":{"enum":["gpt-4"]}}}}}',
    b'"models":["gpt-mini"],"fallbacks":[{"model":"gpt-mini","max_tokens":1,"service_tier":"auto"}]',
    b'"provider":{"allow_fallbacks":false,"order":["x"]},"metadata":{"model":"gpt-4"},"temperature":1e400',
    b'"big":' + b"1" * 5000,
)


@pytest.mark.requirement("P7", "S.7")
async def test_no_field_at_any_depth_names_a_model_that_the_key_may_not_use(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        for path in ("/v1/responses", "/v1/chat/completions"):
            for field in FIELDS:
                body = b'{"model":"gpt-mini","input":"x","messages":[],' + field + b"}"
                answer = await run.ask(path, body=body)
                assert answer.status_code in (400, 403), (path, field)
        assert not run.asked()
        for path in ("/v1/responses", "/v1/embeddings"):
            for field in FINE:
                body = b'{"model":"gpt-mini","input":"x",' + field + b"}"
                assert (await run.ask(path, body=body)).status_code == 200, (path, field)
                assert run.one.asked[-1].body == body


@pytest.mark.requirement("P7", "S.7")
async def test_several_models_in_one_name_and_forms_with_other_fields_are_judged(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        for name in ("gpt-mini,gpt-4", "gpt-4, gpt-mini", "gpt-mini,"):
            for path in ("/v1/responses", "/v1/chat/completions"):
                assert (await run.ask(path, body=said(name))).status_code == 403, (path, name)
        assert not run.asked()


@pytest.mark.requirement("P7")
def test_a_pattern_does_not_stretch_over_a_comma() -> None:
    caller = Caller(tenant="0" * 32, models=("gpt-mini*",))
    caller.require("gpt-mini-2, gpt-mini-3")
    with pytest.raises(ModelNotAllowed):
        caller.require("gpt-mini-2,gpt-4")


STEERING = {
    "x-portkey-config": '{"override_params":{"model":"gpt-4"}}',
    "x-portkey-provider": "other",
    "helicone-target-url": "https://other.example",
    "helicone-fallbacks": "[]",
    "x-litellm-model": OTHER,
    "cf-aig-custom-provider": "other",
    "x-gateway-model-name": OTHER,
    "azureml-model-deployment": OTHER,
    "x-ms-oai-image-generation-deployment": OTHER,
    "ai-language-model-id": OTHER,
    "x-http-method-override": "DELETE",
    "x-http-method": "DELETE",
    "x-original-url": "/v1/files",
    "x-rewrite-url": "/v1/files",
}
KEPT = {"openai-beta": "x", "anthropic-version": "2023-06-01", "x-stainless-lang": "python", "x-request-source": "app"}


@pytest.mark.requirement("P7", "S.7")
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions", "/v1/models/gpt-mini"])
async def test_headers_that_steer_a_gateway_stay_here_for_a_key_with_models(tmp_path: Path, path: str) -> None:
    async with scene(tmp_path) as run:
        method, body = ("GET", None) if "models" in path else ("POST", said(MINE))
        for key, expected in ((LIMITED, KEPT), (FREE, KEPT | STEERING)):
            answer = await run.ask(path, key=key, method=method, body=body, headers=KEPT | STEERING)
            assert answer.status_code == 200, answer.text
            seen = [each for each in run.one.asked if each.target == path][-1].headers
            assert {name: seen[name] for name in KEPT | STEERING if name in seen} == expected


async def raw(run: Scene, head: str, body: bytes) -> bytes:
    """Everything that is answered to bytes as they are."""
    where = urlsplit(run.weir.root)
    reader, writer = await asyncio.open_connection(where.hostname, where.port)
    writer.write(head.replace("\n", "\r\n").encode() + body)
    answer = await asyncio.wait_for(reader.read(), 60)
    writer.close()
    return answer


TRAILERS = ("content-type: application/x-www-form-urlencoded", "x-portkey-config: 1", f"authorization: Bearer {FREE}")


@pytest.mark.requirement("S.12", "P7")
@pytest.mark.parametrize("path", ["/v1/responses", "/v1/chat/completions"])
async def test_trailers_are_no_headers(tmp_path: Path, path: str) -> None:
    async with scene(tmp_path) as run:
        body = json.dumps(said(MINE)).encode()
        for trailer in (*TRAILERS, "host: a b", "x-late: 1"):
            head = f"POST {path} HTTP/1.1\nHost: x\nAuthorization: Bearer {LIMITED}\nTransfer-Encoding: chunked\n"
            framed = b"%x\r\n%b\r\n0\r\n%b\r\n\r\n" % (len(body), body, trailer.encode())
            answer = await raw(run, f"{head}Connection: close\n\n", framed)
            assert answer.startswith(b"HTTP/1.1 200"), (trailer, answer)
            seen = [each for each in run.one.asked if each.method == "POST"][-1]
            assert not {"x-portkey-config", "x-late", "content-type"} & set(seen.headers), trailer


@pytest.mark.requirement("P7", "S.7")
async def test_a_chat_body_is_what_its_content_type_says_for_a_key_with_models(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        body = b'{"model":"gpt-mini","messages":[],"x":"&model=gpt-4&"}'
        kinds = (
            "application/x-www-form-urlencoded",
            "multipart/form-data; boundary=x",
            "application/json; charset=utf-7",
            "application/json; charset*=utf-16''",
        )
        for kind in kinds:
            assert (await run.ask("/v1/chat/completions", body=body, kind=kind)).status_code == 400, kind
        assert not run.asked()
        for fine in ("application/json; charset=UTF-8", "text/plain", None):
            assert (await run.ask("/v1/chat/completions", body=said(MINE), kind=fine)).status_code == 200, fine


@pytest.mark.requirement("S.7")
async def test_no_path_climbs_out_of_the_upstreams_address(tmp_path: Path) -> None:
    async with scene(tmp_path) as run:
        for dots in ("..%2f", "%2e%2e%2F", "..;/", "..;x=1/", "%2e.%3bx/", "..%5c", ".%2e%2f"):
            for path in (f"/v1/x/{dots}{dots}admin", f"/v1/{dots}admin", f"/v1/files/{dots}chat/completions"):
                answer = await run.ask(path, key=FREE, body=said(OTHER))
                assert answer.status_code == 400, path
        assert not run.asked()
        for fine in ("/v1/files/a..b", "/v1/files/a%2fb", "/v1/files/...", "/v1/files/..a"):
            assert (await run.ask(fine, key=FREE, method="GET")).status_code == 200, fine


@pytest.mark.requirement("P7")
@pytest.mark.parametrize("upstreams", [ONE, TWO])
async def test_a_question_about_a_model_may_have_a_body_of_unknown_length(tmp_path: Path, upstreams: str) -> None:
    async with scene(tmp_path, upstreams) as run:
        for key in (LIMITED, FREE):
            answer = await run.ask("/v1/models/gpt-mini", key=key, method="GET", body={"a": 1}, chunked=True)
            assert answer.status_code == 200, answer.text
