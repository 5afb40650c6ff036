#!/usr/bin/env bash
# Installs what a build needs and this machine lacks (Debian 12, Ubuntu 24.04). With --tests also what the tests need.
# Changes nothing when all is there.
set -euo pipefail

packages=(g++ make cmake git openmpi-bin libopenmpi-dev libhdf5-dev libopenblas-dev zlib1g-dev
          libyaml-cpp-dev libspdlog-dev libfmt-dev libcli11-dev nlohmann-json3-dev python3)
case "${1:-}" in
  "") ;;
  --tests) packages+=(catch2 hdf5-tools python3-h5py python3-jinja2) ;;
  *) echo "usage: $0 [--tests]" >&2; exit 2 ;;
esac

# A tool of another origin (a newer cmake, a python of one's own) is as good as its package.
present() {
  case "$1" in
    g++ | make | cmake | git | python3) command -v "$1" >/dev/null && return 0 ;;
  esac
  [ "$(dpkg-query -W -f='${db:Status-Status}' "$1" 2>/dev/null)" = installed ]
}

missing=()
for package in "${packages[@]}"; do
  present "$package" || missing+=("$package")
done

if [ ${#missing[@]} -eq 0 ]; then
  echo "install: nothing to do, all packages are there"
elif ! command -v apt-get >/dev/null; then
  echo "install: no apt-get here; what Debian calls ${missing[*]} has to be installed by hand" >&2
  exit 1
else
  as_root=()
  if [ "$(id -u)" -ne 0 ]; then
    if ! command -v sudo >/dev/null; then
      echo "install: as root: apt-get install ${missing[*]}" >&2
      exit 1
    fi
    as_root=(sudo)
  fi
  echo "install: ${missing[*]}"
  apt=("${as_root[@]}" env DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 -o Acquire::Retries=3 -qq)
  "${apt[@]}" update
  "${apt[@]}" install -y --no-install-recommends "${missing[@]}" </dev/null
fi

# $1 tool, $2 its version, $3 the oldest that will do
at_least() {
  if [ "$(printf '%s\n' "$2" "$3" | sort -V | head -n 1)" != "$3" ]; then
    echo "install: $1 is $2, but $3 or newer is needed" >&2
    exit 1
  fi
}
at_least cmake "$(cmake --version | sed -n '1s/[^0-9]*\([0-9.]*\).*/\1/p')" 3.24
at_least g++ "$(g++ -dumpfullversion)" 12
