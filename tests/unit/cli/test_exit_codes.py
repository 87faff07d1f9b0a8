"""What a shell is told about how a command in a sandbox ended."""

import pytest

from agentenv.cli.process import SIGNALS, exit_code

# The words of the guest agent for each signal that it has a word for.
AGENT_WORDS = {
    "hangup": 1, "interrupt": 2, "quit": 3, "illegal instruction": 4, "trace/breakpoint trap": 5, "aborted": 6,
    "bus error": 7, "floating point exception": 8, "killed": 9, "user defined signal 1": 10, "segmentation fault": 11,
    "user defined signal 2": 12, "broken pipe": 13, "alarm clock": 14, "terminated": 15, "stopped": 20,
    "bad system call": 31,
}  # fmt: skip


def ended(status: str, **more: object) -> dict[str, object]:
    return {"exitCode": -1, "exited": False, "status": status, "error": status, **more}


@pytest.mark.parametrize(("word", "number"), AGENT_WORDS.items())
def test_a_signal_is_128_and_its_number(word: str, number: int) -> None:
    assert exit_code(ended(f"signal: {word}")) == 128 + number


@pytest.mark.parametrize("number", [*range(1, 32), 34, 64])
def test_a_signal_without_a_word_goes_by_its_number(number: int) -> None:
    assert exit_code(ended(f"signal: signal {number}")) == 128 + number


def test_every_signal_has_one_word() -> None:
    assert sorted(SIGNALS.values()) == list(range(1, 32))


@pytest.mark.parametrize(
    ("status", "code"),
    [
        ("signal: segmentation fault (core dumped)", 139),
        ("signal: killed (out of memory)", 137),
        ("signal: aborted (core dumped) (out of memory)", 134),
        ("signal: aborted (out of memory) (core dumped)", 134),
        ("signal: stopped (tty input)", 149),
        ("signal: signal 31 (core dumped)", 159),
        ("signal: something new", 128),
        ("", 128),
    ],
)
def test_remarks_do_not_hide_the_signal(status: str, code: int) -> None:
    assert exit_code(ended(status)) == code


def test_the_error_says_it_where_the_status_does_not() -> None:
    assert exit_code(ended("", error="signal: terminated")) == 143


@pytest.mark.parametrize(
    ("end", "code"), [({}, 0), ({"exitCode": 0}, 0), ({"exitCode": 7}, 7), ({"exitCode": 137}, 137)]
)
def test_an_exit_is_its_code(end: dict[str, object], code: int) -> None:
    assert exit_code({"exited": True, **end}) == code
