"""Render a page as one self-contained HTML file; every text is escaped."""

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path

from markdown_it import MarkdownIt

from pipebench.show.page import Block, Cell, Heading, Image, Page, PageLink, RenderedTable, Text, Verbatim
from pipebench.tracking.view import run_address

# No raw HTML and no external images.
_MARKDOWN = MarkdownIt("commonmark", {"html": False}).enable("table").disable(["image", "html_block", "html_inline"])
_STYLE = """
:root { color-scheme: light; --ink: #1b1f24; --pale: #667; --line: #dde; --link: #0b5cad; }
body { margin: 0 auto; max-width: 76rem; padding: 1rem; color: var(--ink); background: #fff;
  font: 15px/1.5 system-ui, sans-serif; }
h1 { font-size: 1.6rem; line-height: 1.25; margin: .4rem 0 1rem; }
h2 { font-size: 1.15rem; margin: 2.2rem 0 .6rem; }
a { color: var(--link); }
code, pre { font: .87em/1.45 ui-monospace, Menlo, Consolas, monospace; }
pre { overflow-x: auto; padding: .7rem; background: #f6f7f9; border-radius: 4px; }
nav { font-size: .92rem; }
nav a { margin-right: 1rem; white-space: nowrap; }
.wide { overflow-x: auto; margin: .6rem 0; }
table { border-collapse: separate; border-spacing: 0; font-size: .92rem; }
th, td { padding: .3rem .7rem; border-bottom: 1px solid var(--line); text-align: right; vertical-align: top; }
th { border-bottom: 2px solid var(--pale); text-align: right; }
.word { text-align: left; }
td:first-child { min-width: 9rem; position: sticky; left: 0; background: #fff; }
tbody tr:hover { background: #f6f7f9; }
td code { overflow-wrap: anywhere; }
.runs { display: block; max-width: 15rem; margin-left: auto; font-size: .75em; color: var(--pale); }
.runs > * { margin-left: .5em; white-space: nowrap; }
.word .runs { margin-left: 0; }
.word .runs > * { margin: 0 .5em 0 0; }
figure { margin: 1rem 0; }
figure img { max-width: 100%; height: auto; }
figcaption { color: var(--pale); font-size: .87rem; }
@media (min-width: 50rem) { td:first-child { white-space: nowrap; } }
summary { cursor: pointer; color: var(--link); }
"""


def html(page: Page, folder: Path, server: str) -> str:
    """Return a page as HTML, embedding the pictures in `folder`: SVG files, or PNGs where there is none.

    Links lead to `server`, MLflow's address; without one there are none.
    """
    headings = [block.text for block in page.blocks if isinstance(block, Heading)]
    places = "".join(f'<a href="#{_anchor(text)}">{_inline(text)}</a>\n' for text in headings)
    body = "\n".join(_block(block, folder, server) for block in page.blocks)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{escape(page.title)}</title>
<style>{_STYLE}</style>
</head>
<body>
<p><code>{escape(page.command)}</code></p>
<h1>{_inline(page.title)}</h1>
<nav>
{places}</nav>
{body}
</body>
</html>
"""


def _block(block: Block, folder: Path, server: str) -> str:
    match block:
        case Heading(text):
            return f'<h2 id="{_anchor(text)}">{_inline(text)}</h2>'
        case Text(text):
            return _paragraphs(text)
        case Image(name, description):
            vector, pixels = folder / f"{name}.svg", folder / f"{name}.png"
            kind, path = ("svg+xml", vector) if vector.is_file() else ("png", pixels)
            content = base64.b64encode(path.read_bytes()).decode()
            image = f'<img alt="{escape(description)}" src="data:image/{kind};base64,{content}">'
            return f"<figure>{image}<figcaption>{_inline(description)}</figcaption></figure>"
        case Verbatim(text):
            return f"<pre>{escape(text)}</pre>"
        case RenderedTable():
            table = _table(block, server)
            return f"<details><summary>{len(block.rows)} lines</summary>{table}</details>" if block.long else table


def _table(table: RenderedTable, server: str) -> str:
    head = "".join(f"<th{_side(table, index)}>{_inline(text)}</th>" for index, text in enumerate(table.headings))
    rows = (
        "".join(f"<td{_side(table, index)}>{_cell(cell, server)}</td>" for index, cell in enumerate(row))
        for row in table.rows
    )
    body = "\n".join(f"<tr>{row}</tr>" for row in rows)
    return f'<div class="wide"><table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div>'


def _side(table: RenderedTable, index: int) -> str:
    return ' class="word"' if index < table.left else ""


def _cell(cell: Cell, server: str) -> str:
    if isinstance(cell, str):
        return _inline(cell)
    text, links = _inline(cell.text), _known(cell.links, server)
    return f'{text}<span class="runs">{" ".join(links)}</span>' if links else text


def _known(links: Sequence[PageLink], server: str) -> list[str]:
    """Return the runs as links, those that are not recorded as plain text."""
    written = []
    for link in links:
        title, text = escape(link.tooltip), escape(link.text)
        if link.run_id and server:
            address = escape(run_address(server, link.experiment_id, link.run_id))
            written.append(f'<a href="{address}" title="{title}">{text}</a>')
        else:
            written.append(f'<span title="{title}">{text}</span>')
    return written


def _paragraphs(text: str) -> str:
    written: str = _MARKDOWN.render(text)
    return written


def _inline(text: str) -> str:
    written: str = _MARKDOWN.renderInline(text)
    return written


def _anchor(text: str) -> str:
    return re.sub(r"[\W_]+", "-", text.lower()).strip("-")
