#!/bin/sh
# Resolves the locks; each keeps the comment at its top. COMPILE is the command of uv (see the Makefile).
set -eu
cd "$(dirname "$0")/.."
resolved=$(mktemp)
trap 'rm -f "$resolved"' EXIT

# lock NAME OPTIONS: writes requirements/lock-NAME.txt.
lock() {
  file=requirements/lock-$1.txt
  shift
  $COMPILE "$@" --override requirements/overrides.txt setup.py >"$resolved"
  { grep '^#' "$file"; grep -E "${ONLY:-.}" "$resolved"; } >"$file.new"
  mv "$file.new" "$file"
}

# lock_all VERSION OPTIONS: the lock of a Python that has TensorFlow.
lock_all() {
  version=$1
  shift
  lock "$version" --python-version "$version" --extra seqio --extra test requirements/lock.in "$@"
}

lock_all 3.11 -c requirements/oldest.txt
lock_all 3.12
lock_all 3.13
lock core-3.14 --python-version 3.14 --extra test
ONLY='^(jax-cuda13-|nvidia-)' lock cuda --python-version 3.12 --extra cuda -c requirements/lock-3.12.txt
