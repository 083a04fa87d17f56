"""A file system with one file, each read of which takes a while, as over a network, for tests to mount.

It speaks the kernel's FUSE protocol, in a process of its own, which unmounts and ends when its standard
input does: so also when the process of the test is killed. It needs root and /dev/fuse.

Sources: linux/fuse.h; fuse(4); the kernel's Documentation/filesystems/fuse.
"""

import collections
import ctypes
import errno
import json
import os
import queue
import struct
import subprocess
import sys
import threading
import time
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

# Kinds of requests, flags of INIT, flags of the answer to OPEN, inodes, and a flag of umount2.
LOOKUP, FORGET, GETATTR, OPEN, READ, RELEASE, INIT = 1, 2, 3, 14, 15, 18, 26
INTERRUPT, BATCH_FORGET = 36, 42
ASYNC_READ, AUTO_INVAL_DATA, MAX_PAGES = 1 << 0, 1 << 12, 1 << 22
DIRECT_IO, KEEP_CACHE = 1 << 0, 1 << 1
ROOT, FILE = 1, 2
DETACH = 2

libc = ctypes.CDLL(None, use_errno=True)


class Read(NamedTuple):
    """A READ that the kernel sent, in bytes of the file, and when, by time.monotonic()."""

    offset: int
    size: int
    began: float
    ended: float


