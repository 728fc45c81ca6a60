"""Wordings by which upstreams say that a prompt does not fit, and those that only look like it.

Every pattern is bounded: literal words, ``\\d{1,12}`` and gaps of at most 80 characters, because error text is
hostile input (unbounded lazy gaps take seconds on 3,000 characters). They expect text from ``overflow_body.plain``.
"""

import re
from collections.abc import Iterator
from typing import Final

SAID: Final = 1024
"""Characters of a message in which a wording that is not in the tables is looked for."""

OVERFLOW_CODES: Final = frozenset(
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
RATE_CODES: Final = frozenset(
    {
        "rate_limit_exceeded",
        "rate_limit_error",
        "ratelimitexceeded",
        "ratelimitreached",
        "ratelimiterror",
        "too_many_requests",
        "toomanyrequests",
        "tpm_rate_limit_exceeded",
        "rpm_rate_limit_exceeded",
        "insufficient_quota",
        "insufficient_balance",
        "exceeded_current_quota_error",
        "quota_exceeded",
        "quotaexceeded",
        "resource_exhausted",
        "resourceexhausted",
        "throttlingexception",
        "throttling",
        "throttling.allocationquota",
        "throttling.ratequota",
        "overloaded_error",
        "server_overloaded",
        "billing_hard_limit_reached",
        "1302",  # Zhipu: concurrency, frequency, tokens a minute
        "1303",
        "1305",
    }
)
PAYLOAD_CODES: Final = frozenset(
    {"string_above_max_length", "array_above_max_length", "request_too_large", "characters_too_long"}
)
OTHER_CODES: Final = frozenset(
    {
        "content_filter",
        "content_policy_violation",
        "responsibleaipolicyviolation",
        "data_inspection_failed",
        "datainspectionfailed",
        "invalid_api_key",
        "authentication_error",
        "permission_error",
        "model_not_found",
    }
)

N: Final = r"\d{1,12}"

CODE_IN_TEXT: Final = re.compile(
    r"\b(?:code|type|status|error_code|error_type|errortype|__type|reason) ?[:=] ?([a-z][a-z0-9_.]{2,48})"
)

RATE: Final = tuple(
    (needle, re.compile(pattern))
    for needle, pattern in (
        ("per ", r"\bper (?:\d{1,4} )?(?:sec|second|min|minute|hour|day|week|month)s?\b|\bper \d{1,4}s\b"),
        ("/", r"/ ?min\b"),
        ("p", r"\b[tr]p[mds]\b"),
        ("rate", r"rate.?limit|token rate"),
        ("too many requests", r"too many requests"),
        ("throttl", r"throttl"),
        ("quota", r"\bquota"),
        ("wait", r"wait before|please wait \d"),
        ("for this ", r"for this (?:minute|hour|day)"),
        ("ly", r"\bdaily\b|\bmonthly\b"),
        ("credit", r"\b(?:more|insufficient|enough) credits?\b|credit balance"),
        ("can only afford", r"can only afford"),
        ("billing", r"\bbilling\b"),
        ("overloaded", r"\boverloaded\b"),
        ("try again ", r"try again (?:in \d|tomorrow)"),
        ("429", r"\b(?:error code|status|status code|http|code):? ?429\b|^429\b"),
        ("402", r"\b(?:error code|status|status code|http|code):? ?402\b|^402\b"),
        ("529", r"\b(?:error code|status|status code|http|code):? ?529\b|^529\b"),
        *(
            (word, word)
            for word in (
                "限额",
                "限流",
                "频率",
                "频繁",
                "配额",
                "额度",
                "余额",
                "欠费",
                "每分钟",
                "每秒",
                "每日",
                "并发",
            )
        ),
    )
)
RATE_LIMIT: Final = re.compile(
    rf"\blimit:? ({N})\b|\bof ({N}) (?:input |output )?tokens per\b|\blimit of ({N})\b|\blimit: ({N})"
)
RATE_REQUESTED: Final = re.compile(rf"\brequested:? (?:up to )?({N})\b")

# What the upstream calls the window, what it calls being over it, and what is over.
WINDOW: Final = re.compile(
    r"\b(?:context[ _-]?(?:length|window|size|limit|budget)|maximum context|max(?:imum)?[ _](?:model|seq|sequence"
    r"|input|prompt"
    r"|position)[ _](?:len|length|tokens?|embeddings)|max(?:imum)? (?:allowed )?(?:input|prompt) (?:length|size"
    r"|tokens?)"
    r"|n_ctx|(?:input|prompt|models?) token limit|max(?:imum)? (?:number of )?(?:allowed |input |prompt )?tokens\b"
    r"|tokens? limit for this model|max(?:imum)? tokens? limit)"
)
OVER: Final = re.compile(
    r"\b(?:exceed(?:s|ed|ing)?\b|overflow(?:s|ed)?\b|surpass(?:es|ed)?\b|(?:longer|greater|larger|bigger|more) than"
    r"|too (?:long|large|big|many)\b|over the|above the|beyond|(?:does|do|did|will|would) ?(?:not|nt) fit"
    r"|cant fit|cannot fit"
    r"|no room|exhausted|must be (?:less|fewer|smaller|shorter|<)|must have less|tokens? (?:>|is more))|> ?\d"
)
_SUBJECT: Final = re.compile(r"\b(?:prompt|text|inputs?|messages?|conversation|history|request|query|sequence|chat)\b")
_LONG: Final = re.compile(r"\btoo (?:long|large|big)\b")
_UNIT: Final = re.compile(r"\b(?:models?|tokens?|llm|context)\b")
_MORE: Final = re.compile(r"\b(?:exceeds?|exceeded|longer than|larger than|greater than|more than|above|over)\b")
_COUNT: Final = re.compile(
    r"\b(?:prompt|input|request(?:ed)?|total|number of|message)(?:[ _-](?:input|prompt))?[ _-]tokens?\b|\btoken count\b"
)
_BOUND: Final = re.compile(r"\b(?:limit|max|maximum|window|allowed|models?|\d{3,12})\b")
SUMMED: Final[tuple[tuple[re.Pattern[str], ...], int]] = (
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
"""Prompt and answer together are too much."""
GENERIC: Final[tuple[tuple[tuple[re.Pattern[str], ...], int], ...]] = (
    ((WINDOW, OVER), 80),
    ((OVER, WINDOW), 80),
    ((_SUBJECT, _LONG, _UNIT), 30),
    ((_SUBJECT, _MORE, re.compile(r"\d tokens?\b")), 40),
    ((_COUNT, _MORE, _BOUND), 40),
    (
        (
            re.compile(
                r"\b(?:prompt|inputs?|prompt tokens|input tokens|messages|conversation)(?: (?:is|are|was"
                r"|were))? too long"
            ),
        ),
        0,
    ),
    SUMMED,
)
"""Chains of patterns that follow one another in a sentence, and the largest gap in characters."""
CONDITION: Final = re.compile(r"\b(?:if|when|whenever|unless|whether|unknown|unrecognized|truncation|set to|so that)\b")
GUARD: Final = re.compile(
    r"\b(?:if|when|whenever|unless|whether|parameter|unknown|unrecognized|unsupported|not supported|does not support"
    r"|beta|header|must be (?:a|an|one of|positive|set|greater|at least)|expected (?:an? )?(?:integer|string|number"
    r"|object)|not a valid|invalid (?:type|value|json)|not enabled|not available|field required|deprecated"
    r"|too small|minimum"
    r"|at least one|truncation|summary|cache|caching|debug|documentation"
    r"|logit_bias|logprobs|reasoning|thinking|training|n_ctx_train"
    r"|batch size)\b"
)
CLAUSE: Final = re.compile(r"[.!?;:] |。")
SENTENCE: Final = re.compile(r"[.!?;] |。")
SHORTEST_SENTENCE: Final = 4
MOST_SENTENCES: Final = 40

PHRASES: Final = tuple(
    (needle, re.compile(pattern))
    for needle, pattern in (
        (
            "maximum context length",
            r"maximum context length (?:is|of|was|:)? ?\(?\d",
        ),  # OpenAI, DeepSeek, vLLM, OpenRouter, SGLang
        ("input tokens exceed", r"input tokens exceed the configured limit"),  # OpenAI gpt-5
        (
            "exceed",
            r"exceeds? (?:(?:the|this|your|models?|available|max(?:imum)?|allowed) ){0,4}context(?! deadline)\b",
        ),
        ("prompt", r"prompt (?:tokens )?(?:is )?too (?:long|large)"),  # Anthropic, Baidu, Tencent, Ollama
        ("exceed context limit", r"input length and max_tokens exceed context limit"),  # Anthropic, Bedrock, Vertex
        ("max_tokens", r"max_tokens (?:would )?exceeds? (?:the )?context"),
        ("input token count", r"input token count.{0,30}exceeds? the max"),  # Gemini
        (
            "input is too long for",
            r"input is too long for (?:the |this )?(?:requested )?model",
        ),  # Bedrock, Hugging Face
        ("total text bytes", r"too many total text bytes"),  # Bedrock through Databricks
        ("too many input tokens", r"too many input tokens"),  # Bedrock Nova
        ("max input tokens: ", r"max input tokens: \d"),  # SAP, OCI
        ("exceed model maximum", r"prompt tokens (?:\(\d{1,12}\) )?exceed model maximum"),  # Bedrock Mantle
        ("maximum prompt length is", r"maximum prompt length is \d"),  # xAI
        ("reduce the length of", r"reduce the length of (?:the|your) (?:messages|prompt|input)"),  # Groq, Cerebras
        ("while limit is", r"current length is \d{1,12} while limit is \d"),  # Cerebras
        ("too large for model with", r"too large for model with \d{1,12} maximum context"),  # Mistral
        ("model token limit", r"exceed(?:ed|s)? (?:the )?model token limit"),  # Moonshot
        ("context window exceeds limit", r"context window exceeds limit"),  # MiniMax
        ("prompt", r"prompt exceeds max length|prompt ?超长"),  # Zhipu
        ("range of input length", r"range of input length should be"),  # DashScope, Xunfei
        (
            "total number of tokens",
            r"total number of tokens (?:\([a-z ]{0,40}\)|in the prompt) cannot exceed",
        ),  # Cohere
        (
            "longer than the",
            r"longer than the (?:models?|maximum) (?:maximum )?(?:context|model) length",
        ),  # Together, SGLang, vLLM
        ("cannot exceed the total token", r"input tokens \d{1,12} cannot exceed the total tokens? limit"),  # watsonx
        ("the maximum allowed", r"exceeds the maximum allowed (?:input )?length"),  # Poolside, Baseten, SGLang
        ("prompt token count of", r"prompt token count of \d{1,12} exceeds"),  # GitHub Copilot
        ("model. max size: ", r"too large for [a-z0-9_.:/ -]{1,60} model\. max size: \d{1,12} tokens"),  # GitHub Models
        ("after expanding", r"multimodal prompt is too long after expanding"),  # SGLang
        ("max_new_tokens must be <=", r"inputs tokens \+ max_new_tokens must be <="),  # TGI
        ("inputs must have less than", r"inputs must have less than \d{1,12} tokens"),  # TGI
        ("context size has been exceeded", r"context size has been exceeded"),  # llama.cpp
        ("exceed context window", r"requested tokens \(\d{1,12}\) exceed context window"),  # llama-cpp-python
        (
            "context",
            r"context (?:length|window|size|limit)[ _](?:has been |was |is )?(?:exceeded|overflow|reached|full)",
        ),
        (
            "context",
            r"out of context space|context is full|ran out of context|prompt is longer than the context",
        ),  # Ollama
        ("input length exceeds the", r"input length exceeds the (?:context|max)"),  # Ollama, DashScope
        ("exceeded max", r"exceeded max(?:imum)? context length"),  # Ollama, ctransformers
        ("initial prompt is greater", r"to keep from the initial prompt is greater than the context"),  # LM Studio
        ("trying to keep the first", r"trying to keep the first"),  # LM Studio
        ("n_keep", r"n_keep \(?:? ?\d{1,12}\)? ?>="),  # LM Studio
        ("not exceed max_seq_len", r"sum of prompt length.{0,60}should not exceed max_seq_len"),  # TensorRT-LLM, NIM
        (
            "prompt length",
            r"prompt length.{0,20}exceeds? (?:the )?max(?:imum)? (?:input|sequence) length",
        ),  # TensorRT-LLM
        ("less than max_seq_len", r"prompt_tokens \(\d{1,12}\) must be less than max_seq_len"),  # SiliconFlow
        ("the configured context size", r"prompt has \d{1,12} tokens.{0,10} but the configured context size"),  # DS4
        ("more than max tokens allowed", r"tokens in request more than max tokens allowed"),
        ("maximum output tokens", r"estimated number of input and maximum output tokens.{0,30}exceeded"),  # Workers AI
        ("got -", r"max_tokens must be at least 1, got -\d"),  # old vLLM: window less prompt went below zero
        ("max tokens of", r"max tokens of \d{1,12} exceeded"),  # Snowflake
        ("length of all messages", r"total length of all messages is too long"),  # Perplexity
        ("exceed max message tokens", r"total tokens of image and text exceed max message tokens"),  # Volcano Ark
        ("request content exceeds", r"request content exceeds the internal limit of the (?:large )?model"),
        ("contextwindowexceedederror", r"contextwindowexceedederror"),  # LiteLLM
        ("context overflow: ", r"context overflow: "),
        ("_exceeded", r"context_(?:window|length|size)_exceeded"),
        ("exceeds", r"request (?:size )?exceeds (?:the )?model context"),
    )
)
"""Wordings that say it outright: a word that must be there, and the pattern that is tried if it is."""
_CN_OVER: Final = re.compile(r"超长|过长|太长|超出|超过|超限|大于")
CHINESE: Final[tuple[tuple[tuple[re.Pattern[str], ...], int], ...]] = (
    ((re.compile(r"上下文|输入|提示词?|请求|对话|会话|消息|内容|文本|prompt|tokens?"), _CN_OVER), 24),
    ((_CN_OVER, re.compile(r"上下文|最大输入|token|窗口")), 16),
    ((re.compile(r"压缩上下文"),), 0),
    ((re.compile(r"コンテキスト|トークン|컨텍스트|토큰"), re.compile(r"超え|超過|長すぎ|초과")), 24),
)
CHINESE_GUARD: Final = re.compile(
    r"字节|字符|图片|图像|文件|大小|次数|个数|条数|时长|超时|时间|最大输出|输出长度|max_tokens|\bmb\b|温度|用量|账户"
)
CHINESE_TOKENS: Final = re.compile(r"tokens?|コンテキスト|トークン|컨텍스트|토큰|上下文|超长|过长|太长|长度|窗口")
LAST_RESORT: Final = re.compile(
    r"too many tokens|token limit (?:exceeded|reached)|exceed(?:s|ed)? (?:the )?tokens? limit"
)

INPUT_LIMIT: Final = re.compile(
    r"maximum prompt length|input tokens exceed the configured limit|max(?:imum)?(?: allowed)? (?:input"
    r"|prompt) (?:tokens?"
    r"|length)|range of input length|input token count.{0,30}exceeds? the max|prompt token count of"
    r"|inputs must have less"
    r"|exceed model maximum|max_(?:input|prompt)_(?:tokens?|len)|maximum number of (?:input|prompt) tokens|最大输入"
)
DOUBTFUL: Final = re.compile(rf"input tokens plus {N} max_(?:completion_)?tokens")
"""vLLM of about 0.15: one build prints the window less ``max_tokens`` as the maximum context length."""
AT_LEAST: Final = re.compile(r"at least \d{1,12} (?:input|prompt)|\bn_keep\b|trying to keep the first")
BATCH: Final = re.compile(rf"input \(({N}) tokens\) is too large to process.{{0,60}}batch size: ({N})")

_MAX_TOKENS: Final = re.compile(
    r"max(?:imum)?_(?:(?:completion|output|new)_)?tokens?(?:_to_sample)?\b|max(?:imum)? ?(?:completion|output|new"
    r"|generated)"
    r" ?tokens\b|\boutput token limit|maximum (?:allowed )?number of (?:output|completion) tokens|最大输出"
)
_BARE_MAX: Final = re.compile(r"\bmax(?:imum)? tokens\b|\bmaxtokens\b|maximum number of tokens you requested")
_CAPPED: Final = re.compile(
    r"too (?:large|high|big|many)|less than|lower than|at most|[<>]=?|(?:above|the) maximum|must not|exceeds?\b"
    r"|exceeded|greater than"
    r"|larger than|cannot be|should be|must be|\brange\b|between|超|范围|大于|不能|上限"
)
CAPS: Final[tuple[tuple[tuple[re.Pattern[str], ...], int], ...]] = (
    ((_MAX_TOKENS, _CAPPED), 60),
    ((_BARE_MAX, _CAPPED), 60),
    ((re.compile(r"range of"), _MAX_TOKENS), 30),
    ((re.compile(r"supports? at most \d{1,12} (?:completion|output) tokens"),), 0),
)
CAP_GUARD: Final = re.compile(
    r"thinking|budget_tokens|at least|positive|greater than 0|non-?negative|\bmissing\b|\brequired\b|\bhigher\b"
    r"|not supported|unsupported|not compatible|valid integer|must be an? (?:int|number)|not a valid"
)
CAP_LIMITS: Final = tuple(
    re.compile(pattern)
    for pattern in (
        rf"at most ({N})",
        rf"> ?({N})",
        rf"(?:less than or equal to|less than|lower than|no more than|<=?|up to|not exceed) ?({N})",
        rf"[\[(]\d{{1,2}}, ?({N})[\])]",
        rf"\(inclusive\) to ({N})",
        rf"between \d and ({N})",
        rf"(?:output tokens|limit|maximum) (?:of |is |\()({N})",
        rf"max_model_len=(?:[a-z_]{{1,30}}=)?({N})",
    )
)
CAP_ASKED: Final = re.compile(
    rf"(?:too (?:large|high|big)[:,]?|max_(?:completion_|output_|new_)?tokens[:=]? ?\(?|but got|received|value of"
    rf"|got) ?({N})"
)

SIZED: Final = re.compile(r"exceed|max|limit|\btoo\b|more than|less than|longer|larger|at most|greater|超|限制|上限")
PAYLOAD: Final = re.compile(
    r"string too long|array too long|expected maxlength|entity too large|payload too large|request_too_large"
    r"|body (?:is )?too large|(?:request|body|payload|file|image|message|upload) size|exceeds the maximum size"
    r"|content.?length|max input characters|maximum allowed size|too many (?:images|messages|tools|items)"
)
UNITS: Final = re.compile(
    r"\b(?:bytes?|characters?|chars|pixels?|pages?|images?|seconds?|items?|elements|(?:\d{1,9} ?)?[kmg]i?b)\b|字节|字符"
)
CHARACTERS: Final = re.compile(r"\d (?:characters|chars|bytes)\b|\d ?(?:字符|字节)")
TOKENS: Final = re.compile(rf"\d tokens?\b|\b(?:input|prompt|total|many) tokens?\b|{WINDOW.pattern}")

NO_BODY: Final = re.compile(r"^(?:4(?:00|13))? ?(?:status code)? ?\(no body\)$")


def chained(text: str, patterns: tuple[re.Pattern[str], ...], gap: int) -> bool:
    """Whether the patterns follow one another, each at most ``gap`` characters behind the last; linear in the text."""
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


def first(table: tuple[tuple[str, re.Pattern[str]], ...], text: str) -> Iterator[re.Match[str]]:
    """The matches of a table's rows in order, the first of each row; a row is tried only if its word is there."""
    for needle, pattern in table:
        found = pattern.search(text) if needle in text else None
        if found:
            yield found
