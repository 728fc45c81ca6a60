"""Error bodies taken apart, and the wordings by which they say that a prompt does not fit or only
seem to.

Bodies are JSON, JSON in a string, arrays, SSE lines, SDK dumps or plain text. Every pattern is
bounded: literal words, ``[0-9]{1,12}`` and gaps of at most 80 characters, because error text is
hostile input (unbounded lazy gaps take seconds on 3,000 characters). They expect text from
``plain``.
"""

import html
import json
import re
from dataclasses import dataclass, field
from itertools import islice
from typing import NamedTuple

import msgspec

HEAD = 1024

# Anthropic, about thinking after an array that was changed
BOUND = "bound to a different conversation"
CHANGED = re.compile(
    r"`?thinking`? (?:or `?redacted_thinking`? )?blocks in the latest assistant message cannot be modified"
    r"|invalid `?signature`? in `?thinking`? block"
    r"|provided without its required .?(?:following|reasoning).? item"
)
"""What Anthropic and OpenAI say about reasoning that is not as it was given."""
OVERFLOW_CODES = frozenset(
    {
        "context_length_exceeded",  # OpenAI, Azure, Groq, Cerebras
        "context_window_exceeded",
        "context_size_exceeded",
        "context_limit_exceeded",
        "context_exceeded",
        "contextlengthexceeded",
        "contextwindowexceedederror",  # LiteLLM
        "max_context_length_exceeded",
        "maximum_context_length_failed",  # new-api gateways
        "model_context_window_exceeded",  # Anthropic, z.ai
        "model_max_prompt_tokens_exceeded",  # GitHub Copilot
        "tokens_limit_reached",  # GitHub Models, with 413
        "exceed_context_size_error",  # llama.cpp
        "outofcontexterror",  # Volcano Ark
        "token_quantity_exceeded",  # watsonx
        "tokens_too_long",  # Baidu
        "prompt_too_long",
        "input_too_long",
        "1261",  # Zhipu
        "3051",  # Mistral
        "336103",  # Baidu
    }
)
RATE_CODES = frozenset(
    {
        *(
            "rate_limit_exceeded",
            "rate_limit_error",
            "ratelimitexceeded",
            "ratelimitreached",
            "ratelimiterror",
        ),
        *(
            "tpm_rate_limit_exceeded",
            "rpm_rate_limit_exceeded",
            "too_many_requests",
            "toomanyrequests",
        ),
        *("insufficient_quota", "quota_exceeded", "quotaexceeded", "exceeded_current_quota_error"),
        *(
            "resource_exhausted",
            "resourceexhausted",
            "insufficient_balance",
            "billing_hard_limit_reached",
        ),
        *(
            "throttlingexception",
            "throttling",
            "throttling.allocationquota",
            "throttling.ratequota",
        ),
        *("overloaded_error", "server_overloaded"),
        *("1302", "1303", "1305"),  # Zhipu: concurrency, frequency, tokens a minute
    }
)
PAYLOAD_CODES = frozenset(
    {"string_above_max_length", "array_above_max_length", "characters_too_long"}
)
BODY_CODES = frozenset({"request_too_large", "payload_too_large"})
OTHER_CODES = frozenset(
    {
        *("content_filter", "content_policy_violation", "responsibleaipolicyviolation"),
        *("data_inspection_failed", "datainspectionfailed"),
        *("invalid_api_key", "authentication_error", "permission_error", "model_not_found"),
    }
)

N = r"\d{1,12}"


def _compiled(*patterns: str) -> tuple[re.Pattern[str], ...]:
    return tuple(map(re.compile, patterns))


CODE_IN_TEXT = re.compile(
    r"\b(?:code|type|status|error_code|error_type|errortype|__type|reason) ?[:=] ?([a-z][a-z0-9_.]{2,48})"
)

RATE = _compiled(
    r"\bper (?:\d{1,4} )?(?:sec|second|min|minute|hour|day|week|month)s?\b|\bper \d{1,4}s\b",
    r"/ ?min\b",
    r"\b[tr]p[mds]\b",
    r"rate.?limit|token rate",
    r"too many requests|throttl|\bquota|\bbilling\b|\boverloaded\b|\bdaily\b|\bmonthly\b",
    r"wait before|please wait \d|try again (?:in \d|tomorrow)|for this (?:minute|hour|day)",
    r"\b(?:more|insufficient|enough) credits?\b|credit balance|can only afford",
    r"\b(?:error code|status|status code|http|code):? ?(?:429|402|529)\b|^(?:429|402|529)\b",
    "限额|限流|频率|频繁|配额|额度|余额|欠费|每分钟|每秒|每日|并发",
)
RATE_LIMIT = re.compile(
    rf"\blimit:? ({N})\b|\bof ({N}) (?:input |output )?tokens per\b|\blimit of ({N})\b|\blimit: ({N})"
)
RATE_REQUESTED = re.compile(rf"\brequested:? (?:up to )?({N})\b")

