#!/bin/sh
# A kernel variant exports its table's getter and nothing else: any further symbol, weak ones above
# all, could be the copy of an inline function that the linker keeps for every caller, and would
# fault on a CPU without the variant's instructions.
# Usage: exported_symbols.sh NM ARCHIVE GETTER
set -u
exported=$("$1" -C --defined-only "$2" | grep -E '^[0-9a-f]+ [A-Zuvw] ' | grep -vE '^[0-9a-f]+ [BDRT] \.') || {
    echo "no symbols in $2"
    exit 1
}
expected="T k3::kernels::$3()"
found=$(printf '%s\n' "$exported" | sed -E 's/^[0-9a-f]+ //')
if [ "$found" != "$expected" ]; then
    printf 'expected only: %s\nfound:\n%s\n' "$expected" "$found"
    exit 1
fi
