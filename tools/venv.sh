#!/bin/sh
# Makes a virtual environment in DIRECTORY and installs PIP-ARGUMENTS into it, at the tested versions; without any, hoist:
#   sh tools/venv.sh DIRECTORY [PIP-ARGUMENTS...]
# As root on Debian it first installs what may be missing there: venv, and for `dev` a C compiler (one test uses it) and
# chromium (tests open reports in it, or skip).
set -eu
cd "$(dirname "$0")/.."
directory=${1:?name the directory of the environment, like .venv}
shift
[ $# != 0 ] || set -- .

debian_package() {
    if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
        echo "$0: $1 is missing; install it and run this again" >&2
        exit 1
    fi
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq "$1"
}

python=
for candidate in ${PYTHON:-python3 python3.14 python3.13 python3.12 python3.11}; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "$0: no Python of version 3.11 or later found; install one, or name it in PYTHON" >&2
    exit 1
fi
"$python" -c 'import ensurepip, venv' 2>/dev/null || debian_package python3-venv
case "$*" in
    *dev*)
        command -v gcc >/dev/null || debian_package gcc
        if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null && ! command -v chromium >/dev/null; then
            debian_package chromium || echo "$0: no chromium: tests that need a browser will skip" >&2
        fi
        ;;
esac
echo "installing hoist and torch into $directory: about 1.2 GB, a minute or two" >&2
"$python" -m venv "$directory"
"$directory/bin/python" -m pip install --quiet --disable-pip-version-check -c constraints.txt "$@"
