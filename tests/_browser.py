"""Chromium without a window, where it is installed: what of a page is where on the screen."""

from __future__ import annotations

import json
import queue
import shutil
import subprocess
import tempfile
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
"""Path of the browser; None where there is none."""
DEADLINE = 60.0
"""Seconds after which a browser has failed."""

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
"""A page within a frame, since a window is never narrower than some 500 pixels; it sends where its elements are."""


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
    assert BROWSER is not None
    told: queue.Queue[dict[str, dict[str, Any]]] = queue.Queue()
    frame = FRAME.format(page=page, width=width, height=height, selectors=json.dumps(selectors))
    pages = partial(Pages, directory=str(folder), frame=frame, told=told)
    with ThreadingHTTPServer(("127.0.0.1", 0), pages) as server, tempfile.TemporaryDirectory() as profile:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        words = [
            BROWSER,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={profile}",
        ]
        window = f"--window-size={max(width, 600)},{height}"
        url = f"http://127.0.0.1:{server.server_port}/frame"
        browser = subprocess.Popen([*words, window, url], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            return told.get(timeout=DEADLINE)
        finally:
            browser.terminate()
            browser.wait()
            server.shutdown()
