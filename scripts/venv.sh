# Sourced by quickstart, test and check: makes the virtual environment and installs twopool in it.
# TWOPOOL_VENV names its folder (default: .venv here); PYTHON the Python to make it with (default: python3).

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
venv=${TWOPOOL_VENV:-$root/.venv}

# install_twopool [EXTRAS]: editable, with EXTRAS such as '[dev]'; does nothing when that is done already.
install_twopool() {
    local extras=${1:-} python=${PYTHON:-python3} stamp wanted
    if [ ! -x "$venv/bin/python" ]; then
        "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
            echo "twopool needs Python 3.11 or later; $python is $("$python" --version 2>&1). Set PYTHON." >&2
            return 1
        }
        echo "Creating the virtual environment $venv" >&2
        "$python" -m venv "$venv"
    fi
    stamp=$venv/.twopool-installed$extras
    wanted="$root $(cat "$root/pyproject.toml" "$root/setup.py" "$root"/kernels/native/* | cksum)"
    if [ "$(cat "$stamp" 2>/dev/null)" != "$wanted" ]; then
        echo "Installing twopool$extras into $venv" >&2
        "$venv/bin/python" -m pip install --quiet --disable-pip-version-check --editable "$root$extras" >&2
        printf '%s\n' "$wanted" >"$stamp"
    fi
}
