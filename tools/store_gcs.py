"""Requests of Google's XML API in the words of its JSON API: the emulator decides conditions in the latter alone."""

from __future__ import annotations

import json
from urllib.parse import parse_qs, quote, unquote, urlsplit
from xml.sax.saxutils import escape

from tools.store_proxy import Answer, Request, forward


def translated(port: int, request: Request) -> Answer:
    """Have the emulator carry a request out, and answer as the XML API does. Raises OSError, HTTPException."""
    address = urlsplit(request.path)
    bucket, _, key = unquote(address.path).lstrip("/").partition("/")
    objects = f"/storage/v1/b/{bucket}/o"
    headers = {name: value for name, value in request.headers.items() if not name.lower().startswith("x-goog")}
    if request.kind == "list":
        return _listed(port, objects, parse_qs(address.query).get("prefix", [""])[0])
    if request.method == "PUT":
        condition = {name.lower(): value for name, value in request.headers.items()}.get("x-goog-if-generation-match")
        query = f"uploadType=media&name={quote(key, safe='')}"
        query += "" if condition is None else f"&ifGenerationMatch={condition}"
        asked = Request("POST", f"/upload{objects}?{query}", headers, request.body)
    elif request.method == "DELETE":
        asked = Request("DELETE", f"{objects}/{quote(key, safe='')}", headers)
    else:
        facts = forward(port, Request("GET", f"{objects}/{quote(key, safe='')}", {}))
        if facts.status != 200:
            return Answer(facts.status, [], b"")
        generation = json.loads(facts.body)["generation"]
        given = forward(port, Request("GET", f"{objects}/{quote(key, safe='')}?alt=media&generation={generation}", {}))
        size = ("Content-Length", str(len(given.body)))
        return Answer(given.status, [*_headers(facts.body), size], b"" if request.method == "HEAD" else given.body)
    answer = forward(port, asked)
    return Answer(answer.status, _headers(answer.body) if request.method == "PUT" and answer.status == 200 else [], b"")


def _headers(body: bytes) -> list[tuple[str, str]]:
    facts = json.loads(body)
    generation = str(facts["generation"])
    modified = ("Last-Modified", "Sat, 28 Nov 2026 00:00:00 GMT")
    return [("ETag", f'"{generation}"'), ("x-goog-generation", generation), modified]


def _listed(port: int, objects: str, prefix: str) -> Answer:
    answer = forward(port, Request("GET", f"{objects}?maxResults=10000&prefix={quote(prefix, safe='')}", {}))
    rows = "".join(
        f"<Contents><Key>{escape(each['name'])}</Key><Size>{each['size']}</Size><ETag>{each['generation']}</ETag>"
        "<LastModified>2026-11-28T00:00:00.000Z</LastModified></Contents>"
        for each in json.loads(answer.body).get("items", [])
    )
    body = f'<?xml version="1.0"?><ListBucketResult><IsTruncated>false</IsTruncated>{rows}</ListBucketResult>'
    return Answer(200, [("Content-Type", "application/xml")], body.encode())
