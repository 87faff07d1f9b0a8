"""Where logs go: one line an event on standard error, what libraries say among them.

Everything of ours logs with `structlog.get_logger`. Only this module touches the
standard library's logging, which it leads into the same stream and shape.
"""

import logging  # noqa: TID251 - see above
import sys

import structlog

from agentenv.config.schema import Log


def set_up_logs(settings: Log) -> None:
    """As a server writes them."""
    level = logging.getLevelNamesMapping()[settings.level.upper()]
    pretty = settings.format == "pretty" or (settings.format == "auto" and sys.stderr.isatty())
    shared: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    last: structlog.typing.Processor = (
        structlog.dev.ConsoleRenderer() if pretty else structlog.processors.JSONRenderer()
    )
    structlog.configure(
        processors=[*shared, structlog.processors.format_exc_info, last],
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                structlog.processors.format_exc_info,
                last,
            ],
        )
    )
    logging.basicConfig(level=level, handlers=[handler], force=True)
    for name in ("alembic", "uvicorn"):  # what they say of themselves at every start is no event of a node
        logging.getLogger(name).setLevel(max(level, logging.WARNING))


def only_problems() -> None:
    """As a command for people writes them, whose standard output is its own."""
    structlog.configure(
        wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING),
        logger_factory=structlog.PrintLoggerFactory(sys.stderr),
    )
