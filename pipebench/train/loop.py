"""Training to a target: segments between drains, evaluations, checkpoints, and the outcome.

A run that misses its target has no time to accuracy. In a distributed run every process runs this loop, and processes
exchange at every drain what decides its course, so that all decide alike.
"""

import logging
import time
from contextlib import closing, suppress
from dataclasses import replace
from typing import Any

import torch

from pipebench.checkpoint.progress import CurvePoint, Facts, SavedProgress
from pipebench.checkpoint.store import Checkpoints
from pipebench.engine.admission import EvaluationStoppedError
from pipebench.errors import DivergedError, OutOfMemoryError
from pipebench.formats import num_epochs
from pipebench.model.allocator import release_copies
from pipebench.recipe.engines import engine_kind
from pipebench.recipe.rules_zoo import EVAL_LOSS
from pipebench.recipe.users_code import during
from pipebench.simulate.timeline import Timeline
from pipebench.train.checkpointing import (
    NO_CHECKPOINTS,
    CheckpointPolicy,
    CheckpointWriter,
    ResumePoint,
    count_on,
    counted_under,
    earlier_workers,
    last_samples,
    taken_by,
)
from pipebench.train.clock import RunClock
from pipebench.train.curves import Curves, TrainingLoss
from pipebench.train.interfaces import LoopExtension, MakeEngine, OnPoint, ProgressSink
from pipebench.train.job import Job
from pipebench.train.memory_forecast import what_would_help
from pipebench.train.metrics import (
    EarlierWorkers,
    curve_metrics,
    describe,
    finite_metrics,
    result_fields,
    run_metrics,
    run_notes,
    stage_rows,
    sum_facts,
)
from pipebench.train.result import COMPLETED, DIVERGED, INTERRUPTED, MISSED, REACHED, Point, RunResult

# Seconds between the checkpoints that a run in one process writes without being asked to: what a kill costs at most.
_MOST_UNSAVED_S = 600.0
_LOG = logging.getLogger(__name__)


class _StoppedError(Exception):
    """All processes have agreed to stop here."""


