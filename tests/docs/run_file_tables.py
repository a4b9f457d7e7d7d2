"""The tables of docs/run-file.md, made from the schema of run files.

python -m tests.docs.run_file_tables     # writes them anew
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any

from hf_diloco.lm.arguments import _REFUSED
from hf_diloco.lm.runfile import RunFile, TokenizerBlock, TrainTokenizer
from tests.docs.pages import ROOT

PAGE = ROOT / "docs" / "run-file.md"
REFUSED = "refused by training"
_TABLE = re.compile(
    r"(?<=<!-- keys: )(?P<block>[\w. ]+)(?P<head> -->\n)(?P<table>.*?)(?=<!-- end of keys -->)", re.DOTALL
)
_HAVE_THEIR_OWN_TABLE = ("model", "tokenizer", "data", "launch", "sample", "diloco")
_KINDS = {
    "integer": "whole number",
    "object": "mapping",
    "boolean": "`true`, `false`",
    "string": "text",
    "array": "list",
}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def blocks() -> dict[str, dict[str, Any]]:
    """The properties of every block by its path, from the schema that `hf-diloco config-schema` prints."""
    whole = RunFile.model_json_schema()

    def walk(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield path or "run", node["properties"]
        for key, value in node["properties"].items():
            for option in [value, *value.get("anyOf", [])]:
                if "$ref" in option:
                    yield from walk(f"{path}.{key}".lstrip("."), whole["$defs"][option["$ref"].rpartition("/")[2]])

    return dict(walk("", whole))


def table(block: str) -> str:
    """The Markdown table of one block: a row for each key."""
    if block == REFUSED:
        head, rows = "| key | why |\n|---|---|", [f"| `{key}` | {why} |" for key, why in sorted(_REFUSED.items())]
    else:
        head = "| key | value | default | meaning |\n|---|---|---|---|"
        rows = [_row(block, key, value) for key, value in blocks()[block].items()]
    return "\n".join([head, *rows]) + "\n"


def with_tables(text: str) -> str:
    """The page with all its tables made anew."""
    return _TABLE.sub(lambda match: match["block"] + match["head"] + table(match["block"]), text)


def blocks_with_tables(text: str) -> list[str]:
    """The blocks whose tables the page has."""
    return [match["block"] for match in _TABLE.finditer(text)]


def _row(block: str, key: str, value: dict[str, Any]) -> str:
    meaning = value.get("description", "")
    if block == "run" and f"\n## {key}\n" in PAGE.read_text():
        meaning = f"{meaning}; see [below](#{key})".lstrip("; ")
    return f"| `{key}` | {_kind(value)} | {_default_text(block, key)} | {meaning} |"


def _kind(value: dict[str, Any]) -> str:
    if "$ref" in value:
        return "block"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(_kind(option) for option in value["anyOf"]))
    if "enum" in value:
        return ", ".join(f"`{option}`" for option in value["enum"])
    kind = _KINDS.get(value["type"], value["type"])
    limits = [f"{sign} {value[limit]:,}" for limit, sign in _LIMITS.items() if limit in value]
    return f"{kind} {', '.join(limits)}".strip()


def _default_text(block: str, key: str) -> str:
    if block == "run":
        special = {"name": "the file's name", "training": "required", "model": "`{preset: llama-tiny}`"}
        if key in special or key in _HAVE_THEIR_OWN_TABLE:
            return special.get(key, "")
    default = _defaults(block)[key]
    if default is None:
        return "null"
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


def _defaults(block: str) -> dict[str, Any]:
    if block == "model":
        return dict.fromkeys(blocks()["model"])
    if block == "tokenizer.train":
        return TrainTokenizer().model_dump()
    if block == "tokenizer":
        return TokenizerBlock().model_dump()
    values = RunFile(name="name", training={"max_steps": 1}).model_dump()
    found: dict[str, Any] = values if block == "run" else values[block]
    return found


if __name__ == "__main__":
    PAGE.write_text(with_tables(PAGE.read_text()))
