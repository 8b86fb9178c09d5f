#!/usr/bin/env python3
"""Compiles headers alone, so that none relies on what a source happened to include before it.

A header with a source of its own is left out: the source includes it first (check_tree.py sees to
that), so the build itself has compiled it alone. The others take about a second each.

Usage: check_headers.py SOURCE_ROOT BUILD_ROOT COMPILER...

Prints one line per header that does not compile, with the compiler's first error.
"""

import concurrent.futures
import os
import pathlib
import subprocess
import sys


def headers_of(root):
    for folder in ("common", "services", "launcher", "tests", "bench"):
        for path in sorted((root / folder).rglob("*.h")):
            if not path.with_suffix(".cc").exists():
                yield path.relative_to(root).as_posix()


def first_error(compiler, root, build, header):
    """The compiler's first error about `header`, or None."""
    command = [*compiler, "-std=c++20", "-fsyntax-only", "-I", str(root)]
    command += ["-I", str(build / "proto"), "-x", "c++", "-"]
    source = f'#include "{header}"\n'
    result = subprocess.run(command, input=source, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        return None
    errors = [line for line in result.stderr.splitlines() if "error:" in line]
    return (errors or result.stderr.splitlines() or ["the compiler failed"])[0]


def main():
    root, build = pathlib.Path(sys.argv[1]).resolve(), pathlib.Path(sys.argv[2]).resolve()
    compiler = sys.argv[3:]
    headers = list(headers_of(root))
    if not headers:
        sys.exit(f"{root}: no headers found")
    n_bad = 0
    with concurrent.futures.ThreadPoolExecutor(os.cpu_count() or 2) as pool:
        results = pool.map(lambda header: first_error(compiler, root, build, header), headers)
        for header, error in zip(headers, results):
            if error:
                n_bad += 1
                print(f"{header}: does not compile alone: {error}")
    print(f"{len(headers)} headers without a source, {n_bad} do not compile alone")
    sys.exit(1 if n_bad else 0)


if __name__ == "__main__":
    main()
