"""filesystem.Filesystem: entries, listings, moves, watches."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.unit.guest_envd.agent import Agent, Json, Stream, StreamError, as_user, wait_until
from tests.unit.guest_envd.conftest import USER_ID, Box

pytestmark = pytest.mark.needs("root", "mount", "envd")

SERVICE = "filesystem.Filesystem"


def call(agent: Agent, method: str, **fields: Any) -> Json:
    return agent.call(f"{SERVICE}/{method}", fields)


def failure(agent: Agent, method: str, **fields: Any) -> tuple[int, str]:
    return agent.failure(f"{SERVICE}/{method}", fields)


def test_an_entry_tells_all_about_a_file(box: Box) -> None:
    file = box.home / "f.txt"
    file.write_bytes(b"12345")
    file.chmod(0o640)
    os.utime(file, ns=(0, 1_700_000_000_123_000_000))
    shutil.chown(file, USER_ID, 1234)
    assert call(box.agent, "Stat", path="f.txt") == {
        "entry": {
            "name": "f.txt",
            "type": "FILE_TYPE_FILE",
            "path": str(file),
            "size": "5",
            "mode": 0o640,
            "permissions": "-rw-r-----",
            "owner": "user",
            "group": "helpers",
            "modifiedTime": "2023-11-14T22:13:20.123Z",
        }
    }


def test_a_link_is_told_as_one_with_where_it_leads(box: Box) -> None:
    (box.home / "d").mkdir()
    for name, to, target in (
        ("link", "d", f"{box.home}/d"),
        ("chain", "link", f"{box.home}/d"),
        ("broken", "nowhere", "nowhere"),
    ):
        (box.home / name).symlink_to(to)
        entry = call(box.agent, "Stat", path=name)["entry"]
        assert (entry["type"], entry["isSymlink"], entry["symlinkTarget"]) == ("FILE_TYPE_SYMLINK", True, target)
    plain = call(box.agent, "Stat", path="d")["entry"]
    assert plain["type"] == "FILE_TYPE_DIRECTORY"
    assert "symlinkTarget" not in plain
    assert "isSymlink" not in plain


def test_the_root_and_special_files_have_entries(agent: Agent) -> None:
    assert call(agent, "Stat", path="/")["entry"]["name"] == "/"
    null = call(agent, "Stat", path="/dev/null")["entry"]
    assert (null["type"], null["permissions"][0]) == ("FILE_TYPE_FILE", "c")


@pytest.mark.parametrize("path", ["missing", "f/below", "~/nothing/there"])
def test_what_is_not_there_is_not_found(box: Box, path: str) -> None:
    (box.home / "f").write_text("")
    assert failure(box.agent, "Stat", path=path) == (404, "not_found")
    assert failure(box.agent, "ListDir", path=path) == (404, "not_found")


def test_what_a_user_may_not_see_is_denied(box: Box) -> None:
    closed = box.home / "closed"
    closed.mkdir(mode=0o700)
    (closed / "x").write_text("")
    assert failure(box.agent, "Stat", path="closed/x") == (403, "permission_denied")
    assert failure(box.agent, "ListDir", path="closed") == (403, "permission_denied")
    assert failure(box.agent, "MakeDir", path="closed/y") == (403, "permission_denied")
    assert failure(box.agent, "Remove", path="/etc/passwd") == (403, "permission_denied")
    mine = box.home.parent / "root-owned"  # beside the home, since a move between file systems fails before that
    mine.write_text("")
    assert failure(box.agent, "Move", source=str(mine), destination="x") == (403, "permission_denied")
    assert box.agent.call(f"{SERVICE}/Stat", {"path": str(closed / "x")}, as_user("root"))["entry"]["name"] == "x"


def names(listing: Json, home: Path) -> list[str]:
    return [str(Path(entry["path"]).relative_to(home)) for entry in listing["entries"]]


def test_a_listing_is_in_order_and_as_deep_as_asked(box: Box) -> None:
    for path in ("a/b/c/d", "e"):
        (box.home / path).mkdir(parents=True)
    (box.home / "a/file").write_text("")
    (box.home / "z").symlink_to("a")
    expected = {
        0: ["a", "e", "z"],
        1: ["a", "e", "z"],
        2: ["a", "a/b", "a/file", "e", "z"],
        9: ["a", "a/b", "a/b/c", "a/b/c/d", "a/file", "e", "z"],
    }
    for depth, wanted in expected.items():
        assert names(call(box.agent, "ListDir", path="", depth=depth), box.home) == wanted
    assert names(call(box.agent, "ListDir", path="z"), box.home) == ["z/b", "z/file"]
    assert call(box.agent, "ListDir", path="e") == {"entries": []}


def test_a_listing_goes_around_what_may_not_be_read(box: Box) -> None:
    (box.home / "a").mkdir(mode=0o700)
    (box.home / "b").mkdir()
    assert names(call(box.agent, "ListDir", path="", depth=5), box.home) == ["a", "b"]


def test_only_directories_are_listed(box: Box) -> None:
    (box.home / "f").write_text("")
    assert failure(box.agent, "ListDir", path="f") == (400, "invalid_argument")


@pytest.mark.slow
def test_an_endless_listing_is_refused(box: Box) -> None:
    for n in range(200):
        (box.home / f"{n:03}").mkdir()
        for m in range(200):
            (box.home / f"{n:03}" / ("name" * 10 + f"{m:03}")).touch()
    assert failure(box.agent, "ListDir", path="", depth=2) == (429, "resource_exhausted")
    assert len(call(box.agent, "ListDir", path="", depth=1)["entries"]) == 200


def test_a_directory_is_made_with_its_parents_for_the_user(box: Box) -> None:
    entry = call(box.agent, "MakeDir", path="a/b/c")["entry"]
    assert (entry["path"], entry["type"], entry["owner"]) == (f"{box.home}/a/b/c", "FILE_TYPE_DIRECTORY", "user")
    assert (box.home / "a").stat().st_uid == USER_ID
    assert failure(box.agent, "MakeDir", path="a/b") == (409, "already_exists")
    (box.home / "f").write_text("")
    assert failure(box.agent, "MakeDir", path="f") == (400, "invalid_argument")
    assert failure(box.agent, "MakeDir", path="f/g") == (400, "invalid_argument")


def test_a_move_makes_the_parents_of_its_destination(box: Box) -> None:
    call(box.agent, "MakeDir", path="from")
    (box.home / "from/f").write_text("content")
    entry = call(box.agent, "Move", source="from", destination="to/here")["entry"]
    assert (entry["name"], entry["path"]) == ("here", f"{box.home}/to/here")
    assert (box.home / "to/here/f").read_text() == "content"
    assert not (box.home / "from").exists()
    assert failure(box.agent, "Move", source="from", destination="x") == (404, "not_found")
    assert failure(box.agent, "Move", source="to", destination="to/here/inside")[0] == 400
    assert not (box.home / "x").exists()


def test_a_removal_takes_all_and_may_be_repeated(box: Box) -> None:
    call(box.agent, "MakeDir", path="d/e")
    (box.home / "outside").mkdir()
    (box.home / "outside/kept").write_text("")
    (box.home / "d/link").symlink_to("../outside")
    for _ in range(2):
        assert call(box.agent, "Remove", path="d") == {}
    assert not (box.home / "d").exists()
    assert (box.home / "outside/kept").exists()
    (box.home / "broken").symlink_to("nowhere")
    call(box.agent, "Remove", path="broken")
    assert not (box.home / "broken").is_symlink()
    assert failure(box.agent, "Remove", path="/") == (400, "invalid_argument")


# --- watches ---


def watch(box: Box, path: str = "", **fields: Any) -> Stream:
    stream = box.agent.stream(f"{SERVICE}/WatchDir", {"path": path, **fields})
    assert next(stream) == {"start": {}}
    return stream


def next_event(stream: Stream) -> tuple[str, str]:
    event = next(stream)["filesystem"]
    return event["name"], event["type"].removeprefix("EVENT_TYPE_")


def expect(stream: Stream, *wanted: tuple[str, str]) -> None:
    for one in wanted:
        assert next_event(stream) == one


def test_each_change_is_told_by_its_name(box: Box) -> None:
    file = box.home / "f"
    with watch(box) as stream:
        file.write_text("x")
        expect(stream, ("f", "CREATE"), ("f", "WRITE"))
        file.chmod(0o600)
        expect(stream, ("f", "CHMOD"))
        file.rename(box.home / "g")
        expect(stream, ("f", "RENAME"), ("g", "CREATE"))
        (box.home / "g").unlink()
        expect(stream, ("g", "REMOVE"))


def test_a_watch_that_is_not_recursive_looks_at_one_directory(box: Box) -> None:
    with watch(box) as stream:
        (box.home / "d").mkdir()
        (box.home / "d/inside").write_text("x")
        (box.home / "last").touch()
        expect(stream, ("d", "CREATE"), ("last", "CREATE"))


def test_a_recursive_watch_follows_new_and_moved_directories(box: Box) -> None:
    (box.home / "old/deep").mkdir(parents=True)
    with watch(box, recursive=True) as stream:
        (box.home / "old/deep/f").touch()
        expect(stream, ("old/deep/f", "CREATE"))
        (box.home / "new").mkdir()
        expect(stream, ("new", "CREATE"))
        (box.home / "new/f").touch()
        expect(stream, ("new/f", "CREATE"))
        (box.home / "old").rename(box.home / "moved")
        expect(stream, ("old", "RENAME"), ("moved", "CREATE"))
        (box.home / "moved/deep/g").touch()
        expect(stream, ("moved/deep/g", "CREATE"))


def test_what_is_in_a_new_directory_at_once_is_told_once(box: Box) -> None:
    call(box.agent, "MakeDir", path="watched")
    with watch(box, "watched", recursive=True) as stream:
        for n in range(20):
            (box.home / f"watched/{n}/a/b").mkdir(parents=True)
            (box.home / f"watched/{n}/a/b/f").touch()
        (box.home / "watched/last").touch()
        seen = []
        while (event := next_event(stream)) != ("last", "CREATE"):
            seen.append(event)
    expected = [(path, "CREATE") for n in range(20) for path in (f"{n}", f"{n}/a", f"{n}/a/b", f"{n}/a/b/f")]
    assert sorted(seen) == sorted(expected)


def test_content_written_before_its_directory_was_watched_is_told(box: Box) -> None:
    with watch(box, recursive=True) as stream:
        with box.agent.stopped():
            (box.home / "e").mkdir()
            (box.home / "e/f").write_text("x")
        expect(stream, ("e", "CREATE"), ("e/f", "CREATE"), ("e/f", "WRITE"))


def test_a_change_can_come_with_the_entry(box: Box) -> None:
    with watch(box, includeEntry=True) as stream:
        (box.home / "f").write_text("12")
        event = next(stream)["filesystem"]
        assert (event["entry"]["path"], event["entry"]["type"]) == (f"{box.home}/f", "FILE_TYPE_FILE")
    with watch(box) as stream:
        (box.home / "g").touch()
        assert "entry" not in next(stream)["filesystem"]


@pytest.mark.parametrize(
    ("path", "code"), [("missing", "not_found"), ("f", "invalid_argument"), ("closed", "permission_denied")]
)
def test_what_cannot_be_watched_is_told(box: Box, path: str, code: str) -> None:
    (box.home / "f").write_text("")
    (box.home / "closed").mkdir(mode=0o700)
    with box.agent.stream(f"{SERVICE}/WatchDir", {"path": path}) as stream, pytest.raises(StreamError) as failed:
        next(stream)
    assert failed.value.code == code
    assert failure(box.agent, "CreateWatcher", path=path)[1] == code


def test_a_watch_keeps_its_deadline_and_shows_that_it_is_alive(box: Box) -> None:
    headers = {"Keepalive-Ping-Interval": "1", "Connect-Timeout-Ms": "1500"}
    with box.agent.stream(f"{SERVICE}/WatchDir", {"path": ""}, headers) as stream:
        assert next(stream) == {"start": {}}
        assert next(stream) == {"keepalive": {}}
        with pytest.raises(StreamError) as failed:
            next(stream)
    assert failed.value.code == "deadline_exceeded"


def poll_until(box: Box, watcher: str, done: Callable[[list[Json]], bool]) -> list[Json]:
    seen: list[Json] = []

    def poll() -> bool:
        seen.extend(call(box.agent, "GetWatcherEvents", watcherId=watcher)["events"])
        return done(seen)

    wait_until(poll)
    return seen


def test_a_polled_watcher_gives_each_change_once(box: Box) -> None:
    watcher = call(box.agent, "CreateWatcher", path="", recursive=True)["watcherId"]
    (box.home / "a").write_text("x")
    first = poll_until(box, watcher, lambda seen: len(seen) >= 2)
    assert [(event["name"], event["type"]) for event in first] == [
        ("a", "EVENT_TYPE_CREATE"),
        ("a", "EVENT_TYPE_WRITE"),
    ]
    (box.home / "b").mkdir()
    assert poll_until(box, watcher, bool)[0] == {"name": "b", "type": "EVENT_TYPE_CREATE"}
    assert call(box.agent, "GetWatcherEvents", watcher_id=watcher) == {"events": []}
    assert call(box.agent, "RemoveWatcher", watcherId=watcher) == {}
    for method in ("GetWatcherEvents", "RemoveWatcher"):
        assert failure(box.agent, method, watcherId=watcher) == (404, "not_found")


@pytest.mark.slow
@pytest.mark.parametrize("files", [6000, 20_000])
def test_changes_that_nobody_fetches_are_bounded_and_their_loss_is_told_once(box: Box, files: int) -> None:
    """With 6000 files the agent's own queue runs over, with 20000 already the kernel's."""
    watcher = call(box.agent, "CreateWatcher", path="")["watcherId"]
    before = box.agent.rss_kib()
    with box.agent.stopped():
        for n in range(files):
            (box.home / f"{n}").touch()
    wait_until(box.agent.is_idle)
    assert failure(box.agent, "GetWatcherEvents", watcherId=watcher) == (429, "resource_exhausted")
    assert len(call(box.agent, "GetWatcherEvents", watcherId=watcher)["events"]) == 4096
    assert box.agent.rss_kib() - before < 8000
    call(box.agent, "RemoveWatcher", watcherId=watcher)


def test_there_are_only_so_many_watchers_and_closing_gives_them_back(box: Box) -> None:
    made = []
    while (answer := box.agent.unary(f"{SERVICE}/CreateWatcher", {"path": ""})).status == 200:
        made.append(answer.json()["watcherId"])
        assert len(made) < 2000
    assert answer.json()["code"] == "resource_exhausted"
    for watcher in made:
        call(box.agent, "RemoveWatcher", watcherId=watcher)
    with watch(box) as stream:
        (box.home / "f").touch()
        expect(stream, ("f", "CREATE"))
