from reports.studies.lab import REPLICATED, page, section

WHOLE = "# Title\n\n## Every recipe at every bandwidth\n\nwhole\n\n## Bytes\n\nmany\n"
OTHER = "# Title\n\n## Every recipe at every bandwidth\n\n| replicated |\n\nbelow\n\n## Bytes\n\nfew\n"


def test_the_second_lab_s_runs_are_below_the_page_of_the_first() -> None:
    text = page(WHOLE, OTHER)
    assert text.startswith(WHOLE.rstrip())
    assert (
        section(text, "A replicated stage: three hosts on the same cores")
        == f"`{REPLICATED}`\n\n| replicated |\n\nbelow"
    )
    assert "few" not in text
    assert text.endswith("studies/lab_runs.json`.\n")


def test_without_the_second_lab_the_page_is_complete() -> None:
    assert "replicated" not in page(WHOLE)
    assert section(page(WHOLE), "Bytes") == "many"