# What the upstream calls the window, what it calls being over it, and what is over.
WINDOW = re.compile(
    r"\b(?:context[ _-]?(?:length|window|size|limit|budget)|maximum context|n_ctx"
    r"|max(?:imum)?[ _](?:model|seq|sequence|input|prompt|position)[ _](?:len|length|tokens?|embeddings)"
    r"|max(?:imum)? (?:allowed )?(?:input|prompt) (?:length|size|tokens?)"
    r"|max(?:imum)? (?:number of )?(?:allowed |input |prompt )?tokens\b|max(?:imum)? tokens? limit"
    r"|(?:input|prompt|models?) token limit|tokens? limit for this model)"
)
OVER = re.compile(
    r"\b(?:exceed(?:s|ed|ing)?\b|overflow(?:s|ed)?\b|surpass(?:es|ed)?\b|(?:longer|greater|larger|bigger|more) than"
    r"|too (?:long|large|big|many)\b|over the|above the|beyond|no room|exhausted"
    r"|(?:does|do|did|will|would) ?(?:not|nt) fit|cant fit|cannot fit"
    r"|must be (?:less|fewer|smaller|shorter|<)|must have less|tokens? (?:>|is more))|> ?\d"
)
_SUBJECT = re.compile(
    r"\b(?:prompt|text|inputs?|messages?|conversation|history|request|query|sequence|chat)\b"
)
_LONG = re.compile(r"\btoo (?:long|large|big)\b")
_UNIT = re.compile(r"\b(?:models?|tokens?|llm|context)\b")
_MORE = re.compile(
    r"\b(?:exceeds?|exceeded|longer than|larger than|greater than|more than|above|over)\b"
)
_COUNT = re.compile(
    r"\b(?:prompt|input|request(?:ed)?|total|number of|message)(?:[ _-](?:input|prompt))?[ _-]tokens?\b|\btoken count\b"
)
_BOUND = re.compile(r"\b(?:limit|max|maximum|window|allowed|models?|\d{3,12})\b")
_TOO_LONG = re.compile(
    r"\b(?:prompt|inputs?|prompt tokens|input tokens|messages|conversation)(?: (?:is|are|was|were))? too long"
)
SUMMED = (
    (
        re.compile(r"\b(?:prompt|inputs?|messages|context)\b"),
        re.compile(r"\+|\bplus\b|\band\b|\bwith\b"),
        re.compile(
            r"\b(?:max_(?:new_|completion_|output_)?tokens|(?:max |maximum )?(?:completion|output|new)(?: tokens)?)\b"
        ),
        re.compile(r"exceeds?\b|exceeded|> ?\d|(?:greater|larger|longer|more) than|<="),
    ),
    40,
)
GENERIC = (
    ((WINDOW, OVER), 80),
    ((OVER, WINDOW), 80),
    ((_SUBJECT, _LONG, _UNIT), 30),
    ((_SUBJECT, _MORE, re.compile(r"\d tokens?\b")), 40),
    ((_COUNT, _MORE, _BOUND), 40),
    ((_TOO_LONG,), 0),
    SUMMED,
)
"""Chains of patterns that follow one another in a sentence, and the largest gap in characters."""
CONDITION = re.compile(
    r"\b(?:if|when|whenever|unless|whether|unknown|unrecognized|truncation|set to|so that)\b"
)
GUARD = re.compile(
    r"\b(?:if|when|whenever|unless|whether|parameter|unknown|unrecognized|unsupported|not supported|does not support"
    r"|beta|header|must be (?:a|an|one of|positive|set|greater|at least)|"
    r"expected (?:an? )?(?:integer|string|number|object)|not a valid|invalid (?:type|value|json)|not enabled"
    r"|not available|field required|deprecated|too small|minimum|at least one|truncation|summary|cache|caching|debug"
    r"|documentation|logit_bias|logprobs|reasoning|thinking|training|n_ctx_train|batch size)\b"
)
CLAUSE = re.compile(r"[.!?;:] |。")
SENTENCE = re.compile(r"[.!?;] |。")
MIN_SENTENCE_LEN = 4
MAX_SENTENCES = 40

