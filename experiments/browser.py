"""Chromium without a window, where it is installed: what of a page is where on the screen, and a picture of it."""

from __future__ import annotations

import contextlib
import json
import math
import queue
import shutil
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from PIL import Image

from pipesgd.errors import UserInputError

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser; None where there is none."""
DEADLINE = 60.0
"""Seconds after which a browser has failed."""
NARROWEST = 600
"""Pixels of the narrowest window that there is; narrower screens are frames within it."""

FRAME = """<body style="margin: 0">
<iframe id="page" src="{page}" style="border: 0; width: {width}px; height: {height}px"></iframe>
<script>
const frame = document.getElementById("page"), boxes = {{}};
frame.addEventListener("load", () => setTimeout(() => {{
  const page = frame.contentDocument;
  for (const [name, selector] of Object.entries({selectors})) {{
    const one = page.querySelector(selector);
    if (!one) continue;
    const {{left, top, width, height}} = one.getBoundingClientRect();
    const source = one.currentSrc || "", text = one.textContent.slice(0, 1000), scrolls = one.scrollWidth;
    boxes[name] = {{left, top, width, height, source, text, scrolls}};
  }}
  fetch("/boxes", {{method: "POST", body: JSON.stringify(boxes)}});
}}, 500));
</script>"""
"""A page within a frame, which sends where its elements are."""


class Pages(SimpleHTTPRequestHandler):
    """Files of a folder, a frame around one of them, and what that sends."""

    def __init__(self, *arguments: Any, frame: str, told: queue.Queue[Any], **options: Any) -> None:
        self.frame, self.told = frame.encode(), told
        super().__init__(*arguments, **options)

    def do_GET(self) -> None:
        if self.path == "/frame":
            self.answer(self.frame)
        else:
            super().do_GET()

    def do_POST(self) -> None:
        self.told.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
        self.answer(b"")

    def answer(self, body: bytes) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None: ...


def boxes(folder: Path, page: str, width: int, height: int, selectors: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return, by name, where the first element of each selector is on a screen, in pixels, its text and its picture.

    Elements that the page has not are left out. The page is served on loopback while this runs.
    """
    with _opened(folder, page, (width, height), selectors) as (_, told):
        return told.get(timeout=DEADLINE)


def picture(folder: Path, page: str, width: int, height: int | None = None) -> Image.Image:
    """Return a page as a screen of this ``width`` and ``height`` shows it, in pixels; all of it without a height."""
    if height is None:
        height = math.ceil(boxes(folder, page, width, 900, {"page": "html"})["page"]["height"])
    with tempfile.TemporaryDirectory() as name:
        file = Path(name) / "screen.png"
        with _opened(folder, page, (width, height), {}, f"--screenshot={file}", "--virtual-time-budget=5000") as (
            browser,
            _,
        ):
            browser.wait(DEADLINE)  # it ends when it has drawn
            with Image.open(file) as drawn:
                return drawn.convert("RGB").crop((0, 0, width, height))


@contextlib.contextmanager
def _opened(
    folder: Path, page: str, size: tuple[int, int], selectors: dict[str, str], *options: str
) -> Iterator[tuple[subprocess.Popen[bytes], queue.Queue[dict[str, dict[str, Any]]]]]:
    """Open a page of ``folder`` in a browser on a screen of ``size``; yield both it and the queue of what it tells."""
    if BROWSER is None:
        raise UserInputError("Chromium must be installed; got none of chromium, chromium-browser, google-chrome")
    width, height = size
    told: queue.Queue[dict[str, dict[str, Any]]] = queue.Queue()
    frame = FRAME.format(page=page, width=width, height=height, selectors=json.dumps(selectors))
    pages = partial(Pages, directory=str(folder), frame=frame, told=told)
    with ThreadingHTTPServer(("127.0.0.1", 0), pages) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = ["--headless=new", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", f"--user-data-dir={profile}"]
        window = f"--window-size={max(width, NARROWEST)},{height}"
        url = f"http://127.0.0.1:{server.server_port}/frame"
        browser = subprocess.Popen(
            [BROWSER, *words, *options, window, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        try:
            yield browser, told
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
