"""The reference task: fifty steps that take a code base from axios to fetch, in a window that ends at step fifteen.

The code base, what its tools return and what the model says at every step are made here, the same at every run. The
model is the simulator with a script that goes on from the newest tool result, the agent is the openai SDK.
"""

import json
import re
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import openai
import pytest

from proxy.wire.chat import digest_of
from tests.functional.harness import ALONE, COUNTER, Deployment, InTurns, answered, apart
from tests.profile import each_once
from tests.upstream import RecordedRequest, Request, SimulatedAnswer, SimulatedCall, SimulatorSettings
from tests.upstream.app import RunningSimulator, serve_simulator

pytestmark = pytest.mark.slow

WINDOW = 8_192
MAX_TOKENS = 512
STEPS = 50

SYSTEM = (
    "You are a coding agent in the repository shop-api (TypeScript, Node 20). Work step by step: one tool call at a "
    "time, and say in a sentence why. Never commit. Report when `npm test` and `npm run typecheck` both pass."
)
GOAL = (
    "Migrate shop-api from axios to the built-in fetch: every module under src/api must use it, and axios must be gone "
    "from package.json. Exported functions must keep their names, parameters and return types. Do not add "
    "dependencies. Callers rely on a rejected promise for 4xx and 5xx answers, keep that. The timeout stays 8000 ms."
)
MODULES = (
    ("users", "User", "/v2/users"),
    ("orders", "Order", "/v2/orders"),
    ("invoices", "Invoice", "/v2/billing/invoices"),
    ("payments", "Payment", "/v2/billing/payments"),
    ("products", "Product", "/v2/catalog/products"),
    ("carts", "Cart", "/v2/carts"),
    ("shipments", "Shipment", "/v2/logistics/shipments"),
    ("coupons", "Coupon", "/v2/catalog/coupons"),
    ("reviews", "Review", "/v2/catalog/reviews"),
    ("warehouses", "Warehouse", "/v2/logistics/warehouses"),
    ("webhooks", "Webhook", "/v2/webhooks"),
    ("reports", "Report", "/v2/reports"),
)
DECISIONS = (
    "Decision: one wrapper, src/http/request.ts, instead of fetch everywhere, because the bearer token is set only once.",
    "I use AbortSignal.timeout(8000) rather than a timeout library, because Node 20 has it and none may be added.",
    "request() throws HttpError(status, body) for a failure, because fetch does not reject and sync.ts catches a 404.",
    "I chose repeated keys for query arrays (ids=1&ids=2), because gateway 3.4 answers 422 to ids[]=1.",
    "The tests use undici MockAgent instead of axios-mock-adapter, because the adapter cannot see the global fetch.",
)
ERROR = "TypeError: Cannot read properties of undefined (reading 'items')"
RESOLUTION = (
    "The cause: listInvoices read response.data.items, but request() returns the parsed JSON itself.",
    "I changed src/api/invoices.ts:31 to read body.items.",
)


@dataclass(frozen=True, slots=True)
class Step:
    """What the model says and calls, and what the tool returns."""

    says: str
    tool: str
    arguments: dict[str, Any]
    returns: str


def functions_of(type_name: str) -> list[tuple[str, str, str, str, str, str]]:
    """Verb, parameters, result, method, path and what is sent of a module's exported functions."""
    one, patch = "/${encodeURIComponent(id)}", f"id: string, patch: Partial<New{type_name}>"
    return [
        ("get", "id: string", type_name, "get", one, ""),
        ("create", f"input: New{type_name}", type_name, "post", "", ", input"),
        ("update", patch, type_name, "patch", one, ", patch"),
        ("remove", "id: string", "void", "delete", one, ""),
        ("restore", "id: string", type_name, "post", f"{one}/restore", ""),
        ("archive", "id: string, reason: string", type_name, "post", f"{one}/archive", ", { reason }"),
        ("duplicate", "id: string", type_name, "post", f"{one}/duplicate", ""),
        ("count", "since: Date", "{ count: number }", "get", "/count?since=${since.toISOString()}", ""),
        ("audit", "id: string", "AuditEntry[]", "get", f"{one}/audit", ""),
    ]


