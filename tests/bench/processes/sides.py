"""The sides of comparisons by name, so that any worker can make them: ours are modes, theirs are torch's classes."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Protocol

import torch

from pipebench.cluster import Cluster, Level
from pipebench.planner.cost_models import COST_MODELS, DEFAULT
from pipebench.planner.planner import Planner
from pipebench.planner.plans import Request
from pipebench.profile.model import Profile
from pipebench.profile.stored import read_profile, write_profile
from pipebench.simulate.costs import NO_HOST_COSTS, HostCosts
from pipebench.typed_json import read
from tests.bench.processes.ours import Ours
from tests.bench.processes.references import (
    DDP,
    FSDP,
    GPIPE,
    ONE_F_ONE_B,
    Alone,
    DataParallel,
    FullyShard,
    Pipelined,
    Plain,
)
from tests.bench.processes.subject import Case, Subject, make_setup

ALONE, PLAIN = "slowest stage alone", "plain loop"
REFERENCES = (GPIPE, ONE_F_ONE_B, DDP, FSDP, ALONE, PLAIN)
# Our mode by the reference that it is compared with.
OURS = {GPIPE: "gpipe", ONE_F_ONE_B: "pipedream-flush", DDP: "dp", FSDP: "fsdp", ALONE: "pipedream", PLAIN: "single"}


class Side(Protocol):
    """One of two implementations that are compared."""

    def train(self, num_minibatches: int) -> None:
        """Train on the next minibatches, in all processes together."""

    def weights(self) -> Mapping[str, torch.Tensor]:
        """Return the parameters this process trains, by the model's names."""


@dataclass(frozen=True)
class Given:
    """What sides are made from, measured once before."""

    subject: Subject  # the model
    cut: int  # first layer of the second stage
    profile: Profile  # taken with as many busy processes as a run has
    cluster: Cluster  # the processes and the links between them
    host: HostCosts = NO_HOST_COSTS  # CPU time that communication takes

    def to_json(self) -> dict[str, Any]:
        """Return it as JSON can hold it."""
        (level,) = self.cluster.levels
        return {
            "subject": asdict(self.subject),
            "cut": self.cut,
            "profile": write_profile(self.profile),
            "link": asdict(level),
            "host": asdict(self.host),
        }

    @staticmethod
    def from_json(fields: Mapping[str, Any]) -> "Given":
        cluster = Cluster("loopback", "local", None, (Level(**fields["link"]),))
        profile, host = read_profile(fields["profile"]), read(HostCosts, fields["host"])
        return Given(Subject(**fields["subject"]), fields["cut"], profile, cluster, host)

    def case(self, mode: str) -> Case:
        """Return how a mode of ours is run: on the same two stages as torch's, data parallel, or in one process."""
        if mode in ("dp", "single"):
            return Case(mode, (), (2 if mode == "dp" else 1,))
        if mode == "fsdp":
            request = Request(self.profile, self.cluster, COST_MODELS[DEFAULT], self.subject.minibatch_size)
            starts = tuple(stage.start for stage in Planner(request, mode).best().plan.stages[1:])
            return Case(mode, starts, (2,) * (len(starts) + 1))
        microbatches = 1 if mode == "pipedream" else self.subject.microbatches
        return Case(mode, (self.cut,), (1, 1), microbatches=microbatches)


def settings_of(side: str) -> list[str]:
    """Return the settings that follow a side's name, such as `single+tf32+compile`."""
    return side.split("+")[1:]


def subject_of(given: Given, side: str) -> Subject:
    """Return the subject with the settings that follow a side's name."""
    return given.subject.with_settings(*settings_of(side))


def make_side(given: Given, side: str) -> Side:
    """Make a side in this process: one of `REFERENCES`, or a mode of ours; settings may follow."""
    given, name = replace(given, subject=subject_of(given, side)), side.split("+")[0]
    if name == PLAIN:
        return Plain(given.subject)
    if name == DDP:
        return DataParallel(given.subject)
    if name == FSDP:
        return FullyShard(given.subject, given.case(OURS[FSDP]).starts)
    if name == ALONE:
        return Alone(given.subject, given.cut)
    if name in REFERENCES:
        return Pipelined(given.subject, given.cut, name)
    return Ours(make_setup(given.subject, given.case(name), given.profile, given.cluster))