_PHRASES = (
    (
        "OpenAI, DeepSeek, vLLM, OpenRouter, SGLang",
        r"maximum context length (?:is|of|was|:)? ?\(?\d",
    ),
    ("OpenAI gpt-5", r"input tokens exceed the configured limit"),
    (
        "various",
        r"exceeds? (?:(?:the|this|your|models?|available|max(?:imum)?|allowed) ){0,4}context(?! deadline)\b",
    ),
    ("Anthropic, Baidu, Tencent, Ollama", r"prompt (?:tokens )?(?:is )?too (?:long|large)"),
    ("Anthropic, Bedrock, Vertex", r"input length and max_tokens exceed context limit"),
    ("various", r"max_tokens (?:would )?exceeds? (?:the )?context"),
    ("Gemini", r"input token count.{0,30}exceeds? the max"),
    ("Bedrock, Hugging Face", r"input is too long for (?:the |this )?(?:requested )?model"),
    ("Bedrock through Databricks", r"too many total text bytes"),
    ("Bedrock Nova", r"too many input tokens"),
    ("SAP, OCI", r"max input tokens: \d"),
    ("Bedrock Mantle", r"prompt tokens (?:\(\d{1,12}\) )?exceed model maximum"),
    ("xAI", r"maximum prompt length is \d"),
    ("Groq, Cerebras", r"reduce the length of (?:the|your) (?:messages|prompt|input)"),
    ("Cerebras", r"current length is \d{1,12} while limit is \d"),
    ("Mistral", r"too large for model with \d{1,12} maximum context"),
    ("Moonshot", r"exceed(?:ed|s)? (?:the )?model token limit"),
    ("MiniMax", r"context window exceeds limit"),
    ("Zhipu", r"prompt exceeds max length|prompt ?超长"),
    ("DashScope, Xunfei", r"range of input length should be"),
    ("Cohere", r"total number of tokens (?:\([a-z ]{0,40}\)|in the prompt) cannot exceed"),
    (
        "Together, SGLang, vLLM",
        r"longer than the (?:models?|maximum) (?:maximum )?(?:context|model) length",
    ),
    ("watsonx", r"input tokens \d{1,12} cannot exceed the total tokens? limit"),
    ("Poolside, Baseten, SGLang", r"exceeds the maximum allowed (?:input )?length"),
    ("GitHub Copilot", r"prompt token count of \d{1,12} exceeds"),
    ("GitHub Models", r"too large for [a-z0-9_.:/ -]{1,60} model\. max size: \d{1,12} tokens"),
    ("SGLang", r"multimodal prompt is too long after expanding"),
    ("TGI", r"inputs tokens \+ max_new_tokens must be <="),
    ("TGI", r"inputs must have less than \d{1,12} tokens"),
    ("llama.cpp", r"context size has been exceeded"),
    ("llama-cpp-python", r"requested tokens \(\d{1,12}\) exceed context window"),
    (
        "various",
        r"context (?:length|window|size|limit)[ _](?:has been |was |is )?(?:exceeded|overflow|reached|full)",
    ),
    (
        "Ollama",
        r"out of context space|context is full|ran out of context|prompt is longer than the context",
    ),
    ("Ollama, DashScope", r"input length exceeds the (?:context|max)"),
    ("Ollama, ctransformers", r"exceeded max(?:imum)? context length"),
    ("LM Studio", r"to keep from the initial prompt is greater than the context"),
    ("LM Studio", r"trying to keep the first"),
    ("LM Studio", r"n_keep \(?:? ?\d{1,12}\)? ?>="),
    ("TensorRT-LLM, NIM", r"sum of prompt length.{0,60}should not exceed max_seq_len"),
    (
        "TensorRT-LLM",
        r"prompt length.{0,20}exceeds? (?:the )?max(?:imum)? (?:input|sequence) length",
    ),
    ("SiliconFlow", r"prompt_tokens \(\d{1,12}\) must be less than max_seq_len"),
    ("DS4", r"prompt has \d{1,12} tokens.{0,10} but the configured context size"),
    ("various", r"tokens in request more than max tokens allowed"),
    ("Workers AI", r"estimated number of input and maximum output tokens.{0,30}exceeded"),
    ("old vLLM: window less prompt went below zero", r"max_tokens must be at least 1, got -\d"),
    ("Snowflake", r"max tokens of \d{1,12} exceeded"),
    ("Perplexity", r"total length of all messages is too long"),
    ("Volcano Ark", r"total tokens of image and text exceed max message tokens"),
    ("various", r"request content exceeds the internal limit of the (?:large )?model"),
    ("LiteLLM", r"contextwindowexceedederror"),
    ("various", r"context overflow: "),
    ("various", r"context_(?:window|length|size)_exceeded"),
    ("various", r"request (?:size )?exceeds (?:the )?model context"),
)
PHRASES = _compiled(*(pattern for _, pattern in _PHRASES))
"""Wordings that say outright that the prompt does not fit, and who words it so."""
_CN_OVER = re.compile(r"超长|过长|太长|超出|超过|超限|大于")
CHINESE = (
    (
        (re.compile(r"上下文|输入|提示词?|请求|对话|会话|消息|内容|文本|prompt|tokens?"), _CN_OVER),
        24,
    ),
    ((_CN_OVER, re.compile(r"上下文|最大输入|token|窗口")), 16),
    ((re.compile(r"压缩上下文"),), 0),
    (
        (re.compile(r"コンテキスト|トークン|컨텍스트|토큰"), re.compile(r"超え|超過|長すぎ|초과")),
        24,
    ),
)
CHINESE_GUARD = re.compile(
    r"字节|字符|图片|图像|文件|大小|次数|个数|条数|时长|超时|时间|最大输出|输出长度|max_tokens|\bmb\b|温度|用量|账户"
)
CHINESE_TOKENS = re.compile(
    r"tokens?|コンテキスト|トークン|컨텍스트|토큰|上下文|超长|过长|太长|长度|窗口"
)
LAST_RESORT = re.compile(
    r"too many tokens|token limit (?:exceeded|reached)|exceed(?:s|ed)? (?:the )?tokens? limit"
)

