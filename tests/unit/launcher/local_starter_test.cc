// The environment of a started process.

#include <doctest/doctest.h>
#include <poll.h>
#include <unistd.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "launcher/starter.h"

using namespace k3;
using namespace k3::launcher;

namespace {

/// Sets a variable of this process, or unsets it, and puts the old value back at the end.
class Variable {
  public:
    Variable(const char* name, const std::optional<std::string>& value) : name_(name) {
        if (const char* old = std::getenv(name); old != nullptr) old_ = old;
        put(value);
    }
    ~Variable() { put(old_); }
    Variable(const Variable&) = delete;
    Variable& operator=(const Variable&) = delete;

  private:
    void put(const std::optional<std::string>& value) const {
        if (value.has_value())
            ::setenv(name_, value->c_str(), 1);
        else
            ::unsetenv(name_);
    }
    const char* name_;
    std::optional<std::string> old_;
};

/// What a child with this environment sees: "<OMP_WAIT_POLICY> <GOMP_SPINCOUNT> <COLOUR>".
std::string seen_by_child(std::vector<std::pair<std::string, std::string>> env) {
    auto starter = make_local_starter();
    REQUIRE(starter.has_value());
    auto process = (*starter)->start(
        {"sh",
         {"/bin/sh", "-c", "printf %s \"${OMP_WAIT_POLICY--} ${GOMP_SPINCOUNT--} ${COLOUR--}\""},
         std::move(env),
         false});
    REQUIRE(process.has_value());
    std::string seen;
    char buffer[256];
    for (;;) {
        pollfd wait{process->output.get(), POLLIN, 0};
        REQUIRE(::poll(&wait, 1, 20000) == 1);
        ssize_t got = ::read(process->output.get(), buffer, sizeof buffer);
        if (got <= 0) break;
        seen.append(buffer, static_cast<std::size_t>(got));
    }
    pollfd ended{process->exited.get(), POLLIN, 0};
    REQUIRE(::poll(&ended, 1, 20000) == 1);
    CHECK((*starter)->reap(*process).has_value());
    return seen;
}

}  // namespace

TEST_CASE("idle compute threads of a child sleep unless somebody has chosen otherwise") {
    Variable policy("OMP_WAIT_POLICY", std::nullopt);
    Variable spins("GOMP_SPINCOUNT", std::nullopt);
    Variable colour("COLOUR", "red");
    CHECK(seen_by_child({}) == "passive 3000 red");
    CHECK(seen_by_child({{"COLOUR", "blue"}}) == "passive 3000 blue");
    CHECK(seen_by_child({{"OMP_WAIT_POLICY", "active"}}) == "active - red");
    CHECK(seen_by_child({{"GOMP_SPINCOUNT", "7"}}) == "- 7 red");
    SUBCASE("by the policy in our environment") {
        Variable ours("OMP_WAIT_POLICY", "active");
        CHECK(seen_by_child({}) == "active - red");
        CHECK(seen_by_child({{"OMP_WAIT_POLICY", "passive"}}) == "passive - red");
    }
    SUBCASE("by the number of spins in our environment") {
        Variable ours("GOMP_SPINCOUNT", "9");
        CHECK(seen_by_child({}) == "- 9 red");
    }
}
