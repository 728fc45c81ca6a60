"""What the load generator sends: requests of each case, the same for everyone under test.

A conversation of the ``agent`` case has a long past and two messages more with every request: a
tool call and its result. When it has grown enough another one begins that nobody has seen: one
request of twenty is such a first one. Connections do not begin theirs at one time: the first of
each is cut short by chance.
"""

import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from benchmarks.stub import completion, digest, events

MODEL = "gpt-4o-mini"
KEY = "sk-bench-0123456789abcdefghijklmnopqrstuvwxyz"
MESSAGES = 200
GROWTH = 40
BYTES_PER_PAIR = 4_120
TURNS_OF_A_CHAT = 4
_LINES = 4_000
_WORDS = [
    "the",
    "service",
    "reads",
    "request",
    "returns",
    "value",
    "when",
    "context",
    "window",
    "is",
    "full",
    "and",
    "every",
    "message",
    "that",
    "was",
    "removed",
    "stays",
    "in",
    "archive",
    "until",
    "someone",
    "asks",
    "for",
    "it",
    "again",
    "test",
    "passes",
    "error",
    "raised",
    "because",
    "connection",
    "closed",
    "before",
    "answer",
    "file",
    "module",
    "function",
    "argument",
    "result",
    "list",
    "order",
    "customer",
    "refund",
    "flight",
    "booking",
    "change",
    "policy",
    "allowed",
    "not",
    "between",
    "next",
]
_TOOLS = json.dumps(
    [
        {
            "type": "function",
            "function": {
                "name": name,
                "description": f"{what} and returns its output as text.",
                "parameters": {
                    "type": "object",
                    "properties": {
                        "path": {"type": "string", "description": "Path inside the repository"},
                        "limit": {"type": "integer", "description": "Lines to return at most"},
                    },
                    "required": ["path"],
                },
            },
        }
        for name, what in (
            ("read_file", "Reads a file"),
            ("run_tests", "Runs tests"),
            ("search", "Searches text"),
        )
    ],
    separators=(",", ":"),
).encode()
_STREAMED = {
    path: b"".join(events(path)) for path in ("/chat/completions", "/responses", "/messages")
}


@dataclass(frozen=True, slots=True)
class Request:
    """One request as bytes, and the body that its answer must have."""

    data: bytes
    expected: bytes


Source = Callable[[], Request]


def source(case: str, *, seed: int, messages: int = MESSAGES) -> Source:
    """The requests of one connection, one by one, without an end. Raises ValueError for an unknown
    case.
    """
    rng = random.Random(f"{case} {seed}")
    match case:
        case "small":
            return _Chats(rng).next
        case "stream":
            return _Chats(rng, stream=True).next
        case "responses stream" | "messages stream":
            return _Chats(rng, stream=True, path=f"/{case.split()[0]}").next
        case "agent":
            return partial(
                next, _one_after_another(rng, messages=messages, path="/chat/completions")
            )
        case "responses" | "messages":
            return partial(next, _one_after_another(rng, messages=messages, path=f"/{case}"))
        case "cold":
            return lambda: Conversation(rng, messages=messages).next()
    raise ValueError(f"there is no case {case!r}")


