"""What is particular to the plain back end: its files, its restarts, what it does about damage."""

import os
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from agentenv.model.errors import Bug, Conflict, Exhausted, Invalid, NotFound, Unavailable, Unsupported
from agentenv.model.ids import LayerId
from agentenv.model.machine import BlockTarget
from agentenv.model.snapshot import Stack
from agentenv.storage import compaction, disks
from agentenv.storage.plain import PlainStorage
from agentenv.storage.records import decode
from tests.unit.storage.disk_guest import GuestDisk, chain_of
from tests.unit.storage.memory_guest import PAGE, MemoryGuest

MIB = 1 << 20
DISK = 4 * MIB
MEMORY = 2 * MIB


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "storage"


@pytest.fixture
async def storage(root: Path) -> AsyncIterator[PlainStorage]:
    storage = PlainStorage(root)
    await storage.start()
    yield storage
    await storage.close()


async def restarted(storage: PlainStorage) -> None:
    await storage.close()
    await storage.start()


async def import_base(storage: PlainStorage, tmp_path: Path, content: bytes = b"base") -> Stack:
    (tmp_path / "base.img").write_bytes(content)
    stack = await storage.import_disk(tmp_path / "base.img", DISK)
    storage.unpin(stack.layers, ())
    return stack


async def make_memory(storage: PlainStorage, *contents: bytes) -> Stack:
    """A memory captured once for each of *contents*, each in a page of its own."""
    stack = Stack((), MEMORY)
    for number, content in enumerate(contents):
        with MemoryGuest(await storage.attach_memory("maker", stack)) as guest:
            await storage.fill_memory("maker", guest.pid)
            guest.write(number * PAGE, content)
            stack = await storage.capture_memory("maker", guest.pid)
        await storage.detach("maker")
        storage.unpin(stack.layers, ())
    return stack


def files(root: Path, folder: str) -> set[str]:
    return {path.name for path in (root / folder).iterdir()}


# Files


async def test_sealed_files_cannot_be_written_and_uppers_can(storage: PlainStorage, root: Path, tmp_path: Path) -> None:
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    sealed = await storage.seal_disk("one", disk.switch)
    memory = await make_memory(storage, b"one", b"two")
    (tmp_path / "blob").write_bytes(b"x")
    blob = await storage.put_blob(tmp_path / "blob")
    for layer in (*sealed.layers, *memory.layers):
        assert (root / "layers" / layer).stat().st_mode & 0o777 == 0o444
    assert storage.blob_path(blob).stat().st_mode & 0o777 == 0o444
    assert disk.target.path.stat().st_mode & 0o777 == 0o600


async def test_memory_is_a_base_and_one_delta_however_often_it_is_captured(storage: PlainStorage) -> None:
    assert len((await make_memory(storage, b"1")).layers) == 1
    stack = await make_memory(storage, b"1", b"2", b"3", b"4")
    assert [layer.split(".")[1] for layer in stack.layers] == ["memory", "delta"]


async def test_equal_memories_share_their_base(storage: PlainStorage) -> None:
    stack = await make_memory(storage, b"1", b"2")
    paths = {await storage.attach_memory(owner, stack) for owner in ("one", "two", "three")}
    assert len(paths) == 1


async def test_zeroed_memory_takes_no_room(storage: PlainStorage) -> None:
    one = await storage.attach_memory("one", Stack((), 1 << 40))
    two = await storage.attach_memory("two", Stack((), 1 << 40))
    assert one == two
    assert one.stat().st_size == 1 << 40
    assert one.stat().st_blocks == 0


async def test_a_directory_can_be_moved(storage: PlainStorage, root: Path, tmp_path: Path) -> None:
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    await storage.seal_disk("one", disk.switch)
    disk.write(100, b"upper")
    await storage.close()
    root.rename(tmp_path / "elsewhere")
    moved = PlainStorage(tmp_path / "elsewhere")
    await moved.start()
    disk = GuestDisk(await moved.open_disk("one"))
    assert disk.read(0, 4) + disk.read(100, 5) == b"baseupper"
    await moved.close()


