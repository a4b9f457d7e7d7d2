"""The report of a run, read from its run folder: a table, JSON, or a page with plots.

    run = load_run("runs/quickstart")      # records, as written
    report = summarise(run)                # figures, JSON-able
    print_report(report)                   # the table
    write_html(run, "report.html")         # one self-contained page

Importing this package loads none of the third-party libraries that it uses; each loads on first use.
"""

from hf_diloco.report.html import write_html
from hf_diloco.report.read import Run, load_run
from hf_diloco.report.rows import print_report
from hf_diloco.report.summary import Report, summarise

__all__ = ["Report", "Run", "load_run", "print_report", "summarise", "write_html"]