def _one_after_another(rng: random.Random, *, messages: int, path: str) -> Iterator[Request]:
    """The requests of conversations that nobody has seen, each but the first of which grows by
    GROWTH messages.
    """
    left = rng.randint(1, GROWTH // 2)
    while True:
        conversation = Conversation(rng, messages=messages, path=path)
        for _ in range(left):
            yield conversation.next()
        left = GROWTH // 2


class Conversation:
    """One agent's conversation; every request of it has two messages more than the one before.

    It is the same in the JSON of each endpoint, which ``path`` names.
    """

    def __init__(
        self, rng: random.Random, *, messages: int = MESSAGES, path: str = "/chat/completions"
    ) -> None:
        self._rng = rng
        self._path = path
        self._lines = [line(rng) for _ in range(_LINES // 10)]
        self._calls = 0
        opening = [
            _message(
                "system", "You are a careful engineer. Read before you write; run the tests. " * 8
            ),
            _message(
                "user",
                "The nightly build is red since yesterday. Find out why and repair it. "
                + line(rng),
            ),
        ]
        past = [self._pair() for _ in range((messages - len(opening)) // 2)]
        system, user = opening
        start = {
            "/chat/completions": (
                b'{"model":"%b","stream":false,"temperature":0,"max_tokens":1024,"tools":%b,'
                b'"messages":[%b,'
            ),
            "/responses": (
                b'{"model":"%b","store":false,"max_output_tokens":1024,"tools":%b,"input":[%b,'
            ),
            "/messages": (
                b'{"model":"%b","stream":false,"max_tokens":1024,"tools":%b,"system":[%b],"messages":['
            ),
        }[path]
        if path == "/messages":
            system = b'{"type":"text","text"' + system.removeprefix(b'{"role":"system","content"')
        self._past = start % (MODEL.encode(), _TOOLS, system) + b",".join([user, *past])
        self._grown: list[bytes] = []

    def next(self) -> Request:
        """The next request."""
        self._grown.append(b"," + self._pair())
        return _whole(b"".join([self._past, *self._grown, b"]}"]), path=self._path)

    def _pair(self) -> bytes:
        """A tool call and its result, about BYTES_PER_PAIR bytes."""
        self._calls += 1
        rng = self._rng
        thought = " ".join(rng.choices(_WORDS, k=60))
        call = f"call_{rng.getrandbits(80):020x}"
        arguments = (
            f'{{\\"path\\": \\"src/{rng.choice(_WORDS)}/{rng.choice(_WORDS)}_{self._calls}.py\\"}}'
        )
        if self._path != "/chat/completions":
            return self._elsewhere(thought, call, arguments)
        asked = (
            f'{{"role":"assistant","content":"{thought}.","tool_calls":[{{"id":"{call}","type":"function",'
            f'"function":{{"name":"read_file","arguments":"{arguments}"}}}}]}}'
        )
        result = self._result(len(asked))
        return f'{asked},{{"role":"tool","tool_call_id":"{call}","content":"{result}"}}'.encode()

    def _result(self, asked: int) -> str:
        """A tool's output that makes a call of ``asked`` bytes a pair of the size that all have."""
        room = BYTES_PER_PAIR - asked - 100
        taken = [f"# part {self._calls} of {self._rng.getrandbits(32)}"]
        while (room := room - len(taken[-1]) - 2) > 0:
            taken.append(self._rng.choice(self._lines))
        return "\\n".join(taken)

    def _elsewhere(self, thought: str, call: str, arguments: str) -> bytes:
        """The pair in the JSON of the other endpoints."""
        if self._path == "/responses":
            said = f'{{"type":"output_text","text":"{thought}.","annotations":[]}}'
            made = (
                f'{{"type":"message","role":"assistant","content":[{said}]}},{{"type":"function_call","call_id":"{call}",'
                f'"name":"read_file","arguments":"{arguments}"}}'
            )
            result = self._result(len(made))
            output = f'{{"type":"function_call_output","call_id":"{call}","output":"{result}"}}'
            return f"{made},{output}".encode()
        asked = arguments.replace(chr(92), "")
        made = (
            f'{{"role":"assistant","content":[{{"type":"text","text":"{thought}."}},{{"type":"tool_use","id":"{call}",'
            f'"name":"read_file","input":{asked}}}]}}'
        )
        block = (
            f'{{"type":"tool_result","tool_use_id":"{call}","content":"{self._result(len(made))}"}}'
        )
        return f'{made},{{"role":"user","content":[{block}]}}'.encode()


class _Chats:
    """Chats of about 1 KB: a few turns, each request the one before and a turn more; then another
    chat.
    """

    def __init__(
        self, rng: random.Random, *, stream: bool = False, path: str = "/chat/completions"
    ) -> None:
        self._rng = rng
        self._stream = stream
        self._path = path
        self._messages: list[bytes] = []

    def next(self) -> Request:
        if not self._messages or len(self._messages) > 2 * (TURNS_OF_A_CHAT - 1):
            role = "user" if self._path == "/messages" else "system"
            self._messages = [
                _message(role, "You help customers of an airline. Be brief and kind. " * 8)
            ]
        else:
            self._messages.append(_message("assistant", line(self._rng)))
        self._messages.append(_message("user", f"{line(self._rng)} {self._rng.getrandbits(48)}"))
        limit, array = (
            ("max_output_tokens", "input")
            if self._path == "/responses"
            else ("max_tokens", "messages")
        )
        stream = '"stream":true,' if self._stream else ""
        head = f'{{"model":"{MODEL}",{stream}"{limit}":256,"{array}":['.encode()
        return _whole(
            head + b",".join(self._messages) + b"]}", stream=self._stream, path=self._path
        )


def line(rng: random.Random) -> str:
    """Some words and identifiers, about four bytes a token, without anything that JSON would
    escape.
    """
    words = rng.choices(_WORDS, k=12)
    words[3] = f"{words[3]}_{words[4]}={rng.getrandbits(20):05x}"
    words[9] = f"({rng.randrange(10_000)},"
    return f"src/{words[0]}/{words[1]}.py:{rng.randrange(1000)}: " + " ".join(words)


def _message(role: str, text: str) -> bytes:
    return f'{{"role":"{role}","content":"{text}"}}'.encode()


def _whole(body: bytes, *, stream: bool = False, path: str = "/chat/completions") -> Request:
    head = (
        b"POST /v1%b HTTP/1.1\r\nHost: 127.0.0.1\r\nAuthorization: Bearer %b\r\nContent-Type:"
        b" application/json\r\nAccept: application/json\r\nUser-Agent: OpenAI/Python"
        b" 2.8.0\r\nX-Bench-Digest: %b\r\nContent-Length: %d\r\n\r\n"
        % (path.encode(), KEY.encode(), digest(body), len(body))
    )
    return Request(head + body, _STREAMED[path] if stream else completion(len(body), path))