INPUT_LIMIT = re.compile(
    r"maximum prompt length|input tokens exceed the configured limit|range of input length|inputs must have less"
    r"|max(?:imum)?(?: allowed)? (?:input|prompt) (?:tokens?|length)|input token count.{0,30}exceeds? the max"
    r"|prompt token count of|exceed model maximum|max_(?:input|prompt)_(?:tokens?|len)"
    r"|maximum number of (?:input|prompt) tokens|最大输入"
)
DOUBTFUL = re.compile(rf"input tokens plus {N} max_(?:completion_)?tokens")
"""vLLM of about 0.15: one build prints the window less ``max_tokens`` as the maximum context
length.
"""
AT_LEAST = re.compile(r"at least \d{1,12} (?:input|prompt)|\bn_keep\b|trying to keep the first")
BATCH = re.compile(rf"input \(({N}) tokens\) is too large to process.{{0,60}}batch size: ({N})")

_MAX_TOKENS = re.compile(
    r"max(?:imum)?_(?:(?:completion|output|new)_)?tokens?(?:_to_sample)?\b|"
    r"max(?:imum)? ?(?:completion|output|new|generated) ?tokens\b|\boutput token limit|"
    r"maximum (?:allowed )?number of (?:output|completion) tokens|最大输出"
)
_BARE_MAX = re.compile(
    r"\bmax(?:imum)? tokens\b|\bmaxtokens\b|maximum number of tokens you requested"
)
_CAPPED = re.compile(
    r"too (?:large|high|big|many)|less than|lower than|at most|[<>]=?|(?:above|the) maximum|must not|exceeds?\b"
    r"|exceeded|greater than|larger than|cannot be|should be|must be|\brange\b|between|超|范围|大于|不能|上限"
)
CAPS = (
    ((_MAX_TOKENS, _CAPPED), 60),
    ((_BARE_MAX, _CAPPED), 60),
    ((re.compile(r"range of"), _MAX_TOKENS), 30),
    ((re.compile(r"supports? at most \d{1,12} (?:completion|output) tokens"),), 0),
)
CAP_GUARD = re.compile(
    r"thinking|budget_tokens|at least|positive|greater than 0|non-?negative|\bmissing\b|\brequired\b|\bhigher\b"
    r"|not supported|unsupported|not compatible|valid integer|must be an? (?:int|number)|not a valid"
)
CAP_LIMITS = _compiled(
    rf"at most ({N})",
    rf"> ?({N})",
    rf"(?:less than or equal to|less than|lower than|no more than|<=?|up to|not exceed) ?({N})",
    rf"[\[(]\d{{1,2}}, ?({N})[\])]",
    rf"\(inclusive\) to ({N})",
    rf"between \d and ({N})",
    rf"(?:output tokens|limit|maximum) (?:of |is |\()({N})",
    rf"max_model_len=(?:[a-z_]{{1,30}}=)?({N})",
)
CAP_ASKED = re.compile(
    rf"(?:too (?:large|high|big)[:,]?|max_(?:completion_|output_|new_)?tokens[:=]? ?\(?|but got|received"
    rf"|value of|got) ?({N})"
)