async def test_relative_roots_give_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    storage = PlainStorage(Path("here"))
    await storage.start()
    assert (await storage.create_disk("one", Stack((), DISK))).path.is_absolute()
    assert (await storage.attach_memory("one", Stack((), MEMORY))).is_absolute()
    await storage.close()


async def test_a_failed_start_leaves_the_directory_free(root: Path) -> None:
    storage = PlainStorage(root)
    await storage.start()
    second = PlainStorage(root)
    with pytest.raises(Conflict):
        await second.start()
    await storage.close()
    (root / "layers").rename(root / "away")
    (root / "layers").touch()
    with pytest.raises(Unavailable):
        await second.start()
    (root / "layers").unlink()
    (root / "away").rename(root / "layers")
    await second.start()
    await second.close()


# Imports


@pytest.mark.needs("root")
async def test_a_file_of_another_file_system_is_copied_with_its_holes(storage: PlainStorage, root: Path) -> None:
    source = Path("/dev/shm") / f"storage-test-{os.getpid()}"
    if source.parent.stat().st_dev == root.stat().st_dev:
        pytest.fail("/dev/shm is no file system of its own")
    try:
        source.write_bytes(b"start")
        os.truncate(source, DISK)
        with source.open("r+b") as file:
            file.seek(2 * MIB)
            file.write(b"middle")
        stack = await storage.import_disk(source, 2 * DISK)
        assert not source.exists()
        path = root / "layers" / stack.layers[0]
        assert path.stat().st_size == 2 * DISK
        assert path.stat().st_blocks * 512 <= 64 << 10
        disk = GuestDisk(await storage.create_disk("one", stack))
        assert disk.read(0, 5) + disk.read(2 * MIB, 6) == b"startmiddle"
        source.write_bytes(b"blob")
        assert storage.blob_path(await storage.put_blob(source)).read_bytes() == b"blob"
        assert not source.exists()
        assert list((root / "temporary").iterdir()) == []
    finally:
        source.unlink(missing_ok=True)


async def test_what_cannot_be_put_in_place_stays_where_it_was(
    storage: PlainStorage, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"mine")
    mode = source.stat().st_mode

    def fail(path: Path) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr("agentenv.storage.files.sync_directory", fail)
    with pytest.raises(Unavailable):
        await storage.put_blob(source)
    assert source.read_bytes() == b"mine"
    assert source.stat().st_mode == mode
    assert files(root, "blobs") == set()


# Seals that were cut short


def record_of(root: Path, owner: str) -> "tuple[LayerId, LayerId | None]":
    disk = decode((root / "owners" / f"{owner}.json").read_text()).disk
    assert disk is not None
    return disk.upper, disk.next


async def test_a_vmm_that_switched_although_it_said_no_keeps_its_new_upper(
    storage: PlainStorage, root: Path, tmp_path: Path
) -> None:
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    disk.write(0, b"old!")

    async def switch_and_fail(target: BlockTarget) -> None:
        await disk.switch(target)
        disk.write(100, b"new!")
        raise Unavailable("it did not answer in time")

    with pytest.raises(Unavailable, match="did not answer"):
        await storage.seal_disk("one", switch_and_fail)
    assert (await storage.open_disk("one")) == disk.target
    assert disk.read(0, 4) + disk.read(100, 4) == b"old!new!"
    sealed = await storage.seal_disk("one", disk.switch)
    assert disk.read(0, 4) + disk.read(100, 4) == b"old!new!"
    assert len(sealed.layers) == 3
    assert record_of(root, "one")[1] is None


async def test_a_vmm_that_has_the_new_upper_open_keeps_it(storage: PlainStorage, root: Path, tmp_path: Path) -> None:
    """It may have switched; nothing was written since, so the content cannot tell."""
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    vmm = None

    async def open_and_fail(target: BlockTarget) -> None:
        nonlocal vmm
        vmm = holder(target.path)
        raise Unavailable("it did not answer in time")

    with pytest.raises(Unavailable):
        await storage.seal_disk("one", open_and_fail)
    assert vmm is not None
    following = (await storage.open_disk("one")).path
    assert following != disk.target.path
    assert following.exists()
    close(vmm)
    assert GuestDisk(await storage.open_disk("one")).read(0, 4) == b"base"