def module_source(name: str, type_name: str, path: str) -> str:
    """A module of the code base before the migration."""
    functions = [
        f"/** {verb.capitalize()}s one of the {name}; rejects with the upstream's status for 4xx and 5xx. */\n"
        f"export async function {verb}{type_name}({given}): Promise<{gives}> {{\n"
        f"  const response = await client.{method}<{gives}>(`{path}{suffix}`{sent});\n"
        f'  log.debug({{ status: response.status, took: response.headers["x-took"] }}, "{verb}{type_name}");\n'
        f"  return response.data;\n}}\n"
        for verb, given, gives, method, suffix, sent in functions_of(type_name)
    ]
    listing = (
        f"export async function list{type_name}s(ids: string[] = [], cursor?: string): Promise<Page<{type_name}>> {{\n"
        f"  const params = {{ ids, cursor, limit: 50 }};\n"
        f"  const response = await client.get<Page<{type_name}>>(`{path}`, {{ params }});\n"
        f"  return {{ items: response.data.items, next: response.data.next }};\n}}\n"
    )
    head = (
        f'import axios from "axios";\nimport {{ client }} from "../http/client";\nimport {{ log }} from "../log";\n'
        f'import type {{ AuditEntry, Page }} from "../types";\n'
        f'import type {{ {type_name}, New{type_name} }} from "../types/{name}";\n'
    )
    return "\n".join((head, listing, *functions))


def module_diff(name: str, type_name: str, path: str) -> str:
    """What the edit tool says: the hunks of a module's migration."""
    lines = [f"--- a/src/api/{name}.ts", f"+++ b/src/api/{name}.ts", '-import axios from "axios";']
    lines += ['-import { client } from "../http/client";', '+import { request } from "../http/request";']
    for number, (verb, given, gives, method, suffix, sent) in enumerate(functions_of(type_name)):
        lines += [
            f"@@ -{9 + 6 * number},5 +{8 + 6 * number},4 @@ export async function {verb}{type_name}({given})",
            f"-  const response = await client.{method}<{gives}>(`{path}{suffix}`{sent});",
            f'+  const body = await request<{gives}>("{method.upper()}", `{path}{suffix}`{sent});',
            "-  return response.data;",
            "+  return body;",
        ]
    return "\n".join(lines)


def report_of(name: str, number: int) -> str:
    """What the test runner says when a module's tests pass."""
    lines = [f"> shop-api@3.4.1 test\n> vitest run tests/api/{name}.test.ts --reporter verbose\n"]
    lines += [
        f"   \u2713 tests/api/{name}.test.ts > {group} > {verb} {name} {3 + (number * n) % 17}ms"
        for n, (group, verb) in enumerate(((g, v) for g in ("happy path", "failures") for v in VERBS), 1)
    ]
    passed = 2 * len(VERBS)
    return "\n".join([*lines, "", f" Test Files  1 passed (1)\n      Tests  {passed} passed ({passed})"])


VERBS = ("lists", "pages through", "gets one of", "creates", "updates", "removes", "restores", "audits", "times out on")


