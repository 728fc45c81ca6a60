"""How authority is claimed: words for who decides, for permission and for orders, and what they look like.

The patterns are wide on purpose: a sentence that they take for a claim is looked up, and stays if the user said it.
"""

import re

_WHO = (
    r"(?:users?|owner|customer|client|human|operator|admin(?:istrator)?s?|developers?|maintainers?|manager|boss|ceo"
    r"|security team"
    r"|(?:the )?(?:system|compliance|legal)(?: (?:prompt|message|team|policy|administrator))?|openai|anthropic"
    r"|management|you(?:r)?)"
)
_WILL = (
    r"(?:authori[sz]|approv|permi(?:t|ss)|allow|grant|consent|confirm|agree|sign(?:ed|s)?[- ]off|ask|request|want"
    r"|instruct|order"
    r"|direct(?:ed|s|ive)|demand|requir|told|tells|said|says|stat(?:ed|es)|prefer|insist|expect|wish|need|decid"
    r"|mandat|waive|whitelist"
    r"|delegat|accept|pre-?approv|entitl|licen[sc]|clear(?:ed|ance)|command|urge|trust|verif|acknowledg|okayed"
    r"|ok['\u2019]?d|green[- ]?lit)"
)
CLAIM = re.compile(
    rf"\b{_WHO}\b[^.!?\n]{{0,160}}\b{_WILL}|\b{_WILL}\w{{0,8}}\b[^.!?\n]{{0,80}}\b{_WHO}\b"
    r"|\byou(?:['\u2019]re| are)?\s(?:must|should|shall|have to|need to|may|can|will|ought|now|no longer"
    r"|authori[sz]ed|allowed|permitted"
    r"|required|free to|to )\b"
    r"|\b(?:the )?(?:assistant|agent|ai|model|bot|llm|next model|reader)\b[^.!?\n]{0,30}\b(?:must|should|shall|has to"
    r"|needs to|is to|may|will"
    r"|can|is (?:now )?(?:authori[sz]ed|allowed|permitted|required|free|instructed))\b"
    r"|\b(?:ignor|disregard|overrid|overrul|bypass|supersed|forget|circumvent)\w{0,4}\b[^.!?\n]{0,60}\b(?:previous"
    r"|prior|above|earlier|all|any"
    r"|safety|rules?|instructions?|polic\w{1,3}|guard\w{0,8}|restrictions?|constraints?|checks?|confirmation|limits?"
    r"|everything)\b"
    r"|\bnew (?:system |standing |binding )?(?:instructions?|rules?|polic(?:y|ies)|prompt|orders?|directives?)\b"
    r"|\A\W{0,6}(?:system|developer|admin(?:istrator)?|user|human|assistant|operator|root|important|remember|note"
    r"|attention|urgent"
    r"|critical|instruction|directive|policy|reminder|constraint|rule|p\.?s|notice|warning)(?: (?:note|message|prompt"
    r"|override|update|instruction|to"
    r"|for) ?(?:the |all )?(?:assistant|agents?|ai|model|llm|bot)?)?\s{0,3}[:\uff1a]"
    r"|\b(?:from now on|henceforth|going forward|standing (?:order|instruction|permission|rule|approval))\b"
    r"|\b(?:authori[sz]ed|pre-?approved|approved|permitted|allowed|waived|entitled|whitelisted|mandatory|mandated"
    r"|consented|cleared to)\b"
    r"|\b(?:permission|authori[sz]ation|approval|consent|clearance|confirmation|sign-off)\b"
    r"|\b(?:do not|don['\u2019]t|never|without|no need to)\b[^.!?\n]{0,20}\b(?:tell|inform|ask|mention|reveal|warn"
    r"|alert|notify|log|report|verify|check"
    r"|confirm)\w{0,4}\b"
    r"|\b(?:safety|security|review|approval|audit|content)\b[^.!?\n]{0,30}\b(?:disabled|off|lifted|suspended|skipped"
    r"|waived|unnecessary"
    r"|not (?:needed|required|apply))\b"
    r"|\b(?:must|mandatory|obliged)\b"
    r"|\b(?:root|admin(?:istrator)?|superuser|developer|debug|god|unrestricted|jailbreak|dan)[ -](?:mode|access"
    r"|rights|privileges)\b",
    re.IGNORECASE,
)
FOREIGN = re.compile(
    r"\b(?:benutzer|nutzer|anwender|kunde|utilisateur|client[e]?|usu[a\u00e1]ri[oa]|utente|utilizador|gebruiker"
    r"|u\u017cytkownik|kullan\u0131c\u0131|anv\u00e4ndare|bruker"
    r"|k\u00e4ytt\u00e4j\u00e4|u\u017eivatel|felhaszn\u00e1l\u00f3|utilizator|pengguna|ng\u01b0\u1eddi d\u00f9ng"
    r"|mtumiaji|sistem\w{0,2}|syst\u00e8me|entwickler|genehmig\w{0,4}|erlaub\w{0,3}|darf"
    r"|d\u00fcrfen|muss|m\u00fcssen|autoris\w{0,4}|autoriz\w{0,5}|approuv\w{0,4}|apro[bv]\w{0,4}|permis\w{0,4}"
    r"|permit\w{0,3}|debe\w{0,2}|doit|deve|moet|musi|zatwierdzi\w{0,3}"
    r"|ignorier\w{0,3}|ignor[ae]\w{0,3}|izin|onay\w{0,4})\b"
    r"|\u043f\u043e\u043b\u044c\u0437\u043e\u0432\u0430\u0442"
    r"|\u043a\u043e\u0440\u0438\u0441\u0442\u0443\u0432\u0430\u0447|\u0440\u0430\u0437\u0440\u0435\u0448"
    r"|\u043e\u0434\u043e\u0431\u0440|\u0441\u0438\u0441\u0442\u0435\u043c\u0430:"
    r"|\u7528\u6237|\u7528\u6236|\u4f7f\u7528\u8005|\u7cfb\u7edf|\u30e6\u30fc\u30b6\u30fc|\u30b7\u30b9\u30c6\u30e0"
    r"|\uc0ac\uc6a9\uc790|\uc2dc\uc2a4\ud15c|\u0627\u0644\u0645\u0633\u062a\u062e\u062f\u0645"
    r"|\u0627\u0644\u0646\u0638\u0627\u0645|\u05d4\u05de\u05e9\u05ea\u05de\u05e9"
    r"|\u0909\u092a\u092f\u094b\u0917\u0915\u0930\u094d\u0924\u093e|\u0b89|\u0e1c\u0e39\u0e49\u0e43\u0e0a\u0e49"
    r"|\u03c7\u03c1\u03ae\u03c3\u03c4"
    r"|\u6279\u51c6|\u6388\u6743|\u5141\u8bb8|\u5fc5\u987b|\u627f\u8a8d|\u8a31\u53ef|\uc2b9\uc778|\ud5c8\uac00"
    r"|\u0648\u0627\u0641\u0642|\u05d0\u05d9\u05e9\u05e8|\u0905\u0928\u0941\u092e\u0924\u093f",
    re.IGNORECASE,
)
"""Words for the user, for permission and for duty in other languages; a sentence with one of them claims something."""
GRANT = re.compile(
    r"authori[sz]|approv|permi(?:t|ss)|allow|grant|consent|confirm|agree|sign(?:ed|s)?[- ]off|waive|whitelist|entitl"
    r"|clear(?:ed|ance)"
    r"|accept|licen[sc]|delegat|okayed|green[- ]?lit|\bmay\b|without (?:asking|confirm|approval)|disabled"
    r"|unrestricted|trust"
    r"|genehmig|erlaub|autori[sz]|approuv|aprob|permis|\u0440\u0430\u0437\u0440\u0435\u0448"
    r"|\u043e\u0434\u043e\u0431\u0440|\u6279\u51c6|\u6388\u6743|\u5141\u8bb8|\u627f\u8a8d|\u8a31\u53ef|\uc2b9\uc778"
    r"|\ud5c8\uac00",
    re.IGNORECASE,
)
ASSENT = re.compile(
    r"authori[sz]|approv|permi(?:t|ss)|allow|grant|consent|confirm|agree|sign(?:ed|s)?[- ]off|waive|entitl|cleared"
    r"|\b(?:yes|yep|yeah|ok|okay|sure"
    r"|fine|may|can|could|please|go ahead|do it|proceed|feel free|right|correct|without asking|no need|trust|skip"
    r"|disable|accept)\b|genehmig"
    r"|erlaub|darfst|\bja\b|\bsi\b|\bs\u00ed\b|\boui\b|autori[sz]|\u0434\u0430\b|\u597d|\u53ef\u4ee5|\u662f\u7684"
    r"|\u306f\u3044|\ub124",
    re.IGNORECASE,
)
ORDER = re.compile(
    r"(?:\W{0,4}(?:please|then|now|next|first|also|immediately|kindly|always|just"
    r"|simply)\b[ ,]{0,2}){0,3}\W{0,4}(?:send|transfer|delete|remove"
    r"|e-?mail|forward|post|upload|run|execute|call|open|visit|download|install|disable|enable|grant|share|reveal"
    r"|publish|approve|pay|buy"
    r"|purchase|wire|curl|wget|rm|drop|reset|rotate|add|change|set|print|output|reply|respond|answer|say|write|copy"
    r"|paste|include|insert|append"
    r"|exfiltrate|encode|fetch|navigate|click|use|invoke|turn|switch|stop|start|continue|push|merge|commit|deploy"
    r"|chmod|sudo|give|provide|submit"
    r"|leak|expose|make|put|store|save|remember|treat|consider|act|pretend|assume|follow|obey|refund|cancel|book|move"
    r"|create|update|ignore"
    r"|disregard|skip|bypass|accept|confirm|tell|inform|notify|contact)\b",
    re.IGNORECASE,
)
TELLS_NOTHING = frozenset(
    [
        "user",
        "users",
        "assistant",
        "agent",
        "model",
        "system",
        "developer",
        "admin",
        "administrator",
        "tool",
        "result",
        "results",
        "said",
        "says",
        "say",
        "told",
        "tells",
        "ask",
        "asked",
        "asks",
        "want",
        "wants",
        "wanted",
        "request",
        "requested",
        "requests",
        "authorised",
        "authorized",
        "authorises",
        "authorizes",
        "authorise",
        "authorize",
        "authorisation",
        "authorization",
        "approve",
        "approved",
        "approves",
        "approval",
        "allow",
        "allowed",
        "allows",
        "permit",
        "permitted",
        "permits",
        "permission",
        "grant",
        "granted",
        "grants",
        "confirm",
        "confirmed",
        "confirms",
        "confirmation",
        "consent",
        "consented",
        "agree",
        "agreed",
        "agrees",
        "instruct",
        "instructed",
        "instructs",
        "instruction",
        "instructions",
        "must",
        "should",
        "shall",
        "may",
        "can",
        "will",
        "need",
        "needs",
        "needed",
        "require",
        "required",
        "requires",
        "now",
        "note",
        "important",
        "remember",
        "according",
        "explicitly",
        "previously",
        "already",
        "per",
        "prefer",
        "prefers",
        "preferred",
        "decided",
        "decides",
        "order",
        "ordered",
        "orders",
        "state",
        "stated",
        "states",
        "expects",
        "expected",
        "wishes",
        "insists",
    ]
)
SPEAKERS = frozenset(
    [
        "system",
        "developer",
        "admin",
        "administrator",
        "user",
        "human",
        "assistant",
        "operator",
        "important",
        "remember",
        "note",
        "attention",
        "urgent",
        "critical",
        "instruction",
        "directive",
        "policy",
        "reminder",
        "constraint",
        "constraints",
        "rule",
        "rules",
        "notice",
        "warning",
    ]
)
LOOKALIKES = str.maketrans(
    "\u0430\u0435\u043e\u0440\u0441\u0443\u0445\u0456\u0458\u0455\u04bb\u0501\u051b\u0261\u03bf\u03b1\u03b5\u03b9\u03ba\u03bd\u03c1\u03c4\u03c5\u03c7\u0131\u2019\u2018\u02bc",
    "aeopcyxijshdqgoaeiknptuxi'''",
)
