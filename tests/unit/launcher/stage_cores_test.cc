#include "launcher/stage_cores.h"

#include <doctest/doctest.h>

#include <string>

#include "tests/support/text.h"

using namespace k3;
using namespace k3::launcher;

namespace {

const MachineCores kSixCores{8, {0, 1, 2, 3, 4, 6}};

StagePlan stage_with(msg::ServiceKind kind, std::vector<ServiceSetting> settings) {
    StagePlan stage;
    stage.kind = kind;
    stage.name = "the-stage";
    stage.where = "p.toml:7";
    stage.settings = std::move(settings);
    return stage;
}

std::string described(const StagePlan& stage) {
    auto text = describe_cores(stage, kSixCores);
    REQUIRE_MESSAGE(text.has_value(), (text.has_value() ? "" : text.error().sentence()));
    return *text;
}

}  // namespace

TEST_CASE("a stage that computes has a thread for each of its cores") {
    using msg::ServiceKind;
    for (ServiceKind kind : {ServiceKind::trunk, ServiceKind::experts}) {
        CHECK(described(stage_with(kind, {})) == "6 threads on cores 0-4,6");
        CHECK(described(stage_with(kind, {{"threads", {"0"}}})) == "6 threads on cores 0-4,6");
        CHECK(described(stage_with(kind, {{"threads", {"4"}}})) == "4 threads on cores 0-4,6");
        CHECK(described(stage_with(kind, {{"cores", {"3,1-2"}}})) == "3 threads on cores 1-3");
        CHECK(described(stage_with(kind, {{"cores", {"6"}}})) == "1 thread on core 6");
        CHECK(described(stage_with(kind, {{"cores", {"0-3"}}, {"threads", {"2"}}})) ==
              "2 threads on cores 0-3");
    }
    CHECK(described(stage_with(ServiceKind::sampler, {})).empty());
    CHECK(described(stage_with(ServiceKind::sampler, {{"cores", {"6"}}})) == "core 6");
}

TEST_CASE("cores of a wrapped stage are its wrapper's matter") {
    StagePlan stage = stage_with(msg::ServiceKind::trunk, {});
    stage.wrapped = true;
    CHECK(described(stage) == "as many threads on the cores that its wrapper leaves");
    stage.settings = {{"cores", {"64-127"}}};
    CHECK(described(stage) == "64 threads on cores 64-127");
}

TEST_CASE("cores that cannot be had are refused with the table that asks for them") {
    for (const char* cores : {"0-", "5", "8"}) {
        CAPTURE(cores);
        const auto refused =
            describe_cores(stage_with(msg::ServiceKind::trunk, {{"cores", {cores}}}), kSixCores);
        REQUIRE(!refused.has_value());
        CHECK(refused.error().code == ErrorCode::invalid_argument);
        CHECK(test::contains(refused.error().message,
                             "p.toml:7: the-stage: cores '" + std::string(cores) + "'"));
    }
}
