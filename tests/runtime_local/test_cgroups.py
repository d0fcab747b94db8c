"""What is made of the control groups that a machine offers, told by pretended ones: files in a directory."""

import os
from pathlib import Path

from basilica.runtimes.local.capabilities import capabilities_of
from basilica.runtimes.local.cgroups import LEAF, Cgroups, find, for_rank
from basilica.runtimes.local.gpus import GpuInventory

MACHINE = Path("/sys/fs/cgroup")


def unified_tree(root: Path, *, controllers: str, enabled: str, members: str = "") -> Path:
    """A delegated group at `root/user/serve`, as systemd makes it."""
    own = root / "user" / "serve"
    own.mkdir(parents=True)
    (own / "cgroup.controllers").write_text(controllers)
    (own / "cgroup.subtree_control").write_text(enabled)
    (own / "cgroup.procs").write_text(members)
    (own / "cgroup.type").write_text("domain")
    (own.parent / "cgroup.subtree_control").touch()
    return own


def look(root: Path, own: str, mounts: str, *, ours: set[int] | None = None) -> Cgroups:
    return find((ours or set()).__contains__, root=root, own=own, mounts=mounts)


def test_one_group_of_version_2_does_it_all() -> None:
    machine = Cgroups(unified=MACHINE / "a", unified_controllers=frozenset({"memory", "cpu"}), can_kill=True)
    groups = for_rank(machine, "r", memory_bytes=1000, cpu=1.5)
    [task] = groups.tasks
    assert task["path"] == "/sys/fs/cgroup/a/r"
    assert task["home"] == "/sys/fs/cgroup/a"
    assert task["settings"] == [("memory.max", "1000"), ("memory.swap.max", "0"), ("cpu.max", "150000 100000")]
    assert (groups.memory_events, groups.kill_file) == (f"{task['path']}/memory.events", f"{task['path']}/cgroup.kill")
    assert groups.freezer is None


def test_a_hybrid_machine_kills_by_version_2_and_limits_by_version_1() -> None:
    machine = Cgroups(
        unified=MACHINE / "u", memory=MACHINE / "m", cpu=MACHINE / "c", freezer=MACHINE / "f", can_kill=True
    )
    groups = for_rank(machine, "r", memory_bytes=1000, cpu=0.001)
    assert [task["path"] for task in groups.tasks] == [f"/sys/fs/cgroup/{kind}/r" for kind in "umc"]
    assert groups.tasks[0]["settings"] == []
    assert groups.tasks[1]["settings"] == [("memory.limit_in_bytes", "1000"), ("memory.memsw.limit_in_bytes", "1000")]
    assert groups.tasks[2]["settings"][1] == ("cpu.cfs_quota_us", "1000")  # the kernel takes no less
    assert groups.memory_events == "/sys/fs/cgroup/m/r/memory.oom_control"
    assert groups.freezer is None


def test_without_version_2_the_freezer_holds_them_still() -> None:
    groups = for_rank(Cgroups(memory=MACHINE / "m", freezer=MACHINE / "f"), "r", memory_bytes=None, cpu=None)
    assert [task["path"] for task in groups.tasks] == ["/sys/fs/cgroup/m/r", "/sys/fs/cgroup/f/r"]
    assert (groups.kill_file, groups.freezer) == (None, "/sys/fs/cgroup/f/r")
    assert [task["settings"] for task in groups.tasks] == [[], []]


def test_a_group_that_already_shares_its_controllers_is_used(tmp_path: Path) -> None:
    own = unified_tree(tmp_path, controllers="cpu io memory", enabled="cpu memory")
    found = look(tmp_path, "0::/user/serve\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert (found.unified, found.unified_controllers) == (own, frozenset({"cpu", "memory"}))
    assert (found.limits_memory, found.limits_cpu, found.problem) == (True, True, "")


def test_a_group_that_others_live_in_is_not_divided(tmp_path: Path) -> None:
    own = unified_tree(tmp_path, controllers="cpu memory", enabled="", members="1\n")
    (own / "cgroup.subtree_control").chmod(0o400)
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").symlink_to("/proc/version")  # not to be written, not even by root
    found = look(tmp_path, "0::/user/serve\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert (found.unified, found.limits_memory) == (own, False)  # still good for finding all members
    assert found.unified_home == own
    assert "other processes share" in found.problem
    assert "systemd-run --user --scope -p Delegate=yes basilica serve" in found.problem
    assert not (own / LEAF).exists()


def test_a_group_beside_our_own_does_where_our_own_is_shared(tmp_path: Path) -> None:
    own = unified_tree(tmp_path, controllers="cpu memory", enabled="", members=f"1\n{os.getpid()}\n")
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").symlink_to("/proc/version")
    (own.parent / "cgroup.subtree_control").write_text("cpuset memory")
    found = look(tmp_path, "0::/user/serve\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert (found.unified, found.unified_home, found.problem) == (own.parent, own, "")
    assert (found.limits_memory, found.limits_cpu) == (True, False)


def test_a_server_that_is_alone_in_its_group_makes_room(tmp_path: Path) -> None:
    own = unified_tree(tmp_path, controllers="memory", enabled="", members=f"{os.getpid()}\n")
    (own / "cgroup.subtree_control").unlink()
    (own / "cgroup.subtree_control").symlink_to("/proc/version")
    (own / LEAF).mkdir()
    (own / LEAF / "cgroup.procs").touch()
    found = look(tmp_path, "0::/user/serve\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n", ours={os.getpid()})
    assert (own / LEAF / "cgroup.procs").read_text() == str(os.getpid())
    assert found.unified_home == own / LEAF


def test_the_next_server_finds_the_room_that_the_last_one_made(tmp_path: Path) -> None:
    own = unified_tree(tmp_path, controllers="memory", enabled="memory")
    (own / LEAF).mkdir()
    (own / LEAF / "cgroup.procs").write_text(f"{os.getpid()}\n")
    found = look(tmp_path, f"0::/user/serve/{LEAF}\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n")
    assert (found.unified, found.unified_home, found.limits_memory) == (own, own / LEAF, True)


def test_a_container_sees_its_own_group_at_the_mount_point(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    found = look(tmp_path, "4:memory:/docker/0123\n", f"cgroup {tmp_path}/memory cgroup rw,memory 0 0\n")
    assert found.memory == tmp_path / "memory"


def test_a_machine_without_any_says_what_is_lost_and_what_to_do(tmp_path: Path) -> None:
    found = look(tmp_path, "", "")
    lacking = {c.name: c for c in capabilities_of(found, GpuInventory()) if not c.available}
    assert {"memory limits", "cpu limits", "GPUs"} == lacking.keys()
    assert lacking["memory limits"].remedy == "systemd-run --user --scope -p Delegate=yes basilica serve"
