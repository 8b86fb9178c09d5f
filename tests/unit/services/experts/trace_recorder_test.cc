// Recorded routing: readable, bounded, and the same visits when it is read again.

#include "services/experts/trace_recorder.h"

#include <doctest/doctest.h>

#include <optional>
#include <string>
#include <vector>

#include "common/experts/trace_replay.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/text.h"

using namespace k3;
using namespace k3::experts;

namespace {

std::optional<TraceRecorder> record_to(const std::filesystem::path& path,
                                       std::uint64_t max_bytes = 1U << 20U) {
    auto made = TraceRecorder::create({path, max_bytes, 4});
    REQUIRE_MESSAGE(made.has_value(), (made.has_value() ? "" : made.error().sentence()));
    return std::move(made).value();
}

}  // namespace

TEST_CASE("a trace is lines of pass, layer and experts, with ranks where the place does not say") {
    const test::TempDir dir;
    const auto path = dir.path() / "trace.csv";
    test::write_file(path, "what was there before");
    auto recorder = record_to(path);
    recorder->visit(1, std::vector<ExpertUse>{{7, 0}, {3, 1}, {11, 2}, {0, 3}});
    recorder->visit(2, std::vector<ExpertUse>{{5, 0}, {6, 0}, {9, 3}});
    recorder->visit(1, std::vector<ExpertUse>{{8, 2}});
    // A pass is in the file as soon as the next one begins.
    CHECK(test::read_file(path) ==
          "position,layer,rank0,rank1,rank2,rank3\n0,1,7,3,11,0\n0,2,5,6:0,9:3\n");
    recorder.reset();
    const auto trace = read_trace(path);
    REQUIRE_MESSAGE(trace.has_value(), (trace.has_value() ? "" : trace.error().sentence()));
    REQUIRE(trace->visits.size() == 3);
    CHECK(trace->visits[1].uses[1].expert == 6);
    CHECK(trace->visits[1].uses[1].rank == 0);
    CHECK(trace->visits[1].uses[2].rank == 3);
    CHECK(trace->visits[2].position == 1);
    CHECK(trace->visits[2].uses[0].rank == 2);
    CHECK(trace->n_positions() == 2);
}

TEST_CASE("a cell that is neither an expert nor one with a rank is refused") {
    const test::TempDir dir;
    const auto path = dir.path() / "trace.csv";
    for (const char* cell : {"5:", ":5", "5:x", "5:1:2", "5;1"}) {
        CAPTURE(cell);
        test::write_file(path, std::string("position,layer,rank0\n0,1,") + cell + "\n");
        const auto trace = read_trace(path);
        REQUIRE(!trace.has_value());
        CHECK(test::contains(trace.error().sentence(), "line 2"));
    }
}

TEST_CASE("a recording ends at its bound, with whole lines") {
    const test::TempDir dir;
    const auto path = dir.path() / "trace.csv";
    auto recorder = record_to(path, 1000);
    for (std::uint32_t i = 0; i < 500; ++i)
        recorder->visit(1 + i % 3, std::vector<ExpertUse>{{i % 24, 0}, {(i + 1) % 24, 1}});
    recorder.reset();
    CHECK(std::filesystem::file_size(path) <= 1000);
    const auto trace = read_trace(path);
    REQUIRE(trace.has_value());
    CHECK(trace->visits.size() > 50);
    CHECK(trace->visits.size() % 3 == 0);
    CHECK(!TraceRecorder::create({dir.path() / "none" / "trace.csv", 1000, 4}).has_value());
}
