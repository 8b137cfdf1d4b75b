"""The interface of a channel's two ends, for every kind of transport."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Received:
    """A received message."""

    unit: int
    values: Any  # as sent, on the receiver's device
    payload_bytes: int  # of all tensors
    sent_s: float  # when it was sent, on the run's clock
    arrived_s: float  # end of the wait for it, on the run's clock; if it was there before, when it was asked for
    note: float  # a number sent with it
    taken: int  # messages of the other direction that the sender has taken


class SendingEnd:
    """The sending end. Every method may raise `PeerLostError` if the receiver is gone."""

    def send(self, unit: int, values: Any, note: float, most_leaving: int | None = None, taken: int = 0) -> int:
        """Send a message; return its payload in bytes.

        Args:
            unit: the unit of the values.
            values: a pytree of tensors.
            note: a number sent with it.
            most_leaving: wait until fewer earlier messages than this are unsent or untaken; None never waits.
            taken: number of messages of the other direction taken here.
        """
        raise NotImplementedError

    def taken(self, num_messages: int) -> None:
        """Note how many messages the receiver has taken; unused if it reports free buffers itself."""

    def flush(self) -> None:
        """Wait until every message has left; nothing if a send stores it with the receiver."""

    def times_s(self) -> list[float]:
        """Return when every message since the last call could leave, and how long it took; by default none is timed."""
        return []

    def close(self) -> None:
        """Release what this end owns."""


class ReceivingEnd:
    """The receiving end."""

    num_taken: int  # messages received so far

    def expect(self, num_messages: int) -> None:
        """Prepare for future messages, if needed."""

    def receive(self, unit: int | None) -> Received:
        """Wait for the next message, which must be of this unit; None: of any."""
        raise NotImplementedError

    def close(self) -> None:
        """Release what this end owns; received values stay valid."""