SIZED = re.compile(
    r"exceed|max|limit|\btoo\b|more than|less than|longer|larger|at most|greater|超|限制|上限"
)
PAYLOAD = re.compile(
    r"string too long|array too long|expected maxlength"
    r"|(?:payload|file|image|message|upload) size|exceeds the maximum size"
    r"|content.?length|max input characters|maximum allowed size|too many (?:tools|items)"
)
UNITS = re.compile(
    r"\b(?:bytes?|characters?|chars|pixels?|pages?|images?|seconds?|items?|elements|(?:\d{1,9} ?)?[kmg]i?b)\b|字节|字符"
)


class Measure(NamedTuple):
    """A limit of something else than tokens: its kind, the wordings, and those that name it or what
    was sent.

    The first group of ``most`` is the number, the second its unit where it is in bytes.
    """

    kind: str
    said: re.Pattern[str]
    most: tuple[re.Pattern[str], ...] = ()
    found: tuple[re.Pattern[str], ...] = ()


_SIZE = rf"({N}) ?(bytes|[kmg]i?b)?(?!\w)"
_MOST_BYTES = _compiled(
    rf"(?<!\w)\d{{1,12}}(?: bytes)? ?> ?{_SIZE}",
    rf"(?:limit|max(?:imum)?)(?: (?:allowed|request|body|size|limit|is|of))*:? ?\(?{_SIZE}",
    rf"超过(?:了)?(?:最大)?限制 ?{_SIZE}",
)
_MOST_ITEMS = _compiled(
    rf"maximum length ({N})",
    rf"at most ({N})",
    rf"\d ?> ?({N})",
    rf"(?:limit|max(?:imum)?)(?: (?:allowed|number|of|is|images?|messages?))*:? ?\(?({N})",
    rf"image=({N})",
)
_FOUND_ITEMS = _compiled(
    rf"got (?:an array with length )?({N})",
    rf"\(({N})\) exceeds?",
    rf": ({N}) (?:images?|messages?)",
)
MEASURES = (
    Measure(
        "many_images_side",
        re.compile(r"max(?:imum)? allowed size for many-image requests"),
        _compiled(rf": ({N}) pixels"),
    ),
    Measure(
        "image_side",
        re.compile(
            r"image dimensions? exceeds? max|image (?:is )?too large(?: for model)?: ?\d{1,6} ?x ?\d"
        ),
        _compiled(rf"size: ({N}) pixels"),
    ),
    Measure(
        "image_bytes",
        re.compile(
            r"image exceeds [^.;]{1,30}maximum|image size \(?\d[^.;]{0,20}exceeds|size of the input image exceeds"
        ),
        _compiled(rf"> ?{_SIZE}", rf"maximum allowed size of {_SIZE}"),
        _compiled(rf"maximum: ({N}) bytes", rf"image size \(?({N})"),
    ),
    Measure(
        "images",
        re.compile(
            r"too many images|(?:number|count) of images [^.;]{0,30}(?:exceeds?|more than)"
            rf"|images? exceeds? [^.;]{{0,20}}limit of \d|at most {N} images?\b|limit-mm-per-prompt"
        ),
        _MOST_ITEMS,
        _FOUND_ITEMS,
    ),
    Measure(
        "entries",
        re.compile(
            r"invalid (?:messages|input|contents): array too long|too many messages"
            r"|(?:messages|input) (?:array )?(?:has|contains) too many (?:items|elements|entries)"
        ),
        _MOST_ITEMS,
        _FOUND_ITEMS,
    ),
    Measure(
        "bytes",
        re.compile(
            r"(?:request )?entity too large|payload too large|(?:request|body) (?:is )?too large(?! for)"
            r"|(?:request|body|total message) size(?: [^.;]{0,20})? exceeds?|请求体大小超"
            r"|request exceeds the maximum (?:size|allowed number of bytes)|maximum request (?:body )?size"
        ),
        _MOST_BYTES,
        _compiled(rf"size ({N}) exceeds"),
    ),
)
"""What upstreams limit other than tokens; the first match counts."""
UNIT_BYTES = {"k": 10**3, "m": 10**6, "g": 10**9}
CHARACTERS = re.compile(r"\d (?:characters|chars|bytes)\b|\d ?(?:字符|字节)")
TOKENS = re.compile(rf"\d tokens?\b|\b(?:input|prompt|total|many) tokens?\b|{WINDOW.pattern}")

