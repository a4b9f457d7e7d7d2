"""The report's page while a run goes on, served over HTTP and refreshing itself. It only reads; imports no torch.

source = open_source("runs/quickstart", key=b"")         # a run folder, or where its islands meet
app = Dashboard(source, interval=5, is_local=True).app()   # an aiohttp application
"""
