"""The tables of docs/run-file.md and docs/vision.md, made from the schemas of run files.

python -m scripts.site.run_file_tables     # writes them anew
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hf_diloco.apps.common.base import DECIDED_ELSEWHERE, BaseRun
from hf_diloco.apps.lm.runfile import RunFile, TokenizerBlock, TrainTokenizer
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.trainer.refusals import REFUSALS

ROOT = Path(__file__).parents[2]

PAGES: dict[Path, type[BaseRun]] = {
    ROOT / "docs" / "run-file.md": RunFile,
    ROOT / "docs" / "vision.md": VisionRun,
}
TRAINER_PAGE = ROOT / "docs" / "trainer.md"
REFUSED = "refused by training"
NO_OUTER_LOOP = "refused everywhere"
_WHERE = {
    "islands": "`DiLoCoCallback`",
    "nodes": "`GossipCallback`",
    "loop": "`OuterLoop`",
    "onebit": "`OneBitCallback`",
    "muon": "`optimizer: {name: muon}`",
}
_TABLE = re.compile(
    r"(?<=<!-- keys: )(?P<block>[\w. ]+)(?P<head> -->\n)(?P<table>.*?)(?=<!-- end of keys -->)", re.DOTALL
)
_SPECIAL = {"name": "the file's name", "training": "required"}
_DEFAULT_MODELS = {RunFile: "`{preset: llama-tiny}`", VisionRun: "`{preset: resnet-tiny}`"}
_KINDS = {
    "integer": "whole number",
    "object": "mapping",
    "boolean": "`true`, `false`",
    "string": "text",
    "array": "list",
}
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}


def blocks(kind: type[BaseRun] = RunFile) -> dict[str, dict[str, Any]]:
    """The properties of every block by its path, from the schema that `hf-diloco config-schema` prints."""
    whole = kind.model_json_schema()

    def walk(path: str, node: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
        yield path or "run", node["properties"]
        for key, value in node["properties"].items():
            for option in [value, *value.get("anyOf", [])]:
                if "$ref" in option:
                    yield from walk(f"{path}.{key}".lstrip("."), whole["$defs"][option["$ref"].rpartition("/")[2]])

    return dict(walk("", whole))


def table(page: Path, block: str) -> str:
    """The Markdown table of one block: a row for each key."""
    if block == REFUSED:
        head = "| key | why |\n|---|---|"
        rows = [f"| `{key}` | {why} |" for key, why in sorted(DECIDED_ELSEWHERE.items())]
    elif block == NO_OUTER_LOOP:
        head = "| setting | refused by | refused values | why, and what to do |\n|---|---|---|---|"
        rows = [
            f"| `{one.setting}` | {', '.join(_WHERE[where] for where in one.where)} | {one.values} | {one.why} |"
            for one in REFUSALS
        ]
    else:
        head = "| key | value | default | meaning |\n|---|---|---|---|"
        rows = [_row(page, block, key, value) for key, value in blocks(PAGES[page])[block].items()]
    return "\n".join([head, *rows]) + "\n"


def with_tables(page: Path) -> str:
    """The page with all its tables made anew."""
    return _TABLE.sub(lambda match: match["block"] + match["head"] + table(page, match["block"]), page.read_text())


def blocks_with_tables(text: str) -> list[str]:
    """The blocks whose tables the page has."""
    return [match["block"] for match in _TABLE.finditer(text)]


def _row(page: Path, block: str, key: str, value: dict[str, Any]) -> str:
    meaning = value.get("description", "")
    if block == "run":
        meaning = f"{meaning}{_where(page, key)}".lstrip("; ")
    return f"| `{key}` | {kind_text(value)} | {default_text(PAGES[page], block, key, value)} | {meaning} |"


def _where(page: Path, key: str) -> str:
    """Where a key of the whole file has its own heading: on the page itself, or on the first."""
    first = next(iter(PAGES))
    for text, link in (
        (page.read_text(), f"[below](#{key})"),
        (first.read_text(), f"[{first.name}]({first.name}#{key})"),
    ):
        if re.search(rf"^##+ {key}$", text, re.MULTILINE):
            return f"; see {link}"
    return ""


def kind_text(value: dict[str, Any]) -> str:
    """What a setting takes, in words, from its JSON schema."""
    if "$ref" in value:
        return "block"
    if "anyOf" in value:
        return " or ".join(dict.fromkeys(kind_text(option) for option in value["anyOf"]))
    if "enum" in value:
        return ", ".join(f"`{option}`" for option in value["enum"])
    if "const" in value:
        return f"`{value['const']}`"
    kind = _KINDS.get(value["type"], value["type"])
    limits = [f"{sign} {value[limit]:,}" for limit, sign in _LIMITS.items() if limit in value]
    return f"{kind} {', '.join(limits)}".strip()


def default_text(kind: type[BaseRun], block: str, key: str, value: dict[str, Any]) -> str:
    """The default of a setting of a block, or "required"."""
    if block == "run":
        special = {**_SPECIAL, "model": _DEFAULT_MODELS[kind]}
        if key in special or any(path.partition(".")[0] == key for path in blocks(kind)):
            return special.get(key, "")
    default = _defaults(kind, block).get(key, value.get("default", _REQUIRED))
    if default is _REQUIRED:
        return "required"
    if default is None:
        return "null"
    if isinstance(default, dict) and default and "$ref" in value:
        return ""  # a block, which has its own table
    return f"`{default if isinstance(default, str) else json.dumps(default)}`"


_REQUIRED = object()


def _defaults(kind: type[BaseRun], block: str) -> dict[str, Any]:
    """What the settings of a block are where nothing is given; of blocks that are not there by default, nothing."""
    if block == "model":
        return {}  # each by itself: what `model` is by default is told where it stands
    if block == "tokenizer.train":
        return TrainTokenizer().model_dump()
    if block == "tokenizer":
        return TokenizerBlock().model_dump()
    found: Any = kind(name="name", training={"max_steps": 1}).model_dump(mode="json")
    for part in block.split(".") if block != "run" else []:
        found = found.get(part) or {}
    return dict(found)


if __name__ == "__main__":
    for one in (*PAGES, TRAINER_PAGE):
        one.write_text(with_tables(one))
