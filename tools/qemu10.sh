#!/bin/sh
# Unpack QEMU 10 from the backports of this Debian release into a folder, beside the installed one.
#   tools/qemu10.sh DIR        then, for instance: AENV_QEMU=DIR/qemu make test
# The host's sources, lists and packages stay as they are: apt works on a configuration of its own. No root needed.
set -eu
mkdir -p "$1"
dir=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}

release=$("$python" "$here/apt_sources.py" --codename)
wanted=$("$python" "$here/apt_sources.py"; "$python" "$here/apt_sources.py" --backports)
if [ -x "$dir/qemu" ] && [ "$(cat "$dir/sources" 2>/dev/null)" = "$wanted" ]; then
    echo "$dir/qemu: $("$dir/qemu" --version | head -1), as it was"
    exit 0
fi

rm -rf "$dir/apt" "$dir/root" "$dir/qemu"
mkdir -p "$dir/root"
echo "fetching QEMU from the backports of $release"
conf=$(sh "$here/backports_apt.sh" "$dir/apt")
# What the host has already is not fetched again, except where backports have a newer one that QEMU needs.
apt-get -c="$conf" -q -y -t "$release-backports" --no-install-recommends --reinstall --download-only \
    install qemu-system-x86 qemu-system-data qemu-system-common qemu-utils seabios >"$dir/log" 2>&1 ||
    { tail -5 "$dir/log" >&2; echo "error: the backports of $release have no QEMU" >&2; exit 1; }
for archive in "$dir"/apt/archives/*.deb; do
    dpkg-deb --extract "$archive" "$dir/root"
done

cat >"$dir/qemu.new" <<WRAPPER
#!/bin/sh
export LD_LIBRARY_PATH="$dir/root/usr/lib/x86_64-linux-gnu\${LD_LIBRARY_PATH:+:\$LD_LIBRARY_PATH}"
export QEMU_MODULE_DIR="$dir/root/usr/lib/x86_64-linux-gnu/qemu"
exec "$dir/root/usr/bin/qemu-system-x86_64" -L "$dir/root/usr/share/qemu" -L "$dir/root/usr/share/seabios" "\$@"
WRAPPER
chmod +x "$dir/qemu.new"
"$dir/qemu.new" --version | head -1
"$dir/qemu.new" -M help >/dev/null
rm -rf "$dir/apt"
mv "$dir/qemu.new" "$dir/qemu"
echo "$wanted" >"$dir/sources"
echo "ready: AENV_QEMU=$dir/qemu"
