"""The part of the Hub's HTTP API that an upload goes through, in this process."""

from __future__ import annotations

import base64
import json
from collections.abc import Collection

from aiohttp import web


class HubServer:
    """Takes what is pushed to it; everything is stored as it comes, nothing in Git LFS.

    Args:
        branches: that each repository has.

    Attributes:
        is_private: of each repository that was made.
        commits: the branch of each, and its files by path, with their contents; in order.
    """

    def __init__(self, branches: Collection[str] = ("main",)) -> None:
        self.is_private: dict[str, bool] = {}
        self.commits: list[tuple[str, dict[str, bytes]]] = []
        self._branches = branches

    def app(self) -> web.Application:
        """The application, to be served."""
        app = web.Application(client_max_size=1 << 28)
        app.router.add_get("/api/whoami-v2", self._whoami)
        app.router.add_post("/api/repos/create", self._create)
        app.router.add_post("/api/validate-yaml", self._validate)
        app.router.add_post("/api/models/{owner}/{name}/preupload/{branch}", self._prepare)
        app.router.add_post("/api/models/{owner}/{name}/commit/{branch}", self._commit)
        return app

    async def _whoami(self, request: web.Request) -> web.Response:
        is_known = request.headers["Authorization"] == "Bearer hf_test"
        return web.json_response({"name": "somebody"}, status=200 if is_known else 401)

    async def _create(self, request: web.Request) -> web.Response:
        asked = await request.json()
        name = f"{asked['organization']}/{asked['name']}"
        self.is_private[name] = asked.get("private") is True or asked.get("visibility") == "private"
        return web.json_response({"url": f"{request.url.origin()}/{name}"})

    async def _validate(self, request: web.Request) -> web.Response:
        return web.json_response({"errors": [], "warnings": []})

    async def _prepare(self, request: web.Request) -> web.Response:
        branch = request.match_info["branch"]
        if branch not in self._branches:
            headers = {"X-Error-Code": "RevisionNotFound", "X-Error-Message": f"Invalid rev id: {branch}"}
            return web.json_response({}, status=404, headers=headers)
        files = (await request.json())["files"]
        modes = [{"path": file["path"], "uploadMode": "regular", "shouldIgnore": False} for file in files]
        return web.json_response({"files": modes})

    async def _commit(self, request: web.Request) -> web.Response:
        items = [json.loads(line) for line in (await request.text()).splitlines()]
        files = [item["value"] for item in items if item["key"] == "file"]
        contents = {file["path"]: base64.b64decode(file["content"]) for file in files}
        self.commits.append((request.match_info["branch"], contents))
        where = f"{request.url.origin()}/{request.match_info['owner']}/{request.match_info['name']}/commit/0"
        return web.json_response({"commitUrl": where, "commitOid": "0" * 40})
