"""The study of throughput while layers move: its cuts, and the moves that lead to them."""

import itertools
import random
from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from pipebench.extensions.moves.engine import moving
from pipebench.extensions.moves.repartition_plan import CutLayout, Repartition, layout_problems
from pipebench.extensions.moves.throughput import Finished
from pipebench.schedule.modes import KEEP
from reports.studies.live_moves import BEGINNINGS, HEAD, Course, balanced, begun, draw, steps, subject
from tests.studies.again import check_rows
from tests.support import Mlp, make_setup


@pytest.mark.parametrize("p", [2, 3, 4])
def test_no_cut_has_a_faster_slowest_stage(p: int) -> None:
    setup = make_setup(Mlp(), (list(range(1, p)), [1] * p))
    seconds = [row.forward_s + row.backward_s for row in setup.profile.by_size[4]]
    seconds[-2:] = [sum(seconds[-2:])]

    def slowest(starts: tuple[int, ...]) -> float:
        return max(sum(seconds[a:b]) for a, b in itertools.pairwise([0, *starts, len(seconds)]))

    assert slowest(balanced(setup)) == min(map(slowest, itertools.combinations(range(1, len(seconds)), p - 1)))


def test_minibatches_at_one_pace_are_a_level_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Periods of equal seconds ended one minibatch more now and then, and drew a peak 13 % higher."""
    drawn: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, *_, **__: drawn.append(figure))
    units = [Finished(0.3 + 0.031 * number, 4) for number in range(280)]
    draw({"a": [Course("live", units, units[-1].end_s + 0.2, 0)]}, Path("x.png"))
    (line,) = drawn[0].axes[0].lines
    assert np.asarray(line.get_ydata()).tolist() == pytest.approx([4 / 0.031] * 34)
    assert np.asarray(line.get_xdata()).tolist()[:2] == pytest.approx([0.424, 0.672])


def test_every_step_moves_layers_by_one_stage() -> None:
    draw = random.Random(1)
    for _ in range(200):
        p, num_layers = draw.randint(2, 6), 40
        before, after = (tuple(sorted(draw.sample(range(1, num_layers), p - 1))) for _ in range(2))
        path = [before, *steps(before, after, num_layers)]
        assert path[-1] == after
        for one, other in itertools.pairwise(path):
            assert not [*layout_problems(CutLayout(one, (KEEP,) * num_layers), Repartition(0, other))]


@pytest.mark.slow
def test_the_first_row_is_reproduced() -> None:
    """Of the page; BERT-large's profile and four courses take some 7 s."""
    _, text = begun(moving(subject()), next(iter(BEGINNINGS)))
    check_rows([*HEAD.splitlines(), *text.splitlines()], "live_moves.md", "nox -s studies")
