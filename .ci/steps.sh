# Shared by the scripts of this folder; sourced by bash.
cd "$(dirname "${BASH_SOURCE[0]}")/.."

# Runs a command, and says how long it took.
step() {
  local began=$SECONDS
  "$@"
  echo "== $((SECONDS - began)) s: $*"
}

# Makes a virtual environment in the folder $1.
environment() {
  python3.11 -m venv "$1" 2>/dev/null || python3 -m venv "$1"
}

# Runs a command of the compiled environment on a copy of the tree without the package, since a
# checkout's sources would be found before the wheel. Nothing runs unless compiled modules are loaded.
in_compiled_tree() (
  export LEAN_SELECTOR_FORM=compiled LEAN_SELECTOR_IMAGE="$PWD/.compiled/image"
  cd .compiled/tree
  "../venv/bin/$@"
)
