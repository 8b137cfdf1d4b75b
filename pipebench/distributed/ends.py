"""The two ends of a channel, however its bytes travel: what a transport asks of them."""

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Message:
    """What was received.

    Attributes:
        unit: whose values they are.
        values: as they were sent, on the receiver's device.
        payload_bytes: of all tensors together.
        sent_s: when they were handed over, on the run's clock.
        arrived_s: when they were here: when the wait for them ended, or the moment they were asked for; where a thread
            receives them, when it had.
        note: the number that travelled along.
        taken: how many messages the sender has taken of those that go the other way.
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
        """Hand over a message; return its payload in bytes.

        Args:
            unit: the unit whose values these are.
            values: a pytree of tensors.
            note: a number that travels along.
            most_leaving: wait for earlier messages to leave, or to be taken, where that many haven't; None never waits.
            taken: how many messages were taken here of those that come the other way.
        """
        raise NotImplementedError

    def taken(self, num_messages: int) -> None:
        """Take note that the receiver has taken so many; nothing where it says itself what is free."""

    def flush(self) -> None:
        """Wait until every message has left; nothing where it is at once where the receiver finds it."""

    def close(self) -> None:
        """Give up what this end holds; nothing where that is its maker's."""


class ReceivingEnd:
    """The receiving end.

    Attributes:
        num_taken: messages received so far.
    """

    num_taken: int

    def expect(self, num_messages: int) -> None:
        """Make room for messages that are going to come; nothing where there always is."""

    def receive(self, unit: int | None) -> Message:
        """Wait for the next message, which must be about this unit; None: about any.

        Raises:
            PeerLostError: the sender is gone.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Give up what this end holds; values that are still held stay what they are."""
