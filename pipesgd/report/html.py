"""HTML that escapes every text by itself, and the frame of a page that loads nothing from elsewhere."""

from __future__ import annotations

import html

STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #57606a; --paper: #ffffff; --tile: #f3f5f7; --line: #d0d7de;
  --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8860b; --c4: #7a5195; --bad: #b3261e; }
@media (prefers-color-scheme: dark) {
  :root { --ink: #e6edf3; --soft: #9aa5b1; --paper: #12161b; --tile: #1c2229; --line: #3a424c;
    --c0: #56b4e9; --c1: #ff9a57; --c2: #3cd6a5; --c3: #f0c94a; --c4: #c9a3e6; --bad: #ff8a80; } }
@media print {
  :root { color-scheme: light; --ink: #000000; --soft: #444444; --paper: #ffffff; --tile: #f3f5f7; --line: #bbbbbb;
    --c0: #0072b2; --c1: #d55e00; --c2: #009e73; --c3: #b8860b; --c4: #7a5195; --bad: #b3261e; }
  tr, figure, .tiles { break-inside: avoid; }
  h2 { break-after: avoid; }
  .options { font-size: 0.75rem; }
  .options td { padding-top: 0; padding-bottom: 0; }
  details::details-content { content-visibility: visible; block-size: auto; } }
* { box-sizing: border-box; print-color-adjust: exact; -webkit-print-color-adjust: exact; }
body { margin: 0 auto; max-width: 47rem; padding: 1rem; background: var(--paper); color: var(--ink);
  font: 16px/1.5 system-ui, sans-serif; overflow-wrap: break-word; }
h1 { font-size: 1.5rem; line-height: 1.25; margin: 0.5rem 0; }
h2 { font-size: 1.15rem; margin: 2rem 0 0.5rem; border-top: 1px solid var(--line); padding-top: 1rem; }
p { margin: 0.5rem 0; }
.soft, figcaption { color: var(--soft); font-size: 0.9rem; }
.bad { color: var(--bad); font-weight: 600; }
.tiles { display: grid; grid-template-columns: repeat(auto-fill, minmax(9.5rem, 1fr)); gap: 0.6rem; margin: 1rem 0; }
.tiles div { background: var(--tile); border-radius: 6px; padding: 0.6rem 0.8rem; }
.tiles dt { color: var(--soft); font-size: 0.85rem; line-height: 1.3; }
.tiles dd { margin: 0; font-size: 1.15rem; font-weight: 600; line-height: 1.35; }
table { border-collapse: collapse; width: 100%; font-size: 0.9rem; margin: 0.5rem 0; }
th, td { text-align: left; vertical-align: top; padding: 0.3rem 0.6rem 0.3rem 0; border-bottom: 1px solid var(--line); }
th { color: var(--soft); font-weight: 600; }
td.number, th.number { text-align: right; font-variant-numeric: tabular-nums; overflow-wrap: normal; }
td:last-child, th:last-child { padding-right: 0; }
td:last-child, h1, p, .options td { overflow-wrap: anywhere; }
table:not(.options) td:first-child, .whole { white-space: nowrap; }
.options td:first-child { width: 45%; }
figure { margin: 0.5rem 0; }
svg { display: block; width: 100%; height: auto; }
svg.narrow { display: none; }
@media screen and (max-width: 600px) { svg.wide { display: none; } svg.narrow { display: block; } }
svg text { fill: var(--ink); font: 13px system-ui, sans-serif; }
svg text.soft { fill: var(--soft); font-size: 12px; }
.grid { stroke: var(--line); stroke-width: 1; }
.mark { stroke: var(--soft); stroke-width: 1.5; stroke-dasharray: 4 3; }
.curve { fill: none; stroke-width: 2; stroke-linejoin: round; opacity: 0.85; }
.name { margin-right: 1.2em; }
.c0 { stroke: var(--c0); } .c1 { stroke: var(--c1); } .c2 { stroke: var(--c2); }
.c3 { stroke: var(--c3); } .c4 { stroke: var(--c4); }
.f0 { fill: var(--c0); } .f1 { fill: var(--c1); } .f2 { fill: var(--c2); } .f3 { fill: var(--c3); }
.f4 { fill: var(--c4); }
.spread { opacity: 0.22; }
.key { display: inline-block; width: 0.8em; height: 0.8em; border-radius: 2px; margin-right: 0.4em; }
.key.f0 { background: var(--c0); } .key.f1 { background: var(--c1); } .key.f2 { background: var(--c2); }
.key.f3 { background: var(--c3); } .key.f4 { background: var(--c4); }
summary { cursor: pointer; }
"""
COLOURS = 5
"""Number of colours in ``STYLE``, told apart with any kind of colour vision: classes c0 to c4 draw, f0 to f4 fill."""


class Html(str):
    """Text that is HTML already; all other text is escaped where it is put into a page."""

    __slots__ = ()


Child = str | float | None
"""Content of an element: HTML as it is, other text escaped, nothing for None."""


def tag(name: str, *children: Child, **attributes: str | float | None) -> Html:
    """Return an element with these children. Attributes are escaped, and left out where they are None.

    Underscores in the names of attributes are hyphens, and one at their end is dropped, for Python's keywords.

    >>> tag("p", "1 < 2 ", tag("b", "bold"), class_="soft")
    '<p class="soft">1 &lt; 2 <b>bold</b></p>'
    """
    given = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items() if value is not None}
    words = "".join(f' {key}="{html.escape(_text(value))}"' for key, value in given.items())
    return Html(f"<{name}{words}>{join(*children)}</{name}>")


def join(*children: Child) -> Html:
    """Return these children one after another.

    >>> join("a & b", None, Html("<br>"))
    'a &amp; b<br>'
    """
    return Html("".join(child if isinstance(child, Html) else html.escape(_text(child)) for child in children))


def table(head: list[Child], rows: list[list[Child]], *, class_: str | None = None, numbers: bool = False) -> Html:
    """Return a table, without a head if that is empty; with ``numbers``, all columns but the first end at the right."""

    def row(kind: str, cells: list[Child]) -> Html:
        aligned = "number" if numbers else None
        return tag("tr", *(tag(kind, cell, class_=aligned if index else None) for index, cell in enumerate(cells)))

    top = tag("thead", row("th", head)) if head else None
    return tag("table", top, tag("tbody", *(row("td", cells) for cells in rows)), class_=class_)


def page(title: str, *sections: Child) -> Html:
    """Return a whole page, which browsers do not let load anything."""
    policy = "default-src 'none'; style-src 'unsafe-inline'"
    head = tag(
        "head",
        Html('<meta charset="utf-8">'),
        Html(f'<meta http-equiv="Content-Security-Policy" content="{policy}">'),
        Html('<meta name="viewport" content="width=device-width, initial-scale=1">'),
        tag("title", title),
        tag("style", Html(STYLE)),
    )
    return Html(f"<!DOCTYPE html>\n{tag('html', head, tag('body', tag('main', *sections)), lang='en')}\n")


def _text(value: Child) -> str:
    """Return ``value`` as text that UTF-8 can write: bytes of other names of files are shown as escapes."""
    if value is None:
        return ""
    text = f"{value:g}" if isinstance(value, float) else str(value)
    return text.encode(errors="backslashreplace").decode()
