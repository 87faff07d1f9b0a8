#!/bin/sh
# Unpack the cloud kernel of this Debian release's backports into a folder.
#   tools/lab/kernel.sh OUT        OUT/boot/vmlinuz-VERSION and OUT/lib/modules/VERSION; no root needed
set -eu
out=$1
tools=$(cd "$(dirname "$0")/.." && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

conf=$(sh "$tools/backports_apt.sh" "$work/apt")
meta=linux-image-cloud-amd64
version=$(apt-cache -c="$conf" madison "$meta" | awk '/-backports/ { print $3; exit }')
[ -n "$version" ] || { echo "error: the backports of this release have no $meta" >&2; exit 1; }
package=$(apt-cache -c="$conf" depends --important "$meta=$version" | awk '/Depends: linux-image/ { print $2; exit }')
(cd "$work" && apt-get -c="$conf" -q download "$package")
dpkg-deb --extract "$work"/*.deb "$work/tree"
rm -rf "$out"
mkdir -p "$(dirname "$out")"
mv "$work/tree" "$out.new" # /tmp may be another file system
mv "$out.new" "$out"
echo "$package $version"
