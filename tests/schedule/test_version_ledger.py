"""A ledger of versions against its rule, which is evaluated anew after every step of random histories."""

import random

import pytest

from pipebench.schedule.version_ledger import VersionLedger


@pytest.mark.parametrize("in_place", [False, True])
@pytest.mark.parametrize("seed", range(20))
def test_the_newest_used_and_requestable_versions_are_alive(seed: int, in_place: bool) -> None:
    rng, ledger = random.Random(seed), VersionLedger(in_place=in_place)
    alive, in_flight, held, newest, keep_from, most = [0], [], None, 0, 0, 1
    for _ in range(300):
        action = rng.choice(("forward", "forward", "backward", "backward", "update", "hold"))
        if action == "forward":
            in_flight.append(rng.choice(alive))
            ledger.use(in_flight[-1])
        elif action == "backward" and in_flight:
            ledger.release(in_flight.pop(rng.randrange(len(in_flight))))
        elif action == "hold" and rng.random() < 0.2:
            held = newest
            assert ledger.hold() == held
        elif action == "update":
            keep_from = rng.randint(keep_from, newest + 1)
            needed = newest >= keep_from or newest in (*in_flight, held)
            assert ledger.step(keep_from) is (in_place or not needed)
            newest += 1
            alive.append(newest)
        used = (*in_flight, held)
        alive = [v for v in alive if v == newest or (not in_place and (v >= keep_from or v in used))]
        most = max(most, len(alive))
        assert ledger.alive == {*alive}
        assert (ledger.newest, ledger.most_alive) == (newest, most)
        assert ledger.in_use is any(v is not None for v in used)
    copy = ledger.copied()
    assert (copy.newest, copy.alive, copy.in_use) == (newest, {newest}, False)
    ledger.retire()
    assert ledger.alive == {v for v in alive if v in (*in_flight, held)}
    for number in in_flight:
        ledger.release(number)
    assert ledger.alive == {held} & {*alive}


def test_a_restart_forgets_all_but_one_version() -> None:
    ledger = VersionLedger(in_place=False)
    ledger.hold()
    assert not ledger.step(1)
    assert ledger.alive == {0, 1}
    ledger.restart(7)
    assert (ledger.newest, ledger.alive, ledger.in_use, ledger.most_alive) == (7, {7}, False, 2)