NO_BODY = re.compile(r"^(?:4(?:00|13))? ?(?:status code)? ?\(no body\)$")


def chained(text: str, patterns: tuple[re.Pattern[str], ...], gap: int) -> bool:
    ends = [m.end() for m in patterns[0].finditer(text)]
    for pattern in patterns[1:]:
        if not ends:
            return False
        reached: list[int] = []
        index = 0
        for match in pattern.finditer(text):
            while index + 1 < len(ends) and ends[index + 1] <= match.start():
                index += 1
            if index < len(ends) and 0 <= match.start() - ends[index] <= gap:
                reached.append(match.end())
        ends = reached
    return bool(ends)


MAX_TEXT_LEN = 4096
MAX_TEXTS = 6
MAX_NODES = 64
MAX_DEPTH = 12
MAX_PREFIX_LEN = 512
MAX_NUMBERS = 24

_NARROW = re.compile(r"(?<=\d)[\u00a0\u2009\u202f\u2019'_](?=\d{3}(?!\d))")
_COMMA = re.compile(r"(?<=\d)(?<!\[\d),(?=\d{3}(?!\d))")
_DOT = re.compile(r"(?<=\d)\.(?=\d{3} ?tokens?\b)")
_KILO = re.compile(r"(?<![\w.])(\d{1,6})k(?= ?tokens?\b)")
_GLUED = re.compile(r"(?<=\d)(?=tokens?\b)")
_URL = re.compile(r"https?://[^\s\"'<>)]{1,400}")
_ESCAPE = re.compile(r"\\{1,8}[nrt]")
_UNICODE = re.compile(r"\\{1,8}u([0-9a-fA-F]{4})")
_QUOTES = re.compile(r"[\\\"'`*\u2018\u2019\u201c\u201d]")
_SPACE = re.compile(r"\s+")
_FULL_WIDTH = {0x3000: " "} | {0xFEE0 + code: chr(code) for code in range(0x21, 0x7F)}


def plain(text: str) -> str:
    head = text[:MAX_TEXT_LEN]
    if "\\" in head:
        head = _ESCAPE.sub(" ", _UNICODE.sub(lambda match: chr(int(match.group(1), 16)), head))
    head = _NARROW.sub("", head)
    head = html.unescape(head) if "&" in head else head
    head = head.lower() if head.isascii() else head.translate(_FULL_WIDTH).lower()
    head = _SPACE.sub(" ", _QUOTES.sub("", _URL.sub(" ", head))).replace("(2013)", "")
    head = _GLUED.sub(" ", _DOT.sub("", _COMMA.sub("", head)))
    return _KILO.sub(r"\g<1>000", head).strip()


def decode(text: str) -> object:
    """The JSON value in ``text``, also after a prefix such as ``400`` or ``data:``, else ``text``
    itself.
    """
    if text.startswith(("data:", "event:", "id:", ":")):
        lines = [line[5:].strip() for line in text.splitlines()[:32] if line.startswith("data:")]
        parsed = [value for line in lines if isinstance(value := _decode_json(line), dict | list)]
        failing = [value for value in parsed if failure_in(value) is not None]
        return next(iter(failing or parsed), "\n".join(lines))
    value = _decode_json(text)
    return text if value is None else value


def _decode_json(text: str) -> object:
    for start in sorted(at for at in (text.find("{"), text.find("[")) if at >= 0):
        if start > MAX_PREFIX_LEN or "{" in text[:start]:
            return None
        try:
            value, _ = json.JSONDecoder().raw_decode(text, start)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) or (
            isinstance(value, list) and value and isinstance(value[0], dict)
        ):
            return value if start == 0 else [{"message": text[:start]}, value]
    return None


def failure_in(value: object) -> object | None:
    if isinstance(value, list):
        inner = (failure_in(item) for item in value[:MAX_NODES])
        return next((item for item in inner if item is not None), None)
    if not isinstance(value, dict):
        return None
    response = value.get("response")
    if isinstance(response, dict) and response.get("error"):
        return response
    marked = (
        value.get("type") == "error"
        or value.get("object") == "error"
        or value.get("success") is False
    )
    if value.get("error") or value.get("errors") or marked:
        return value
    answered = any(
        key in value for key in ("choices", "content", "output", "delta", "usage", "object")
    )
    stated = any(
        isinstance(value.get(key), str) for key in ("message", "msg", "error_msg", "detail")
    )
    return (
        value
        if stated and not answered and not str(value.get("type", "")).startswith("response.")
        else None
    )


