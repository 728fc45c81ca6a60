"""A YAML file as plain data that remembers where every value stood, and typed values made from it.

The file is closed: a key that no dataclass field names is an error with file, line, path and the nearest
name. ``${NAME}`` and ``${NAME:-default}`` inside a scalar read the environment; what they give stays text
(a number field still accepts it), and an empty result is null.
"""

import dataclasses
import difflib
import functools
import re
import types
import typing
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import yaml
from pydantic import TypeAdapter, ValidationError

from proxy.errors import redact_shapes

KeyPath = tuple[str | int, ...]
"""Where a value stands in the data: ``("models", 0, "match")`` is ``models[0].match``."""

_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_VARIABLE = re.compile(r"\$\{([A-Za-z_][A-Za-z0-9_]*)(?::-((?:[^}$]|\$(?!\{))*+))?\}")
_TAG_BOOL = "tag:yaml.org,2002:bool"  # YAML 1.1 also reads on, off, yes and no as one; here they are words
_TAG_TIME = "tag:yaml.org,2002:timestamp"
MAX_DEPTH = 32
_MAX_SIZE = 2**20
_MAX_READ = 4 * _MAX_SIZE  # characters once every alias stands for what it means, each value counting as 16 at least
_MIN_PER_VALUE = 16
_MAX_NUMBER_LEN = 64
_NUMBERS = frozenset({"tag:yaml.org,2002:int", "tag:yaml.org,2002:float"})


class ConfigError(ValueError):
    """A configuration that Weir does not start with.

    Attributes:
        problems: every fault found, one line each, as ``weir.yaml:12: listen.prot: unknown key; …``, without what
            looks like a credential: a key may stand where a name should.
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
        """``weir.yaml:12``, ``WEIR_PORT`` or ``--port``: of the value at ``path`` or of what holds it."""
        for length in range(len(path), 0, -1):
            if (found := self.places.get(path[:length])) is not None:
                return found
        return self.name

    def problem(self, path: KeyPath, message: str) -> str:
        where = f"{self.place(path)}: " if self.place(path) else ""
        return f"{where}{dotted(path)}: {message}" if path else f"{where}{message}"

    def overlaid(self, values: Mapping[KeyPath, tuple[str, object]]) -> "Document":
        data: dict[str, object] = dict(self.data)
        places = dict(self.places)
        for path, (source, value) in values.items():
            inner = data
            for key in path[:-1]:
                held = inner.get(str(key))
                inner[str(key)] = dict(held) if isinstance(held, Mapping) else {}
                inner = typing.cast("dict[str, object]", inner[str(key)])
            inner[str(path[-1])] = value
            places = {at: place for at, place in places.items() if at[: len(path)] != path}
            places[path] = source
        return Document(name=self.name, data=data, places=places)


def dotted(path: KeyPath) -> str:
    """``upstreams.openai.base_url`` or ``models[0].match``."""
    text = ""
    for key in path:
        text += f"[{key}]" if isinstance(key, int) else f".{key}" if text else key
    return text


def leaves_of(value: object, path: KeyPath = ()) -> Iterator[tuple[KeyPath, object]]:
    """Every value that is no section with its path; a list is one value unless it holds sections or lists."""
    if isinstance(value, Mapping) and value:
        for key, each in value.items():
            yield from leaves_of(each, (*path, str(key)))
    elif isinstance(value, list) and any(isinstance(each, Mapping | list) for each in value):
        for at, each in enumerate(value):
            yield from leaves_of(each, (*path, at))
    else:
        yield path, value


def nearest(word: str, known: Sequence[str]) -> str:
    """``; did you mean X?`` for the known name nearest to ``word``, else the list of all known names."""
    close = difflib.get_close_matches(word, known, n=1, cutoff=0.6)
    return f"; did you mean {close[0]}?" if close else f"; known: {', '.join(known)}" if known else ""


def read_document(path: Path, *, env: Mapping[str, str]) -> Document:
    """The file's data and places; ConfigError if it cannot be read, is no YAML, or names an unset variable."""
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
    try:
        _judge(text, name)
        node = yaml.compose(text, Loader=_LOADER)
    except yaml.MarkedYAMLError as fault:
        line = fault.problem_mark.line + 1 if fault.problem_mark else 1
        raise ConfigError(f"{name}:{line}: not YAML: {fault.problem or fault.context}") from fault
    except yaml.YAMLError as fault:
        raise ConfigError(f"{name}: not YAML: {str(fault).splitlines()[0]}") from fault
    if node is None:
        return Document(name=name)
    reader = _Reader(name, env)
    data = reader.value(node, ())
    if reader.problems:
        raise ConfigError(*reader.problems)
    if data is None:
        return Document(name=name)
    if not isinstance(data, dict):
        raise ConfigError(f"{name}:1: should be a mapping of keys to values")
    return Document(name=name, data=data, places=reader.places)


