"""Reservations of memory: what others see of them, and when they end."""

import fcntl
import os
import random
import re
import struct
import sys

import pytest
from helpers import run_python

from tokenloader.storage import reservation
from tokenloader.storage.memory_limits import MemoryLimit, memory_limits
from tokenloader.storage.reservation import Reservation

GIB = 2**30
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="no such locks")


@pytest.fixture
def limits(tmp_path):
    """Limits that leave so many bytes each, by name; those of one name are one limit."""

    def make(**left_bytes):
        for name in left_bytes:
            (tmp_path / name).touch()
        return lambda: [MemoryLimit(tmp_path / name, left) for name, left in left_bytes.items()]

    return make


def fits(num_bytes, limits):
    """Whether so many bytes could be reserved now."""
    try:
        Reservation("it", num_bytes, limits).close()
    except MemoryError:
        return False
    return True


def test_a_reservation_is_refused_with_what_is_needed_available_and_reserved(limits):
    ten = limits(machine=10 * GIB)
    first, second = Reservation("a", 4 * GIB, ten), Reservation("b", 3 * GIB, ten)
    message = (
        "c needs 3.50 GiB and 10.00 GiB of memory are available (control group limits included), of which "
        'fills under way on this host reserve 7.00 GiB; use residency="mmap", which needs none, and whose '
        "page cache all processes of a host share"
    )
    with pytest.raises(MemoryError, match=f"^{re.escape(message)}$"):
        Reservation("c", 7 * GIB // 2, ten)
    assert fits(3 * GIB, ten)
    first.close()
    assert fits(7 * GIB, ten)
    second.close()
    message = "d needs 11.00 GiB and 10.00 GiB of memory are available (control group limits included); use"
    with pytest.raises(MemoryError, match=f"^{re.escape(message)}"):
        Reservation("d", 11 * GIB, ten)
    assert fits(10 * GIB, ten)


def test_what_was_taken_is_no_longer_reserved(limits):
    ten = limits(machine=10)
    taking = Reservation("it", 6, ten)
    for left in (4, 1):
        taking.taken({4: 2, 1: 3}[left])
        assert fits(10 - left, ten)
        assert not fits(11 - left, ten)
    taking.taken(1)
    assert fits(10, ten)


def test_the_sum_is_right_whichever_reservations_end_and_in_whatever_order(limits):
    plenty, chance = limits(machine=10**6), random.Random(0)
    held = []
    for _ in range(200):
        if held and chance.random() < 0.45:
            held.pop(chance.randrange(len(held)))[0].close()
        elif held and chance.random() < 0.3:
            one = chance.choice(held)
            if one[1] > 1:
                one[0].taken(1)
                one[1] -= 1
        else:
            size = chance.randint(1, 9)
            held.append([Reservation("it", size, plenty), size])
        left = 10**6 - sum(size for _, size in held)
        assert fits(left, plenty)
        assert not fits(left + 1, plenty)


def test_each_limit_counts_what_is_reserved_under_it(limits):
    """A machine with two control groups."""
    here = limits(machine=100, here=10)
    held = Reservation("it", 8, limits(machine=100, there=10))
    assert fits(10, here)
    assert not fits(3, limits(machine=100, there=10))
    assert not fits(93, limits(machine=100))
    assert fits(92, limits(machine=100))
    held.close()


def test_where_a_limit_is_read_and_cannot_be_locked_it_holds_all_the_same(tmp_path):
    def nowhere():
        return [MemoryLimit(tmp_path / "none", 10)]

    held = Reservation("it", 10, nowhere)
    assert fits(10, nowhere)
    assert not fits(11, nowhere)
    held.close()


def test_where_no_limit_is_known_everything_fits():
    assert fits(2**62, list)


def test_on_this_machine_reservations_add_up():
    if not memory_limits():
        pytest.skip("none are known here")
    held = Reservation("it", 64 << 20, memory_limits)
    with pytest.raises(MemoryError, match=r"^it needs 1073741824.00 GiB .* reserve \d+\.\d\d GiB"):
        Reservation("it", 2**60, memory_limits)
    held.close()


def test_locks_of_other_programs_on_the_file_do_not_stop_anything(limits, tmp_path, monkeypatch):
    monkeypatch.setattr(reservation, "_TURN_SECONDS", 0.05)
    ten = limits(machine=10)
    others = os.open(tmp_path / "machine", os.O_RDWR)
    endless = struct.pack("hhqqi0q", fcntl.F_RDLCK, 0, 3, 0, 0)
    fcntl.fcntl(others, fcntl.F_OFD_SETLK, endless)
    fcntl.flock(others, fcntl.LOCK_EX)  # as if it had been stopped in its turn
    assert fits(10, ten)
    assert not fits(11, ten)
    os.close(others)


PROCESSES = """
import os, signal, time
from pathlib import Path
from tokenloader.storage.memory_limits import MemoryLimit
from tokenloader.storage.reservation import Reservation
path = Path(os.environ["LIMIT"])
limits = lambda: [MemoryLimit(path, 35)]
def start(wait_for=None):
    '''A process that tries to reserve 10 bytes, says whether it could, and holds them.'''
    told, tells = os.pipe()
    pid = os.fork()
    if not pid:
        wait_for and os.read(wait_for, 1)
        try:
            held = Reservation("it", 10, limits)
            os.write(tells, b"y")
        except MemoryError:
            os.write(tells, b"n")
        time.sleep(60)
    return pid, told
"""


def test_of_eight_processes_that_start_together_as_many_pass_as_fit_and_killed_ones_make_room(tmp_path):
    (tmp_path / "limit").touch()
    told = run_python(
        f"import os; os.environ['LIMIT'] = {str(tmp_path / 'limit')!r}\n"
        + PROCESSES
        + """
waiting, go = os.pipe()
processes = [start(waiting) for _ in range(8)]
os.write(go, b"........")
could = [os.read(told, 1) for _, told in processes]
print(could.count(b"y"))
passed = [pid for (pid, _), told in zip(processes, could) if told == b"y"]
again = start()
print(os.read(again[1], 1).decode())
os.kill(passed[0], signal.SIGKILL)
os.waitpid(passed[0], 0)
more = start(), start()
print(sorted(os.read(told, 1).decode() for _, told in more))
for pid, _ in [*processes, again, *more]:
    if pid != passed[0]:
        os.kill(pid, signal.SIGKILL)
"""
    )
    assert told.splitlines() == ["3", "n", "['n', 'y']"]


def test_a_reservation_ends_though_a_child_after_a_fork_goes_on(tmp_path):
    (tmp_path / "limit").touch()
    told = run_python(
        f"import os; os.environ['LIMIT'] = {str(tmp_path / 'limit')!r}\n"
        + PROCESSES
        + """
held = Reservation("it", 30, limits)
child = os.fork()
if not child:
    time.sleep(60)
held.close()
pid, told = start()
print(os.read(told, 1).decode())
os.kill(pid, signal.SIGKILL), os.kill(child, signal.SIGKILL)
"""
    )
    assert told == "y\n"
