#!/usr/bin/env python3
"""Rules of the tree that a text search can decide. Prints one line per violation.

Usage: check_tree.py SOURCE_ROOT

- Arrows point one way: a folder of common/ includes lower ranks only, services and launcher never
  include or link each other, and only tests and benchmarks include everything.
- Includes of ours are written from the root, in quotes, and exist; a source includes its own header
  first; a header has #pragma once.
- Heavy third-party headers stay where they are wrapped, in .cc files (a header pays for its includes
  once per file that includes it).
- Every source is listed in a meson.build, and every meson.build is reached by subdir().
"""

import pathlib
import re
import sys

CODE_FOLDERS = ("common", "services", "launcher", "tests", "bench")
RANKS = {"base": 0, "storage": 1, "transport": 1, "model": 2, "kernels": 2, "telemetry": 2,
         "pack": 3, "experts": 3}
SERVICES = ("gateway", "tokenizer", "trunk", "experts", "sampler")

# Third-party header (prefix) -> folders whose .cc files may include it. What is not named here may be
# included anywhere.
HEAVY = {
    "nlohmann/json.hpp": ("common/storage", "common/model", "services", "launcher", "tests", "bench"),
    "simdjson.h": ("common/storage", "services/tokenizer", "tests"),
    "CLI/": ("common/base", "launcher", "bench"),
    "toml++/": ("common/base", "launcher", "tests"),
    "spdlog/": ("common/base",),
    "zmq": ("common/transport", "tests"),
    "capnp/": ("common/transport", "tests"),
    "kj/": ("common/transport", "tests"),
    "httplib.h": ("services/gateway", "tests"),
    "unicode/": ("services/tokenizer", "tests"),
    "doctest/": ("tests",),
}
# Private headers that exist to wrap one of them, included by two or three sources of their folder.
HEAVY_IN_HEADER = {
    "common/storage/json_names.h": "simdjson.h",
    "launcher/toml_table.h": "toml++/",
}
# Only these, and benchmarks of the machine, may use instructions that not every CPU has.
INTRINSICS = re.compile(r"(immintrin|arm_neon|x86intrin)\.h")
VARIANT = re.compile(r"common/kernels/.*(avx2|avx512|neon)|bench/")

INCLUDE = re.compile(r'^\s*#\s*include\s*([<"])([^>"]+)[>"]')


class Tree:
    def __init__(self, root):
        self.root = root
        self.problems = []

    def report(self, path, line, text):
        place = f"{path}:{line}" if line else str(path)
        self.problems.append(f"{place}: {text}")

    def files(self, *suffixes):
        for folder in CODE_FOLDERS:
            for path in sorted((self.root / folder).rglob("*")):
                if path.suffix in suffixes and path.is_file():
                    yield path.relative_to(self.root).as_posix()

    def text(self, path):
        return (self.root / path).read_text(encoding="utf-8", errors="replace")


def part_of(path):
    """The unit of the include rule a file belongs to: common/base, services/trunk, launcher, tests."""
    parts = path.split("/")
    return "/".join(parts[:2]) if parts[0] in ("common", "services") else parts[0]


def may_include(user, used):
    """Why `user` may not include something of `used`, or None."""
    if user == used or user in ("tests", "bench"):
        return None
    if used in ("tests", "bench"):
        return f"{used} is not for others"
    if used == "proto":
        return None if user == "common/transport" else "generated messages stay in common/transport"
    if used == "launcher" or used.startswith("services/"):
        return f"{user} and {used} never include each other; shared code belongs into common/"
    if user.startswith("common/"):
        above, below = RANKS.get(user.split("/")[1]), RANKS.get(used.split("/")[1])
        if above is None or below is None or below >= above:
            return f"{user} may only include lower ranks than its own"
    return None


def check_ours(tree, path, number, name):
    if name.endswith(".capnp.h"):  # generated beside no source of ours
        used = "proto"
        exists = (tree.root / "proto" / name.removesuffix(".h")).exists()
    else:
        used = part_of(name)
        exists = (tree.root / name).exists()
        if name.split("/")[0] not in CODE_FOLDERS:
            tree.report(path, number, f'write "{name}" from the root, or in <> if it is not ours')
            return
    if not exists:
        tree.report(path, number, f'"{name}" does not exist')
    reason = may_include(part_of(path), used)
    if reason:
        tree.report(path, number, f'includes "{name}": {reason}')


