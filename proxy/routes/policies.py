"""``/weir/policies``: every policy that there is, to anybody with a key; the operator may set one while Weir runs."""

import asyncio
import re
from collections.abc import Mapping

from proxy.config import Config, ConfigError
from proxy.config_file import Document
from proxy.errors import InvalidRequest, NotFound, ProxyError
from proxy.intake import read_body
from proxy.policy_files.presets import about, policy_values, policy_warnings, preset_documents
from proxy.reload import SetPolicy, read_policy, without_set_policy
from proxy.routes.pages import listed, part_of, place_in
from proxy.routes.question import Answer, Question, as_json
from proxy.runtime import Runtime
from proxy.store import StoreError

LARGEST = 256 * 1024
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


async def listing(question: Question) -> Answer:
    """Every policy that there is, in a line each."""
    limit, after = question.limit(), place_in(question.query.get("cursor"), str)
    runtime, presets = question.runtime, preset_documents()
    names = part_of(list(runtime.config.policies), limit, after, lambda name: (name,))
    return listed(names, limit, lambda name: _row(runtime, name, presets), lambda name: (name,))


async def one(question: Question) -> Answer:
    """One policy with every value that holds, and what is doubtful in it."""
    name = question.path["name"]
    if name not in question.runtime.config.policies:
        raise NotFound(f"There is no policy {name[:80]!r}.")
    return as_json(_whole(question.runtime, name))


async def put(question: Question) -> Answer:
    """Set a policy for the next request on, and keep it in the database; the body is its YAML or JSON."""
    runtime, name = question.runtime, question.path["name"]
    if not NAME.fullmatch(name):
        raise InvalidRequest(
            "A policy's name has up to 64 letters, digits, dots, dashes and underscores.", param="name"
        )
    try:
        text = (await read_body(question.receive, limit=LARGEST)).decode("utf-8")
        if not text.strip():
            raise InvalidRequest("The body must be a policy, in YAML or JSON: preset: balanced.", param="body")
        body = await asyncio.to_thread(_read, runtime.config, name, text)
    except UnicodeDecodeError:
        raise InvalidRequest("The policy is not UTF-8.", param="body") from None
    except ConfigError as error:
        problems = list(error.problems)
        raise InvalidRequest("; ".join(problems), param="body", weir={"problems": problems}) from None
    known = name in runtime.config.policies
    before = _origin(runtime, name) if known else "nothing"
    policy = SetPolicy(name, text, runtime.planner.clock(), body)
    kept = await _keep(runtime, policy)
    runtime.set_policy(policy)
    runtime.logger.info("policy %s was set over HTTP by the admin, before it was from: %s", name, before)
    return as_json({**_whole(runtime, name), "kept": kept}, status=200 if known else 201)


def _read(config: Config, name: str, text: str) -> Mapping[str, object]:
    """The keys of a policy that can be used. ConfigError."""
    body = read_policy(name, text)
    config.with_policy(name, body)
    return body


async def delete(question: Question) -> Answer:
    """Remove a policy that was set over HTTP: the file's policy of that name, or the preset, holds again."""
    runtime, name = question.runtime, question.path["name"]
    if name not in runtime.set_policies or _origin(runtime, name) != "api":
        raise NotFound(f"No policy {name[:80]!r} was set over HTTP; the file's and presets are not removed here.")
    try:
        restored = await asyncio.to_thread(without_set_policy, runtime.config, name)
    except ConfigError as error:
        text = f"The file's policy {name} would hold again, and is not valid: {'; '.join(error.problems)}"
        raise InvalidRequest(text, weir={"problems": list(error.problems)}) from None
    try:
        await runtime.store.delete_policy(name, runtime.planner.clock())
    except StoreError as error:
        runtime.logger.error("policy %s could not be removed from the database: %s", name, error)
        raise ProxyError("The database cannot be written now: the policy still holds.") from None
    runtime.set_policies[name] = SetPolicy(name, "", runtime.planner.clock(), None)
    runtime.adopt(restored)
    left = _origin(runtime, name) if name in restored.policies else None
    runtime.logger.info("policy %s of the API was removed by the admin, now it is from: %s", name, left or "nothing")
    return as_json({"name": name, "deleted": True, "from": left})


async def _keep(runtime: Runtime, policy: SetPolicy) -> str:
    """Where the policy is kept: in the database, or only in memory while that fails."""
    try:
        await runtime.store.save_policy(policy.name, policy.text, policy.at)
    except StoreError as error:
        runtime.logger.error("the policy %s could not be stored, it holds in memory: %s", policy.name, error)
        return "memory"
    return "database"


def _origin(runtime: Runtime, name: str) -> str:
    """Where a policy is from: ``api``, ``file`` or ``preset``."""
    given = runtime.set_policies.get(name)
    if given is not None and given.body is not None:
        return "api"
    return "file" if ("policies", name) in runtime.config.places else "preset"


def _row(runtime: Runtime, name: str, presets: Mapping[str, Document]) -> dict[str, object]:
    config, given = runtime.config, runtime.set_policies.get(name)
    document = presets.get(name, Document(name=name))
    if given is not None and given.body is not None:
        document = Document(name=name, data=given.body)
    settings = config.policy(name)
    return {
        "name": name,
        "for": about(document),
        "from": _origin(runtime, name),
        "default": name == config.default_policy,
        "mode": str(settings.mode),
        "cascade": [layer.strategy for layer in settings.layers],
    }


def _whole(runtime: Runtime, name: str) -> dict[str, object]:
    settings = runtime.config.policy(name)
    row = _row(runtime, name, preset_documents())
    return {**row, "policy": policy_values(settings), "warnings": list(policy_warnings(settings))}