CLIENT = """import axios from "axios";
import { log } from "../log";
import { token } from "./token";

export const client = axios.create({ baseURL: process.env.SHOP_URL, timeout: 8000, maxRedirects: 3 });

client.interceptors.request.use((config) => {
  config.headers.set("authorization", `Bearer ${token()}`);
  config.headers.set("x-request-id", crypto.randomUUID());
  return config;
});

client.interceptors.response.use(undefined, (error) => {
  if (error.code === "ECONNABORTED") log.warn({ url: error.config.url }, "shop timed out after 8000 ms");
  if (error.response?.status === 401) token.forget();
  return Promise.reject(error);
});
"""
SYNC = """import { getOrder, updateOrder } from "../api/orders";
import { getShipment } from "../api/shipments";

export async function syncOrder(id: string): Promise<void> {
  try {
    const order = await getOrder(id);
    const shipment = await getShipment(order.shipmentId);
    await updateOrder(id, { status: shipment.deliveredAt ? "delivered" : order.status });
  } catch (error) {
    if (error.response?.status === 404 || error.status === 404) return markGone(id);
    if (error.response?.status === 409) return retryLater(id, 30_000);
    throw error;
  }
}
"""
PACKAGE = {
    "name": "shop-api",
    "version": "3.4.1",
    "type": "module",
    "engines": {"node": ">=20"},
    "scripts": {"build": "tsc -p .", "typecheck": "tsc --noEmit", "test": "vitest run", "lint": "eslint src tests"},
    "dependencies": {"axios": "1.6.8", "fastify": "4.26.2", "pino": "8.19.0", "zod": "3.22.4", "pg": "8.11.5"},
    "devDependencies": {"axios-mock-adapter": "1.22.0", "typescript": "5.4.3", "vitest": "1.4.0", "eslint": "8.57.0"},
}


def tree() -> str:
    """What listing the repository shows."""
    kinds = (("src/api", ".ts", 2100), ("src/types", ".ts", 640), ("tests/api", ".test.ts", 3300))
    found = [
        f"{folder}/{name}{end}  {size + 37 * n}" for folder, end, size in kinds for n, (name, *_) in enumerate(MODULES)
    ]
    return "\n".join([*found, "src/http/client.ts  612", "src/jobs/sync.ts  544", "package.json  731"])


def uses() -> str:
    """What searching for axios and its client finds."""
    return "\n".join(
        f'src/api/{name}.ts:1:import axios from "axios";\n'
        + "\n".join(
            f"src/api/{name}.ts:{17 + 6 * n}:  const response = await client.{method}<{gives}>("
            for n, (_, _, gives, method, _, _) in enumerate(functions_of(kind))
        )
        for name, kind, _ in MODULES[:11]
    )


def survey() -> list[Step]:
    """The first steps: what there is, and the decisions that follow from it."""
    wrapper = {"path": "src/http/request.ts", "content": "export async function request<T>(method, path, body?)"}
    package = json.dumps(PACKAGE, indent=2)
    return [
        Step("First I look at what there is.", "list_files", {"path": "."}, tree()),
        Step("Then at every use of axios.", "grep", {"pattern": "axios|client\\.", "path": "src"}, uses()),
        Step("The dependencies decide what I may use.", "read_file", {"path": "package.json"}, package),
        Step("The shared client may carry behaviour.", "read_file", {"path": "src/http/client.ts"}, CLIENT),
        Step(DECISIONS[0], "write_file", wrapper, "Wrote src/http/request.ts (41 lines)."),
        Step(DECISIONS[1], "edit_file", {"path": "src/http/request.ts", "line": 12}, "Edited 1 hunk, 2 lines added."),
        Step("How are failures handled by callers?", "read_file", {"path": "src/jobs/sync.ts"}, SYNC),
        Step(DECISIONS[2], "edit_file", {"path": "src/http/request.ts", "line": 24}, "Edited 2 hunks, 9 lines added."),
    ]