@pytest.mark.parametrize("held", [True, False])
@pytest.mark.parametrize("by_pid", [True, False])
async def test_recovery_looks_at_what_the_vmm_has_open(root: Path, tmp_path: Path, held: bool, by_pid: bool) -> None:
    storage = PlainStorage(root)
    await storage.start()
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    vmm = None

    async def crash(target: BlockTarget) -> None:
        nonlocal vmm
        vmm = holder(target.path if held else disk.target.path)
        # What a killed server leaves: the intent in the record, and nobody to settle it.
        raise SystemExit

    storage._open.disks._settle = leave_it  # type: ignore[method-assign]
    with pytest.raises(SystemExit):
        await storage.seal_disk("one", crash)
    await storage.close()
    upper, following = record_of(root, "one")
    assert following is not None
    assert vmm is not None

    await storage.start()
    await storage.recover_disk("one", vmm.pid if by_pid else None)
    assert record_of(root, "one") == ((following if held else upper), None)
    assert (await storage.open_disk("one")).path.name == (following if held else upper)
    assert (root / "layers" / following).exists() == held
    assert (root / "layers" / upper).stat().st_mode & 0o777 == (0o444 if held else 0o600)
    close(vmm)
    disk = GuestDisk(await storage.open_disk("one"))
    assert disk.read(0, 4) == b"base"
    await storage.seal_disk("one", disk.switch)
    await storage.close()


async def leave_it(owner: str, pid: int | None) -> None:
    """In place of settling."""


def holder(path: Path) -> "subprocess.Popen[bytes]":
    program = "import os, sys; f = open(sys.argv[1], 'r+b'); os.write(1, b'.'); os.read(0, 1)"
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", program, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.read(1) == b"."
    return process


def close(process: "subprocess.Popen[bytes]") -> None:
    process.communicate(b"x")


# Damage


async def test_uppers_without_an_owner_are_removed_at_start(storage: PlainStorage, root: Path, tmp_path: Path) -> None:
    await storage.create_disk("one", await import_base(storage, tmp_path))
    await storage.create_disk("two", Stack((), DISK))
    (root / "owners/two.json").unlink()
    await restarted(storage)
    assert storage.owners() == {"one"}
    assert len(files(root, "layers")) == 2


