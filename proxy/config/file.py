"""A YAML file as plain data with the line of every value, and typed values made from it.

The file is closed: a key that no field of the dataclasses names is an error with file, line, path
and the nearest name. ``${NAME}`` and ``${NAME:-default}`` inside a scalar read the environment;
what they give stays text (a number field still accepts it), and an empty result is null.
"""

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import ConfigDict, TypeAdapter, ValidationError

from proxy.errors import redact_shapes

KeyPath = tuple[str | int, ...]
"""The path of a value in the data: ``("models", 0, "match")`` is ``models[0].match``."""

MAX_DEPTH = 32
_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-((?:[^}$]|\$(?!\{))*+))?\}")
_MAX_SIZE = 2**20
_MAX_READ = 4 * _MAX_SIZE
_PER_VALUE = 16
_MAX_NUMBER_LEN = 64
_MANY_KEYS = 16


class ConfigError(ValueError):
    """A configuration that Weir does not start with.

    Attributes:
        problems: every fault found, one line each, as ``weir.yaml:12: listen.prot: unknown key;
            …``, without what looks like a credential: a key may be in the place of a name.
    """

    def __init__(self, *problems: str) -> None:
        self.problems = tuple(redact_shapes(each) for each in problems)
        super().__init__("\n".join(self.problems))


@dataclass(frozen=True, slots=True, kw_only=True)
class Document:
    name: str
    data: Mapping[str, object] = field(default_factory=dict)
    places: Mapping[KeyPath, str] = field(default_factory=dict)

    def place(self, path: KeyPath) -> str:
        """``weir.yaml:12``, ``WEIR_PORT`` or ``--port``: of the value at ``path`` or of what holds
        it.
        """
        held = (path[:length] for length in range(len(path), 0, -1))
        return next((self.places[each] for each in held if each in self.places), self.name)

    def problem(self, path: KeyPath, message: str) -> str:
        return _line(self.place(path), path, message)

    def overlaid(self, values: Mapping[KeyPath, tuple[str, object]]) -> "Document":
        """The document with other values, each with where it comes from."""
        data: object = self.data
        places = dict(self.places)
        for path, (source, value) in values.items():
            data = _replaced(data, path, value)
            places = {at: place for at, place in places.items() if at[: len(path)] != path}
            places[path] = source
        return Document(
            name=self.name, data=typing.cast("Mapping[str, object]", data), places=places
        )


def _line(place: str, path: KeyPath, message: str) -> str:
    return ": ".join(part for part in (place, dotted(path), message) if part)


def _replaced(data: object, path: KeyPath, value: object) -> object:
    """A copy of the data with ``value`` at ``path``; what is no section on the way there becomes
    one.
    """
    if not path:
        return value
    key, *rest = path
    if isinstance(data, list | tuple) and isinstance(key, int):
        return [
            _replaced(each, tuple(rest), value) if at == key else each
            for at, each in enumerate(data)
        ]
    section = data if isinstance(data, Mapping) else {}
    return {**section, key: _replaced(section.get(key), tuple(rest), value)}


def dotted(path: KeyPath) -> str:
    """``upstreams.openai.base_url`` or ``models[0].match``."""
    return "".join(f"[{key}]" if isinstance(key, int) else f".{key}" for key in path).removeprefix(
        "."
    )


