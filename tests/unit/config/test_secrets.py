"""Secrets: where they come from, how they are kept, what is made from them."""

import os
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from agentenv.config.resolve import resolve
from agentenv.config.schema import Settings
from agentenv.config.secrets import Credentials, load_api_key, load_credentials
from agentenv.model.errors import Conflict, Invalid, NoSpace, Unavailable

KEY = "k" * 40
SANDBOX = "01936f8e-72f5-7000-8000-000000000001"


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return tmp_path / "home"


@pytest.fixture
def no_mounts(tmp_path: Path) -> Path:
    return tmp_path / "run-secrets"


def _settings(home: Path, **values: object) -> Settings:
    flags: dict[str, object] = {"paths.home": home}
    return resolve(flags | {f"auth.{name}": value for name, value in values.items()}, file=Path(os.devnull)).settings


def test_tokens_are_those_of_the_test_vector() -> None:
    credentials = Credentials("test-seed")

    envd, traffic = credentials.envd_token(SANDBOX), credentials.traffic_token(SANDBOX)

    # As computed by OpenSSL: printf ID | openssl dgst -sha256 -hmac test-seed
    assert envd == "4f00f2a93a87c37161ae01c59b6d4f84506668113441277e9f6272dd4bfae1a7"
    assert traffic == "586547d7c10facb0f4871297fdbfd9d2b4376f4b02b2e1487646c1c87a293bd8"
    assert len({envd, traffic, credentials.control_secret(SANDBOX)}) == 3
    assert credentials.control_secret(SANDBOX) != Credentials("other-seed").control_secret(SANDBOX)


def test_credentials_do_not_show_their_seed() -> None:
    assert "test-seed" not in repr(Credentials("test-seed"))


def test_a_key_is_generated_once_and_kept_for_its_owner_only(home: Path, no_mounts: Path) -> None:
    key = load_api_key(_settings(home), run_secrets=no_mounts)

    assert key.startswith("e2b_")
    assert len(key) == 44
    assert load_api_key(_settings(home), run_secrets=no_mounts) == key
    assert stat.S_IMODE((home / "secrets").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "secrets/api-key").stat().st_mode) == 0o600
    assert [path.name for path in (home / "secrets").iterdir()] == ["api-key"]


def test_a_seed_is_generated_once_and_kept(home: Path) -> None:
    credentials = load_credentials(_settings(home))

    assert len(credentials.seed) == 64
    assert load_credentials(_settings(home), in_use=True) == credentials
    assert load_credentials(_settings(home.parent / "other")) != credentials


def test_the_nearest_source_of_a_key_wins(home: Path, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    mounts.mkdir()
    (mounts / "api-key").write_text("m" * 40 + "\n")
    (tmp_path / "file").write_text("f" * 40)
    load_api_key(_settings(home), run_secrets=tmp_path / "none")

    assert load_api_key(_settings(home), run_secrets=mounts) == "m" * 40
    assert load_api_key(_settings(home, api_key_file=tmp_path / "file"), run_secrets=mounts) == "f" * 40
    both = _settings(home, api_key=KEY, api_key_file=tmp_path / "file")
    assert load_api_key(both, run_secrets=mounts) == KEY


def test_a_given_seed_is_used_as_it_is(home: Path, tmp_path: Path) -> None:
    (tmp_path / "seed").write_text("f" * 20)
    assert load_credentials(_settings(home, token_seed="s" * 20)).seed == "s" * 20
    assert load_credentials(_settings(home, token_seed_file=tmp_path / "seed")).seed == "f" * 20
    assert not home.exists()


def test_a_seed_that_is_lost_while_sandboxes_need_it_is_not_replaced(home: Path) -> None:
    with pytest.raises(Conflict) as refused:
        load_credentials(_settings(home), in_use=True)
    assert refused.value.hint
    assert list((home / "secrets").iterdir()) == []


@pytest.mark.parametrize("key", ["", "short", "k" * 31, "k" * 257, "k" * 32 + " ", "k" * 32 + "\n", "é" * 40])
def test_a_bad_key_is_refused_and_not_told(home: Path, no_mounts: Path, tmp_path: Path, key: str) -> None:
    (tmp_path / "file").write_text(f"x{key}" if key.endswith("\n") else key)
    for settings in (_settings(home, api_key_file=tmp_path / "file"), Settings(auth={"api_key": key})):
        if key.endswith("\n") and settings.auth.api_key_file:
            continue  # a line end at the end of a file is not part of the key
        with pytest.raises(Invalid) as refused:
            load_api_key(settings, run_secrets=no_mounts)
        assert not key or key not in refused.value.message


def _replaced_by_link(path: Path) -> None:
    path.rename(path.with_name("elsewhere"))
    path.symlink_to(path.with_name("elsewhere"))


def _replaced_by_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path, 0o600)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda path: path.chmod(0o640),
        lambda path: path.write_text("short"),
        lambda path: path.write_text(""),
        lambda path: path.write_bytes(b"\xff" * 40),
        lambda path: (path.unlink(), path.mkdir()),
        _replaced_by_fifo,
        lambda path: path.parent.chmod(0o755),
        _replaced_by_link,
        lambda path: (path.parent.rename(path.parent.with_name("s")), path.parent.symlink_to("s")),
    ],
    ids=["mode", "short", "empty", "binary", "directory", "fifo", "open directory", "link", "linked directory"],
)
def test_a_kept_secret_that_is_not_as_we_left_it_is_refused_and_left_alone(
    home: Path, no_mounts: Path, spoil: Callable[[Path], object]
) -> None:
    load_api_key(_settings(home), run_secrets=no_mounts)
    path = home / "secrets/api-key"
    spoil(path)
    before = sorted(str(item) for item in home.rglob("*"))

    with pytest.raises(Invalid):
        load_api_key(_settings(home), run_secrets=no_mounts)

    assert sorted(str(item) for item in home.rglob("*")) == before


