"""What the lab's suite makes of a Rust test program's words."""

from tests.lab import rust

SAID = """\
running 3 tests
test one ... ok
test two ... some program's words
FAILED

failures:

---- two stdout ----
thread 'two' panicked: no

---- three stdout ----
hm

failures:
    two
"""


def test_each_test_is_told_with_what_it_said() -> None:
    told = rust.verdicts("ok one\nfailed two\nfailed three\nfailed four\n", SAID)

    assert told["one"] is None
    assert told["two"] == "thread 'two' panicked: no\n\n"
    assert told["three"] == "hm\n\n"
    assert told["four"] == "it failed without a word"


def test_tests_are_found_by_why_they_are_ignored() -> None:
    found = rust.tests_for("needs ublk: make lab", "storaged", "ublk")

    assert "a_disk_is_the_bytes_that_were_written" in found
    assert "is_a_daemon_when_asked" not in found
