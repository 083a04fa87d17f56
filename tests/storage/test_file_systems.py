"""The type of an open file's file system, from what Linux writes into /proc, and on this machine."""

import os
import subprocess
import sys

import pytest

from tokenloader.storage.file_systems import file_system_type, is_over_a_network

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux tells, others do not")

# As Linux writes it: numbers of mount and parent, device, root, mount point, options, more, type, source.
MOUNTINFO = """\
27 1 254:0 / / rw,relatime - ext4 /dev/vda rw,discard
31 27 0:31 / /cg rw,nosuid shared:9 master:1 - cgroup2 cgroup2 rw
40 27 0:42 / /home rw,relatime shared:30 - nfs4 server:/home rw,vers=4.2,rsize=1048576,proto=tcp
41 27 0:43 / /mnt/my\\040bucket ro,nosuid,nodev - fuse.gcsfuse my-bucket ro,user_id=0,max_read=1048576
42 27 0:44 / /mnt/s3 rw,nosuid - fuse mountpoint-s3 rw,user_id=0
43 27 0:45 /@data /data rw,relatime - btrfs /dev/nvme1n1p1 rw,subvolid=256,subvol=/@data
44 43 8:17 / /data/windows rw - fuseblk /dev/sdb1 rw,user_id=0,blksize=4096
45 27 2:7 / /scratch rw shared:2 propagate_from:3 - lustre 10.0.0.1@o2ib:/scratch rw,flock
46 27 0:50 / / rw,relatime - overlay overlay rw,lowerdir=/l,upperdir=/u,workdir=/w
47 45 254:0 /srv/a\\134b\\011c\\043 /scratch/bound rw - ext4 /dev/vda rw
48 27 0:60 / /odd\r\x85\u2028\xa0-\udcff/- rw - 9p drvfs rw
"""


@pytest.fixture
def proc(tmp_path):
    """Writes /proc/self/mountinfo, and what fdinfo says of a descriptor."""

    def write(descriptor, fdinfo, mountinfo=MOUNTINFO):
        folder = tmp_path / "proc/self/fdinfo"
        folder.mkdir(parents=True)
        (tmp_path / "proc/self/mountinfo").write_bytes(mountinfo.encode("utf-8", "surrogateescape"))
        (folder / str(descriptor)).write_text(fdinfo)
        return tmp_path

    return write


@pytest.fixture
def opened(tmp_path):
    """The descriptor of an open file."""
    with (tmp_path / "file").open("wb") as file:
        yield file.fileno()


@pytest.mark.parametrize(
    ("mount", "expected"),
    [
        (27, "ext4"),
        (31, "cgroup2"),
        (40, "nfs4"),
        (41, "fuse.gcsfuse"),
        (42, "fuse"),
        (43, "btrfs"),
        (44, "fuseblk"),
        (45, "lustre"),
        (46, "overlay"),
        (47, "ext4"),
        (48, "9p"),
        (4, None),
    ],
)
def test_the_type_is_that_of_the_mount_that_the_file_was_opened_in(proc, opened, mount, expected):
    fdinfo = f"pos:\t0\nflags:\t0100000\nmnt_id:\t{mount}\nino:\t12\n"
    assert file_system_type(opened, proc(opened, fdinfo)) == expected


def test_without_the_number_of_its_mount_it_is_found_by_its_device(proc, opened):
    device = os.fstat(opened).st_dev
    other, same = "7 1 1234:5 / /a rw - xfs /dev/a rw\n", f"{os.major(device)}:{os.minor(device)}"
    mountinfo = f"{other}8 1 {same} / /b rw - zfs tank rw\n"
    assert file_system_type(opened, proc(opened, "flags:\t0\n", mountinfo)) == "zfs"


def test_a_device_that_no_mount_has_is_of_no_known_type(proc, opened):
    assert file_system_type(opened, proc(opened, "", "7 1 1234:5 / /a rw - xfs /dev/a rw\n")) is None


def test_without_proc_it_is_unknown(tmp_path, opened):
    assert file_system_type(opened, tmp_path) is None


def test_a_closed_descriptor_is_an_error():
    read, write = os.pipe()
    os.close(read)
    os.close(write)
    with pytest.raises(OSError, match="Bad file descriptor"):
        file_system_type(read)


@linux
def test_on_this_machine_proc_is_of_type_proc():
    with open("/proc/self/stat") as file:
        assert file_system_type(file.fileno()) == "proc"


@linux
def test_on_this_machine_files_are_of_the_type_that_stat_tells(opened, tmp_path):
    command = ["findmnt", "--noheadings", "--output=FSTYPE", "--target", str(tmp_path)]
    try:
        told = subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        pytest.skip("no findmnt here")
    assert file_system_type(opened) == told


@linux
def test_a_deleted_file_is_still_told(opened, tmp_path):
    before = file_system_type(opened)
    (tmp_path / "file").unlink()
    assert file_system_type(opened) == before is not None


NETWORK = """nfs nfs4 cifs smb3 smbfs lustre gpfs ceph beegfs glusterfs afs orangefs pvfs2 wekafs 9p
    virtiofs fuse fuse.gcsfuse fuse.s3fs fuse.juicefs fuse.sshfs fuse.mount.s3"""
LOCAL = """ext4 xfs btrfs zfs f2fs tmpfs ramfs overlay squashfs erofs iso9660 fuseblk fuseblk.ntfs fusectl
    nfsd ntfs3 ocfs2 gfs2"""


@pytest.mark.parametrize("name", NETWORK.split())
def test_a_read_of_these_is_a_request_to_a_server(name):
    assert is_over_a_network(name)


@pytest.mark.parametrize("name", LOCAL.split())
def test_a_read_of_these_is_one_of_a_local_disk(name):
    assert not is_over_a_network(name)