_CODE_KEYS = frozenset(
    {
        "code",
        "type",
        "status",
        "reason",
        "error_code",
        "errorcode",
        "error_type",
        "errortype",
        "__type",
        "name",
    }
)
_TEXT_KEYS = frozenset(
    {
        *(
            "message",
            "msg",
            "error",
            "error_msg",
            "errormsg",
            "error_message",
            "errormessage",
            "status_msg",
        ),
        *(
            "detail",
            "details",
            "title",
            "description",
            "raw",
            "body",
            "reason",
            "error_description",
            "cause",
        ),
    }
)
_NESTED_KEYS = frozenset(
    {
        *("error", "errors", "detail", "details", "metadata", "innererror", "inner_error"),
        *("response", "data", "cause", "raw", "base_resp"),
    }
)
_STATUS_KEYS = frozenset(
    {
        "code",
        "status",
        "http_status_code",
        "status_code",
        "statuscode",
        "http_status",
        "raw_status_code",
    }
)


@dataclass(slots=True)
class ErrorReport:
    """An error body taken apart: normalised messages, lower-case codes, numbers by field, a status
    if one is in it.
    """

    texts: list[str] = field(default_factory=list)
    codes: set[str] = field(default_factory=set)
    numbers: dict[str, int] = field(default_factory=dict)
    status: int | None = None
    nodes: int = 0

    def walk(self, value: object, *, depth: int, nested: int) -> None:
        self.nodes += 1
        if depth > MAX_DEPTH or self.nodes > MAX_NODES:
            return
        if isinstance(value, str):
            self.texts.append(value[:MAX_TEXT_LEN])
            inner = _decode_json(value) if nested < 3 and ("{" in value or "[" in value) else None
            if inner is not None:
                self.walk(inner, depth=depth + 1, nested=nested + 1)
        elif isinstance(value, list):
            for item in value[:8]:
                self.walk(item, depth=depth + 1, nested=nested)
        elif isinstance(value, dict):
            for name, item in islice(value.items(), MAX_NODES):
                key = name.lower()
                self._note(key, item)
                keys = _TEXT_KEYS if isinstance(item, str) else _NESTED_KEYS
                if isinstance(item, str | dict | list) and key in keys:
                    self.walk(item, depth=depth + 1, nested=nested)

    def _note(self, key: str, item: object) -> None:
        number = item if isinstance(item, int) and not isinstance(item, bool) else None
        if key in _CODE_KEYS and (number is not None or isinstance(item, str)):
            self.codes.add(str(item)[:64])
        if key in _STATUS_KEYS and self.status is None:
            digits = (
                str(item)
                if number is not None or (isinstance(item, str) and len(item) == 3)
                else ""
            )
            self.status = int(digits) if re.fullmatch(r"[45]\d\d", digits) else None
        if number is not None:
            self.numbers[key] = number


def take_apart(value: object) -> ErrorReport:
    """The messages, codes and numeric fields of an error body, whatever its envelope."""
    found = ErrorReport()
    found.walk(value, depth=0, nested=0)
    found.texts = list(dict.fromkeys(filter(None, map(plain, found.texts[:MAX_TEXTS]))))
    found.codes = {code.strip().lower() for code in found.codes}
    found.codes.update(
        match.group(1) for text in found.texts for match in CODE_IN_TEXT.finditer(text)
    )
    return found


_SUM = re.compile(rf"({N}) ?\+ ?({N}) ?>=? ?({N})")
_PAIR = re.compile(rf"(?<![\d+-] )(?<!\d)({N})(?: tokens?)? ?>=? ?({N})(?!\d| ?[-+])")
_RATIO = re.compile(rf"\(({N}) ?/ ?({N}) tokens?\)")
_RANGE = re.compile(rf"input length should be \[\d{{1,3}}, ?({N})\]")
_NUMBER = re.compile(rf"(?<![\w.\-/])({N})(?![\w]|\.\d|%)")
_CUT = re.compile(r"[.;,!?。]| but | while | however ")

