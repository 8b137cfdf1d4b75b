"""A report's page as Markdown and as HTML, compared with a stored page and with the report's data."""

import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from pipebench.report.definition import Measure, Published, Report, Row, RunReference
from pipebench.report.evaluated import Evaluated, TableCell
from pipebench.report.expressions import value_expression
from pipebench.report.render import Rendered, render
from pipebench.report.wording import compared_text, plan_class, published_text, reproduced_text
from tests.report.made import CALIBRATED, REPORT, SPEEDUP, evaluated

GOLDEN = Path(__file__).with_name("made.md")
# Of HTML these have no end.
_VOID = {"meta", "img", "br"}


@pytest.fixture(scope="module")
def rendered(tmp_path_factory: pytest.TempPathFactory) -> Rendered:
    return render(evaluated(), tmp_path_factory.mktemp("made"))


class Reader(HTMLParser):
    """Reads a page: its tags with their attributes, in order, and its text; tags that don't match are an error."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.rows: list[list[str]] = []
        self._open: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in _VOID:
            self._open.append(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self._open:
            self.text += data
        if {"td", "th"} & {*self._open} and "span" not in self._open:
            self.rows[-1][-1] += data


def read(page: Path) -> Reader:
    reader = Reader()
    reader.feed(page.read_text())
    reader.close()
    assert not reader._open
    return reader


def test_markdown_equals_the_reviewed_page(rendered: Rendered) -> None:
    assert rendered.files[0].read_text() == GOLDEN.read_text()


def test_the_page_is_the_same_whenever_it_is_made(rendered: Rendered, tmp_path: Path) -> None:
    again = render(evaluated(), tmp_path)
    for one, other in zip(rendered.files, again.files, strict=True):
        assert one.name == other.name
        if one.name != "report.html":  # says when it was made
            assert one.read_bytes() == other.read_bytes(), one.name


def test_stored_pages_have_neither_time_nor_place(rendered: Rendered) -> None:
    text = rendered.files[0].read_text()
    assert "127.0.0.1" not in text
    assert "2026" not in text
    assert "torch" not in text


def test_html_has_the_markdown_s_tables(rendered: Rendered) -> None:
    lines = [line for line in rendered.files[0].read_text().splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    plain = [
        [cell.replace("\\|", "|").replace("`", "") for cell in row]
        for row in cells
        if row[-1][:3] not in ("---", "--:")
    ]
    assert plain == [[" ".join(cell.split()) for cell in row] for row in read(rendered.files[1]).rows]


def test_html_needs_nothing_else_and_runs_nothing(rendered: Rendered) -> None:
    page = read(rendered.files[1])
    names = {tag for tag, _ in page.tags}
    assert not names & {"script", "link", "iframe", "object", "embed", "base", "form"}
    assert not [name for _, attributes in page.tags for name in attributes if name.startswith("on")]
    sources = [attributes["src"] or "" for _, attributes in page.tags if "src" in attributes]
    assert len(sources) == 5
    assert all(source.startswith("data:image/svg+xml;base64,") for source in sources)
    assert "url(" not in rendered.files[1].read_text().split("</style>")[0]
    assert "<script>alert(1)</script>" in page.text  # as text
    assert "onerror=alert(1)" in page.text


def test_cells_link_to_their_runs(rendered: Rendered) -> None:
    page = read(rendered.files[1])
    links = [attributes["href"] or "" for tag, attributes in page.tags if tag == "a"]
    for row in REPORT.rows:
        address = f"http://127.0.0.1:5000/#/experiments/7/runs/<{row.name}>?workflowType=machine_learning"
        assert links.count(address) == 3  # a cell in either column, and how it was obtained
    places = {attributes["id"] for _, attributes in page.tags if "id" in attributes}
    inside = [link.removeprefix("#") for link in links if link.startswith("#")]
    assert len(inside) == 7
    assert {*inside} <= places


def test_without_a_server_cells_have_no_links(tmp_path: Path) -> None:
    plain = Evaluated(REPORT, evaluated().cells)
    page = read(render(plain, tmp_path).files[1])
    assert not [attributes for tag, attributes in page.tags if tag == "a" and "runs/" in (attributes["href"] or "")]


def test_the_summary_agrees_with_the_tables(rendered: Rendered) -> None:
    text = rendered.files[0].read_text()
    assert rendered.summary in text
    assert "5.22x" in rendered.summary
    assert "![" not in rendered.summary


@pytest.mark.parametrize(
    ("unit", "value", "reproduced", "published"),
    [
        ("x", 5.2, "5.20x", "5.2x"),
        ("x", 14.9, "14.90x", "14.9x"),
        ("share", 0.9, "90.0%", "90%"),
        ("share", 0.345, "34.5%", "34.5%"),
        ("share", 0.00774, "0.774%", "0.774%"),
        ("s", 0.25, "250 ms", "250 ms"),
        ("bytes", 2.9e9, "2.90 GB", "2.90 GB"),
        ("samples/s", 1547.2, "1,547 samples/s", "1,547 samples/s"),
        ("count", 1640.0, "1,640", "1,640"),
        ("none", 0.123456, "0.123", "0.123456"),
    ],
)
def test_values_are_written_in_their_unit(unit: str, value: float, reproduced: str, published: str) -> None:
    measure = Measure("m", "m", unit)
    assert reproduced_text(TableCell("r", "m", "c", value), measure) == reproduced
    assert published_text(Published(value), measure) == published


def test_cells_with_seeds_problems_and_no_value_are_labelled() -> None:
    assert reproduced_text(TableCell("r", "m", "c", 2.0, 1.5, 2.5), SPEEDUP) == "2.00x [1.50x to 2.50x]"
    assert reproduced_text(TableCell("r", "m", "c", 2.0, 2.0, 2.0), SPEEDUP) == "2.00x"
    assert reproduced_text(TableCell("r", "m", "c", problem="missed"), SPEEDUP) == "missed"
    assert reproduced_text(None, SPEEDUP) == "-"


@pytest.mark.parametrize(
    ("value", "published", "text", "compared"),
    [
        (2.0, Published(2.0, "at_least"), "≥ 2x", "kept"),
        (1.9, Published(2.0, "at_least"), "≥ 2x", "not kept"),
        (0.9, Published(0.9, "at_most"), "≤ 0.9x", "kept"),
        (1.0, Published(0.9, "at_most"), "≤ 0.9x", "not kept"),
        (3.0, Published(1.5, "about"), "about 1.5x", "2.00"),
        (3.0, Published(4.0), "4x", "0.75"),
        (3.0, Published(0.0), "0x", "-"),
    ],
)
def test_published_values_and_bounds_are_compared(value: float, published: Published, text: str, compared: str) -> None:
    assert published_text(published, SPEEDUP) == text
    assert compared_text(TableCell("r", "m", "c", value, published=published)) == compared


@pytest.mark.parametrize(
    ("plan", "found"),
    [
        ("16", "data parallel"), ("1", "data parallel"), ("15-1", "replicated"), ("2-2-2", "replicated"),
        ("straight", "straight"), ("Straight", "straight"), ("1-1", "straight"),
    ],
)  # fmt: skip
def test_plans_have_classes(plan: str, found: str) -> None:
    assert plan_class(plan) == found


def test_a_user_s_table_has_no_published_column(tmp_path: Path) -> None:
    measures = (SPEEDUP, Measure("sent", "sent per sample", "bytes"))
    report = Report("own", Path("own.yaml"), "Own", (CALIBRATED,), measures, (Row("a", "A", {}), Row("b", "B", {})))
    cells = (
        TableCell("a", "speedup", "calibrated", 2.0),
        TableCell("a", "sent", "calibrated", 1e6),
        TableCell("b", "sent", "calibrated", 5.0),
    )
    text = render(Evaluated(report, cells), tmp_path).files[0].read_text()
    assert "| A | 2.00x | 1.00 MB |\n| B | - | 5 B |" in text
    assert "published" not in text
    assert "Marks" not in text


def test_unchanged_columns_are_shown_once_and_auxiliary_measures_not_at_all(tmp_path: Path) -> None:
    runs = {"run": RunReference(("a.yaml",)), "best": RunReference(("b.yaml",), same=True)}
    spelled = {name: value_expression(f"{name}.epoch_time_s", {}) for name in runs}
    measures = (
        Measure("own", "epoch", "s", spelled["run"]),
        Measure("best", "best epoch", "s", spelled["best"]),
        Measure("bound", "what is drawn", "s", spelled["best"], shown=False),
    )
    rows = (Row("a", "A", runs),)
    report = Report("own", Path("own.yaml"), "Own", REPORT.columns, measures, rows)
    made = [TableCell("a", measure.name, column.name, 2.0) for measure in measures for column in REPORT.columns]
    text = render(Evaluated(report, tuple(made)), tmp_path).files[0].read_text()
    assert "|  | epoch, ideal hardware | epoch, clusters of 2019 | best epoch |\n" in text
    assert "what is drawn" not in text


def test_a_remark_is_made_once(tmp_path: Path) -> None:
    measures = tuple(Measure(name, name, "x") for name in ("one", "two", "three"))
    rows = tuple(Row(name, name.upper(), {}, {measure.name: Published(1.0) for measure in measures}) for name in "ab")
    report = Report("own", Path("own.yaml"), "Own", (CALIBRATED,), measures, rows)
    made = [
        TableCell(row.name, measure.name, "calibrated", 2.0, published=Published(1.0), remarks=("out of memory",))
        for measure in measures
        for row in rows
        if row.name == "a" or measure.name == "three"
    ]
    text = render(Evaluated(report, tuple(made)), tmp_path).files[0].read_text()
    first, second, third = text.split("## ")[1:4]
    assert "\n- A: out of memory\n" in first
    assert "out of memory" not in second
    assert "\n- A; B: out of memory\n" in third  # of other rows, so it is another one
