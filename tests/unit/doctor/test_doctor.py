"""Findings on hosts laid out for the test, and one on this host."""

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from agentenv import doctor
from agentenv.doctor import Finding, Places
from tests.capabilities import QEMU

STATUS = "Name:\tpython\nCapEff:\t{:016x}\n"


@pytest.fixture
def places(tmp_path: Path) -> Places:
    """A host with nothing on it."""
    for name in ("dev", "proc/self", "sys/module", "sys/fs/cgroup"):
        (tmp_path / name).mkdir(parents=True)
    return Places(
        home=tmp_path / "home/aenv",
        guest_dir=tmp_path / "guest",
        qemu=str(tmp_path / "no-qemu"),
        dev=tmp_path / "dev",
        proc=tmp_path / "proc",
        sys=tmp_path / "sys",
        machine="x86_64",
        release="6.12.1-test",
    )


def changed(places: Places, **values: str) -> Places:
    fields = {name: getattr(places, name) for name in Places.__slots__}
    return Places(**{**fields, **values})


def test_a_host_with_nothing_on_it_gets_a_full_answer(places: Places) -> None:
    findings = doctor.examine(places)

    assert len({finding.name for finding in findings}) == len(findings) == 18
    by_name = {finding.name: finding.ok for finding in findings}
    assert by_name["cpu"] is True
    for name in ("privileges", "qemu", "guest image", "tun", "memory"):
        assert by_name[name] is False, name
    for name in ("kvm", "fuse", "ublk", "cgroups"):
        assert by_name[name] is None, name


def test_what_is_not_well_says_what_follows(places: Places) -> None:
    for finding in doctor.examine(places):
        assert finding.ok is True or finding.consequence, finding


@pytest.mark.parametrize(("machine", "ok"), [("x86_64", True), ("aarch64", False), ("riscv64", False)])
def test_only_x86_64_is_supported(places: Places, machine: str, ok: bool) -> None:
    assert doctor.architecture(changed(places, machine=machine)).ok is ok


@pytest.mark.parametrize(
    ("release", "ok", "told"),
    [
        ("4.19.0-27-amd64", False, "lacks"),
        ("5.9.16", False, "lacks"),
        ("5.10.0", True, "pagemap"),
        ("6.1.0-57-cloud-amd64", True, "pagemap"),
        ("6.7.0", True, ""),
        ("6.18.44-fc-v657", True, ""),
        ("10.0", True, ""),
    ],
)
def test_the_kernel_is_judged_by_its_version(places: Places, release: str, ok: bool, told: str) -> None:
    finding = doctor.kernel(changed(places, release=release))

    assert finding.ok is ok
    assert told in finding.consequence
    assert bool(told) == bool(finding.consequence)


def test_missing_capabilities_are_named(places: Places) -> None:
    every = (1 << 41) - 1
    (places.proc / "self/status").write_text(STATUS.format(every & ~(1 << 12)))
    assert "CAP_NET_ADMIN" in doctor.privileges(places).detail
    assert "CAP_SYS_ADMIN" not in doctor.privileges(places).detail
    assert doctor.privileges(places).ok is False

    (places.proc / "self/status").write_text(STATUS.format(every))
    assert doctor.privileges(places).ok is True


@pytest.mark.parametrize(("free_mib", "ok"), [(100, False), (1024, None), (8192, True)])
def test_memory_is_judged_by_what_is_available(places: Places, free_mib: int, ok: bool | None) -> None:
    (places.proc / "meminfo").write_text(f"MemTotal: 99999999 kB\nMemAvailable: {free_mib << 10} kB\n")

    assert doctor.memory(places).ok is ok


def test_a_device_that_opens_is_well_and_one_that_does_not_says_why(places: Places) -> None:
    (places.dev / "net").mkdir()
    (places.dev / "net/tun").touch()
    (places.dev / "fuse").touch()

    assert doctor.tun(places).ok is True
    assert doctor.fuse(places).ok is True
    assert "No such file" in doctor.ublk(places).detail


@pytest.mark.parametrize(("release", "hint"), [("5.15.0", "6.0"), ("6.1.0", "modprobe")])
def test_the_advice_on_ublk_depends_on_the_kernel(places: Places, release: str, hint: str) -> None:
    assert hint in doctor.ublk(changed(places, release=release)).hint


def test_both_versions_of_cgroups_are_recognised(places: Places) -> None:
    (places.sys / "fs/cgroup/memory").mkdir()
    assert "version 1" in doctor.cgroups(places).detail

    (places.sys / "fs/cgroup/cgroup.controllers").write_text("cpu memory\n")
    assert doctor.cgroups(places) == Finding("cgroups", True, "version 2: cpu memory")


def test_a_pvm_host_runs_guests_in_software(places: Places) -> None:
    (places.dev / "kvm").touch()
    (places.sys / "module/kvm_pvm").mkdir()

    finding = doctor.accelerator(places)

    assert finding.ok is None
    assert "PVM" in finding.detail


def test_a_stub_of_kvm_is_not_kvm(places: Places) -> None:
    (places.dev / "kvm").touch()

    assert doctor.accelerator(places).ok is None


def test_disk_is_asked_where_home_will_be(places: Places) -> None:
    assert not places.home.exists()
    assert str(places.home) in doctor.disk(places).detail


def test_a_qemu_that_is_something_else_is_no_qemu(places: Places, tmp_path: Path) -> None:
    impostor = tmp_path / "qemu"
    impostor.write_text("#!/bin/sh\necho not today >&2\nexit 3\n")
    impostor.chmod(0o755)

    finding = doctor.qemu(changed(places, qemu=str(impostor)))

    assert finding.ok is False
    assert "not today" in finding.detail


@pytest.mark.needs("qemu")
def test_the_qemu_of_this_host_is_asked(places: Places) -> None:
    finding = doctor.qemu(changed(places, qemu=QEMU))

    assert finding.ok is True, finding
    assert "version" in finding.detail


def aenv_doctor(home: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "agentenv.cli", "doctor"],
        env={**os.environ, "AENV_PATHS_HOME": str(home), **environ},
        capture_output=True,
        text=True,
        check=False,
    )


def test_piped_it_is_json_and_fails_when_something_is_missing(tmp_path: Path) -> None:
    done = aenv_doctor(tmp_path)

    findings = {finding["name"]: finding for finding in json.loads(done.stdout)}
    assert findings["guest image"]["ok"] is False
    assert findings["guest image"]["hint"]
    assert done.returncode == 1


@pytest.mark.parametrize("name", ["SSL_CERT_FILE", "PIP_CERT", "NODE_EXTRA_CA_CERTS"])
def test_certificates_of_the_host_that_guests_do_not_get_are_said(places: Places, name: str) -> None:
    found = doctor.certificates(replace(places, environ={name: "/etc/proxy.pem"}))

    assert found.ok is None
    assert name in found.detail
    assert "https" in found.consequence
    assert "/etc/proxy.pem" in found.hint


@pytest.mark.parametrize("environ", [{}, {"SSL_CERT_FILE": ""}, {"HOME": "/root"}])
def test_a_host_without_certificates_of_its_own_is_well(places: Places, environ: dict[str, str]) -> None:
    assert doctor.certificates(replace(places, environ=environ)).ok is True


def test_a_bundle_for_guests_ends_the_matter_if_it_can_be_read(places: Places, tmp_path: Path) -> None:
    there = replace(places, environ={"PIP_CERT": "/x"}, ca_bundle=tmp_path / "ca.pem")
    assert doctor.certificates(there).ok is False

    (tmp_path / "ca.pem").write_text("x")
    assert doctor.certificates(there).ok is True