# Roles of a number, from the words after it and before it; ``part`` is one of a prompt that is
# given in pieces.
_AFTER = {
    role: re.compile(" ?(?:tokens? )?(?:" + words + ")")
    for role, words in {
        "part": r"in (?:the|your) (?:messages|prompt|input|functions|tools|tool)"
        r"|of (?:text|tool|image|audio|file)? ?input|from the input|(?:inputs?|prompt) tokens",
        "completion": r"(?:in|for) (?:the|your) (?:completion|output|response)"
        r"|max_(?:new_|completion_|output_)?tokens|(?:output|completion) tokens",
        "none": r"draft|bytes|char|pixel|[kmg]b\b|images?|seconds|ms\b|s\b|over the|above the|too ",
        "limit": r"maximum|max\b|limit\b|token limit|token context|available|allowed|supported|permitted",
        "total": r"requested|were requested|used\b|received",
    }.items()
}
_BEFORE = {
    role: re.compile(pattern)
    for role, pattern in {
        "limit": r"(?:max(?:imum)?(?!_(?:new_|completion_|output_)?tokens)|limit|allowed"
        r"|context (?:length|window|size|limit)|context ?(?=[:(])|n_ctx|at most|up to|cannot exceed|not exceed"
        r"|exceeds?|exceeded|less than|longer than|greater than|larger than|more than|<=?|>=?|window|budget|capacity"
        r"|supports|最大|上限|限制|不超过|不能超过|超过|超出|大于|窗口)"
        r"(?:[ _](?:input|prompt|context|sequence|seq|tokens?|length|len|number|of|allowed|total|models?|size|window"
        r"|is|was|the|to|count|only|limit|maximum|max|supported|permitted))*"
        r"(?:[上下文长度的模型输入为是数量窗口限制]{0,12})",
        "prompt": r"(?:number of tokens|token count|prompt|inputs?|messages|contains|contained|resulted in|n_keep|first"
        r"|conversation|history|request|has|have|given|provided|sent|supplied|actual|got|your"
        r"|输入|请求|实际|当前|提示词)"
        r"(?:[ _](?:input|prompt|tokens?|length|count|of|is|was|size|contains|has|are|too|long|number|at|least))*"
        r"(?:[长度的为是数量个共约达]{0,8})",
        "total": r"(?:input and (?:maximum )?output tokens|requested|received|total|sum|current length|used|总)"
        r"(?: (?:of|tokens|is|about|a|at|least))*",
        "completion": r"max_(?:new_|completion_|output_)?tokens(?: is too large)?|completion|output|generation",
        "none": r"\bby\b|upper bound for|\bid\b|error|code|status|http|query length|index|position",
    }.items()
}


class Numbers(msgspec.Struct, frozen=True):
    """What one message states, in tokens; ``requested`` is prompt plus completion, else the total,
    else the prompt.
    """

    limit: int | None = None
    prompt: int | None = None
    completion: int | None = None
    requested: int | None = None

    @property
    def told(self) -> int:
        return sum(
            n is not None for n in (self.limit, self.prompt, self.completion, self.requested)
        )


def read_numbers(text: str) -> Numbers:
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
    roles: dict[str, list[int]] = {}
    last = 0
    for match in islice(_NUMBER.finditer(text), MAX_NUMBERS):
        role = _role(
            text[max(last, match.start() - 64) : match.start()],
            text[match.end() : match.end() + 40],
        )
        last = match.end()
        number = int(match.group(1))
        if not (match.start() == 0 and 400 <= number < 600):  # a status
            roles.setdefault(role, []).append(number)
    limits = roles.get("limit", [])
    parts = roles.get("part", [])
    limit, prompt, completion, total = (
        next(iter(roles.get(role, ())), None) for role in ("limit", "prompt", "completion", "total")
    )
    if parts:
        prompt = sum(dict.fromkeys(parts))
    if (
        limits
        and prompt is None
        and total is None
        and completion is None
        and max(limits) > min(limits)
    ):
        limit = min(limits)
        prompt = max(limits)
    if prompt is not None and completion is not None:
        return Numbers(limit, prompt, completion, prompt + completion)
    return Numbers(limit, prompt, completion, prompt if total is None else total)


def _role(before: str, after: str) -> str:
    if before.endswith("upper bound for "):
        return "none"
    for role, pattern in _AFTER.items():
        if pattern.match(after):
            return role
    tail = _CUT.split(before)[-1]
    best = "none"
    reach = -1
    for role, pattern in _BEFORE.items():
        end = max((m.end() for m in pattern.finditer(tail)), default=-1)
        if end > reach:
            best = role
            reach = end
    return best
