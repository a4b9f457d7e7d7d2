"""Reads hand-written YAML files: line numbers in errors, YAML 1.2 scalars, overrides from the command line."""

from __future__ import annotations

import re
from collections.abc import Hashable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import yaml

from hf_diloco.errors import ConfigError
from hf_diloco.utils.text import one_line

KeyPath = tuple[str, ...]

# Limits of a run file: far above real files, but below what exhausts stack or memory.
MAX_CHARACTERS = 1 << 20
MAX_DEPTH = 50
MAX_VALUES = 100_000  # those that an alias repeats count each time
MAX_DIGITS = 300  # with a few more an integer is too large for a float


class _Loader(yaml.SafeLoader):
    """SafeLoader with the YAML 1.2 core scalars: `1e-3` is a number; `no` and `2024-01-01` are strings.

    Accepts only types that JSON has, so that a run file can be recorded and passed to DeepSpeed.
    """

    yaml_constructors = {  # noqa: RUF012 - PyYAML's way
        tag: construct
        for tag, construct in yaml.SafeLoader.yaml_constructors.items()
        if tag is None or tag.rsplit(":", 1)[-1] in ("null", "bool", "int", "float", "str", "seq", "map")
    }

    yaml_implicit_resolvers = {  # noqa: RUF012 - PyYAML's way
        first: [(tag, regexp) for tag, regexp in resolvers if tag.rsplit(":", 1)[-1] in ("null", "merge")]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self._depth = 0
        self._sizes: dict[int, int] = {}  # number of values below each node, with repeats by aliases

    def compose_node(self, parent: yaml.Node | None, index: Any) -> yaml.Node | None:
        """Raises `yaml.YAMLError` beyond the limits above, and for null characters and lone surrogates."""
        event: Any = self.peek_event()  # type: ignore[no-untyped-call]
        mark, is_alias = event.start_mark, isinstance(event, yaml.AliasEvent)
        self._depth += 1
        if self._depth > MAX_DEPTH:
            raise yaml.MarkedYAMLError(problem=f"nested more than {MAX_DEPTH} deep", problem_mark=mark)
        node: Any = super().compose_node(parent, index)
        self._depth -= 1
        if is_alias and id(node) not in self._sizes:
            raise yaml.MarkedYAMLError(problem="an alias of what it stands in", problem_mark=mark)
        parts = chain.from_iterable(node.value) if isinstance(node, yaml.MappingNode) else node.value
        if isinstance(node, yaml.ScalarNode):
            _check_scalar(node)
            parts = ()
        self._sizes[id(node)] = 1 + sum(self._sizes[id(part)] for part in parts)
        if self._sizes[id(node)] > MAX_VALUES:
            problem = f"more than {MAX_VALUES:,} values, those that aliases (*name) repeat counted each time"
            raise yaml.MarkedYAMLError(problem=problem, problem_mark=mark)
        return node  # type: ignore[no-any-return]

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            if key_node.tag == "tag:yaml.org,2002:merge":
                continue
            if not isinstance(key_node, yaml.ScalarNode):
                problem = "a list or a block in the place of a key; quote it, if it is a word with brackets"
                raise yaml.constructor.ConstructorError(None, None, problem, key_node.start_mark)
            key = self.construct_object(key_node)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is given twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep=deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that also quotes strings that `_Loader` would read as numbers, such as `1e5`."""


_DIGITS = r"[-+]?[0-9][0-9_]*"
for _tag, _pattern, _first in (
    ("bool", r"true|True|TRUE|false|False|FALSE", "tTfF"),
    ("int", r"[-+]?(0|[1-9][0-9_]*)", "-+0123456789"),
    ("float", rf"{_DIGITS}\.[0-9]*([eE][-+]?[0-9]+)?|{_DIGITS}[eE][-+]?[0-9]+", "-+0123456789"),
    ("float", r"[-+]?\.[0-9]+([eE][-+]?[0-9]+)?|[-+]?\.(inf|Inf|INF)|\.(nan|NaN|NAN)", "-+."),
):
    for _class in (_Loader, _Dumper):
        _class.add_implicit_resolver(f"tag:yaml.org,2002:{_tag}", re.compile(f"^(?:{_pattern})$"), list(_first))


def dump_yaml(values: Mapping[str, Any]) -> str:
    """Returns YAML that `read_yaml` reads back as these values."""
    return yaml.dump(values, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[KeyPath, int]]:
    """Reads a YAML mapping; returns it, and the line (from 1) of every key by its path.

    Raises `ConfigError` if the file is missing, is not YAML (the message has the line), repeats a key, or is not a
    mapping.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file{_neighbours(path)}") from None
    except IsADirectoryError:
        raise ConfigError(f"{path} is a folder: give a run file, as run.yaml") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read as text: {error}") from None
    try:
        values, node = _load(text)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f", line {mark.line + 1}" if mark else ""
        raise ConfigError(f"{path}{where}: not valid YAML: {_problem(error)}") from None
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: expected `key: value` lines, got {type(values).__name__}")
    return values, _lines(node)


def parse_override(item: str) -> tuple[KeyPath, Any]:
    """Parses `a.b=value` (the value as YAML); raises `ConfigError` if `item` has another form."""
    key, separator, text = item.partition("=")
    path = tuple(key.strip().split("."))
    if not separator or not all(path):
        raise ConfigError(f"{item!r}: expected KEY=VALUE, as in training.max_steps=200")
    try:
        return path, _load(text)[0]
    except yaml.YAMLError as error:
        raise ConfigError(f"{item!r}: the value is not valid YAML: {_problem(error)}") from None


def _load(text: str) -> tuple[Any, yaml.Node | None]:
    """Returns a document's value and nodes, None if it is empty. Raises `yaml.YAMLError`, also beyond the limits."""
    if len(text) > MAX_CHARACTERS:
        raise yaml.YAMLError(f"{len(text):,} characters, more than {MAX_CHARACTERS:,}; is it a run file?")
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, None
        return loader.construct_document(node), node
    except (LookupError, TypeError, ValueError) as error:  # PyYAML's own
        raise yaml.YAMLError(f"a value does not fit its !!tag ({error}); leave the tag out") from None
    finally:
        loader.dispose()


_TOO_LONG = f"a whole number of more than {MAX_DIGITS} digits; give a smaller one"


def parse_whole(digits: str) -> int:
    """Parses an integer of a JSON file that a run file names; raises `ValueError` beyond the limit."""
    if len(digits) > MAX_DIGITS:
        raise ValueError(_TOO_LONG)
    return int(digits)


def _check_scalar(node: yaml.Node) -> None:
    """Raises `yaml.YAMLError` for an integer beyond the limit, a null character or a lone surrogate."""
    problem = ""
    if node.tag == "tag:yaml.org,2002:int" and len(node.value) > MAX_DIGITS:
        problem = _TOO_LONG
    try:
        if "\0" in node.value.encode().decode():
            problem = f"{node.value!r} has a null character; leave it out"
    except UnicodeEncodeError:
        problem = f"{node.value!r} has a lone surrogate; leave it out"
    if problem:
        raise yaml.MarkedYAMLError(problem=problem, problem_mark=node.start_mark)


def set_at(values: dict[str, Any], path: KeyPath, value: Any) -> None:
    """Sets a nested value in place, creating missing blocks; raises `ConfigError` if a block is a value."""
    block: Any = values
    for depth, key in enumerate(path[:-1], 1):
        if block.get(key) is None:
            block[key] = {}
        block = block[key]
        if not isinstance(block, dict):
            name = ".".join(path[:depth])
            raise ConfigError(f"{'.'.join(path)}={value!r}: {name} is {block!r} here, which has no settings inside")
    block[path[-1]] = value


def _lines(node: yaml.Node | None, prefix: KeyPath = ()) -> dict[KeyPath, int]:
    if not isinstance(node, yaml.MappingNode):
        return {}
    lines: dict[KeyPath, int] = {}
    for key, value in node.value:
        path = (*prefix, str(key.value))
        lines[path] = key.start_mark.line + 1
        lines.update(_lines(value, path))
    return lines


def nearest_line(lines: Mapping[KeyPath, Any], path: Sequence[Any]) -> Any | None:
    """Returns the entry of the setting at `path`, else of the closest enclosing block."""
    names = tuple(str(part) for part in path)
    for length in range(len(names), 0, -1):
        if names[:length] in lines:
            return lines[names[:length]]
    return None


def _problem(error: yaml.YAMLError) -> str:
    problem = getattr(error, "problem", None) or one_line(error)
    is_alias = getattr(error, "context", None) == "while scanning an alias" or "undefined alias" in problem
    return f"{problem}: a text that begins with * needs quotes, as '*.txt'" if is_alias else problem


def _neighbours(path: Path) -> str:
    """Returns a hint that names a file that the user may have meant."""
    import difflib

    if not path.parent.is_dir():
        return f", nor a folder {path.parent}"
    close = difflib.get_close_matches(path.name, [other.name for other in path.parent.iterdir()], n=1)
    return f" (did you mean {path.parent / close[0]}?)" if close else ""
