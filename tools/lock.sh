#!/bin/sh
# Write requirements/*.txt anew from pyproject.toml: every package with its hashes, for all CPUs, no index address.
#   tools/lock.sh [--upgrade]
set -eu
cd "$(dirname "$0")/.."
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"${PYTHON:-python3}" -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet uv
# Companies that intercept TLS put their authority into the system's bundle; uv looks there only when told.
bundle=/etc/ssl/certs/ca-certificates.crt
[ ! -f "$bundle" ] || export SSL_CERT_FILE="${SSL_CERT_FILE:-$bundle}"
lock() {
    "$work/venv/bin/uv" pip compile --quiet --universal --python-version 3.11 --generate-hashes \
        --no-header --no-emit-index-url --no-emit-find-links "$@"
}
lock "$@" pyproject.toml -o requirements/runtime.txt
lock "$@" pyproject.toml --extra dev -c requirements/runtime.txt -o requirements/dev.txt
if grep -nE '^(--|-i |-f )|://' requirements/*.txt; then
    echo "a lock file names an index or an address: see the lines above" >&2
    exit 1
fi
echo "locked: $(grep -c '==' requirements/runtime.txt) packages to run, $(grep -c '==' requirements/dev.txt) to develop"