def _judge(text: str, name: str) -> None:
    """Nothing, or ConfigError for a text that is not to be composed.

    libyaml's composer recurses once a level until the stack is full, and its scanner looks at every open bracket for
    each new one; its parser, which gives these events one by one, does neither. Aliases are followed by who reads.
    """
    open_: list[tuple[str | None, int]] = []
    sizes: dict[str, int] = {}
    read = 0
    for event in yaml.parse(text, Loader=_LOADER):
        before, anchor = read, getattr(event, "anchor", None)
        if isinstance(event, yaml.CollectionStartEvent):
            if len(open_) > MAX_DEPTH:
                raise _refused(name, event, f"nested more than {MAX_DEPTH} levels deep")
            open_.append((anchor, read))
            read += _MIN_PER_VALUE
            continue
        if isinstance(event, yaml.CollectionEndEvent):
            anchor, before = open_.pop()
        elif isinstance(event, yaml.ScalarEvent):
            read += _MIN_PER_VALUE + len(event.value)
        elif isinstance(event, yaml.AliasEvent):
            if any(anchor == each for each, _ in open_):
                raise _refused(name, event, f"*{anchor} stands within itself")
            read += sizes.get(anchor or "", 0)
        if anchor is not None and not isinstance(event, yaml.AliasEvent):
            sizes[anchor] = read - before
        if read > _MAX_READ:
            raise _refused(name, event, "too much to read, with what its aliases stand for")


def _refused(name: str, event: yaml.Event, words: str) -> ConfigError:
    line = event.start_mark.line + 1 if event.start_mark else 1
    return ConfigError(f"{name}:{line}: {words}")


