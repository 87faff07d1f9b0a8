"""Load order from the modules themselves."""

import gzip
import lzma
from pathlib import Path

import pytest

from agentenv.guest.kmod import ModuleTree, dependencies
from agentenv.model.errors import Invalid, NotFound
from tests.unit.guest_image.modules import make_module, make_tree


def test_what_is_needed_comes_first_and_once(tmp_path: Path) -> None:
    tree = make_tree(
        tmp_path,
        {
            "virtio-net.ko": make_module("virtio", "net_failover"),
            "virtio_blk.ko": make_module("virtio"),
            "virtio.ko": make_module(),
            "net_failover.ko": make_module("failover"),
            "failover.ko": make_module(),
        },
    )

    order = [module.name for module in ModuleTree(tree).load_order(["virtio_blk", "virtio_net"])]

    assert order == ["virtio", "virtio_blk", "failover", "net_failover", "virtio_net"]


def test_what_is_built_in_is_left_out(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"overlay.ko": make_module("ext4")}, builtin=("ext4",))

    assert [module.name for module in ModuleTree(tree).load_order(["ext4", "overlay"])] == ["overlay"]


@pytest.mark.parametrize(("suffix", "pack"), [(".xz", lzma.compress), (".gz", gzip.compress)])
def test_a_packed_module_is_unpacked(tmp_path: Path, suffix: str, pack: object) -> None:
    module = make_module()
    assert callable(pack)
    tree = make_tree(tmp_path, {f"tun.ko{suffix}": pack(module)})

    assert ModuleTree(tree).load_order(["tun"])[0].data == module


def test_a_missing_dependency_is_named_with_who_needs_it(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"tun.ko": make_module("nowhere")})

    with pytest.raises(NotFound, match=r"nowhere.*tun"):
        ModuleTree(tree).load_order(["tun"])


def test_a_circle_is_refused(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"a.ko": make_module("b"), "b.ko": make_module("a")})

    with pytest.raises(Invalid, match="a -> b -> a"):
        ModuleTree(tree).load_order(["a"])


@pytest.mark.parametrize("keep", [0, 3, 40, 63, 70, 120])
def test_a_cut_off_module_is_refused(keep: int) -> None:
    with pytest.raises(Invalid):
        dependencies(make_module("virtio")[:keep])


def test_a_damaged_archive_is_refused(tmp_path: Path) -> None:
    tree = make_tree(tmp_path, {"tun.ko.xz": lzma.compress(make_module())[:-9]})

    with pytest.raises(Invalid, match=r"tun\.ko\.xz"):
        ModuleTree(tree).load_order(["tun"])
