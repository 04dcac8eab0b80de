#!/bin/sh
# Prints the path of a Python that can host this project, or fails with one line.
#
# Every candidate is run, not looked up: a version manager's shims exist on PATH for versions that are not selected, and
# only fail when called.  A candidate passes if it is new enough and can create a virtual environment with pip in it.
# PYTHON=<command> skips the search.

minimum=3.12
# Tried in this order; 3.12 first because it is what the project is developed and benchmarked on.
versions="3.12 3.13 3.14"

probe='
import sys
minimum = tuple(int(part) for part in sys.argv[1].split("."))
version = "%d.%d.%d" % sys.version_info[:3]
if sys.version_info[:2] < minimum:
    print("old " + version)
else:
    try:
        import ensurepip, venv
        # inside a virtual environment: the interpreter that it was made from
        print("ok %s %s" % (version, getattr(sys, "_base_executable", None) or sys.executable))
    except ImportError:
        print("novenv " + version)
'

found=""          # what the error message lists
chosen_minor=""   # major.minor of the best candidate so far
chosen_path=""

note() { found="${found:+$found, }$1"; }

limit="timeout 20" # a candidate that hangs is a candidate that does not run
command -v timeout >/dev/null 2>&1 || limit=""

# check COMMAND: sets $state and $detail
check() {
    answer=$($limit "$1" -c "$probe" "$minimum" </dev/null 2>/dev/null | tail -n 1)
    state=${answer%% *}
    detail=${answer#* }
    case $state in
        ok | old | novenv) ;;
        *) state=broken ;;
    esac
}

explain() { # explain COMMAND: one phrase about a candidate that does not fit
    case $state in
        old) note "$1 is $detail" ;;
        novenv) note "$1 is $detail but lacks the venv module (Debian: install python3-venv)" ;;
        broken) note "$1 does not run" ;;
    esac
}

fail() {
    echo "error: Python >= $minimum is needed ($1); install one, or name it: make PYTHON=/path/to/python3.12" >&2
    exit 1
}

if [ -n "${PYTHON:-}" ]; then
    check "$PYTHON"
    if [ "$state" != ok ]; then
        explain "PYTHON=$PYTHON"
        fail "$found"
    fi
    echo "${detail#* }"
    exit 0
fi

rank() { # place of a version in $versions; unknown, newer ones come last
    place=0
    for known in $versions; do
        place=$((place + 1))
        if [ "$known" = "$1" ]; then
            echo $place
            return
        fi
    done
    echo 99
}

consider() {
    check "$1"
    if [ "$state" != ok ]; then
        explain "$1"
        return
    fi
    version=${detail%% *}
    minor=${version%.*}
    if [ -z "$chosen_path" ] || [ "$(rank "$minor")" -lt "$(rank "$chosen_minor")" ]; then
        chosen_minor=$minor
        chosen_path=${detail#* }
    fi
}

for name in python3 python3.12 python3.13 python3.14 python; do
    if command -v "$name" >/dev/null 2>&1; then
        consider "$name"
    fi
done
for root in "${PYENV_ROOT:-}" "${HOME:-}/.pyenv"; do
    [ -n "$root" ] || continue
    for candidate in "$root"/versions/3.*/bin/python3; do
        if [ -x "$candidate" ]; then
            consider "$candidate"
        fi
    done
    [ "$root" != "${HOME:-}/.pyenv" ] || break # both may name the same folder
done

[ -n "$chosen_path" ] || fail "found: ${found:-no Python at all}"
echo "$chosen_path"
