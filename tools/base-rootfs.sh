#!/bin/sh
# Make the root file system of the template `base`: Debian, from the package sources that this machine has.
#   tools/base-rootfs.sh OUT.tar      as root; needs mmdebstrap and, the first time, the package mirror
set -eu
out=$1
here=$(cd "$(dirname "$0")" && pwd)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
trap 'exit 130' INT TERM

packages="bash ca-certificates curl gcc git iproute2 less libc6-dev make nodejs npm patch procps
    python-is-python3 python3 python3-pip python3-venv sudo unzip xz-utils"

"${PYTHON:-python3}" "$here/apt_sources.py" >"$work/sources.list"
release=$("${PYTHON:-python3}" "$here/apt_sources.py" --codename)

cat >"$work/customize" <<'HOOK'
#!/bin/sh
set -eu
root=$1
chroot "$root" useradd --create-home --uid 1000 --shell /bin/bash user
printf 'user ALL=(ALL:ALL) NOPASSWD: ALL\n' >"$root/etc/sudoers.d/user"
chmod 0440 "$root/etc/sudoers.d/user"
# The SDK runs each command in a login shell: these start no process and read what only a person needs for none but a person.
cat >"$root/etc/profile" <<'PROFILE'
if [ "${EUID:-$(id -u)}" -eq 0 ]; then
  PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
else
  PATH=/usr/local/bin:/usr/bin:/bin:/usr/local/games:/usr/games
fi
export PATH
case $- in *i*) [ -z "${BASH_VERSION-}" ] || . /etc/bash.bashrc ;; esac
for i in /etc/profile.d/*.sh; do [ ! -r "$i" ] || . "$i"; done
unset i
PROFILE
cat >"$root/home/user/.profile" <<'PROFILE'
[ ! -d "$HOME/bin" ] || PATH=$HOME/bin:$PATH
[ ! -d "$HOME/.local/bin" ] || PATH=$HOME/.local/bin:$PATH
case $- in *i*) [ -z "${BASH_VERSION-}" ] || . "$HOME/.bashrc" ;; esac
PROFILE
# What a sandbox writes at start; empty here so that no two sandboxes share what the build had.
: >"$root/etc/machine-id"
printf 'sandbox\n' >"$root/etc/hostname"
printf '127.0.0.1 localhost\n::1 localhost ip6-localhost ip6-loopback\n' >"$root/etc/hosts"
rm -rf "$root"/var/cache/apt/* "$root"/var/log/* "$root"/var/cache/ldconfig/* "$root"/var/cache/debconf/*-old "$root"/var/lib/dpkg/*-old
HOOK
chmod +x "$work/customize"

# Each word of apt's that lets this machine use its mirror has to hold inside as well.
valid_until=$(apt-config dump --format '%v' Acquire::Check-Valid-Until)
check_date=$(apt-config dump --format '%v' Acquire::Check-Date)

# force-unsafe-io: a sandbox is snapshot whole, and apt inside it is several times as fast without fsync.
# EXTERNALLY-MANAGED: in a throw-away machine `pip install` should just install.
mmdebstrap --variant=minbase --mode=root --format=tar --include="$(echo $packages | tr ' ' ',')" \
    --aptopt='APT::Install-Recommends "false"' \
    --aptopt='Acquire::Languages "none"' \
    ${valid_until:+--aptopt="Acquire::Check-Valid-Until \"$valid_until\""} \
    ${check_date:+--aptopt="Acquire::Check-Date \"$check_date\""} \
    --dpkgopt='force-unsafe-io' \
    --dpkgopt='path-exclude=/usr/share/man/*' \
    --dpkgopt='path-exclude=/usr/share/info/*' \
    --dpkgopt='path-exclude=/usr/share/locale/*/LC_MESSAGES/*' \
    --dpkgopt='path-exclude=/usr/share/doc/*' \
    --dpkgopt='path-include=/usr/share/doc/*/copyright' \
    --dpkgopt='path-exclude=/usr/lib/python3*/EXTERNALLY-MANAGED' \
    --dpkgopt='path-exclude=/usr/bin/*lto-dump*' \
    --customize-hook="$work/customize" \
    "$release" "$work/root.tar" "$work/sources.list"
mkdir -p "$(dirname "$out")"
mv "$work/root.tar" "$out.new" # beside the target first: /tmp may be another file system
mv "$out.new" "$out"
