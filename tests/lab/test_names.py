import os
import subprocess
import sys

from tests.lab.names import Owner, begun_ticks, lab_name, left_behind, namespaces, this_process


def test_two_hosts_share_a_wire_and_more_are_joined_by_a_switch() -> None:
    lab = lab_name(Owner(12, 345), 0)
    assert namespaces(lab, 2) == ["pipebench-lab-12.345.0-host0", "pipebench-lab-12.345.0-host1"]
    assert namespaces(lab, 3)[2:] == ["pipebench-lab-12.345.0-host2", "pipebench-lab-12.345.0-switch"]


def test_only_namespaces_of_a_dead_owner_count_as_left_behind() -> None:
    living = this_process()
    reborn = Owner(living.pid, living.ticks - 1)  # the same process id, of a process before
    theirs = ["host0", "pipebench", "pipebench-lab-1-host0", "pipebench-lab-1.2.0-host", "x-pipebench-lab-1.2.0-host0"]
    names = [*namespaces(lab_name(living, 0), 3), *namespaces(lab_name(reborn, 7), 3), *theirs]
    assert left_behind(names) == namespaces(lab_name(reborn, 7), 3)


def test_a_zombie_counts_as_ended() -> None:
    process = subprocess.Popen([sys.executable, "-I", "-S", "-c", "input()"], stdin=subprocess.PIPE)
    ticks = begun_ticks(process.pid)
    assert ticks is not None
    assert Owner(process.pid, ticks).is_alive
    process.kill()
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and is a zombie
    assert not Owner(process.pid, ticks).is_alive
    process.communicate()
    assert begun_ticks(process.pid) is None