class SlowFile:
    """A file that is read over a slow file system, at `path`, until the end of a with block.

    Args:
        folder: an empty one, to be the mount point.
        source: the file to serve under its own name, read-only.
        delay: seconds from a READ to its answer; any number of them are at work at once.
        max_read: bytes of a READ at most, up to 1 MiB.
        max_background: READs that the kernel reads ahead with at once.
        read_ahead: bytes that the kernel reads ahead of a reader at most, and of a range on advice.
        async_read: whether it reads ahead without waiting for the answers.
        keep_cache: whether the file's pages stay in the page cache when it is opened again.
        direct_io: whether reads of it, but not its mappings, go past the page cache.
    """

    def __init__(
        self,
        folder,
        source,
        *,
        delay=0.01,
        max_read=128 << 10,
        max_background=12,
        read_ahead=128 << 10,
        async_read=True,
        keep_cache=True,
        direct_io=False,
    ):
        self.path, self._folder, self._answered = folder / source.name, folder, []
        options = {"delay": delay, "max_read": max_read, "max_background": max_background}
        options["init"] = ASYNC_READ * async_read | AUTO_INVAL_DATA | MAX_PAGES
        options["open"] = DIRECT_IO * direct_io | KEEP_CACHE * keep_cache
        self._server = subprocess.Popen(
            [sys.executable, __file__, folder, source, json.dumps(options)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,  # what ends the test's process group leaves it time to unmount
        )
        try:
            if error := json.loads(self._server.stdout.readline())["errno"]:
                raise OSError(error, os.strerror(error), str(folder))
            device = os.stat(folder).st_dev
            settings = Path(f"/sys/class/bdi/{os.major(device)}:{os.minor(device)}")
            (settings / "read_ahead_kb").write_text(str(read_ahead >> 10))
        except BaseException:
            self.close()
            raise

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.close()

    def close(self):
        """Unmounts it; READs that are under way fail."""
        self._server.kill()
        self._server.communicate()
        libc.umount2(bytes(self._folder), DETACH)

    def reads(self):
        """The READs that were answered since the last call of this."""
        self._tell({})
        reads, self._answered = self._answered, []
        return reads

    def fail(self, begin, end):
        """Has READs that touch bytes [begin, end) fail with EIO from now on."""
        self._tell({"failing": [begin, end]})

    def stall(self, begin, end):
        """Has READs that touch bytes [begin, end), and no others, wait until another call of this."""
        self._tell({"stalling": [begin, end]})

    def num_stalled(self):
        """How many READs wait for another call of stall."""
        return self._tell({})

    def _tell(self, settings):
        self._server.stdin.write(json.dumps(settings) + "\n")
        self._server.stdin.flush()
        answered, num_stalled = json.loads(self._server.stdout.readline())
        self._answered += [Read(*one) for one in answered]
        return num_stalled


def most_at_once(reads):
    """The greatest number of READs that were under way at one time."""
    changes = sorted([(one.began, 1) for one in reads] + [(one.ended, -1) for one in reads])
    return max(accumulate(change for _, change in changes), default=0)


class Server:
    """Answers the kernel: one thread takes requests, another answers READs when their time has come."""

    def __init__(self, folder, source, options):
        self.options, self.settings = options, {"failing": [0, 0], "stalling": [0, 0]}
        self.name = os.path.basename(source).encode()
        self.file, self.size = os.open(source, os.O_RDONLY), os.stat(source).st_size
        self.device = os.open("/dev/fuse", os.O_RDWR)
        self.waiting, self.stalled, self.log = queue.SimpleQueue(), [], collections.deque()
        arguments = f"fd={self.device},rootmode=40000,user_id=0,group_id=0,allow_other"
        failed = libc.mount(b"slow", os.fsencode(folder), b"fuse.slow", 0, arguments.encode())
        print(json.dumps({"errno": ctypes.get_errno() if failed else 0}), flush=True)
        if not failed:
            threading.Thread(target=self.take_requests, daemon=True).start()
            threading.Thread(target=self.answer_reads, daemon=True).start()

    def obey(self):
        """Takes settings from standard input, and tells each time what was answered since."""
        for line in sys.stdin:
            self.settings |= json.loads(line)
            answered = [self.log.popleft() for _ in range(len(self.log))]
            print(json.dumps([answered, len(self.stalled)]), flush=True)

    def take_requests(self):
        while True:
            try:
                request = os.read(self.device, 1 << 16)
            except OSError as error:
                if error.errno == errno.ENODEV:  # unmounted
                    return
                if error.errno not in (errno.EINTR, errno.EAGAIN, errno.ENOENT):  # withdrawn
                    raise
                continue
            length, kind, unique, node = struct.unpack_from("<IIQQ", request)
            body = request[40:length]
            if kind == READ:
                self.waiting.put((time.monotonic(), unique, *struct.unpack_from("<8xQI", body)))
            elif kind not in (FORGET, BATCH_FORGET, INTERRUPT):  # those have no answer
                self.answer(unique, *self.answer_to(kind, node, body))

    def answer_reads(self):
        while True:
            began, unique, offset, size = read = self.next_read()
            if self.touches("stalling", offset, size):
                self.stalled.append(read)
                continue
            time.sleep(max(0, began + self.options["delay"] - time.monotonic()))
            fails = self.touches("failing", offset, size)
            data = b"" if fails else os.pread(self.file, size, offset)
            self.log.append((offset, size, began, time.monotonic()))
            self.answer(unique, errno.EIO if fails else 0, data)

    def next_read(self):
        while True:
            for i, (_, _, offset, size) in enumerate(self.stalled):
                if not self.touches("stalling", offset, size):
                    return self.stalled.pop(i)
            try:
                return self.waiting.get(timeout=0.02 if self.stalled else None)
            except queue.Empty:
                pass

    def touches(self, setting, offset, size):
        begin, end = self.settings[setting]
        return offset < end and begin < offset + size

    def answer(self, unique, error, body=b""):
        try:
            os.writev(self.device, [struct.pack("<IiQ", 16 + len(body), -error, unique), body])
        except OSError as problem:
            if problem.errno not in (errno.ENOENT, errno.ENODEV):  # nobody waits for it any more
                raise

    def answer_to(self, kind, node, body):
        """Returns an error number, and the body of the answer."""
        if kind == INIT:
            _, _, read_ahead, offered = struct.unpack_from("<4I", body)
            first = struct.pack("<4I", 7, 31, read_ahead, offered & self.options["init"])
            most, pages = self.options["max_background"], self.options["max_read"] >> 12
            # Where the kernel counts as congested: at three quarters, as where a server does not say.
            return 0, (first + struct.pack("<2H2IH", most, most * 3 // 4, 4096, 1, pages)).ljust(64, b"\0")
        if kind == LOOKUP:
            if body.rstrip(b"\0") != self.name:
                return errno.ENOENT, b""
            return 0, struct.pack("<4Q2I", FILE, 0, 1, 1, 0, 0) + self.attributes(FILE)
        if kind == GETATTR:
            return 0, struct.pack("<Q2I", 1, 0, 0) + self.attributes(node)
        if kind == OPEN:
            return 0, struct.pack("<Q2I", 0, self.options["open"], 0)
        return (0 if kind == RELEASE else errno.ENOSYS), b""

    def attributes(self, node):
        size, mode = (0, 0o40755) if node == ROOT else (self.size, 0o100644)
        times = [10**9] * 3
        return struct.pack("<6Q10I", node, size, size // 512, *times, 0, 0, 0, mode, 1, *[0] * 5)


if __name__ == "__main__":
    Server(sys.argv[1], sys.argv[2], json.loads(sys.argv[3])).obey()
    libc.umount2(os.fsencode(sys.argv[1]), DETACH)
