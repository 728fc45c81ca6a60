"""The numbers of an error message, by the role that the words beside them give."""

import re
from dataclasses import dataclass
from itertools import islice
from typing import Final

N: Final = r"\d{1,12}"
MOST_NUMBERS: Final = 24

_SUM: Final = re.compile(rf"({N}) ?\+ ?({N}) ?>=? ?({N})")
_PAIR: Final = re.compile(rf"(?<![\d+-] )(?<!\d)({N})(?: tokens?)? ?>=? ?({N})(?!\d| ?[-+])")
_RATIO: Final = re.compile(rf"\(({N}) ?/ ?({N}) tokens?\)")
_RANGE: Final = re.compile(rf"input length should be \[\d{{1,3}}, ?({N})\]")

# Roles of a number, from the words before and after it.
_NUMBER: Final = re.compile(rf"(?<![\w.\-/])({N})(?![\w]|\.\d|%)")
_CUT: Final = re.compile(r"[.;,!?。]| but | while | however ")
_AFTER: Final = (
    (
        "part",
        re.compile(
            r" ?(?:tokens? )?(?:in (?:the|your) (?:messages|prompt|input|functions|tools|tool)|of (?:text|tool"
            r"|image|audio|file"
            r")? ?input|from the input|(?:inputs?|prompt) tokens)"
        ),
    ),
    (
        "completion",
        re.compile(
            r" ?(?:tokens? )?(?:(?:in|for) (?:the|your) (?:completion|output|response)|max_(?:new_|completion_"
            r"|output_)?tokens"
            r"|(?:output|completion) tokens)"
        ),
    ),
    (
        "none",
        re.compile(
            r" ?(?:tokens? )?(?:draft|bytes|char|pixel|[kmg]b\b|images?|seconds|ms\b|s\b|over the|above the|too )"
        ),
    ),
    (
        "limit",
        re.compile(
            r" ?(?:tokens? )?(?:maximum|max\b|limit\b|token limit|token context|available|allowed|supported|permitted)"
        ),
    ),
    ("total", re.compile(r" ?(?:tokens? )?(?:requested|were requested|used\b|received)")),
)
_BEFORE: Final = (
    (
        "limit",
        re.compile(
            r"(?:max(?:imum)?(?!_(?:new_|completion_|output_)?tokens)|limit|allowed|context (?:length|window|size"
            r"|limit)|context ?(?=[:(])|n_ctx|at most|up to|cannot exceed|not exceed"
            r"|exceeds?|exceeded|less than|longer than|greater than|larger than|more than|<=?|>=?|window|budget"
            r"|capacity|supports"
            r"|最大|上限|限制|不超过|不能超过|超过|超出|大于|窗口)"
            r"(?:[ _](?:input|prompt|context|sequence|seq|tokens?|length|len|number|of|allowed|total|models?|size"
            r"|window|is|was|the|to|count|only|limit|maximum|max|supported|permitted))*(?:[上下文长度的模型输入为是数量窗口限制]{0,12})"
        ),
    ),
    (
        "prompt",
        re.compile(
            r"(?:number of tokens|token count|prompt|inputs?|messages|contains|contained|resulted in|n_keep|first"
            r"|conversation|history|request|has|have|given|provided|sent|supplied"
            r"|actual|got|your|输入|请求|实际|当前|提示词)"
            r"(?:[ _](?:input|prompt|tokens?|length|count|of|is|was|size|contains|has|are|too|long|number|at|least))*"
            r"(?:[长度的为是数量个共约达]{0,8})"
        ),
    ),
    (
        "total",
        re.compile(
            r"(?:input and (?:maximum )?output tokens|requested|received|total|sum|current length|used"
            r"|总)(?: (?:of|tokens|is|about|a|at|least))*"
        ),
    ),
    (
        "completion",
        re.compile(r"max_(?:new_|completion_|output_)?tokens(?: is too large)?|completion|output|generation"),
    ),
    ("none", re.compile(r"\bby\b|upper bound for|\bid\b|error|code|status|http|query length|index|position")),
)


@dataclass(frozen=True, slots=True)
class Numbers:
    """What one message states, in tokens; ``requested`` is prompt plus completion, else the total, else the prompt."""

    limit: int | None = None
    prompt: int | None = None
    completion: int | None = None
    requested: int | None = None

    @property
    def told(self) -> int:
        """How many of them were given."""
        return sum(n is not None for n in (self.limit, self.prompt, self.completion, self.requested))


def read(text: str) -> Numbers:
    """The numbers of a normalised message that speaks of an overflow."""
    if "got -" in text:  # old vLLM prints the window less the prompt
        return Numbers()
    added = _SUM.search(text)
    if added:
        prompt, completion, limit = map(int, added.groups())
        return Numbers(limit, prompt, completion, prompt + completion)
    bounded = _RANGE.search(text)
    if bounded:
        return Numbers(int(bounded.group(1)))
    pair = _PAIR.search(text) or _RATIO.search(text)
    if pair and "max_tokens" not in text:
        prompt, limit = map(int, pair.groups())
        return Numbers(limit, prompt, None, prompt)
    return _by_role(text)


def _by_role(text: str) -> Numbers:
    roles: dict[str, list[int]] = {"limit": [], "prompt": [], "part": [], "completion": [], "total": [], "none": []}
    last = 0
    for match in islice(_NUMBER.finditer(text), MOST_NUMBERS):
        role = _role(text[max(last, match.start() - 64) : match.start()], text[match.end() : match.end() + 40])
        last = match.end()
        number = int(match.group(1))
        status = match.start() == 0 and 400 <= number < 600
        roles["none" if status else role].append(number)
    limit, prompt, completion, total = (
        next(iter(roles[role]), None) for role in ("limit", "prompt", "completion", "total")
    )
    if roles["part"]:
        prompt = sum(dict.fromkeys(roles["part"]))
    limits = roles["limit"]
    if limits and prompt is None and total is None and completion is None and max(limits) > min(limits):
        limit, prompt = min(limits), max(limits)
    if prompt is not None and completion is not None:
        return Numbers(limit, prompt, completion, prompt + completion)
    return Numbers(limit, prompt, completion, prompt if total is None else total)


def _role(before: str, after: str) -> str:
    """``limit``, ``prompt``, ``part`` (of a prompt given in pieces), ``completion``, ``total`` or ``none``."""
    if before.endswith("upper bound for "):
        return "none"
    for role, pattern in _AFTER:
        if pattern.match(after):
            return role
    tail = _CUT.split(before)[-1]
    best, reach = "none", -1
    for role, pattern in _BEFORE:
        end = max((m.end() for m in pattern.finditer(tail)), default=-1)
        if end > reach:
            best, reach = role, end
    return best
