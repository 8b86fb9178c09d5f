// Damaged messages, and damaged conversations in good messages.

#include <doctest/doctest.h>

#include <random>
#include <vector>

#include "services/tokenizer/service.h"
#include "services/tokenizer/utf8.h"
#include "tests/support/golden.h"
#include "tests/support/message_fuzzer.h"
#include "tests/unit/services/tokenizer/fixtures.h"
#include "tests/unit/services/tokenizer/running_service.h"

using namespace k3;
using namespace k3::tokenizer;

namespace {

std::unique_ptr<Service> demo_service() {
    auto service = Service::create(test::demo_model_dir());
    if (!service) FAIL(service.error().sentence());
    return std::move(service).value();
}

/// The requests of the golden conversations.
std::vector<std::string> golden_requests() {
    std::vector<std::string> requests;
    auto golden = test::golden_json("tokenizer/chat.json");
    for (const auto& item : golden.at("cases")) requests.push_back(item.at("request").dump());
    return requests;
}

/// One to four bytes changed, removed, repeated or replaced by what means something in JSON.
std::string damaged(std::string text, std::mt19937_64& random) {
    using namespace std::string_view_literals;
    constexpr auto kTelling = "{}[]:,\"\\0-9eEntfu \n\x00\xC3\xFF"sv;
    for (std::uint64_t n = 1 + random() % 4; n > 0 && !text.empty(); --n) {
        std::size_t at = random() % text.size();
        std::size_t length = 1 + random() % 12;
        switch (random() % 4) {
            case 0:
                text[at] = static_cast<char>(random());
                break;
            case 1:
                text[at] = kTelling[random() % kTelling.size()];
                break;
            case 2:
                text.erase(at, length);
                break;
            default:
                text.insert(at, text.substr(at, length));
        }
    }
    return text;
}

}  // namespace

TEST_CASE("two thousand damaged messages do not stop the service") {
    auto service = demo_service();
    test::RunningService running(*service);
    test::FuzzOptions options;
    options.endpoint = running.endpoint();
    options.requests.push_back({msg::Encode{"The capital of France <|sep|>", true, true}, {}});
    options.requests.push_back({msg::Decode{{300, 307, 2050}, "\xE4\xBD", false, true}, {}});
    for (const std::string& json : golden_requests())
        options.requests.push_back({msg::RenderChat{json}, {}});
    CAPTURE(options.seed);
    test::FuzzReport report = test::fuzz_service(options);
    CHECK_MESSAGE(report.alive, report.problem);
    CHECK(report.n_sent >= 2'000);
    CHECK(report.n_failures > 0);
}

TEST_CASE("damaged conversations are rendered or refused in one sentence") {
    auto service = demo_service();
    std::vector<std::string> requests = golden_requests();
    constexpr std::uint64_t kSeed = 5;
    CAPTURE(kSeed);
    std::mt19937_64 random(kSeed);
    int n_rendered = 0;
    int n_refused = 0;
    for (int i = 0; i < 10'000; ++i) {
        std::string json = damaged(requests[random() % requests.size()], random);
        CAPTURE(json);
        auto answer = service->answer(msg::RenderChat{json});
        if (answer) {
            ++n_rendered;
            for (std::uint32_t id : std::get<msg::RenderedChat>(*answer).ids)
                if (id >= 2304) FAIL_CHECK("id ", id);
            continue;
        }
        ++n_refused;
        const Error& error = answer.error();
        bool expected =
            error.code == ErrorCode::invalid_argument || error.code == ErrorCode::unsupported;
        CHECK(expected);
        CHECK(error.message.size() < 500);
        CHECK_FALSE(error.remedy.empty());
        CHECK_FALSE(first_invalid_utf8(error.message).has_value());
        CHECK(error.message.find('\n') == std::string::npos);
    }
    CHECK(n_rendered > 200);  // enough survive the damage to reach the renderer: 386 with this seed
    CHECK(n_refused > 2'000);
}