class _Reader:
    def __init__(self, name: str, env: Mapping[str, str]) -> None:
        self._name = name
        self._env = env
        self._scalars = yaml.constructor.SafeConstructor()
        self.places: dict[KeyPath, str] = {}
        self.problems: list[str] = []

    def value(self, node: yaml.Node, path: KeyPath) -> object:
        if len(path) > MAX_DEPTH:
            raise ConfigError(f"{self._name}:{node.start_mark.line + 1}: {dotted(path[:3])}…: nested too deeply")
        if path:
            self.places.setdefault(path, self._at(node))
        if isinstance(node, yaml.MappingNode):
            return self._mapping(node, path)
        if isinstance(node, yaml.SequenceNode):
            return [self.value(item, (*path, index)) for index, item in enumerate(node.value)]
        return self._scalar(node, path)

    def _at(self, node: yaml.Node) -> str:
        return f"{self._name}:{node.start_mark.line + 1}"

    def _mapping(self, node: yaml.MappingNode, path: KeyPath) -> dict[str, object]:
        found: dict[str, object] = {}
        for key_node, value_node in node.value:
            if not isinstance(key_node, yaml.ScalarNode):
                self.problems.append(f"{self._at(key_node)}: {dotted(path)}: a key should be a plain word")
                continue
            key = str(key_node.value)
            at = (*path, key)
            if key in found:
                self.problems.append(f"{self._at(key_node)}: {dotted(at)}: stands here twice")
                continue
            self.places[at] = self._at(key_node)
            found[key] = self.value(value_node, at)
        return found

    def _scalar(self, node: yaml.Node, path: KeyPath) -> object:
        text = str(node.value)
        if "${" in text:
            return self._expanded(text, node, path)
        if node.tag == _TAG_TIME or (node.tag == _TAG_BOOL and text.lower() not in {"true", "false"}):
            return text
        try:
            if node.tag in _NUMBERS and len(text) > _MAX_NUMBER_LEN:
                raise ValueError(text)  # noqa: TRY301 - 1:0:0:0… is one, and takes quadratic time
            return typing.cast("object", self._scalars.construct_object(node))
        except (yaml.YAMLError, ValueError):
            self.problems.append(f"{self._at(node)}: {dotted(path)}: not a plain value")
            return None

    def _expanded(self, text: str, node: yaml.Node, path: KeyPath) -> str | None:
        def read(match: re.Match[str]) -> str:
            name, default = match.group(1), match.group(2)
            value = self._env.get(name) or default
            if value is None:
                self.problems.append(
                    f"{self._at(node)}: {dotted(path)}: the environment has no {name} "
                    f"(a default is written ${{{name}:-default}})"
                )
                return ""
            return value

        expanded = _VARIABLE.sub(read, text)
        if "${" in _VARIABLE.sub("", text):
            self.problems.append(f"{self._at(node)}: {dotted(path)}: a variable is written ${{NAME}}")
        return expanded or None


Value = typing.TypeVar("Value")

GONE: Mapping[str, str] = types.MappingProxyType(
    {
        "listen.workers": "start one Weir for each process and have them share a PostgreSQL (docs/operating.md)",
        "evaluate": "weir evaluate measures recorded conversations",
    }
)
"""Keys that there were once, with those of a policy as they are in it, to what is to be done instead."""


def typed(
    shape: type[Value],
    document: Document,
    *,
    at: KeyPath = (),
    names: Mapping[str, str] = types.MappingProxyType({}),
) -> Value:
    """The dataclass ``shape`` filled from the document; ConfigError with every unknown key and wrong value.

    Args:
        shape: a dataclass; its fields are the only keys there are.
        document: data whose root becomes the value.
        at: where that root stands in the file, for messages.
        names: field name to the key that stands for it in the file, where they differ.
    """
    problems: list[str] = []
    unknown: list[tuple[KeyPath, list[str]]] = []
    data = _shaped(shape, document.data, (), names, unknown)
    for path, known in unknown:
        instead = GONE.get(dotted((*at, *path))) or GONE.get(dotted(path))
        said = f"unknown key{nearest(str(path[-1]), known)}" if instead is None else f"this key has gone; {instead}"
        problems.append(document.problem((*at, *path), said))
    try:
        value = typing.cast("Value", _adapter(typing.cast("Hashable", shape)).validate_python(data))
    except ValidationError as fault:
        for error in fault.errors(include_url=False, include_input=False, include_context=False):
            path = _resolved(error["loc"], document.data, names)
            last = str(error["loc"][-1]) if error["type"] == "missing" else ""
            missing = names.get(last, last) or None
            problems.append(document.problem((*at, *path), _worded(error["msg"], error["type"], missing)))
        raise ConfigError(*problems) from None
    if problems:
        raise ConfigError(*problems)
    return value


@functools.cache
def _adapter(shape: type) -> TypeAdapter[typing.Any]:
    return TypeAdapter(shape)


def _worded(message: str, kind: str, missing: str | None) -> str:
    """pydantic's message without its grammar, and without the value, which may be a secret."""
    if missing is not None:
        return f"{missing} is missing"
    if kind == "too_short":  # "Value should have …, not 3": of a secret, whose length is its own
        told = message.partition(" after ")[0]
        return told.removeprefix("Value ").replace("item", "character") if told.startswith("Value ") else told
    return _WORDS.get(kind) or message.removeprefix("Input ").removeprefix("Value error, ")