def check_theirs(tree, path, number, name):
    if INTRINSICS.search(name) and not VARIANT.search(path):
        tree.report(path, number, f"<{name}> belongs into the variant files of common/kernels")
    for prefix, folders in HEAVY.items():
        if not name.startswith(prefix):
            continue
        if not any(path.startswith(folder + "/") for folder in folders):
            tree.report(path, number, f"<{name}> may only be included in {', '.join(folders)}")
        elif path.endswith(".h") and not path.startswith("tests/"):
            if HEAVY_IN_HEADER.get(path) != prefix:
                tree.report(path, number, f"<{name}> is heavy and belongs into a .cc file")


def check_includes(tree):
    for path in tree.files(".h", ".cc", ".inc"):
        lines = tree.text(path).splitlines()
        own_header = path.removesuffix(".cc") + ".h"
        has_own_header = path.endswith(".cc") and (tree.root / own_header).exists()
        first = True
        for number, line in enumerate(lines, 1):
            match = INCLUDE.match(line)
            if not match:
                continue
            bracket, name = match.groups()
            if has_own_header and first and name != own_header:
                tree.report(path, number, f'includes "{name}" before its own header')
            first = False
            if bracket == '"':
                check_ours(tree, path, number, name)
            else:
                check_theirs(tree, path, number, name)
        if path.endswith(".h") and "#pragma once" not in lines:
            tree.report(path, 1, "has no #pragma once")


def check_sources_are_built(tree):
    """A source is named, in quotes, in the meson.build of its folder or of one above it."""
    builds = {}

    def build_text(folder):
        if folder not in builds:
            file = tree.root / folder / "meson.build"
            text = file.read_text(encoding="utf-8") if file.exists() else ""
            builds[folder] = re.sub(r"^\s*#.*$", "", text, flags=re.MULTILINE)
        return builds[folder]

    for path in tree.files(".cc"):
        folders = pathlib.PurePosixPath(path).parents
        named = any(
            f"'{pathlib.PurePosixPath(path).relative_to(folder)}'" in build_text(folder)
            for folder in folders
        )
        if not named:
            tree.report(path, 0, "is in no meson.build: it is neither built nor tested")


def check_builds_are_reached(tree):
    for folder in CODE_FOLDERS + ("proto", "configs"):
        for file in sorted((tree.root / folder).rglob("meson.build")):
            place = file.parent.relative_to(tree.root)
            reached = False
            for above in place.parents:
                parent = tree.root / above / "meson.build"
                wanted = f"subdir('{place.relative_to(above).as_posix()}')"
                if parent.exists() and wanted in parent.read_text(encoding="utf-8"):
                    reached = True
            if not reached:
                tree.report(place / "meson.build", 0, "is reached by no subdir()")


def check_links(tree):
    """No service's build names the library of another one, or of the launcher."""
    owners = SERVICES + ("launcher",)
    for owner in owners:
        folder = "launcher" if owner == "launcher" else f"services/{owner}"
        file = tree.root / folder / "meson.build"
        if not file.exists():
            continue
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            for other in owners:
                if other != owner and re.search(rf"\b{other}_(dep|lib)\b", line.split("#")[0]):
                    tree.report(f"{folder}/meson.build", number, f"links {other}")


def check(root):
    """The number of files looked at, and the violations."""
    tree = Tree(pathlib.Path(root).resolve())
    check_includes(tree)
    check_sources_are_built(tree)
    check_builds_are_reached(tree)
    check_links(tree)
    return sum(1 for _ in tree.files(".h", ".cc", ".inc")), tree.problems


def main():
    n_files, problems = check(sys.argv[1])
    if n_files == 0:
        sys.exit(f"{sys.argv[1]}: no sources found")
    for problem in problems:
        print(problem)
    print(f"{n_files} files, {len(problems)} violations")
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
