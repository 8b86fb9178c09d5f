#include "common/base/cores.h"

#include <doctest/doctest.h>

#include <string>
#include <thread>
#include <vector>

#include "tests/support/text.h"

using namespace k3;
using test::contains;

namespace {

Error cores_refusal(Status status) {
    REQUIRE(!status.has_value());
    CHECK(status.error().code == ErrorCode::invalid_argument);
    CHECK(!status.error().remedy.empty());
    return status.error();
}

}  // namespace

TEST_CASE("numbers and ranges of cores") {
    CHECK(*parse_cores("0") == CoreSet{0});
    CHECK(*parse_cores("0-3") == CoreSet{0, 1, 2, 3});
    CHECK(*parse_cores("16,0-2") == CoreSet{0, 1, 2, 16});
    CHECK(*parse_cores("1-3, 2-4, 3") == CoreSet{1, 2, 3, 4});
    CHECK(*parse_cores("5-5") == CoreSet{5});
    CHECK(*parse_cores("8191") == CoreSet{8191});
}

TEST_CASE("whether processes have a core for each of their threads") {
    using Uses = std::vector<CoreUse>;
    CHECK(has_core_for_each(Uses{{{0, 1, 2, 3}, 2}, {{0, 1, 2, 3}, 2}}));
    CHECK_FALSE(has_core_for_each(Uses{{{0, 1, 2, 3}, 2}, {{0, 1, 2, 3}, 3}}));
    CHECK(has_core_for_each(Uses{{{0, 1}, 2}, {{2, 3}, 2}}));
    CHECK_FALSE(has_core_for_each(Uses{{{0}, 2}, {{2, 3, 4}, 1}}));  // two threads on one core
    CHECK_FALSE(has_core_for_each(Uses{{{0, 1}, 1}, {{}, 1}}));      // who knows where the other is
    CHECK(has_core_for_each(Uses{{{0}, 1}}));
}

TEST_CASE("what is not a list of cores is refused with the part that is wrong") {
    struct Case {
        const char* text;
        const char* part;
    };
    for (const Case& c :
         {Case{"", "''"}, Case{",", "''"}, Case{"0,", "''"}, Case{"0,,1", "''"}, Case{"0-", "'0-'"},
          Case{"-1", "'-1'"}, Case{"1--2", "'1--2'"}, Case{"all", "'all'"},
          Case{"0-1-2", "'0-1-2'"}, Case{"1.5", "'1.5'"}, Case{"0-3,7-4", "'7-4' runs backwards"},
          Case{"8192", "'8192'"}, Case{"0x2", "'0x2'"}, Case{"99999999999", "'99999999999'"}}) {
        CAPTURE(c.text);
        const auto parsed = parse_cores(c.text);
        REQUIRE(!parsed.has_value());
        CHECK(parsed.error().code == ErrorCode::invalid_argument);
        CHECK(contains(parsed.error().message, "cores '" + std::string(c.text) + "'"));
        CHECK(contains(parsed.error().message, c.part));
        CHECK(contains(parsed.error().remedy, "0-7,16"));
    }
}

TEST_CASE("a set of cores is written as it is read") {
    for (const char* text : {"0", "0-1", "0-7,16", "0,2,4-6,9"})
        CHECK(format_cores(*parse_cores(text)) == text);
    CHECK(format_cores({}).empty());
}

TEST_CASE("cores that are not there, or not ours, are refused with numbers") {
    const MachineCores machine{8, {0, 1, 2, 3, 6}};
    CHECK(check_cores({0, 1, 2, 3, 6}, machine).has_value());
    CHECK(check_cores({6}, machine).has_value());

    const Error absent = cores_refusal(check_cores({0, 1, 8}, machine));
    CHECK(absent.message == "cores '0-1,8' names core 8, and the last one of this machine is 7");
    const Error forbidden = cores_refusal(check_cores({3, 4, 5, 7}, machine));
    CHECK(forbidden.message ==
          "cores '3-5,7' names cores 4-5,7, and this process may run on 0-3,6 only");
}

TEST_CASE("a thread keeps to its cores, and so do the threads it starts") {
    const MachineCores machine = machine_cores();
    REQUIRE(!machine.allowed.empty());
    CHECK(machine.allowed.back() < machine.n_cores);
    const CoreSet last{machine.allowed.back()};
    // On a thread of its own: other cases keep all cores.
    std::thread([&] {
        CHECK(keep_to_cores("").has_value());
        CHECK(machine_cores().allowed == machine.allowed);
        CHECK(keep_to_cores(format_cores(last)).has_value());
        CHECK(machine_cores().allowed == last);
        std::thread([&] { CHECK(machine_cores().allowed == last); }).join();
        // What a process was given is the limit, and so this cannot be taken back.
        if (machine.allowed.size() > 1)
            CHECK(!keep_to_cores(format_cores(machine.allowed)).has_value());
    }).join();
    CHECK(machine_cores().allowed == machine.allowed);
    CHECK(!keep_to_cores("8191").has_value());
}
