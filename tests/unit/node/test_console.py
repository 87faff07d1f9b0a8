"""What a guest wrote on its console, as log lines."""

from datetime import UTC, datetime

from agentenv.node.console import log_lines

NOW = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def test_the_last_lines_are_given_without_blank_ones() -> None:
    lines = log_lines("one\r\n\n  \ntwo\nthree", NOW, 2)

    assert [(line.message, line.level, line.timestamp) for line in lines] == [
        ("two", "info", NOW),
        ("three", "info", NOW),
    ]


def test_lines_of_the_agent_bring_their_own_time_and_level() -> None:
    (line,) = log_lines('{"timestamp": "2026-01-01T00:00:00Z", "level": "warn", "message": "hot"}', NOW, 10)

    assert (line.message, line.level, line.timestamp) == ("hot", "warn", datetime(2026, 1, 1, tzinfo=UTC))


def test_what_only_looks_like_a_line_of_the_agent_is_text() -> None:
    texts = [
        '{"timestamp": "never", "level": "warn", "message": "x"}',
        '{"level": "loud"}',
        "[" * 100_000,
        '"text"',
        "null",
    ]

    for text in texts:
        (line,) = log_lines(text, NOW, 1)
        assert (line.message, line.level) == (text, "info")


def test_no_lines_are_no_lines() -> None:
    assert log_lines("", NOW, 5) == log_lines("text", NOW, 0) == []


def test_a_line_of_the_agent_with_odd_fields_is_text() -> None:
    for level, message in (("5", '"x"'), ('"shout"', '"x"'), ('"info"', '{"a": 1}'), ('"info"', "null")):
        text = f'{{"timestamp": "2026-01-01T00:00:00Z", "level": {level}, "message": {message}}}'
        (line,) = log_lines(text, NOW, 1)
        assert (line.message, line.level, line.timestamp) == (text, "info", NOW)


def test_a_time_without_a_zone_is_utc() -> None:
    (line,) = log_lines('{"timestamp": "2026-01-01T00:00:00", "level": "info", "message": "x"}', NOW, 1)

    assert line.timestamp == datetime(2026, 1, 1, tzinfo=UTC)
