"""Wrong architecture searches and their traces, with the sentence that refuses them."""

import pytest

from pipebench.errors import RecipeError
from pipebench.recipe.load import load
from tests.recipe.conftest import VALID, Write

TRACES = [
    ("[]", "search.trace: .*trace.json"),
    ('{"pipebench_search": 2}', "pipebench_search: got 2, allowed is 1"),
    ('{"pipebench_search": 1}', "events: got none, allowed is at least one"),
    (
        '{"pipebench_search": 1, "events": [{"add": 3, "stage": 0}]}',
        r"events\[0\]: got neither, both, or not always the",
    ),
    (
        '{"pipebench_search": 1, "events": [{"minibatch": 4, "add": 3, "stage": 0}, {"minibatch": 4, "cells": []}]}',
        r"events\[1\]: got 4 after 4, allowed are moments that ascend",
    ),
    (
        '{"pipebench_search": 1, "events": [{"minibatch": 4, "stage": 0}]}',
        r"events\[0\]: allowed is exactly one of cells",
    ),
    ('{"pipebench_search": 1, "events": [{"minibatch": 4, "add": 2}]}', r"events\[0\].stage: is for add and delete"),
    ('{"pipebench_search": 1, "events": [], "end_second": 4.0}', "events: got none, allowed is at least one"),
    (
        '{"pipebench_search": 1, "events": [{"second": 4.0, "cells": []}], "end_second": 4.0}',
        "end_second: got 4, allowed is one after the last event's second, or null",
    ),
    (
        '{"pipebench_search": 1, "events": [{"second": 4.0, "cells": []}]}',
        "search.trace: got changes at seconds, which engine virtual can't know beforehand: allowed are minibatches",
    ),
]


@pytest.mark.parametrize(("content", "message"), TRACES)
def test_a_wrong_trace_of_a_search_is_refused(write: Write, content: str, message: str) -> None:
    write(content, "trace.json")
    with pytest.raises(RecipeError, match=message):
        load(str(write(VALID + "search: {cells: [a], trace: trace.json}\n")))


def test_a_simulation_needs_a_trace_of_the_search(write: Write) -> None:
    with pytest.raises(RecipeError, match=r"search\.trace: is missing, and engine simulated trains nothing that could"):
        load(str(write(VALID + "search: {cells: [a]}\n")), ["engine.kind=simulated"])


def test_metrics_of_the_whole_model_cannot_score_a_search(write: Write) -> None:
    path = write("extends: small/gnmt8/pipedream\nsearch: {cells: [a]}\n")
    with pytest.raises(RecipeError, match="search: got a search on a data set that scores what the whole model writes"):
        load(str(path))
