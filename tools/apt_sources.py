#!/usr/bin/env python3
"""Print where this machine gets Debian packages from, as apt source lines.

apt itself is asked, so it does not matter how the sources are written down; only
archives that Debian signs are kept. The project names no mirror of its own.

    tools/apt_sources.py              the main, updates and security archives
    tools/apt_sources.py --backports  the backports of the same release, at the same mirror
    tools/apt_sources.py --codename   the name of the release
"""

import argparse
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

KEYRING = Path("/usr/share/keyrings/debian-archive-keyring.gpg")


class Archive(NamedTuple):
    uri: str
    suite: str
    component: str
    label: str


def archives() -> list[Archive]:
    form = "$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(ORIGIN)|$(LABEL)"
    shown = subprocess.run(
        ["apt-get", "indextargets", "--format", form, "Created-By: Packages"],
        stdout=subprocess.PIPE, check=True, text=True,
    ).stdout  # fmt: skip
    found = []
    for line in shown.splitlines():
        uri, suite, component, origin, label = line.split("|")
        if origin == "Debian" and "-backports" not in suite:
            found.append(Archive(uri.rstrip("/"), suite, component, label))
    return sorted(set(found))


def source_line(uri: str, suite: str, components: str) -> str:
    signed = f"[signed-by={KEYRING}] " if KEYRING.exists() else ""
    return f"deb {signed}{uri} {suite} {components}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--backports", action="store_true")
    parser.add_argument("--codename", action="store_true")
    options = parser.parse_args()
    found = archives()
    base = [archive for archive in found if archive.label == "Debian" and archive.suite.isalpha()]
    if not base:
        sys.stderr.write("error: this machine has no package source signed by Debian (was `apt-get update` run?)\n")
        return 1
    if options.codename:
        print(base[0].suite)
    elif options.backports:
        print(source_line(base[0].uri, base[0].suite + "-backports", "main"))
    else:
        by_place = {}  # type: dict[tuple[str, str], list[str]]
        for archive in found:
            by_place.setdefault((archive.uri, archive.suite), []).append(archive.component)
        for (uri, suite), components in by_place.items():
            print(source_line(uri, suite, " ".join(components)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
