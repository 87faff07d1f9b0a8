"""The accelerator probe: every way in which a /dev/kvm can be of no use, and one in which it can."""

import fcntl
import os
from pathlib import Path

import pytest

from agentenv.vmm import accelerator
from agentenv.vmm.accelerator import probe_accelerator


@pytest.fixture
def no_modules(tmp_path: Path) -> Path:
    return tmp_path / "module"


def test_no_device(tmp_path: Path, no_modules: Path) -> None:
    found = probe_accelerator(device=tmp_path / "kvm", modules=no_modules)

    assert found.kind == "tcg"
    assert "there is no" in found.reason


def test_a_device_that_is_no_kvm(tmp_path: Path, no_modules: Path) -> None:
    assert probe_accelerator(device=Path("/dev/null"), modules=no_modules).kind == "tcg"


def test_a_closed_device(tmp_path: Path, no_modules: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kvm").touch()

    def closed(*_: object) -> int:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patched:
        patched.setattr(os, "open", closed)
        found = probe_accelerator(device=tmp_path / "kvm", modules=no_modules)

    assert found.kind == "tcg"
    assert "group" in found.reason


def test_a_pvm_host_is_not_tried(tmp_path: Path) -> None:
    (tmp_path / "module/kvm_pvm").mkdir(parents=True)
    (tmp_path / "kvm").touch()

    assert "PVM" in probe_accelerator(device=tmp_path / "kvm", modules=tmp_path / "module").reason


@pytest.mark.parametrize(("version", "vcpu_works", "kind"), [(12, True, "kvm"), (11, True, "tcg"), (12, False, "tcg")])
def test_it_is_kvm_only_when_a_machine_with_a_cpu_was_made(
    tmp_path: Path, no_modules: Path, monkeypatch: pytest.MonkeyPatch, version: int, vcpu_works: bool, kind: str
) -> None:
    opened: list[int] = []

    def ioctl(_fd: int, request: int, _argument: int) -> int:
        if request == accelerator._KVM_GET_API_VERSION:
            return version
        if request == accelerator._KVM_CREATE_VCPU and not vcpu_works:
            raise OSError(22, "Invalid argument")
        opened.append(os.open("/dev/null", os.O_RDONLY))
        return opened[-1]

    monkeypatch.setattr(fcntl, "ioctl", ioctl)
    (tmp_path / "kvm").touch()

    assert probe_accelerator(device=tmp_path / "kvm", modules=no_modules).kind == kind
    for fd in opened:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
