"""The dashboard: a live page of a run, served over HTTP. Read-only, and imports no torch.

source = Source("runs/quickstart", key=b"")               # a run folder, or where its islands meet
app = Dashboard(source, interval=5, is_local=True).app()  # an aiohttp application
"""
