"""What an all-reduce in two levels sends, counted chunk by chunk and hop by hop, by nobody's formula."""

from collections import Counter
from collections.abc import Sequence


def sent_bytes(server_of: Sequence[int], num_elements: int) -> Counter[bool]:
    """Return the bytes that members of a group send of a buffer of 4-byte elements; True: between servers.

    Every element travels by itself: through the members of each server to one that collects it, from collector to
    collector, round once to be summed and once more to be told, and through the members of each server back.
    `server_of` has the server of every member.
    """
    found: Counter[bool] = Counter()
    members = Counter(server_of)
    for _ in range(num_elements):
        for count in members.values():
            found[False] += 4 * (count - 1)  # handed on until the last of the server has the server's sum
        found[True] += 4 * (len(members) - 1)  # the whole sum grows from server to server
        found[True] += 4 * (len(members) - 1)  # and comes round
        for count in members.values():
            found[False] += 4 * (count - 1)
    return +found