async def test_a_damaged_record_keeps_every_disk_that_might_be_its_own(
    storage: PlainStorage, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    disk.write(0, b"rescue me")
    await storage.create_disk("two", Stack((), DISK))
    text = (root / "owners/one.json").read_text()
    (root / "owners/one.json").write_text(text[:20])

    await restarted(storage)
    assert storage.owners() == {"two"}
    assert "one.json" in caplog.text
    await storage.collect((), ())
    assert disk.read(0, 9) == b"rescue me"

    # An operator mends it ...
    (root / "owners/one.json.broken").unlink()
    (root / "owners/one.json").write_text(text)
    await restarted(storage)
    assert GuestDisk(await storage.open_disk("one")).read(0, 9) == b"rescue me"

    # ... or gives it up.
    (root / "owners/one.json").write_text(text[:20])
    await restarted(storage)
    await storage.remove("one")
    await storage.remove("two")
    await storage.collect((), ())
    assert files(root, "layers") == set()
    assert files(root, "owners") == set()


async def test_a_damaged_layer_is_a_bug_for_who_needs_it_and_nobody_else(
    storage: PlainStorage, root: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    base = await import_base(storage, tmp_path)
    disk = GuestDisk(await storage.create_disk("one", base))
    sealed = await storage.seal_disk("one", disk.switch)
    memory = await make_memory(storage, b"1", b"2")
    for layer in (sealed.layers[-1], memory.layers[-1]):
        path = root / "layers" / layer
        path.chmod(0o600)
        with path.open("r+b") as file:
            file.write(b"garbage")
        path.chmod(0o444)

    await restarted(storage)
    assert sealed.layers[-1] in caplog.text
    assert memory.layers[-1] in caplog.text
    with pytest.raises(Bug):
        await storage.create_disk("two", sealed)
    with pytest.raises(Bug):
        await storage.open_disk("one")
    with pytest.raises(Bug):
        await storage.attach_memory("two", memory)
    await storage.create_disk("two", base)
    await storage.attach_memory("two", Stack(memory.layers[:1], MEMORY))

    # What lies below a damaged layer of an owner is unknown, so nothing goes while there is one.
    assert (await storage.collect((), ())).layers == 0
    await storage.remove("one")
    await storage.remove("two")
    assert (await storage.collect((), ())).layers == 4


async def test_damaged_changed_pages_never_become_memory(storage: PlainStorage, root: Path) -> None:
    stack = await make_memory(storage, b"1", b"2" * PAGE)
    path = root / "layers" / stack.layers[-1]
    path.chmod(0o600)
    with path.open("r+b") as file:
        file.seek(PAGE + 7)
        file.write(b"x")
    with MemoryGuest(await storage.attach_memory("one", stack)) as guest, pytest.raises(Bug):
        await storage.fill_memory("one", guest.pid)
    with pytest.raises(Bug):
        await storage.flatten_memory(stack)
    assert list((root / "temporary").iterdir()) == []


async def test_a_layer_that_vanished_is_a_bug_or_not_found(storage: PlainStorage, root: Path, tmp_path: Path) -> None:
    base = await import_base(storage, tmp_path)
    disk = GuestDisk(await storage.create_disk("one", base))
    sealed = await storage.seal_disk("one", disk.switch)
    (root / "layers" / base.layers[0]).unlink()
    await restarted(storage)
    with pytest.raises(NotFound):
        await storage.create_disk("two", base)
    with pytest.raises(NotFound):
        await storage.create_disk("two", sealed)
    with pytest.raises(Bug):
        await storage.open_disk("one")
    await storage.remove("one")


async def test_a_memory_layer_is_no_disk_and_a_disk_layer_no_memory(storage: PlainStorage, tmp_path: Path) -> None:
    base = await import_base(storage, tmp_path)
    memory = await make_memory(storage, b"1", b"2")
    with pytest.raises(Invalid):
        await storage.create_disk("one", memory)
    with pytest.raises(Invalid):
        await storage.attach_memory("one", base)
    with pytest.raises(Invalid):
        await storage.attach_memory("one", Stack(memory.layers[1:], MEMORY))


async def test_the_upper_of_an_owner_is_no_layer_yet(storage: PlainStorage) -> None:
    target = await storage.create_disk("one", Stack((), DISK))
    with pytest.raises(Invalid):
        await storage.create_disk("two", Stack((LayerId(target.path.name),), DISK))


# Deep chains


@pytest.mark.slow
async def test_a_hundred_seals_do_not_make_a_chain_of_a_hundred(
    storage: PlainStorage, root: Path, tmp_path: Path
) -> None:
    base = await import_base(storage, tmp_path)
    disk = GuestDisk(await storage.create_disk("one", base))
    old = []
    for number in range(100):
        disk.write((number % 9) * 65536 * 3, f"{number:04}".encode())
        stack = await storage.seal_disk("one", disk.switch)
        old.append((number, stack))
        await storage.settle()
        assert len(stack.layers) <= 18
        assert chain_of(root / "layers" / stack.layers[-1]) == [root / "layers" / layer for layer in stack.layers]
    clone = GuestDisk(await storage.create_disk("clone", stack))
    for number in range(91, 100):
        where = (number % 9) * 65536 * 3
        assert disk.read(where, 4) == clone.read(where, 4) == f"{number:04}".encode()
    # Stacks from before a merge are what they were.
    for number, stack in old:
        back = GuestDisk(await storage.create_disk(f"back{number}", stack))
        assert back.read((number % 9) * 65536 * 3, 4) == f"{number:04}".encode()
        await storage.remove(f"back{number}")
    for _, stack in old:
        storage.unpin(stack.layers, ())
    await storage.remove("one")
    await storage.collect((), ())
    assert len(files(root, "layers")) <= 19
    assert clone.read(0, 4) == b"0099"


@pytest.mark.slow
async def test_a_clone_of_a_deep_stack_is_shallow(
    storage: PlainStorage, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compaction, "DEEP", 1000)
    stack = await import_base(storage, tmp_path)
    disk = GuestDisk(await storage.create_disk("one", stack))
    for number in range(20):
        disk.write(number * 65536, f"{number:04}".encode())
        stack = await storage.seal_disk("one", disk.switch)
    monkeypatch.undo()
    await restarted(storage)
    first = await storage.create_disk("first", stack)
    assert len(chain_of(first.path)) == 22
    await storage.settle()
    second = GuestDisk(await storage.create_disk("second", stack))
    assert len(chain_of(second.target.path)) == 3
    assert [second.read(number * 65536, 4) for number in range(20)] == [f"{n:04}".encode() for n in range(20)]
    # The collector leaves alone what makes it shallow.
    await storage.collect(stack.layers, ())
    assert second.read(0, 4) == b"0000"


@pytest.mark.slow
async def test_seals_that_outrun_the_merging_wait_for_it_in_the_end(
    storage: PlainStorage, root: Path, tmp_path: Path
) -> None:
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    for number in range(150):
        disk.write((number % 40) * 65536, f"{number:04}".encode())
        stack = await storage.seal_disk("one", disk.switch)
        storage.unpin(stack.layers, ())
        assert len(chain_of(disk.target.path)) <= 67
    assert [disk.read((n % 40) * 65536, 4) for n in range(110, 150)] == [f"{n:04}".encode() for n in range(110, 150)]


@pytest.mark.slow
async def test_chains_of_several_sizes_stay_as_they_are(storage: PlainStorage, tmp_path: Path) -> None:
    stack = await import_base(storage, tmp_path)
    for number in range(20):
        stack = Stack(stack.layers, stack.size_bytes + 65536)
        disk = GuestDisk(await storage.create_disk(f"o{number}", stack))
        disk.write(number * 65536, f"{number:04}".encode())
        stack = await storage.seal_disk(f"o{number}", disk.switch)
        await storage.settle()
    disk = GuestDisk(await storage.create_disk("last", stack))
    assert [disk.read(number * 65536, 4) for number in range(20)] == [f"{n:04}".encode() for n in range(20)]


async def test_a_chain_that_cannot_be_merged_ends_somewhere(
    storage: PlainStorage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise Unsupported("not these")

    monkeypatch.setattr(compaction, "merge", refuse)
    for name, depth in (("DEEP", 3), ("TOO_DEEP", 5), ("HOPELESS", 9)):
        monkeypatch.setattr(compaction, name, depth)
        if name != "DEEP":
            monkeypatch.setattr(disks, name, depth)
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    for number in range(8):
        disk.write(number * 65536, b"x")
        await storage.seal_disk("one", disk.switch)
    with pytest.raises(Exhausted):
        await storage.seal_disk("one", disk.switch)
    assert GuestDisk(await storage.open_disk("one")).read(7 * 65536, 1) == b"x"


async def test_closing_does_not_wait_for_merges(storage: PlainStorage, root: Path, tmp_path: Path) -> None:
    disk = GuestDisk(await storage.create_disk("one", await import_base(storage, tmp_path)))
    for number in range(18):
        disk.write(number * 65536, b"x")
        await storage.seal_disk("one", disk.switch)
    await storage.close()
    assert list((root / "temporary").iterdir()) == []
    await storage.start()
    assert GuestDisk(await storage.open_disk("one")).read(17 * 65536, 1) == b"x"
