"""``/weir/policies``: every policy that there is, to anybody with a key; the operator may set one while Weir runs."""

import asyncio
import re
from collections.abc import Mapping, MutableMapping
from typing import Any
from urllib.parse import unquote

from proxy.config import ConfigError
from proxy.config_file import Document
from proxy.errors import InvalidAPIKey, InvalidRequest, NotFound, ProxyError
from proxy.intake import ClientGone, Receive, read_body
from proxy.keys import credentials_in, presented, same_secret
from proxy.presets import about, policy_values, policy_warnings, preset_documents
from proxy.relay import Send
from proxy.reload import SetPolicy, read_policy, without_set_policy
from proxy.routes.respond import respond_error, respond_json
from proxy.runtime import Runtime
from proxy.store import StoreError

PREFIX = "/weir/policies"
LARGEST = 256 * 1024
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class Policies:
    """The ASGI application of ``/weir/policies`` and ``/weir/policies/{name}``."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = runtime

    async def __call__(self, scope: MutableMapping[str, Any], receive: Receive, send: Send) -> None:
        """Answer one question, or take one policy."""
        name = unquote(scope["path"].removeprefix(PREFIX).strip("/"))
        try:
            if scope["method"] == "PUT" and name:
                await self._put(scope, receive, send, name)
            elif scope["method"] == "DELETE" and name:
                await self._delete(scope, send, name)
            elif scope["method"] != "GET":
                raise NotFound("Policies are read with GET, set with PUT and removed with DELETE, each under its name.")
            else:
                await self._get(scope, send, name)
        except ProxyError as error:
            await respond_error(send, error)
        except ClientGone:
            return

    async def _get(self, scope: MutableMapping[str, Any], send: Send, name: str) -> None:
        if not self._is_operator(scope):
            self._runtime.keyring.identify(credentials_in(scope["headers"]))
        config = self._runtime.config
        if not name:
            await respond_json(send, {"data": self._rows()})
            return
        if name not in config.policies:
            raise NotFound(f"There is no policy {name[:80]!r}.")
        await respond_json(send, self._whole(name))

    async def _put(self, scope: MutableMapping[str, Any], receive: Receive, send: Send, name: str) -> None:
        if not self._is_operator(scope):
            raise InvalidAPIKey("Policies are set with the admin token (auth.admin_token).")
        if not NAME.fullmatch(name):
            raise InvalidRequest("A policy's name has up to 64 letters, digits, dots, dashes and underscores.")
        try:
            text = (await read_body(receive, limit=LARGEST)).decode("utf-8")
            body = read_policy(name, text)
            self._runtime.config.with_policy(name, body)
        except UnicodeDecodeError:
            raise InvalidRequest("The policy is not UTF-8.", param="body") from None
        except ConfigError as error:
            problems = list(error.problems)
            raise InvalidRequest("; ".join(problems), param="body", weir={"problems": problems}) from None
        known = name in self._runtime.config.policies
        before = self._origin(name) if known else "nothing"
        policy = SetPolicy(name, text, self._runtime.planner.clock(), body)
        kept = await self._keep(policy)
        self._runtime.set_policy(policy)
        self._runtime.logger.info("policy %s was set over HTTP by the admin, before it was from: %s", name, before)
        await respond_json(send, {**self._whole(name), "kept": kept}, status=200 if known else 201)

    async def _delete(self, scope: MutableMapping[str, Any], send: Send, name: str) -> None:
        """Have the file's policy of that name, or the preset, hold again."""
        runtime = self._runtime
        if not self._is_operator(scope):
            raise InvalidAPIKey("Policies are removed with the admin token (auth.admin_token).")
        if name not in runtime.set_policies or self._origin(name) != "api":
            raise NotFound(f"No policy {name[:80]!r} was set over HTTP; the file's and presets are not removed here.")
        try:
            restored = await asyncio.to_thread(without_set_policy, runtime.config, name)
        except ConfigError as error:
            text = f"The file's policy {name} would hold again, and is not valid: {'; '.join(error.problems)}"
            raise InvalidRequest(text, weir={"problems": list(error.problems)}) from None
        try:
            if runtime.store is not None:
                await runtime.store.delete_policy(name, runtime.planner.clock())
        except StoreError as error:
            runtime.logger.error("policy %s could not be removed from the database: %s", name, error)
            await respond_error(send, ProxyError("The database cannot be written now: the policy still holds."))
            return
        runtime.set_policies[name] = SetPolicy(name, "", runtime.planner.clock(), None)
        runtime.adopt(restored)
        left = self._origin(name) if name in restored.policies else None
        runtime.logger.info(
            "policy %s of the API was removed by the admin, now it is from: %s", name, left or "nothing"
        )
        await respond_json(send, {"name": name, "deleted": True, "from": left})

    async def _keep(self, policy: SetPolicy) -> str:
        """Where the policy is kept: in the database, or only in memory while that fails."""
        store = self._runtime.store
        if store is None:
            return "memory"
        try:
            await store.save_policy(policy.name, policy.text, policy.at)
        except StoreError as error:
            self._runtime.logger.error("the policy %s could not be stored, it holds in memory: %s", policy.name, error)
            return "memory"
        return "database"

    def _is_operator(self, scope: MutableMapping[str, Any]) -> bool:
        token = self._runtime.config.admin_token
        headers = credentials_in(scope["headers"])
        return token is not None and same_secret(presented(headers), token.get_secret_value())

    def _origin(self, name: str) -> str:
        """Where a policy is from: ``api``, ``file`` or ``preset``."""
        given = self._runtime.set_policies.get(name)
        if given is not None and given.body is not None:
            return "api"
        return "file" if ("policies", name) in self._runtime.config.places else "preset"

    def _rows(self) -> list[dict[str, object]]:
        presets = preset_documents()
        return [self._row(name, presets) for name in self._runtime.config.policies]

    def _row(self, name: str, presets: Mapping[str, Document]) -> dict[str, object]:
        config, given = self._runtime.config, self._runtime.set_policies.get(name)
        origin = self._origin(name)
        document = presets.get(name, Document(name=name))
        if given is not None and given.body is not None:
            document = Document(name=name, data=given.body)
        settings = config.policy(name)
        return {
            "name": name,
            "for": about(document),
            "from": origin,
            "default": name == config.default_policy,
            "mode": str(settings.mode),
            "cascade": [layer.strategy for layer in settings.layers],
        }

    def _whole(self, name: str) -> dict[str, object]:
        settings = self._runtime.config.policy(name)
        row = self._row(name, preset_documents())
        return {**row, "policy": policy_values(settings), "warnings": list(policy_warnings(settings))}
