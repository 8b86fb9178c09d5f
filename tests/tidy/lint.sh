#!/bin/bash
# Layout, rules of the tree, and clang-tidy. Prints every violation; exits 1 if there was one.
#
#   tests/tidy/lint.sh BUILD_DIR [FILE...]     # FILE: only these sources go through clang-tidy
#
# BUILD_DIR is configured and built (clang-tidy needs the generated message headers). clang-tidy takes
# ten to twenty seconds a file; all of them take a good while.
set -uo pipefail
cd "$(dirname "$0")/../.." || exit 2
[ $# -ge 1 ] && [ -f "$1/compile_commands.json" ] || {
    echo "usage: tests/tidy/lint.sh BUILD_DIR [FILE...], BUILD_DIR configured by ./dev build" >&2
    exit 2
}
build=$1
shift
failed=0

echo "lint: layout"
git ls-files -z -- '*.h' '*.cc' '*.inc' | xargs -0 clang-format --dry-run -Werror || failed=1

echo "lint: rules of the tree"
python3 tests/tidy/check_tree.py . || failed=1

# The sources the build compiles, of our own folders; a generated one has no layout and no names of ours.
sources() {
    python3 - "$build" <<'PYTHON'
import json, os, sys
build = os.path.realpath(sys.argv[1])
root = os.getcwd()
found = set()
for entry in json.load(open(os.path.join(build, "compile_commands.json"), encoding="utf-8")):
    path = os.path.realpath(os.path.join(entry["directory"], entry["file"]))
    name = os.path.relpath(path, root)
    if name.split("/")[0] in ("common", "services", "launcher", "tests", "bench"):
        found.add(name)
print("\n".join(sorted(found)))
PYTHON
}

echo "lint: clang-tidy"
if [ $# -gt 0 ]; then printf '%s\n' "$@"; else sources; fi |
    xargs -P "$(nproc)" -n 1 clang-tidy -p "$build" --quiet 2> >(grep -v 'warnings\? generated' >&2) ||
    failed=1

[ $failed = 0 ] && echo "lint: clean"
exit $failed
