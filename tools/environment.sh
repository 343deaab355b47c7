#!/bin/sh
# Make sure that a virtual environment has this checkout (editable) with some extras.
#
#   sh tools/environment.sh VENV EXTRAS [MINIMUM] [FRESHNESS]
#
# VENV       directory of the environment; made when absent
# EXTRAS     comma-separated extras of pyproject.toml
# MINIMUM    lowest Python, default 3.11
# FRESHNESS  any text; when it changes, packages are upgraded to the newest that fit
#
# PYTHON=... names the interpreter. Otherwise the first suitable one of candidates() is used.
# A stamp file in VENV says what is installed, so that a second run takes milliseconds.
set -eu

cd "$(dirname "$0")/.."
venv=$1 extras=$2 minimum=${3:-3.11} freshness=${4:-}
python=$venv/bin/python
stamp=$venv/.shardwright-$(echo "$extras" | tr ',' '-')

say() { echo "shardwright: $*" >&2; }
die() { say "$*"; exit 1; }

# Print what is wrong with the interpreter $1, or nothing if it is suitable. A pyenv shim of an
# inactive version cannot run.
complaint() {
  "$1" - "$minimum" 2>/dev/null <<'PROBE' || echo "does not run"
import sys
want = tuple(int(part) for part in sys.argv[1].split("."))
if sys.version_info[:2] < want:
    print("is Python %d.%d, older than %s" % (sys.version_info[0], sys.version_info[1], sys.argv[1]))
else:
    try:
        import ensurepip, ssl, venv
    except ImportError as err:
        print("lacks a module of the standard library (%s); on Debian and Ubuntu: apt install python3-venv" % err)
PROBE
}

candidates() {
  for name in python3 python3.14 python3.13 python3.12 python3.11 python; do
    command -v "$name" || true
  done
  for root in "${PYENV_ROOT:-$HOME/.pyenv}/versions" "$HOME/.local/share/uv/python"; do
    ls -d "$root"/*/bin/python3 2>/dev/null | sort -r || true
  done
  for path in /opt/homebrew/bin/python3 /usr/local/bin/python3 /usr/bin/python3; do
    if [ -x "$path" ]; then echo "$path"; fi
  done
}

find_python() {
  if [ -n "${PYTHON:-}" ]; then
    why=$(complaint "$PYTHON")
    [ -z "$why" ] || die "PYTHON=$PYTHON $why"
    echo "$PYTHON"
    return
  fi
  seen=
  for path in $(candidates); do
    why=$(complaint "$path")
    if [ -z "$why" ]; then echo "$path"; return; fi
    seen="$seen
    $path $why"
  done
  die "no Python >= $minimum found; install one, or name it: make PYTHON=/path/to/python3 ...
  looked at:${seen:- nothing that runs}"
}

# Keep an environment with an interpreter that runs. If PYTHON is set, the versions must be equal.
usable() {
  [ -x "$python" ] && [ -z "$(complaint "$python")" ] || return 1
  [ -n "${PYTHON:-}" ] || return 0
  version='import sys; print(sys.version)'
  [ "$("$python" -c "$version")" = "$("$PYTHON" -c "$version" 2>/dev/null)" ]
}

create() {
  if [ -e "$venv" ] && [ ! -e "$venv/pyvenv.cfg" ] && [ -n "$(ls -A "$venv")" ]; then
    die "$venv exists and is not a virtual environment; choose another with VENV="
  fi
  base=$(find_python)
  say "making $venv with $base ($("$base" -V 2>&1))"
  "$base" -m venv --clear "$venv"
}

install() {
  say "installing shardwright[$extras] into $venv (a minute or two the first time)"
  # -qq hides the progress and the warnings of pip. Errors are still shown.
  set -- -qq --disable-pip-version-check --no-input
  if [ -n "$freshness" ]; then set -- "$@" --upgrade --upgrade-strategy eager; fi
  "$python" -m pip install "$@" -e ".[$extras]" || die "pip could not install shardwright[$extras] into $venv, see above"
}

# Install flax, haliax, eformer and what they import (22 MB), because some tests compare with them. They are
# not an extra: eformer also requires ray and cloud clients, which its sharding does not import.
# --no-deps and --target keep both from changing the version of JAX that is tested.
oracles() {
  # Code that reads stack frames skips folders of this name.
  place=$(cd "$venv" && pwd)/oracles/site-packages
  rm -rf "$place"
  for names in "flax treescope pyyaml msgpack chex toolz contextlib2" \
    "haliax>=1.4.dev453 equinox jaxtyping wadler-lindig jmp aqtp" eformer; do
    # shellcheck disable=SC2086  # several names
    "$python" -m pip install -qq --disable-pip-version-check --no-input --no-deps --target "$place" $names ||
      say "could not install ${names%% *}, see above; the tests that compare with it are skipped"
  done
  # Three read their own version there. The plugin of jaxtyping for pytest is not used.
  find "$place" -maxdepth 1 -name '*.dist-info' ! -name 'equinox-*' ! -name 'jaxtyping-*' \
    ! -name 'wadler_lindig-*' -exec rm -rf {} +
  rm -f "$place"/jaxtyping-*.dist-info/entry_points.txt
  echo "$place" > "$("$python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')/shardwright-oracles.pth"
}

if [ -n "${PYTHON:-}" ]; then
  why=$(complaint "$PYTHON")
  [ -z "$why" ] || die "PYTHON=$PYTHON $why"
fi
usable || create
# If another checkout was installed into VENV, the stamps of this checkout are not valid.
owner=$venv/.shardwright-checkout
if [ "$(cat "$owner" 2>/dev/null || true)" != "$(pwd)" ]; then
  rm -f "$venv"/.shardwright-*
  pwd > "$owner"
fi
wanted="$(cksum < pyproject.toml) $freshness"
if [ "$(cat "$stamp" 2>/dev/null || true)" != "$wanted" ]; then
  rm -f "$stamp"
  install
  case ",$extras," in *,test,*) oracles ;; esac
  echo "$wanted" > "$stamp"
fi