@pytest.mark.needs("root")
def test_a_secret_of_another_user_is_refused(home: Path, no_mounts: Path) -> None:
    load_api_key(_settings(home), run_secrets=no_mounts)
    os.chown(home / "secrets/api-key", 12345, 12345)
    with pytest.raises(Invalid):
        load_api_key(_settings(home), run_secrets=no_mounts)


def test_a_mounted_secret_may_be_a_link(home: Path, tmp_path: Path) -> None:
    mounts = tmp_path / "mounts"
    (mounts / "..data").mkdir(parents=True)
    (mounts / "..data/api-key").write_text(KEY)
    (mounts / "api-key").symlink_to("..data/api-key")
    assert load_api_key(_settings(home), run_secrets=mounts) == KEY


def test_a_named_file_that_is_missing_is_told(home: Path, tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="missing"):
        load_api_key(_settings(home, api_key_file=tmp_path / "missing"))
    with pytest.raises(Invalid, match="missing"):
        load_credentials(_settings(home, token_seed_file=tmp_path / "missing"))


def test_a_home_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(Unavailable):
        load_credentials(_settings(tmp_path / "file" / "home"))


@pytest.mark.needs("root")
def test_a_full_disk_leaves_nothing_half_made(tmp_path: Path) -> None:
    mount = tmp_path / "tiny"
    mount.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", mount], check=True)
    try:
        with pytest.raises(OSError, match="No space"), (mount / "hog").open("wb") as hog:
            hog.write(b"x" * (1 << 20))
        with pytest.raises(NoSpace):
            load_credentials(_settings(mount / "home"))
        assert [path.name for path in mount.rglob("*") if path.is_file()] == ["hog"]
    finally:
        subprocess.run(["umount", mount], check=True)


def test_servers_that_start_together_agree_on_one_seed(home: Path) -> None:
    barrier = threading.Barrier(8)
    seeds: list[str] = []

    def load() -> None:
        barrier.wait()
        seeds.append(load_credentials(_settings(home)).seed)

    threads = [threading.Thread(target=load) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(seeds) == 8
    assert len(set(seeds)) == 1
    assert [path.name for path in (home / "secrets").iterdir()] == ["token-seed"]


def test_a_wide_open_umask_changes_nothing(home: Path) -> None:
    program = (
        "import os, sys; os.umask(0); from pathlib import Path\n"
        "from agentenv.config.schema import Settings\n"
        "from agentenv.config.secrets import load_credentials\n"
        "load_credentials(Settings(paths={'home': Path(sys.argv[1])}))\n"
    )
    subprocess.run([sys.executable, "-c", program, home], check=True)
    assert stat.S_IMODE((home / "secrets").stat().st_mode) == 0o700
    assert stat.S_IMODE((home / "secrets/token-seed").stat().st_mode) == 0o600
