"""The report of a run, read from its run folder: a table, JSON, or a page with plots.

    run = load_run("runs/quickstart")      # records, as written
    report = summarise(run)                # figures, JSON-able
    print_report(report)                   # the table
    write_html(run, "report.html")         # one self-contained page

Importing this package loads none of the libraries behind it; each is loaded when it is first needed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hf_diloco.report.html import write_html
    from hf_diloco.report.read import Run, load_run
    from hf_diloco.report.rows import print_report
    from hf_diloco.report.summary import Report, summarise

_MODULES = {
    "Report": "summary",
    "Run": "read",
    "load_run": "read",
    "print_report": "rows",
    "summarise": "summary",
    "write_html": "html",
}

__all__ = ["Report", "Run", "load_run", "print_report", "summarise", "write_html"]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return __all__
