"""YAML and JSON that is made to crash or to hold up whoever reads it: set over HTTP, or reloaded."""

import asyncio
import signal
from pathlib import Path

import aiohttp
import pytest

from proxy.config.file import ConfigError, parse_document
from tests.functional.harness import COUNTER, WeirProcess, free_port, opening
from tests.upstream.app import serve_simulator
from tests.upstream.model import SimulatorSettings

ADMIN = "admin-0123456789"
CONFIG = 'upstreams: {{main: {{base_url: "{upstream}"}}}}\nauth: {{admin_token: {admin}}}\nwindow: {window}\n'


def bomb(letters: str) -> str:
    """Ten times as many values with each letter."""
    lines = [f"{letters[0]}: &{letters[0]} [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"{b}: &{b} [{', '.join([f'*{a}'] * 10)}]" for a, b in zip(letters, letters[1:], strict=False)]
    return "\n".join(lines) + "\n"


NESTED = "nested more than 32 levels deep"
HOSTILE = {
    "braces": ("about: x\nbuckets: " + "{" * 100_000, 2, "a key should be a plain word"),
    "brackets": ("about: x\n\nlayers: " + "[" * 100_000, 3, NESTED),
    "dashes": ("- " * 60_000, 1, NESTED),
    "a list of lists": ("about:\n  " + "- " * 60_000, 2, NESTED),
    "keys that are mappings": ("? " * 60_000, 1, "a key should be a plain word"),
    "indented": ("".join(" " * depth + "a:\n" for depth in range(40)), 34, NESTED),
    "aliases": (bomb("abcdefghij"), 6, "aliases"),
    "an alias of itself": ("about: x\na: &a [1, *a]\n", 2, "within what it names"),
    "a long text, over and over": (f"a: &a {'x' * 2000}\nb: [{', '.join(['*a'] * 10_000)}]\n", 2, "aliases"),
    "as JSON": ('{"about": "x",\n"buckets": ' + '{"a":' * 40_000 + "1" + "}" * 40_000 + "}", 2, NESTED),
}


async def test_over_http_each_is_answered_400_with_its_line(tmp_path: Path) -> None:
    arguments = ["--upstream", "http://127.0.0.1:9/v1", "--store", f"sqlite+aiosqlite:///{tmp_path / 'w.db'}"]
    env = {"WEIR_ADMIN_TOKEN": ADMIN}
    headers = {"authorization": f"Bearer {ADMIN}"}
    async with (
        WeirProcess(arguments, free_port(), env=env) as weir,
        aiohttp.ClientSession(headers=headers) as session,
    ):
        for name, (text, line, words) in HOSTILE.items():
            async with session.put(f"{weir.root}/weir/policies/mine", data=text.encode()) as answer:
                assert answer.status == 400, name
                problem = (await answer.json())["error"]["weir"]["problems"][0]
                assert problem.startswith(f"mine:{line}: "), (name, problem)
                assert words in problem, name
        async with session.put(f"{weir.root}/weir/policies/mine", data=b"preset: balanced") as answer:
            assert answer.status == 201
        assert weir.process is not None
        assert weir.process.returncode is None


@pytest.mark.requirement("R.79")
async def test_a_reloaded_file_of_that_kind_leaves_the_old_one_in_force(tmp_path: Path) -> None:
    async with serve_simulator(SimulatorSettings(), counter=COUNTER) as simulator:
        path = tmp_path / "weir.yaml"

        def write(window: int, more: str = "") -> None:
            text = CONFIG.format(upstream=simulator.base_url, admin=ADMIN, window=window)
            path.write_text(f'{text}store: {{url: "sqlite+aiosqlite:///{tmp_path / "w.db"}"}}\n{more}')

        write(8192)
        async with WeirProcess(["--config", str(path)], free_port()) as weir:
            assert await limit_in_force(weir) > 4_096
            assert weir.process is not None
            for name in ("brackets", "a list of lists", "aliases"):
                said = len(refusals(weir))
                write(4096, HOSTILE[name][0])
                weir.tell(signal.SIGHUP)
                for _ in range(400):
                    if len(refusals(weir)) > said:
                        break
                    await asyncio.sleep(0.05)
                assert len(refusals(weir)) > said, name
                assert weir.process.returncode is None, name
            assert await limit_in_force(weir) > 4_096


async def limit_in_force(weir: WeirProcess) -> int:
    ask = weir.client().chat.completions.with_raw_response.create
    raw = await ask(model="sim", messages=opening(), max_tokens=100)
    return int(raw.headers["x-weir-tokens"].partition("limit=")[2])


def refusals(weir: WeirProcess) -> list[str]:
    return [line for line in weir.log if "the new configuration is not used" in line]


def test_what_is_too_large_is_refused_unread(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"mine: larger than 1 MiB"):
        parse_document("a: 1\n" + "# x\n" * 300_000, name="mine", env={})
