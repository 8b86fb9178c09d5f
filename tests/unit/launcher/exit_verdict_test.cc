#include "launcher/exit_verdict.h"

#include <doctest/doctest.h>
#include <signal.h>

using namespace k3;
using namespace k3::launcher;

TEST_CASE("an exit is judged by its code, its time and its history") {
    ExitFacts facts;
    facts.max_restarts = 3;
    auto judge = [&facts](int code) {
        facts.ending = {false, code};
        return judge_exit(facts);
    };
    facts.was_ready = true;
    CHECK(judge(2) == Verdict::give_up);
    CHECK(judge(3) == Verdict::give_up);
    CHECK(judge(1) == Verdict::restart);
    CHECK(judge(4) == Verdict::restart);
    CHECK(judge(0) == Verdict::restart);
    facts.was_ready = false;
    CHECK(judge(4) == Verdict::give_up);
    CHECK(judge(0) == Verdict::give_up);
    CHECK(judge(127) == Verdict::give_up);
    CHECK(judge(5) == Verdict::restart);
    facts.ending = {true, SIGKILL};
    CHECK(judge_exit(facts) == Verdict::restart);
    facts.recent_restarts = 3;
    CHECK(judge_exit(facts) == Verdict::give_up);
    facts.recent_restarts = 0;
    facts.policy = RestartPolicy::never;
    CHECK(judge_exit(facts) == Verdict::give_up);
    CHECK(back_off_ms(0) == 100);
    CHECK(back_off_ms(3) == 800);
    CHECK(back_off_ms(100) == 5000);
}

TEST_CASE("our exit code is the one of the service that failed, except for a bug of its own") {
    for (int code : {kExitFailed, kExitUsage, kExitModel, kExitResources, kExitUnavailable})
        CHECK(exit_code(error_code_of({false, code})) == code);
    CHECK(exit_code(error_code_of({false, 127})) == kExitUsage);
    CHECK(exit_code(error_code_of({true, SIGSEGV})) == kExitFailed);
}
