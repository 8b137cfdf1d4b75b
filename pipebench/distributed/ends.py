"""The interface of a channel's two ends, for every kind of transport."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """A received message.

    Attributes:
        values: as they were sent, on the receiver's device.
        payload_bytes: of all tensors.
        sent_s: when it was sent, on the run's clock.
        arrived_s: when it had arrived: at the end of the wait, or at the request; in a receiving thread, the moment.
        note: the number sent with it.
        taken: how many messages of the other direction the sender has taken.
    """

    unit: int
    values: Any
    payload_bytes: int
    sent_s: float
    arrived_s: float
    note: float
    taken: int


class SendingEnd:
    """The sending end. Every method may raise `PeerLostError`: the receiver is gone."""

    def send(self, unit: int, values: Any, note: float, most_leaving: int | None = None, taken: int = 0) -> int:
        """Send a message; return its payload in bytes.

        Args:
            unit: the unit whose values these are.
            values: a pytree of tensors.
            note: a number sent with it.
            most_leaving: wait until fewer earlier messages than this are unsent or untaken; None never waits.
            taken: how many messages of the other direction were taken here.
        """
        raise NotImplementedError

    def taken(self, num_messages: int) -> None:
        """Note how many messages the receiver has taken; unused where it reports free buffers itself."""

    def flush(self) -> None:
        """Wait until every message has left; nothing where a send stores it with the receiver."""

    def close(self) -> None:
        """Release what this end owns."""


class ReceivingEnd:
    """The receiving end.

    Attributes:
        num_taken: messages received so far.
    """

    num_taken: int

    def expect(self, num_messages: int) -> None:
        """Prepare for future messages, where that is needed."""

    def receive(self, unit: int | None) -> Message:
        """Wait for the next message, which must be of this unit; None: of any.

        Raises:
            PeerLostError: the sender is gone.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Release what this end owns; received values stay valid."""