_WORDS: typing.Final = {
    **dict.fromkeys(("int_parsing", "int_type", "int_from_float"), "should be a whole number"),
    **dict.fromkeys(("float_parsing", "float_type"), "should be a number"),
    **dict.fromkeys(("dataclass_type", "mapping_type", "dict_type"), "should be a mapping"),
    **dict.fromkeys(("tuple_type", "list_type"), "should be a list"),
    "string_type": "should be text (put it in quotes)",
}


def _fields(shape: object, names: Mapping[str, str]) -> dict[str, tuple[str, object]]:
    hints = typing.get_type_hints(typing.cast("type", shape), include_extras=True)
    own = dataclasses.fields(typing.cast("type[typing.Any]", shape))
    return {names.get(item.name, item.name): (item.name, hints[item.name]) for item in own}


def _plain(hint: object) -> tuple[object, object]:
    """The dataclass or container behind ``X | None`` and ``Annotated``, and what its items are."""
    origin = typing.get_origin(hint)
    if origin is typing.Annotated:
        return _plain(typing.get_args(hint)[0])
    if origin in {types.UnionType, typing.Union}:
        kinds = [each for each in typing.get_args(hint) if each is not types.NoneType]
        return _plain(kinds[0]) if len(kinds) == 1 else (None, None)
    if origin is tuple:
        return tuple, typing.get_args(hint)[0]
    if isinstance(origin, type) and issubclass(origin, Mapping):
        return Mapping, typing.get_args(hint)[1]
    return hint, None


def _shaped(
    hint: object, data: object, path: KeyPath, names: Mapping[str, str], unknown: list[tuple[KeyPath, list[str]]]
) -> object:
    """The data with field names for keys; what no field stands for goes to ``unknown`` with the keys known there.

    An empty section (``keys:`` and nothing below it) is the section's default, and the key of a mapping of
    dataclasses is their ``name``.
    """
    kind, item = _plain(hint)
    if data is None and hint is not kind and typing.get_origin(hint) in {types.UnionType, typing.Union}:
        return None
    if dataclasses.is_dataclass(kind) and isinstance(data, Mapping | None):
        known = _fields(kind, names)
        made: dict[str, object] = {}
        for key, value in (data or {}).items():
            if key in known:
                made[known[key][0]] = _shaped(known[key][1], value, (*path, key), names, unknown)
            else:
                unknown.append(((*path, key), sorted(known)))
        return made
    if kind is tuple and isinstance(data, list | tuple | None):
        return tuple(_shaped(item, value, (*path, at), names, unknown) for at, value in enumerate(data or ()))
    if kind is Mapping and isinstance(data, Mapping | None):
        return {key: _keyed(item, value, (*path, key), names, unknown) for key, value in (data or {}).items()}
    return data


def _keyed(
    hint: object, data: object, path: KeyPath, names: Mapping[str, str], unknown: list[tuple[KeyPath, list[str]]]
) -> object:
    made = _shaped(hint, data, path, names, unknown)
    if not (dataclasses.is_dataclass(hint) and isinstance(made, dict) and "name" in _fields(hint, names)):
        return made
    if isinstance(data, Mapping) and "name" in data:
        unknown.append(((*path, "name"), []))
    return {**made, "name": path[-1]}


def _resolved(loc: Sequence[str | int], data: object, names: Mapping[str, str]) -> KeyPath:
    path: KeyPath = ()
    for step in loc:
        key = names.get(step, step) if isinstance(step, str) else step
        inside = isinstance(data, list | tuple) and isinstance(key, int) and key < len(data)
        if not inside and not (isinstance(data, Mapping) and key in data):
            break
        data = typing.cast("Mapping[str | int, object]", data)[key]
        path = (*path, key)
    return path
