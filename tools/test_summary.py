#!/usr/bin/env python3
"""Counts test cases after `meson test`: test_summary.py BUILD_DIR.

meson counts programs; a doctest program holds many cases. This reads the log that meson leaves and
prints "N passed, N failed[, N skipped]" as its last line, and before it what the failed ones said,
so that the end of a log is enough to know what broke. A program that crashes or times out
prints no summary of its own and counts as one failure; exit code 77 means skipped. No test run at
all is a failure: meson itself would exit with 0.
"""
import json
import pathlib
import re
import sys

CASES = re.compile(r"\[doctest\] test cases:\s*(\d+)\s*\|\s*(\d+) passed\s*\|\s*(\d+) failed"
                   r"\s*\|\s*(\d+) skipped")


def count(test):
    """(passed, failed, skipped) of one program."""
    found = CASES.findall(test.get("stdout") or "")
    passed, failed, skipped = (sum(int(cases[i]) for cases in found) for i in (1, 2, 3))
    if test["result"] == "SKIP":
        return passed, failed, max(skipped, 1)
    if test["result"] in ("OK", "EXPECTEDFAIL"):
        return (passed if found else 1), failed, skipped
    return passed, max(failed, 1), skipped


def complaints(test, n_lines=24):
    """What a failed program said last: the failed checks of a doctest program, with their case."""
    said = test.get("stdout") or ""
    failed = [block.strip() for block in re.split(r"^={79}$", said, flags=re.MULTILINE)
              if "ERROR:" in block]
    lines = ("\n\n".join(failed) or said + (test.get("stderr") or "")).strip().splitlines()
    left_out = [f"... and {len(lines) - n_lines} more lines"] if len(lines) > n_lines else []
    # Checks that follow a failed one are often its consequences; the end of a crash is its cause.
    shown = lines[:n_lines] + left_out if failed else left_out + lines[-n_lines:]
    return "\n".join("  " + line for line in shown)


def main():
    log = pathlib.Path(sys.argv[1]) / "meson-logs" / "testlog.json"
    if not log.exists():
        print("no test was run")
        print("0 passed, 0 failed")
        return 1
    total = [0, 0, 0]
    for line in log.read_text().splitlines():
        test = json.loads(line)
        counts = count(test)
        total = [a + b for a, b in zip(total, counts)]
        if test["result"] == "SKIP":
            reason = (test.get("stdout") or "").strip().splitlines()
            print(f"NOT RUN {test['name']}: {reason[-1] if reason else 'no reason given'}")
        elif counts[2]:
            # Cases that a doctest program skips; why is a line of its own.
            for reason in re.findall(r"^NOT RUN: (.*)$", test.get("stdout") or "", re.MULTILINE):
                print(f"NOT RUN {test['name']}, {counts[2]} cases: {reason}")
        if counts[1]:
            print(f"FAILED {test['name']} ({test['result']})")
            print(complaints(test))
    passed, failed, skipped = total
    print(f"{passed} passed, {failed} failed" + (f", {skipped} skipped" if skipped else ""))
    return 0 if failed == 0 and passed > 0 else 1


if __name__ == "__main__":
    sys.exit(main())
