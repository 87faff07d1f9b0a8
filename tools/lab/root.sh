#!/bin/sh
# Make the root disk of the lab host: Debian, with the modules of its kernel and the init that runs a job.
#   tools/lab/root.sh KERNEL OUT.img        as root; needs mmdebstrap and, the first time, the package mirror
set -eu
kernel=$1
out=$2
here=$(cd "$(dirname "$0")" && pwd)
tools=$(dirname "$here")
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM
packages=busybox-static,e2fsprogs,fdisk,fio,fuse3,iproute2,kmod,procps,python3,util-linux

"${PYTHON:-python3}" "$tools/apt_sources.py" >"$work/sources.list"
release=$("${PYTHON:-python3}" "$tools/apt_sources.py" --codename)
valid_until=$(apt-config dump --format '%v' Acquire::Check-Valid-Until)
check_date=$(apt-config dump --format '%v' Acquire::Check-Date)
mmdebstrap --variant=minbase --mode=root --format=tar --include="$packages" \
    --aptopt='APT::Install-Recommends "false"' \
    --aptopt='Acquire::Languages "none"' \
    ${valid_until:+--aptopt="Acquire::Check-Valid-Until \"$valid_until\""} \
    ${check_date:+--aptopt="Acquire::Check-Date \"$check_date\""} \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    "$release" "$work/root.tar" "$work/sources.list"
mkdir "$work/root"
tar -xf "$work/root.tar" -C "$work/root"
rm "$work/root.tar"
version=$(basename "$kernel"/lib/modules/*)
mkdir -p "$work/root/lib/modules" # wherever /lib is
cp -a "$kernel/lib/modules/$version" "$work/root/lib/modules/"
depmod -b "$work/root" "$version"
mkdir -p "$work/root/lab"
cp "$here/init.sh" "$work/root/lab/init"
chmod 0755 "$work/root/lab/init"
rm -rf "$work"/root/var/cache/apt/* "$work"/root/var/lib/apt/lists/*
size_mib=$(du -sm "$work/root" | cut -f1)
truncate -s "$((size_mib + size_mib / 4 + 256))M" "$work/root.img"
mke2fs -q -t ext4 -O ^has_journal -d "$work/root" "$work/root.img"
cp --sparse=always "$work/root.img" "$out.new" # beside the target first: /tmp may be another file system
mv "$out.new" "$out"
