"""The virtual engine, made for the training loop."""

from pipebench.engine.admission import StopRequest
from pipebench.engine.engine import OnLoss, OnUnit
from pipebench.engine.virtual import VirtualEngine
from pipebench.simulate.meter import Meter
from pipebench.simulate.network import Network
from pipebench.train.interfaces import MakeEngine
from pipebench.train.job import Job


def on_virtual_clock(job: Job, stop: StopRequest | None = None) -> MakeEngine:
    """Return what makes a virtual engine for a job; `stop` may ask it to end early."""

    def make(on_loss: OnLoss, on_unit: OnUnit) -> VirtualEngine:
        meter = Meter(job.setup.pipeline)
        setup = job.setup
        network = Network(setup.cluster, setup.devices, meter.transfer, copies=setup.copies)
        return VirtualEngine(setup, network, on_loss=on_loss, on_unit=on_unit, meter=meter, stop=stop)

    return make
