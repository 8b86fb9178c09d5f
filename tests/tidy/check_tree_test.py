#!/usr/bin/env python3
"""check_tree.py reports what it should: one made-up tree per rule, each broken once."""

import pathlib
import sys
import tempfile
import unittest

import check_tree

# A tree without violations; a case changes or adds files.
GOOD = {
    "meson.build": "subdir('common')\nsubdir('services')\nsubdir('tests')\n",
    "proto/types.capnp": "",
    "common/meson.build": "subdir('base')\nsubdir('storage')\nsubdir('transport')\n",
    "common/base/meson.build": "x = static_library('x', 'a.cc')\n",
    "common/base/a.h": "#pragma once\n#include <string>\n",
    "common/base/a.cc": '#include "common/base/a.h"\n#include <fmt/format.h>\n',
    "common/storage/meson.build": "x = static_library('x', 's.cc')\n",
    "common/storage/s.h": '#pragma once\n#include "common/base/a.h"\n',
    "common/storage/s.cc": '#include "common/storage/s.h"\n#include <simdjson.h>\n',
    "common/transport/meson.build": "x = static_library('x', 't.cc')\n",
    "common/transport/t.h": '#pragma once\n#include "types.capnp.h"\n',
    "common/transport/t.cc": '#include "common/transport/t.h"\n#include <zmq.h>\n',
    "services/meson.build": "subdir('trunk')\nsubdir('experts')\n",
    "services/trunk/meson.build": "trunk_lib = static_library('x', 'main.cc')\n",
    "services/trunk/trunk.h": '#pragma once\n#include "common/storage/s.h"\n',
    "services/trunk/main.cc": '#include "services/trunk/trunk.h"\n',
    "services/experts/meson.build": "experts_lib = static_library('x')\n",
    "services/experts/e.h": "#pragma once\n",
    "tests/meson.build": "test('x', executable('x', 'unit/a_test.cc'))\n",
    "tests/unit/a_test.cc": '#include "services/trunk/trunk.h"\n#include <doctest/doctest.h>\n',
}


def run(changes):
    with tempfile.TemporaryDirectory() as folder:
        for name, text in {**GOOD, **changes}.items():
            path = pathlib.Path(folder) / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text, encoding="utf-8")
        return check_tree.check(folder)[1]


class CheckTree(unittest.TestCase):
    def refused(self, changes, *parts):
        problems = run(changes)
        self.assertEqual(len(problems), 1, problems)
        for part in parts:
            self.assertIn(part, problems[0])

    def test_a_tree_that_keeps_the_rules_passes(self):
        self.assertEqual(run({}), [])

    def test_a_lower_rank_must_not_include_a_higher_one(self):
        self.refused(
            {"common/base/a.h": '#pragma once\n#include "common/storage/s.h"\n'},
            "common/base/a.h:2", "lower ranks",
        )

    def test_neighbours_of_one_rank_must_not_include_each_other(self):
        self.refused(
            {"common/storage/s.h": '#pragma once\n#include "common/transport/t.h"\n'}, "lower ranks"
        )

    def test_services_must_not_include_each_other(self):
        self.refused(
            {"services/trunk/trunk.h": '#pragma once\n#include "services/experts/e.h"\n'},
            "never include each other",
        )

    def test_common_must_not_include_a_service(self):
        self.refused(
            {"common/storage/s.h": '#pragma once\n#include "services/experts/e.h"\n'},
            "never include each other",
        )

    def test_nothing_but_tests_includes_tests(self):
        self.refused(
            {"tests/support.h": "#pragma once\n",
             "services/trunk/trunk.h": '#pragma once\n#include "tests/support.h"\n'},
            "tests is not for others",
        )

    def test_services_must_not_link_each_other(self):
        self.refused(
            {"services/trunk/meson.build": "trunk_lib = executable('main.cc', 'x', experts_lib)\n"},
            "services/trunk/meson.build:1", "links experts",
        )

    def test_generated_messages_stay_in_transport(self):
        self.refused(
            {"services/trunk/trunk.h": '#pragma once\n#include "types.capnp.h"\n'},
            "generated messages",
        )

    def test_a_heavy_header_stays_in_its_folder_and_in_sources(self):
        self.refused(
            {"services/trunk/trunk.h": "#pragma once\n#include <zmq.hpp>\n"},
            "may only be included in common/transport",
        )
        self.refused(
            {"common/transport/t.h": "#pragma once\n#include <zmq.h>\n"}, "belongs into a .cc file"
        )

    def test_intrinsics_stay_in_variant_files(self):
        self.refused(
            {"common/base/a.h": "#pragma once\n#include <immintrin.h>\n"}, "variant files"
        )

    def test_includes_are_written_from_the_root_and_exist(self):
        self.refused({"common/base/a.h": '#pragma once\n#include "b.h"\n'}, "from the root")
        self.refused(
            {"services/trunk/trunk.h": '#pragma once\n#include "common/base/b.h"\n'},
            "does not exist",
        )

    def test_a_source_includes_its_own_header_first(self):
        self.refused(
            {"common/base/a.cc": '#include <string>\n#include "common/base/a.h"\n'},
            "before its own header",
        )

    def test_a_header_has_pragma_once(self):
        self.refused({"common/base/a.h": "#include <string>\n"}, "no #pragma once")

    def test_a_source_that_no_build_names_is_found(self):
        self.refused({"common/base/b.cc": ""}, "common/base/b.cc: is in no meson.build")
        self.refused(
            {"common/base/b.cc": "", "common/base/meson.build": "lib('a.cc')\n# 'b.cc',\n"},
            "common/base/b.cc",
        )

    def test_a_folder_that_no_subdir_reaches_is_found(self):
        self.refused(
            {"tests/unit/x/meson.build": ""}, "tests/unit/x/meson.build: is reached by no subdir"
        )

    def test_an_empty_tree_has_no_files(self):
        with tempfile.TemporaryDirectory() as folder:
            self.assertEqual(check_tree.check(folder), (0, []))


if __name__ == "__main__":
    unittest.main(argv=[sys.argv[0]], verbosity=0)