def migration(number: int, name: str, type_name: str, path: str) -> list[Step]:
    """The steps that migrate one module; the third module fails once and is repaired."""
    file, says = f"src/api/{name}.ts", f"Next is {name}: I read it before I change it."
    change = f"Replace client.* by request() in {name}; the exported signatures stay."
    if number == 4:
        change = DECISIONS[3]
    read = Step(says, "read_file", {"path": file}, module_source(name, type_name, path))
    edit = Step(change, "edit_file", {"path": file, "hunks": 6}, module_diff(name, type_name, path))
    test = Step(f"Do the tests of {name} pass?", "run_tests", {"file": f"tests/api/{name}.test.ts"}, "")
    passed = report_of(name, number)
    if number != 2:
        return [read, edit, Step(test.says, test.tool, test.arguments, passed)]
    failed = (
        f" FAIL  tests/api/{name}.test.ts > lists {name}\n{ERROR}\n at listInvoices src/api/invoices.ts:31:24\n"
        " at tests/api/invoices.test.ts:18:20\n\n Test Files  1 failed (1)\n      Tests  4 failed | 14 passed (18)"
    )
    return [
        read,
        edit,
        Step(test.says, test.tool, test.arguments, failed),
        Step(" ".join(RESOLUTION), "edit_file", {"path": file, "line": 31}, f"Edited {file}: 1 hunk."),
        Step("Again, after the fix.", test.tool, test.arguments, passed),
    ]


def task() -> list[Step]:
    """All fifty steps."""
    steps = survey()
    for number, module in enumerate(MODULES):
        steps += migration(number, *module)
    steps += [
        Step(DECISIONS[4], "edit_file", {"path": "tests/setup.ts"}, "Edited tests/setup.ts: 2 hunks."),
        Step("Is axios used anywhere still?", "grep", {"pattern": "axios", "path": "."}, "package.json:7"),
        Step("Remove both entries.", "edit_file", {"path": "package.json"}, "Edited package.json: 2 lines removed."),
        Step("The whole test run decides.", "run_tests", {"file": ""}, " Tests  216 passed (216)"),
    ]
    return steps


