"""File systems: what type of file system holds an open file, and whether its reads go to a server.

Linux tells the mount of a descriptor in /proc/self/fdinfo, and the type of each mount in
/proc/self/mountinfo. Paths are not compared: so a bind mount, a mount over another, a subvolume of btrfs
(whose device number no mount has) and a file that was renamed or deleted are all told right.

Sources: proc_pid_fdinfo(5), proc_pid_mountinfo(5).
"""

import os
from contextlib import suppress
from pathlib import Path

# Types whose reads are requests to a server, by the names under which Linux mounts them. Not so: gfs2 and
# ocfs2, which hosts share, but each reads from a block device; and overlay, whatever it is over.
_OVER_A_NETWORK = frozenset(
    {
        *("nfs", "nfs4"),  # and Amazon EFS, Google Filestore, Azure Files, VAST
        *("cifs", "smb3", "smbfs"),  # mount.cifs(8); smbfs on macOS, and on Linux until 2.6.36
        *("lustre", "gpfs", "beegfs", "fhgfs", "panfs", "wekafs", "dvs"),  # modules of their makers
        *("ceph", "afs", "coda", "orangefs"),  # the kernel's Documentation/filesystems
        *("pvfs2", "glusterfs", "ncpfs", "davfs"),  # systemd too takes these for network file systems
        *("9p", "virtiofs", "vboxsf", "vmhgfs"),  # the host of a virtual machine serves them
        # A program serves it: for a bucket (gcsfuse, mountpoint-s3, s3fs, JuiceFS), for sshfs, ... Some
        # are local (mergerfs), and there too a page fault is a request to a program. Not so fuseblk, which
        # is on a block device.
        "fuse",
    }
)


def file_system_type(descriptor: int, root: Path = Path("/")) -> str | None:
    """Returns the type of the file system of an open file, as "ext4" or "fuse.gcsfuse".

    None where the system does not tell: it is not Linux, or the file was opened in another mount namespace.
    """
    status = os.fstat(descriptor)
    try:
        mounts = (root / "proc/self/mountinfo").read_bytes().decode("utf-8", "surrogateescape")
    except OSError:
        return None
    with suppress(OSError):
        fdinfo = (root / f"proc/self/fdinfo/{descriptor}").read_text()
        for line in fdinfo.splitlines():
            if line.startswith("mnt_id:"):
                return _type_of_mount(mounts, mount=line.split()[1])
    # gVisor has no mnt_id in fdinfo.
    return _type_of_mount(mounts, device=f"{os.major(status.st_dev)}:{os.minor(status.st_dev)}")


def _type_of_mount(mountinfo: str, *, mount: str | None = None, device: str | None = None) -> str | None:
    """Finds the type of a mount by its number, or by its device, "major:minor"; None if it is not there."""
    for line in mountinfo.split("\n"):  # names may hold all whitespace but this, tabs and spaces
        fields = line.split(" ")
        if "-" in fields and (fields[0] == mount or fields[2] == device):
            return fields[fields.index("-") + 1]  # between the six first and it are none or more
    return None


def is_over_a_network(file_system: str) -> bool:
    """Whether each read of a file system of this type is a request to a server, or to a program."""
    return file_system.partition(".")[0] in _OVER_A_NETWORK
