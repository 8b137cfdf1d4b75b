"""Render a page as Markdown, to be stored beside the report's YAML: only what is reproducible."""

from collections.abc import Iterable

from pipebench.show.page import Block, Cell, Heading, Image, LinkedText, Page, RenderedTable, Text, Verbatim


def markdown(page: Page) -> str:
    """Return a page as Markdown, starting with its command."""
    parts = [f"`{page.command}`", f"# {page.title}", blocks_markdown(page.blocks)]
    return "\n\n".join(part for part in parts if part) + "\n"


def blocks_markdown(blocks: Iterable[Block]) -> str:
    """Return blocks as Markdown, without a final newline."""
    return "\n\n".join(_block(block) for block in blocks)


def _block(block: Block) -> str:
    match block:
        case Heading(text):
            return f"## {text}"
        case Text(text):
            return text
        case Image(name, description):
            return f"![{description}]({name}.png)"
        case Verbatim(text):
            return f"```\n{text}\n```"
        case RenderedTable():
            return _table(block)


def _table(table: RenderedTable) -> str:
    sides = ("---" if index < table.left else "--:" for index in range(len(table.headings)))
    lines = [table.headings, sides, *table.rows]
    return "\n".join(f"| {' | '.join(map(_cell, line))} |" for line in lines)


def _cell(cell: Cell) -> str:
    text = cell.text if isinstance(cell, LinkedText) else cell
    return " ".join(text.split()).replace("|", "\\|")
