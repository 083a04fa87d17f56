"""Request size: how much of a file one announcement has read, by the settings of its disk."""

import os
from pathlib import Path

from tokenloader.storage.kernel_advice import COMMON_READ_AHEAD_BYTES


def announced_bytes(descriptor: int, sys: Path = Path("/sys")) -> int:
    """Returns how many bytes of a file the kernel reads for one announcement; what goes beyond is ignored.

    That is the greater of the disk's read-ahead window and its largest request (mm/readahead.c of Linux).
    """
    device = os.fstat(descriptor).st_dev
    name = f"{os.major(device)}:{os.minor(device)}"  # another mount's, when this one has gone
    disk = sys / "dev" / "block" / name
    found = [COMMON_READ_AHEAD_BYTES >> 10]
    for setting in (
        sys / "class" / "bdi" / name / "read_ahead_kb",
        disk / "queue" / "max_sectors_kb",
        disk / "queue" / "read_ahead_kb",
        disk / ".." / "queue" / "max_sectors_kb",  # of the disk that a partition is on
        disk / ".." / "queue" / "read_ahead_kb",
    ):
        try:
            found.append(int(setting.read_text()))
        except (OSError, ValueError):
            continue
    return max(found) << 10
