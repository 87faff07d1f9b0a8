#!/bin/sh
# Print the configuration of an apt of its own, in a folder, that knows this release and its backports.
#   apt-get -c="$(tools/backports_apt.sh DIR)" ...
# The host's sources, lists and packages stay as they are. No root needed. What apt says goes to DIR/log.
set -eu
mkdir -p "$1/lists/partial" "$1/archives/partial"
dir=$(cd "$1" && pwd)
here=$(cd "$(dirname "$0")" && pwd)
python=${PYTHON:-python3}
{ "$python" "$here/apt_sources.py"; "$python" "$here/apt_sources.py" --backports; } >"$dir/sources.list"
cat >"$dir/apt.conf" <<CONF
#clear APT::Update::Pre-Invoke;
#clear APT::Update::Post-Invoke;
#clear APT::Update::Post-Invoke-Success;
#clear DPkg::Pre-Invoke;
#clear DPkg::Post-Invoke;
Dir::Etc::sourcelist "$dir/sources.list";
Dir::Etc::sourceparts "/dev/null";
Dir::State::lists "$dir/lists";
Dir::Cache "$dir";
APT::Sandbox::User "root";
APT::Update::Error-Mode "any";
Acquire::Languages "none";
Acquire::Retries "3";
Debug::NoLocking "true";
CONF
apt-get -c="$dir/apt.conf" -q update >"$dir/log" 2>&1 || { tail -5 "$dir/log" >&2; echo "error: Debian's packages cannot be reached" >&2; exit 1; }
echo "$dir/apt.conf"
