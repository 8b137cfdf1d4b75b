"""Bytes that an all-reduce in two levels sends, counted hop by hop; shares no code with the simulator."""

from collections import Counter
from collections.abc import Sequence


def sent_bytes(server_of: Sequence[int], num_elements: int) -> Counter[bool]:
    """Return the bytes that the members of a group send, of a buffer of 4-byte elements: between servers by True.

    Every element is sent by itself: through the members of each server to a collector; from collector to collector
    around a ring, once to be summed and once more with the sum; and through the members of each server back.
    `server_of` has the server of every member.
    """
    found: Counter[bool] = Counter()
    members = Counter(server_of)
    for _ in range(num_elements):
        for count in members.values():
            found[False] += 4 * (count - 1)  # from member to member, until the last one has the server's sum
        found[True] += 4 * (len(members) - 1)  # the sum, from server to server
        found[True] += 4 * (len(members) - 1)  # the result, around the ring again
        for count in members.values():
            found[False] += 4 * (count - 1)
    return +found
