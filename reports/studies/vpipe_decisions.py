"""Print how long a decision of vPipe's Algorithm 1 takes: `python -m reports.studies.vpipe_decisions`.

The output is `vpipe_decisions.md`. Section 4.3 says that one triggering of Algorithm 1 takes tens of seconds.
"""

import sys
import time
from collections.abc import Sequence
from unittest.mock import patch

from pipebench.extensions.moves.balancing import RepartitionController, StageReport
from pipebench.extensions.moves.repartition_plan import Repartition
from pipebench.recipe.load import load
from pipebench.train.engines import simulate
from pipebench.train.prepare import prepare
from reports.studies.markdown import table

MODELS = {"BERT": "bert", "Transformer": "transformer", "AmoebaNet": "amoebanet", "GNMT": "gnmt16"}
HEAD = """# How long a decision of vPipe's Algorithm 1 takes

`python -m reports.studies.vpipe_decisions` makes this page: PipeDream with vPipe on 8 simulated 2080 Ti, from the cuts
of Table 2. A decision is new cuts by Algorithm 3 and every stage's policies under them by Algorithm 2, tried against
the simulator until they fit. Seconds are those of one core, of the decision that took longest; the paper's are of
another machine, and say of what they consist only that they are tens of seconds.
"""


def decisions_s(model: str) -> tuple[int, list[float]]:
    """Return a model's number of layers, and the CPU seconds of every decision during its simulated run."""
    loaded = load(f"vpipe/{MODELS[model]}/pipedream-vpipe")
    job = prepare(loaded.recipe, loaded.cluster, trains=False)
    seconds: list[float] = []
    decide = RepartitionController.decide

    def timed(controller: RepartitionController, minibatch: int, reports: Sequence[StageReport]) -> Repartition | None:
        started = time.process_time()
        found = decide(controller, minibatch, reports)
        if found is not None:
            seconds.append(time.process_time() - started)
        return found

    with patch.object(RepartitionController, "decide", timed):
        result, _ = simulate(job)
    return sum(row["num_layers"] for row in result.stages), seconds


def main(models: Sequence[str] = tuple(MODELS)) -> None:
    """Print the page, of some models."""
    rows = [(model, *decisions_s(model)) for model in models]
    cells = [(model, layers, len(taken), f"{max(taken):.1f} s") for model, layers, taken in rows if taken]
    print(HEAD + "\n" + table(("model", "layers", "decisions", "seconds"), cells))


if __name__ == "__main__":
    main(sys.argv[1:] or tuple(MODELS))