class TrainingLoop:
    """Trains a job until its target, its last epoch, divergence or Ctrl-C; `run` may be called once.

    Args:
        job: what to train.
        make_engine: makes the engine, given callbacks for losses and units.
        progress: receives every minibatch and evaluation.
        on_point: called with every point of the curves.
        policy: where checkpoints are written, and the one to resume from.
    """

    def __init__(
        self,
        job: Job,
        make_engine: MakeEngine,
        progress: ProgressSink,
        on_point: OnPoint,
        policy: CheckpointPolicy = NO_CHECKPOINTS,
    ) -> None:
        self._job, self._policy = job, policy
        self._progress, self._on_point = progress, on_point
        self._sampler = job.setup.sampler
        self._periods = job.periods
        self._done = 0  # minibatches trained, as of the last drain
        self._samples = 0  # samples trained, as of the last drain
        # Samples whose loss is known. A process knows its own losses: an estimate, as if all replicas were as far.
        self._seen = 0
        self._sharing = job.setup.pipeline.replicas[-1] if engine_kind(job.recipe).in_processes else 1
        self._reported = 0  # samples reported as progress
        self._loss = TrainingLoss()
        self._curves = Curves(job.recipe.train.target, job.setup.dataset.metrics)
        self._earlier = EarlierWorkers()
        self._engine = make_engine(self._take_loss, self._take_unit)
        self._clock = RunClock(self._engine)
        self._writer = CheckpointWriter(self._engine, progress)
        self._saved_s = time.monotonic()  # when the last checkpoint was begun, or this loop
        parts = job.setup.pipeline.hooks("loop").values()
        self._extensions: list[LoopExtension] = [make(job, self._engine, self._clock, progress.note) for make in parts]

    def run(self) -> tuple[RunResult, Timeline]:
        """Train; return the result and the recorded timeline.

        Raises:
            CheckpointError: the checkpoint to resume from doesn't fit.
            OutOfMemoryError: a device has no memory left; says what would help.
        """
        with closing(self._engine.loaders):
            return self._run()

    def _run(self) -> tuple[RunResult, Timeline]:
        found = self._policy.resume_from
        if found is not None:
            self._restore(found)
        self._clock.start(None if found is None else found.progress, self._policy.lost_s)
        started_s = time.perf_counter()
        total_s: float | None = None
        try:
            self._train_to_target()
            outcome, sentence = self._outcome()
            sentence += self._metrics_without_value()
        except DivergedError as diverged:
            outcome, sentence, total_s = DIVERGED, str(diverged), self._end_early()
        except _StoppedError as stopped:
            reason = str(stopped)
            outcome = DIVERGED if reason.startswith(DIVERGED) else INTERRUPTED
            sentence = reason if outcome == DIVERGED else f"{reason} after {self._samples:,} samples"
        except KeyboardInterrupt:
            outcome, total_s = INTERRUPTED, self._end_early()
            sentence = f"interrupted after {self._seen:,} samples"
        except BaseException as error:
            self._writer.end()
            if isinstance(error, OutOfMemoryError):
                raise OutOfMemoryError(f"{error}; {what_would_help(self._job)}") from error
            raise
        self._writer.wait()
        times_s = {
            "total_time_s": self._clock.drained_s if total_s is None else total_s,
            "start_time_s": started_s - self._job.began_s,
            "wall_time_s": time.perf_counter() - started_s,
        }
        return self._result(outcome, sentence, times_s)

    # The course of a run.

    def _restore(self, found: ResumePoint) -> None:
        """Resume from a checkpoint."""
        saved = found.progress
        for extension in self._extensions:
            extension.restore(saved)
        self._job = replace(self._job, setup=self._engine.setup)
        same_workers, counts_on = saved.taken_by == taken_by(self._job), count_on(saved, self._job)
        self._earlier = earlier_workers(saved, count_on=counts_on)
        facts = saved.facts[self._engine.position] if counts_on else None
        plans = (extension.restored_plan(saved) for extension in self._extensions if same_workers)
        plan = next((plan for plan in plans if plan is not None), None)
        self._engine.restore(found.state, facts, self._policy.lost_s + saved.clock_s, plan)
        found.state.clear()  # the engine has copied what it needs of the whole model
        release_copies(self._job.setup.device, self._job.setup.graph.root)
        self._done = found.step
        self._samples = self._seen = self._reported = saved.samples
        self._loss = TrainingLoss(saved.loss_sum, saved.weight)
        checkpoint_s_at = saved.checkpoint_s_at or [saved.checkpoint_s] * len(saved.points)
        for data, *seconds in zip(saved.points, saved.training_s_at, checkpoint_s_at, strict=True):
            point = Point(**data)
            self._curves.add(point, *seconds)
            # Reported again, since the first process may have died before recording it; records ignore duplicates.
            self._on_point(point)
        best, store = self._curves.best_point, self._policy.checkpoints
        if best is not None and store is not None:
            steps = (step for step in store.steps() if self._sampler.samples_before(step) == best.samples)
            store.best = next(steps, None)

    def _train_to_target(self) -> None:
        periods = self._periods
        if periods.evaluates_at(self._done) and not self._curves.has_point_at(self._samples):
            # The run that is resumed was stopped right before this evaluation.
            self._evaluate()
            self._save(self._store())
        while self._done < periods.total and self._curves.reached is None:
            with self._clock.spending("training_s"):
                self._train(periods.next_drain(self._done))
            self._samples = self._seen = self._reported = self._sampler.samples_before(self._done)
            self._end_if_stopped()
            evaluates = periods.evaluates_at(self._done)
            # First, so that a failure or a kill in the evaluation costs no training
            saved_to = self._store() if evaluates or periods.saves_at(self._done) else None
            self._save(saved_to)
            if evaluates:
                self._evaluate()
            if self._done < periods.total and self._curves.reached is None:
                with self._clock.spending("training_s"):
                    for extension in self._extensions:
                        extension.drained(self._done)
            if saved_to is None:
                self._save(self._store() if evaluates else None)
            elif evaluates or self._extensions:
                self._save(saved_to, again=True)

    def _train(self, drain: int) -> None:
        """Train up to the drain after `drain` minibatches of the run, or up to an earlier one."""
        done = self._done
        for extension in self._extensions:
            drain = extension.begins(done, drain)
        self._done = done + self._engine.train(done, drain - done)
        for extension in self._extensions:
            extension.ended(done, self._done)

    def _end_if_stopped(self) -> None:
        """Exchange the processes' states at a drain; end on an agreed stop, or on a loss that is not finite."""
        shares = self._engine.exchange({**self._loss.take_share(), "stop": self._engine.stop_reason})
        reasons = [share["stop"] for share in shares if share["stop"]]
        if not self._loss.add_shares(shares):  # on a GPU, not every loss has been read
            reasons.append(self._divergence(self._loss.total))
        reason = next((each for each in reasons if each.startswith(DIVERGED)), next(iter(reasons), None))
        if reason is None:
            return
        if not reason.startswith(DIVERGED):
            self._save(self._policy.checkpoints or self._policy.late())
        raise _StoppedError(reason)

    def _evaluate(self) -> None:
        when = f"evaluation after {num_epochs(self._epochs(self._samples))}"
        scores: dict[str, float] | None = None
        with self._clock.spending("evaluation_s"), during(when), suppress(EvaluationStoppedError):
            scores = self._engine.evaluate()
        if scores is None:  # the run that goes on begins with it
            self._end_if_stopped()
            return
        metrics = {"train_loss": self._loss.take_mean(), **scores}
        point = Point(self._samples, self._clock.drained_s, metrics)
        self._curves.add(point, self._clock.training_s, self._clock.checkpoint_s)
        self._on_point(point)
        self._progress.evaluation(point, self._epochs(self._samples))
        _LOG.info("t=%.6g s: %s", point.clock_s, ", ".join(f"{name} {value:.4g}" for name, value in metrics.items()))
        ends = self._done >= self._periods.total or self._curves.reached is not None
        for extension in self._extensions:
            extension.evaluated(point, self._done, ends=ends)

    def _store(self) -> Checkpoints | None:
        """Return where to write a checkpoint at this drain; None: nowhere, as far as is known before its evaluation."""
        policy, is_best = self._policy, self._curves.is_best_at(self._samples)
        is_over = self._done >= self._periods.total or self._curves.reached is not None
        if policy.checkpoints is not None:
            is_due = is_best or is_over or self._periods.saves_at(self._done)
            return policy.checkpoints if is_due else None
        is_due = is_best or is_over or time.monotonic() - self._saved_s > _MOST_UNSAVED_S
        return policy.late() if policy.keeps and is_due else None

    def _save(self, store: Checkpoints | None, *, again: bool = False) -> None:
        """Write a checkpoint of this drain or, `again`, add what has followed: its evaluation, or layers that move."""
        if store is None:
            return
        with self._clock.spending("checkpoint_s"):
            if not again:
                self._writer.wait()
            if self._curves.is_best_at(self._samples):
                store.best = self._done
            (self._writer.amend if again else self._writer.write)(store, self._done, self._saved)
        self._saved_s = time.monotonic()

    def _saved(self, facts: list[Facts]) -> dict[str, Any]:
        """Return this loop's part of a checkpoint; `facts` are the counters of all processes."""
        earlier, clock, points = self._earlier, self._clock, self._curves.points
        return SavedProgress(
            taken_by=taken_by(self._job),
            facts=facts,
            samples=self._samples,
            epoch=self._epochs(self._samples),
            points=[CurvePoint(samples=p.samples, clock_s=p.clock_s, metrics=dict(p.metrics)) for p in points],
            training_s_at=self._curves.training_s_at,
            checkpoint_s_at=self._curves.checkpoint_s_at,
            counted_under=counted_under(self._job),
            counted_from=(earlier.samples, earlier.training_s),
            loss_sum=self._loss.total,
            weight=self._loss.weight,
            training_s=clock.training_s,
            evaluation_s=clock.evaluation_s,
            checkpoint_s=clock.checkpoint_s,
            clock_s=clock.drained_s,
            saved_at_s=time.time(),
            lost_s=clock.lost_s,
            last_samples=last_samples(self._sampler, self._done),
            bytes_before=tuple((kind, level, num_bytes) for (kind, level), num_bytes in earlier.num_bytes.items()),
            **self._saved_by_extensions(),
        ).to_json()

    def _saved_by_extensions(self) -> dict[str, Any]:
        return {field: value for extension in self._extensions for field, value in extension.saved().items()}

    # Callbacks of the engine.

    def _take_loss(self, loss: torch.Tensor, samples: int, weight: float, clock_s: float) -> None:
        """Add a unit's loss; end the run if it is not finite."""
        self._seen += samples * self._sharing
        if not self._loss.add(loss, weight):
            raise DivergedError(self._divergence(float(loss)))

    def _take_unit(self, samples: int, loss: float, clock_s: float) -> None:
        """Report a unit as progress."""
        self._reported += samples
        self._progress.update(self._reported, clock_s, loss, self._engine.busy_fraction)

    # The end of a run.

    def _end_early(self) -> float:
        """Return the run's seconds if it ended between two drains; count the samples since the last one."""
        total_s = self._clock.end_early(in_training=self._seen > self._samples)
        self._samples = self._seen
        return total_s

    def _outcome(self) -> tuple[str, str]:
        """Return the outcome of a run that was not stopped, and a sentence about it."""
        target, reached, epochs = self._job.recipe.train.target, self._curves.reached, self._epochs(self._samples)
        if target is None:
            return COMPLETED, f"trained {num_epochs(epochs)}; no target was set"
        goal = f"{target.metric} {target.value:g}"
        if reached is None:
            best = self._curves.best(target.metric)
            rounded = f"{best:.4g}"
            shown = repr(best) if self._curves.reaches(float(rounded)) else rounded  # rounded, it may be at the target
            return MISSED, f"missed {goal}: the best in {num_epochs(epochs)} was {target.metric} {shown}"
        value, after = reached.metrics[target.metric], self._epochs(reached.samples)
        return REACHED, f"reached {goal} ({target.metric} {value:.4g}) after {num_epochs(after)}"

    def _metrics_without_value(self) -> str:
        """Return since which evaluation metrics are NaN or infinite, as the end of a sentence; "" if none is."""
        since = {name: num_epochs(self._epochs(point.samples)) for name, point in self._curves.metrics_without_value()}
        found = [
            f"; {name} is not a finite number from the evaluation after {epochs} on" for name, epochs in since.items()
        ]
        if EVAL_LOSS in since:
            found.append("; without a loss no score counts")
        return "".join(found)

    def _divergence(self, loss: float) -> str:
        """Return a sentence about a training loss that is not finite."""
        train, first = self._job.recipe.train, self._sampler.size(0)
        advice = f"lower train.optimizer.lr ({train.optimizer.lr:g}) or set train.schedule.warmup_epochs"
        if self._seen <= first * self._sharing:
            advice = "that is the first minibatch, before any update: the data, the model or the loss gives it"
        where = f"after {self._seen:,} samples (epoch {self._epochs(self._seen):.2f})"
        return f"{DIVERGED}: the training loss is {loss:g} {where}; {advice}"

    def _result(self, outcome: str, sentence: str, times_s: dict[str, float]) -> tuple[RunResult, Timeline]:
        """Combine the counters and measurements of all processes; all of them call it."""
        facts = sum_facts(self._engine.exchange(self._engine.facts()))
        measured = self._engine.measured(self._clock.training_s - self._earlier.training_s)
        job = replace(self._job, setup=self._engine.setup)
        metrics = run_metrics(job, self._samples, self._clock, facts, measured, self._earlier)
        metrics |= curve_metrics(job, self._curves)
        hooks, num_bytes = job.setup.pipeline.hooks, self._earlier.num_bytes + facts["num_bytes"]
        returned = [(name, metrics_of(facts["extensions"][name])) for name, metrics_of in hooks("metrics").items()]
        parts = zip(hooks("loop"), self._extensions, strict=True)
        returned += [(name, part.metrics(num_bytes)) for name, part in parts]
        for name, found in returned:
            metrics |= finite_metrics(name, found, self._progress.note)
        if self._policy.checkpoints is not None:
            metrics["checkpoint_time_s"] = self._clock.checkpoint_s
        metrics |= times_s
        result = RunResult(
            **describe(self._job), outcome=outcome, sentence=sentence, metrics=metrics,
            points=tuple(self._curves.points), stages=stage_rows(job, facts), workers=measured.workers,
            notes={**run_notes(job, facts, self._earlier), **measured.notes}, **self._saved_by_extensions(),
            **result_fields(job, facts),
        )  # fmt: skip
        for extension in self._extensions:
            result = extension.completed(result)
        return result, measured.timeline

    def _epochs(self, samples: int) -> float:
        return samples / self._sampler.num_samples
