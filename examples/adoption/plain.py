"""A web server that indexes documents, without durable execution: work in progress at a crash is lost.

python plain.py [PORT]
curl -d '{"urls": ["http://127.0.0.1:9000/a.txt"]}' http://127.0.0.1:8000/index
curl 'http://127.0.0.1:8000/search?word=apple'
"""

from __future__ import annotations

import sqlite3
import sys
from concurrent.futures import ThreadPoolExecutor
from urllib.request import urlopen

import uvicorn
from starlette.applications import Starlette
from starlette.concurrency import run_in_threadpool
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

# --- the index --------------------------------------------------------------------------------------------------------


def open_index() -> sqlite3.Connection:
    index = sqlite3.connect("index.db", timeout=30)
    index.execute("CREATE TABLE IF NOT EXISTS pages (url, number, text, PRIMARY KEY (url, number))")
    return index


# --- indexing ---------------------------------------------------------------------------------------------------------

executor = ThreadPoolExecutor()


def index_documents(urls: list[str]) -> int:
    pages = sum(executor.map(index_document, urls))
    print(f"indexed {len(urls)} documents with {pages} pages", flush=True)
    return pages


def index_document(url: str) -> int:
    with urlopen(url) as answer:
        pages = answer.read().decode().split("\f")
    rows = [(url, number, page) for number, page in enumerate(pages)]
    with open_index() as index:  # a document that is indexed twice is in it once
        index.executemany("INSERT OR REPLACE INTO pages VALUES (?, ?, ?)", rows)
    return len(pages)


async def index_endpoint(request: Request) -> Response:
    body = await request.json()
    await run_in_threadpool(index_documents, body["urls"])
    return Response(status_code=204)


# --- queries ----------------------------------------------------------------------------------------------------------


def search(word: str) -> list[str]:
    rows = open_index().execute("SELECT DISTINCT url FROM pages WHERE instr(text, ?) ORDER BY url", (word,))
    return [url for (url,) in rows]


async def search_endpoint(request: Request) -> JSONResponse:
    return JSONResponse(await run_in_threadpool(search, request.query_params["word"]))


# --- the server -------------------------------------------------------------------------------------------------------

app = Starlette(routes=[Route("/index", index_endpoint, methods=["POST"]), Route("/search", search_endpoint)])

if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8000
    uvicorn.run(app, port=port)
