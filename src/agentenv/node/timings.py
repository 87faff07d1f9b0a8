"""How long the stages of each verb take, as Prometheus histograms."""

import time
from collections.abc import Iterator
from contextlib import contextmanager

from prometheus_client import CollectorRegistry, Counter, Histogram

_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120)


class Timings:
    """Measures stages; one per node."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._stages = Histogram(
            "agentenv_sandbox_stage_duration_seconds",
            "Duration of one stage of a sandbox operation.",
            ("operation", "stage", "status"),
            registry=registry,
            buckets=_BUCKETS,
        )
        self._stopped = Histogram(
            "agentenv_guest_stopped_seconds",
            "For how long an operation kept a guest from running user code.",
            ("operation",),
            registry=registry,
            buckets=_BUCKETS,
        )
        self._lost = Counter(
            "agentenv_vm_lost_total", "Virtual machines that ended without being asked to.", registry=registry
        )

    @contextmanager
    def stage(self, operation: str, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        status = "error"
        try:
            yield
            status = "ok"
        finally:
            self._stages.labels(operation, stage, status).observe(time.perf_counter() - start)

    @contextmanager
    def guest_stopped(self, operation: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stopped.labels(operation).observe(time.perf_counter() - start)

    def vm_lost(self) -> None:
        self._lost.inc()
