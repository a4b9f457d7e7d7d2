"""Reference pages of the documentation site, made from the code: commands, settings, and what the registries hold."""

from __future__ import annotations

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterable

import typer
from typer.cli import get_docs_for_click

from hf_diloco.apps.common.base import BaseRun
from hf_diloco.apps.lm.runfile import RunFile
from hf_diloco.apps.vision.runfile import VisionRun
from hf_diloco.cli.main import app
from hf_diloco.codecs import CODECS
from hf_diloco.codecs.base import Codec
from hf_diloco.config.diloco import DiLoCoConfig
from hf_diloco.methods.gossip import METHODS as GOSSIP_METHODS, settings_of
from hf_diloco.methods.outer import METHODS, OuterMethod
from hf_diloco.methods.topology import GRAPHS
from scripts.site.run_file_tables import PAGES, blocks, default_text, kind_text

SHARED_SETTINGS = ("sync_every", "outer_lr", "outer_momentum", "nesterov")
# Rich's, as it stands in the help text or, with older versions of typer, as HTML.
_MARKUP = re.compile(r'(?P<style>\[bold\]|\[cyan\]|<span style="[^"]*">)(?P<text>.*?)(?:\[/bold\]|\[/cyan\]|</span>)')
_SECTION = re.compile(r"^(Args|Attributes|Raises|Returns|Yields):$", re.MULTILINE)


def pages() -> dict[str, Callable[[], str]]:
    """What makes each generated page, by its path within the site's source."""
    return {
        "reference/commands.md": commands,
        "reference/settings.md": lambda: settings(RunFile, "language models"),
        "reference/settings-vision.md": lambda: settings(VisionRun, "image classifiers"),
        "reference/methods.md": methods,
    }


def commands() -> str:
    """Every command, as its `--help` describes it."""
    command = typer.main.get_command(app)
    text = get_docs_for_click(obj=command, ctx=typer.Context(command), name="hf-diloco", title="Commands")
    return re.sub("^```console$", "```text", _MARKUP.sub(_markdown, text), flags=re.MULTILINE)


def settings(kind: type[BaseRun], trained: str) -> str:
    """Every setting of one kind of run file: a section for each block."""
    (page,) = (path.name for path, one in PAGES.items() if one is kind)
    parts = [
        f"# Settings of {trained}",
        f"Every key of a run file for {trained}, by its full name, as the command line takes it: "
        f"`hf-diloco launch RUN.yaml KEY=VALUE`. [{page}](../{page}) explains them in their context.",
    ]
    for block, keys in blocks(kind).items():
        prefix = "" if block == "run" else f"{block}."
        rows = (
            (f"`{prefix}{key}`", kind_text(value), default_text(kind, block, key, value), value.get("description", ""))
            for key, value in keys.items()
        )
        title = "The whole file" if block == "run" else block
        parts += [f"## {title}", _table(("key", "value", "default", "meaning"), rows)]
    return _joined(parts)


def methods() -> str:
    """Everything in the registries: outer methods, payloads, gossip methods, graphs."""
    return _joined(
        [
            "# Methods, payloads and graphs",
            "Made from the code: names as settings take them, defaults, and the descriptions in the source. "
            "When to use which: [methods.md](../methods.md), [tuning.md](../tuning.md#payload), "
            "[vision.md](../vision.md#methods) and [topology.md](../topology.md).",
            "## Outer methods",
            "`diloco.method`: what a round computes.",
            *_outer_methods(),
            "## Payloads",
            "`diloco.payload`: the number format in which values travel.",
            *(part for name, codec in CODECS.items() for part in _payload(name, codec)),
            "## Gossip methods",
            "`gossip.method`: what nodes on a graph compute at every step.",
            *(part for name in GOSSIP_METHODS for part in _gossip_method(name)),
            "## Graphs",
            "`gossip.topology`: who averages with whom.",
            *(part for name, make in GRAPHS.items() for part in (f"### Graph `{name}`", _prose(make))),
        ]
    )


def _outer_methods() -> Iterable[str]:
    described: set[str] = set()
    for name, method in METHODS.items():
        yield f"### Method `{name}`"
        yield f"{_sentence(method.summary)}"
        yield _table(("setting", "default"), _outer_defaults(name, method))
        if method.__module__ not in described:
            described.add(method.__module__)
            yield _prose(sys.modules[method.__module__])
        yield _prose(method)


def _outer_defaults(name: str, method: type[OuterMethod]) -> Iterable[tuple[str, str]]:
    config = DiLoCoConfig(method=name)
    for setting in SHARED_SETTINGS:
        yield f"`{setting}`", f"`{json.dumps(getattr(config, setting))}`"
    for option, field in method.Options.model_fields.items():
        yield f"`options.{option}`: {field.description}", f"`{json.dumps(field.default)}`"


def _payload(name: str, codec: Codec) -> Iterable[str]:
    kind = type(codec)
    bits = 8 * codec.block_bytes / codec.block_values
    return f"### Payload `{name}`", f"{bits:.4g} bits a value.", _prose(sys.modules[kind.__module__]), _prose(kind)


def _gossip_method(name: str) -> Iterable[str]:
    method = GOSSIP_METHODS[name]
    rows = ((f"`{setting}`", f"`{json.dumps(default)}`") for setting, default in settings_of(method).items())
    return (
        f"### Gossip method `{name}`",
        _prose(sys.modules[method.__module__]),
        _table(("setting", "default"), rows),
    )


def _prose(documented: object) -> str:
    """A docstring without the sections about arguments; its indented equations are code blocks in Markdown too."""
    text = _SECTION.split(inspect.getdoc(documented) or "")[0].strip()
    lines = text.splitlines()
    return "\n".join(line if line.startswith("    ") else line.replace("<", "&lt;") for line in lines)


def _markdown(styled: re.Match[str]) -> str:
    """A terminal's style as Markdown: what is bold is a heading, what is coloured a command."""
    return f"**{styled['text']}**" if "bold" in styled["style"] else f"`{styled['text']}`"


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}."


def _table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in lines)


def _joined(parts: Iterable[str]) -> str:
    return "\n\n".join(part for part in parts if part) + "\n"