def leaves_of(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Every value that is no section with its path; a list is one value unless it holds sections or
    lists.
    """
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from leaves_of(each, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for at, each in enumerate(value):
            yield from leaves_of(each, (*path, at))
    else:
        yield path, value


def nearest(word: str, known: Sequence[str]) -> str:
    """``; did you mean X?`` for the known name nearest to ``word``, else the list of all known
    names.
    """
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    if close:
        return f"; did you mean {close[0]}?"
    return f"; known: {', '.join(known)}" if known else ""


def read_document(path: Path, *, env: Mapping[str, str]) -> Document:
    """The file's data and places; ConfigError if it cannot be read, is no YAML, or names an unset
    variable.
    """
    try:
        with path.open("rb") as file:
            text = file.read(_MAX_SIZE + 1).decode("utf-8")
    except (OSError, UnicodeDecodeError) as fault:
        reason = fault.strerror if isinstance(fault, OSError) else "not UTF-8"
        raise ConfigError(f"{path}: cannot be read: {reason}") from fault
    return parse_document(text, name=str(path), env=env)


def parse_document(text: str, *, name: str, env: Mapping[str, str]) -> Document:
    if len(text) > _MAX_SIZE:
        raise ConfigError(f"{name}: larger than 1 MiB")
    reader = _Reader(text, name, env)
    try:
        data = reader.document()
    except yaml.MarkedYAMLError as fault:
        line = fault.problem_mark.line + 1 if fault.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not YAML: {fault.problem or fault.context}") from fault
    except yaml.YAMLError as fault:
        raise ConfigError(f"{name}: not YAML: {str(fault).splitlines()[0]}") from fault
    if reader.problems:
        raise ConfigError(*reader.problems)
    if not isinstance(data, dict | None):
        raise ConfigError(f"{name}:1: should be a mapping of keys to values")
    return Document(name=name, data=data or {}, places=reader.places)


class _Reader:
    """Makes values of the events of PyYAML's parser.

    Its composer and ``safe_load`` recurse once a level until the stack is full, and let a few
    aliases expand to gigabytes. Keys are words; so are dates, and on, off, yes and no, which YAML
    1.1 reads as booleans.
    """

    def __init__(self, text: str, name: str, env: Mapping[str, str]) -> None:
        self._events = yaml.parse(text, Loader=_LOADER)
        self._scalars = yaml.SafeLoader("")
        self._name = name
        self._env = env
        self._anchors: dict[str, tuple[object, int]] = {}
        self._read = 0  # characters, each alias counting as what it refers to
        self.places: dict[KeyPath, str] = {}
        self.problems: list[str] = []

    def document(self) -> object:
        roots = [
            self._value(event, ()) for event in self._events if isinstance(event, yaml.NodeEvent)
        ]
        if len(roots) > 1:
            raise ConfigError(f"{self._name}: should be one document")
        return roots[0] if roots else None

    def _value(self, event: typing.Any, path: KeyPath) -> object:
        if len(path) > MAX_DEPTH:
            raise ConfigError(self._problem(event, (), f"nested more than {MAX_DEPTH} levels deep"))
        if path:
            self.places.setdefault(path, self._place(event))
        before = self._read
        self._read += _PER_VALUE
        made: object
        if isinstance(event, yaml.AliasEvent):
            if event.anchor not in self._anchors:
                raise ConfigError(
                    self._problem(
                        event, path, f"*{event.anchor} stands before or within what it names"
                    )
                )
            made, size = self._anchors[event.anchor]
            self._read += size
        elif isinstance(event, yaml.MappingStartEvent):
            made = self._mapping(path)
        elif isinstance(event, yaml.SequenceStartEvent):
            made = self._sequence(path)
        else:
            made = self._scalar(event, path)
        if self._read > _MAX_READ:
            raise ConfigError(
                self._problem(event, (), "too much to read, with what its aliases stand for")
            )
        if event.anchor is not None:
            self._anchors.setdefault(event.anchor, (made, self._read - before))
        return made

    def _mapping(self, path: KeyPath) -> dict[str, object]:
        found: dict[str, object] = {}
        while not isinstance(event := next(self._events), yaml.MappingEndEvent):
            if not isinstance(event, yaml.ScalarEvent):
                raise ConfigError(self._problem(event, path, "a key should be a plain word"))
            at = (*path, event.value)
            if event.value in found:
                self.problems.append(self._problem(event, at, "stands here twice"))
            self.places[at] = self._place(event)
            found[event.value] = self._value(next(self._events), at)
        return found

    def _sequence(self, path: KeyPath) -> list[object]:
        found: list[object] = []
        while not isinstance(event := next(self._events), yaml.SequenceEndEvent):
            found.append(self._value(event, (*path, len(found))))
        return found

    def _scalar(self, event: yaml.ScalarEvent, path: KeyPath) -> object:
        text = event.value
        self._read += len(text)
        if "${" in text:
            return self._expanded(event, path)
        tag = event.tag
        if tag in {None, "!"}:
            tag = self._scalars.resolve(yaml.ScalarNode, text, event.implicit)  # type: ignore[no-untyped-call]
        kind = tag.rpartition(":")[2]
        if kind == "timestamp" or (kind == "bool" and text.lower() not in {"true", "false"}):
            return text
        try:
            if kind in {"int", "float"} and len(text) > _MAX_NUMBER_LEN:
                raise ValueError(text)  # noqa: TRY301 - 1:0:0:0… is one, and takes quadratic time
            return typing.cast("object", self._scalars.construct_object(yaml.ScalarNode(tag, text)))
        except (yaml.YAMLError, ValueError):
            self.problems.append(self._problem(event, path, "not a plain value"))
            return None

    def _expanded(self, event: yaml.ScalarEvent, path: KeyPath) -> str | None:
        def read(match: re.Match[str]) -> str:
            name, default = match.groups()
            value = self._env.get(name) or default
            if value is None:
                said = f"the environment has no {name} (a default is written ${{{name}:-default}})"
                self.problems.append(self._problem(event, path, said))
            return value or ""

        expanded = _VARIABLE.sub(read, event.value)
        if "${" in _VARIABLE.sub("", event.value):
            self.problems.append(self._problem(event, path, "a variable is written ${NAME}"))
        return expanded or None

    def _place(self, event: yaml.Event) -> str:
        return f"{self._name}:{event.start_mark.line + 1 if event.start_mark else 1}"

    def _problem(self, event: yaml.Event, path: KeyPath, message: str) -> str:
        return _line(self._place(event), path, message)


GONE: Mapping[str, str] = types.MappingProxyType(
    {
        "listen.workers": (
            "start one Weir for each process and have them share a PostgreSQL (docs/operating.md)"
        ),
        "evaluate": "weir evaluate measures recorded conversations",
        "when_full": "enforce: reject removes nothing and refuses what does not fit",
        "memory.tags": "memory is a list of what texts begin with, and of names",
        "memory.names": "memory is a list of what texts begin with, and of names",
        "ingest.sub_agent_tools": "ingest.sub_agents has tokens by the name of a tool",
        "ingest.sub_agent_cap": "ingest.sub_agents has tokens by the name of a tool",
        "notes.extract": "notes.extract_from is the step from which on notes are taken",
        "notes.min_turns": "notes.extract_from is the step from which on notes are taken",
        "recall.embeddings": "embeddings is a key of the policy",
        "summaries.in_place": "notes are always written apart from the conversation",
        "summaries.tokens_per_hour": (
            "limit what the summariser's own key may spend at its provider"
        ),
    }
)
"""Maps removed keys (those of a policy as they appear in it) to what to do instead.
"""

Value = typing.TypeVar("Value")

_EMPTY: Mapping[str, object] = types.MappingProxyType(
    {"dataclass_type": {}, "dict_type": {}, "mapping_type": {}, "tuple_type": []}
)


def typed(shape: type[Value], document: Document, *, at: KeyPath = ()) -> Value:
    """The dataclass ``shape`` filled from the document; ConfigError with every unknown key and
    wrong value.

    Args:
        shape: a dataclass; its fields are the only keys there are. pydantic reads their types and,
            as what its own ``Field`` would say (``alias``, ``ge``, …), their metadata.
        document: data whose root becomes the value.
        at: where that root is in the file, for messages.
    """
    try:
        return typing.cast("Value", _validated(shape, document.data))
    except ValidationError as fault:
        problems: dict[KeyPath, str] = {}
        errors = fault.errors(include_url=False, include_input=False, include_context=False)
        for error in sorted(errors, key=lambda each: each["type"] != "unexpected_keyword_argument"):
            loc = error["loc"][1:]
            path = _existing(document.data, loc)  # without the name of a union's member
            message = _worded(error["msg"], error["type"], loc)
            if error["type"] == "unexpected_keyword_argument":
                message = _unknown(shape, path)
            problems[loc if error["type"] == "missing" else path] = document.problem(
                (*at, *path), message
            )
        raise ConfigError(*problems.values()) from None


def _validated(shape: type, data: object) -> object:
    """The value; an empty section (``keys:`` and nothing below it) is one without keys, an empty
    list without items.
    """
    try:
        return adapter(shape).validate_python((data,))[0]
    except ValidationError as fault:
        empty = [
            each
            for each in fault.errors(include_url=False)
            if each["input"] is None and each["type"] in _EMPTY
        ]
        places = {each["loc"][1:]: _EMPTY[each["type"]] for each in empty}
        places = {loc: value for loc, value in places.items() if _existing(data, loc) == loc}
        if not places:
            raise
        for loc, value in places.items():
            data = _replaced(data, loc, value)
        return _validated(shape, data)


@functools.cache
def adapter(shape: typing.Any) -> TypeAdapter[typing.Any]:
    """What validates and dumps a tuple of one ``shape``: only this way can a plain dataclass have a
    configuration.
    """
    return TypeAdapter(tuple[shape], config=ConfigDict(extra="forbid"))


def _existing(data: object, loc: KeyPath) -> KeyPath:
    """As much of the path as leads to a value."""
    for length, key in enumerate(loc):
        is_section = isinstance(data, Mapping) and key in data
        if not is_section and not (
            isinstance(data, list | tuple) and isinstance(key, int) and key < len(data)
        ):
            return loc[:length]
        data = typing.cast("Mapping[str | int, object]", data)[key]
    return loc


def _unknown(shape: type, path: KeyPath) -> str:
    gone = GONE.get(dotted(tuple(key for key in path if isinstance(key, str))))
    if gone is not None:
        return f"this key has gone; {gone}"
    for key in path[:-1]:
        inner = next(
            (list(dataclasses_in(hint)) for name, hint in keys_of(shape) if name == key), []
        )
        shape = inner[0] if inner else shape
    hint = nearest(str(path[-1]), sorted(name for name, _ in keys_of(shape)))
    if hint.count(",") >= _MANY_KEYS:
        hint = "; docs/policies.md and weir policy show name every key"
    return f"unknown key{hint}"


def keys_of(shape: type) -> Iterator[tuple[str, object]]:
    """The keys of a section and what each may be."""
    hints = typing.get_type_hints(shape, include_extras=True)
    for each in dataclasses.fields(shape):
        if "validation_alias" not in each.metadata:
            yield each.metadata.get("alias", each.name), hints[each.name]


def dataclasses_in(hint: object) -> Iterator[type]:
    if dataclasses.is_dataclass(hint) and isinstance(hint, type):
        yield hint
    for each in typing.get_args(hint):
        yield from dataclasses_in(each)


_WORDS: Mapping[str, str] = types.MappingProxyType(
    {
        **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "should be a whole number"),
        **dict.fromkeys(("float_parsing", "float_type"), "should be a number"),
        **dict.fromkeys(("dataclass_type", "mapping_type", "dict_type"), "should be a mapping"),
        **dict.fromkeys(("tuple_type", "list_type"), "should be a list"),
        "string_type": "should be text (put it in quotes)",
    }
)


def _worded(message: str, kind: str, loc: KeyPath) -> str:
    """pydantic's message without its grammar, and without the value, which may be a secret."""
    if kind == "missing":
        return f"{loc[-1]} is missing"
    if kind == "too_short":  # "Value should have …, not 3": of a secret, whose length is its own
        message = message.partition(" after ")[0].replace("item", "character")
    return _WORDS.get(kind) or re.sub("^(Input|Value error,|Value) ", "", message)
