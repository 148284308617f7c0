# For the scripts beside it, which source it: from the project's folder, by the Python that is asked
# for, parts that all run whatever fails, and what failed.
cd "$(dirname "${BASH_SOURCE[0]}")/.."
PYTHON="${PYTHON:-python3}"
OUT="${OUT:-/tmp}"
failed=()

part() { # its name, then the command
    local name="$1"
    shift
    printf '\n## %s\n' "$name"
    "$@" || failed+=("$name")
}

mosstalk() { "$PYTHON" -m mosstalk.cli "$@"; }

finish() { # says what failed, and exits 1 then
    if ((${#failed[@]})); then
        printf '\nfailed: %s\n' "${failed[@]}"
        exit 1
    fi
}
