"""Random orders of pushes for asynchronous recipes, in the format of a run's artifact."""

import random
from collections.abc import Mapping
from typing import Any


def num_workers(recipe: Mapping[str, Any]) -> int:
    """Return the number of devices of a recipe's cluster."""
    count: int = recipe["cluster"].get("count", 1)
    return count * int(recipe["cluster"]["servers"])


def push_order(recipe: Mapping[str, Any]) -> dict[str, Any]:
    """Return the contents of the file: a random order in which every worker pushes its minibatches in their order."""
    draw, train, segments, done = random.Random(recipe["train"].get("seed", 0)), recipe["train"], [], 0
    per_epoch = -(-recipe["dataset"]["num_train"] // train["minibatch_size"])

    def minibatches(every: Mapping[str, int]) -> int:
        return every.get("minibatches") or every["epochs"] * per_epoch

    evaluate = train.get("evaluate_every", {"epochs": 1})
    periods = [minibatches(evaluate), minibatches(train.get("checkpoint_every", evaluate))]
    while done < train["max_epochs"] * per_epoch:
        drain = min(train["max_epochs"] * per_epoch, *((done // period + 1) * period for period in periods))
        workers = num_workers(recipe)
        left = [list(range(worker, drain - done, workers)) for worker in range(workers)]
        order: list[int] = []
        while any(left):
            order.append(draw.choice([own for own in left if own]).pop(0))
        segments.append({"first": done, "minibatches": order})
        done = drain
    return {"pipebench_push_order": 1, "segments": segments}