TASK = task()
TOOL_NAMES = ("list_files", "grep", "read_file", "write_file", "edit_file", "run_tests")
TOOLS = [
    {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": {}}}}
    for name in TOOL_NAMES
]


def answer(request: Request) -> SimulatedAnswer:
    """What the model says next: it goes on from the newest tool result, like a model that reads what it is sent."""
    results = [m["tool_call_id"] for m in request["messages"] if m["role"] == "tool"]
    done = int(results[-1].removeprefix("call_")) if results else 0
    if done == len(TASK):
        return SimulatedAnswer(text="axios is gone; 216 tests and the type check pass.")
    step = TASK[done]
    return SimulatedAnswer(
        text=step.says, calls=(SimulatedCall(step.tool, json.dumps(step.arguments), id=f"call_{done + 1}"),)
    )


@dataclass(slots=True)
class Agent:
    """A plain agent loop over the SDK: ask, run the tool, append, until the model calls no tool."""

    client: Any
    messages: list[dict[str, Any]] = field(
        default_factory=lambda: [{"role": "system", "content": SYSTEM}, {"role": "user", "content": GOAL}]
    )
    steps: int = 0
    said: str = ""

    async def run(self) -> None:
        """Work until the task is done."""
        while not self.said:
            reply = await self.client.chat.completions.create(
                model="sim", messages=self.messages, max_tokens=MAX_TOKENS, tools=TOOLS
            )
            message = reply.choices[0].message
            self.messages.append(message.model_dump(exclude_none=True))
            if not message.tool_calls:
                self.said = message.content
                return
            self.messages.append(self._run_tool(message.tool_calls[0]))

    def _run_tool(self, call: Any) -> dict[str, Any]:
        step = TASK[self.steps]
        assert (call.function.name, json.loads(call.function.arguments)) == (step.tool, step.arguments)
        self.steps += 1
        return {"role": "tool", "tool_call_id": call.id, "content": step.returns}


@pytest.fixture
async def upstream() -> AsyncIterator[RunningSimulator]:
    settings = SimulatorSettings(window=WINDOW, answer=answer, summary_model="notes")
    async with serve_simulator(settings, counter=COUNTER) as simulator:
        yield simulator


async def blob(target: InTurns, ref: str) -> bytes:
    """An original by its ref, page by page."""
    body, cursor = b"", "0"
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
        while cursor:
            page = await http.get(f"{target.root()}/weir/blobs/{ref}", params={"cursor": cursor})
            assert page.status_code == 200, f"{ref}: {page.text}"
            body += page.content
            cursor = page.headers.get("x-weir-cursor", "")
    return body


async def restored(target: InTurns, forwarded: list[dict[str, Any]]) -> set[bytes]:
    """Digests of all originals that are removed from conversations, or that the refs in forwarded messages name."""
    await target.settled()
    refs = set(re.findall(r"[Aa]rchived as ([0-9a-f]{12})", json.dumps(forwarded)))
    async with httpx.AsyncClient(headers={"authorization": "Bearer sk-test"}) as http:
        listed = (await http.get(f"{target.root()}/weir/conversations")).json()["data"]
        for each in listed:
            cursor = ""
            while cursor is not None:
                page = await http.get(
                    f"{target.root()}/weir/conversations/{each['id']}/removed",
                    params={"cursor": cursor} if cursor else {},
                )
                refs |= {row["ref"] for row in page.json()["data"]}
                cursor = page.json().get("next_cursor")
    found = set[bytes]()
    for ref in refs:
        original = json.loads(await blob(target, ref))
        found |= {digest_of(message) for message in (original if isinstance(original, list) else [original])}
    return found


@dataclass(frozen=True, slots=True)
class Run:
    """A finished task: the agent, what reached the upstream, and the originals that the last request leads to."""

    agent: Agent
    forwarded: list[RecordedRequest]
    originals: set[bytes]

    @property
    def last(self) -> list[dict[str, Any]]:
        """The messages of the last request that reached the upstream."""
        return apart(self.forwarded[-1].json()["messages"])

    @property
    def gone(self) -> list[dict[str, Any]]:
        """The client's messages that are not in the last forwarded request as they were; its last answer aside."""
        there = {digest_of(m) for m in self.last}
        return [m for m in self.agent.messages[:-1] if digest_of(m) not in there]


async def test_without_weir_the_task_ends_around_step_fifteen(upstream: RunningSimulator) -> None:
    direct = openai.AsyncOpenAI(base_url=upstream.base_url, api_key="sk-test", max_retries=0)
    agent = Agent(direct)
    with pytest.raises(openai.BadRequestError) as refused:
        await agent.run()
    await direct.close()
    assert refused.value.code == "context_length_exceeded"
    assert 13 <= agent.steps <= 17


@each_once
@ALONE
@pytest.mark.requirement("A0.8", "A0.3", "A0.26")
@pytest.mark.parametrize("summarizer", [None, "notes"])
async def test_the_task_is_finished_with_its_goal_and_decisions_in_sight_and_nothing_lost(
    summarizer: str | None, upstream: RunningSimulator, deployment: Deployment
) -> None:
    async with deployment.serving(upstream.base_url, window=WINDOW, summarizer=summarizer) as target:
        agent = Agent(target.client())
        await agent.run()
        forwarded = [seen for seen in answered(upstream) if seen.model == "sim"]
        run = Run(agent, forwarded, await restored(target, list(forwarded[-1].json()["messages"])))

    assert (agent.steps, agent.said) == (STEPS, "axios is gone; 216 tests and the type check pass.")
    assert [seen.status for seen in forwarded] == [200] * (STEPS + 1)
    assert max(seen.prompt_tokens for seen in forwarded) + MAX_TOKENS <= WINDOW

    text = "\n".join(m.get("content") or "" for m in run.last)
    assert run.last[:2] == agent.messages[:2], "rules and goal stand word for word"
    assert [d for d in DECISIONS if d not in text] == []
    assert [s for s in RESOLUTION if s not in text] == [], "the error itself is resolved, its cause and its cure stay"

    assert len(run.gone) > STEPS
    assert [m for m in run.gone if digest_of(m) not in run.originals] == []
