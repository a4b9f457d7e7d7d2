"""The report's page while a run goes on, served over HTTP and refreshing itself. It only reads; imports no torch.

source = open_source("runs/quickstart", key=b"")         # a run folder, or where its islands meet
app = Dashboard(source, interval=5, is_local=True).app()   # an aiohttp application
"""

from hf_diloco.dashboard.server import Dashboard
from hf_diloco.dashboard.source import Look, Source, open_source

__all__ = ["Dashboard", "Look", "Source", "open_source"]
