// The service behind a real socket: its three messages, what it announces, and how it starts.

#include "services/tokenizer/service.h"

#include <doctest/doctest.h>

#include <filesystem>

#include "common/transport/channel.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/unit/services/tokenizer/fixtures.h"
#include "tests/unit/services/tokenizer/running_service.h"

using namespace k3;
using namespace k3::tokenizer;
using Ids = std::vector<std::uint32_t>;

namespace {

std::unique_ptr<Service> demo_service() {
    auto service = Service::create(test::demo_model_dir());
    if (!service) FAIL(service.error().sentence());
    return std::move(service).value();
}

template <typename Answer>
Answer ask(transport::Channel& channel, msg::Body body) {
    auto answer = transport::expect<Answer>(
        channel.call(std::move(body), {}, Deadline::after_ms(20'000)), "tokenizer");
    if (!answer) FAIL(answer.error().sentence());
    return std::move(answer).value();
}

Error refusal(transport::Channel& channel, msg::Body body) {
    auto reply = channel.call(std::move(body), {}, Deadline::after_ms(20'000));
    REQUIRE_FALSE(reply.has_value());
    return reply.error();
}

/// A directory with the tokenizer's files of the demo model, and none of its weights.
void copy_tokenizer_files(const std::filesystem::path& directory) {
    for (const char* name : {"config.json", "tiktoken.model", "tokenizer_config.json"})
        std::filesystem::copy_file(test::demo_model_dir() / name, directory / name);
}

}  // namespace

TEST_CASE("text goes to ids and back through a socket, as golden data says") {
    auto service = demo_service();
    test::RunningService running(*service);
    auto channel = running.connect();
    auto expected = test::golden_json("demo-k3/expected.json");
    for (const auto& item : expected.at("prompts")) {
        CAPTURE(item.at("name"));
        Ids ids = item.at("ids").get<Ids>();
        if (item.contains("messages")) {
            nlohmann::ordered_json request = {{"messages", item.at("messages")},
                                              {"thinking_effort", item.at("thinking_effort")}};
            auto rendered = ask<msg::RenderedChat>(*channel, msg::RenderChat{request.dump()});
            CHECK(rendered.ids == ids);
            CHECK(rendered.channel ==
                  (item.at("thinking_effort").is_null() ? "response" : "think"));
        } else {
            auto encoded = ask<msg::Encoded>(
                *channel, msg::Encode{item.at("prompt").get<std::string>(), false, false});
            CHECK(encoded.ids == ids);
        }
        // The answer as it arrives: one id a call.
        std::string text;
        std::string pending;
        Ids answer = item.at("greedy_ids").get<Ids>();
        for (std::size_t i = 0; i < answer.size(); ++i) {
            auto part = ask<msg::Decoded>(
                *channel, msg::Decode{{answer[i]}, pending, i + 1 == answer.size(), false});
            text += part.text;
            pending = part.pending;
        }
        CHECK(text == item.at("greedy_text").get<std::string>());
    }
}

TEST_CASE("options of Encode and Decode reach the encoder and the decoder") {
    auto service = demo_service();
    test::RunningService running(*service);
    auto channel = running.connect();
    CHECK(ask<msg::Encoded>(*channel, msg::Encode{"<|sep|>", true, false}).ids == Ids{2053});
    CHECK(ask<msg::Encoded>(*channel, msg::Encode{"<|sep|>", false, false}).ids.size() > 1);
    CHECK(ask<msg::Encoded>(*channel, msg::Encode{"", false, false}).ids.empty());
    Ids kept = ask<msg::Encoded>(*channel, msg::Encode{"a\xFF", false, true}).ids;
    CHECK(ask<msg::Decoded>(*channel, msg::Decode{kept, "", true, false}).text == "a\xEF\xBF\xBD");
    CHECK(ask<msg::Decoded>(*channel, msg::Decode{{2048, 2053}, "", true, false}).text ==
          "[BOS]<|sep|>");
    CHECK(ask<msg::Decoded>(*channel, msg::Decode{{2048, 2053}, "", true, true}).text == "<|sep|>");
    CHECK(ask<msg::Decoded>(*channel, msg::Decode{{}, "\xE4\xBD", true, false}).text ==
          "\xEF\xBF\xBD");
    CHECK(ask<msg::Decoded>(*channel, msg::Decode{{}, "\xE4\xBD", false, false}).pending ==
          "\xE4\xBD");
    CHECK(ask<msg::RenderedChat>(
              *channel, msg::RenderChat{R"({"messages": [], "add_generation_prompt": false})"})
              .channel.empty());
}

TEST_CASE("what cannot be answered comes back as an error, and the next call is right") {
    auto service = demo_service();
    test::RunningService running(*service);
    auto channel = running.connect();
    Error bad_text = refusal(*channel, msg::Encode{"abc\xE4", false, false});
    CHECK(bad_text.code == ErrorCode::invalid_argument);
    CHECK(bad_text.message.find("offset 3") != std::string::npos);
    Error bad_id = refusal(*channel, msg::Decode{{2304}, "", true, false});
    CHECK(bad_id.code == ErrorCode::invalid_argument);
    CHECK(bad_id.message.find("id 2304") != std::string::npos);
    CHECK(bad_id.message.find("2304 ids (0 to 2303)") != std::string::npos);
    Error bad_chat = refusal(*channel, msg::RenderChat{R"({"messages": [{"role": "x"}]})"});
    CHECK(bad_chat.message.find("role \"x\"") != std::string::npos);
    Error other = refusal(*channel, msg::Prefetch{});
    CHECK(other.code == ErrorCode::unsupported);
    CHECK(other.message.find("Prefetch") != std::string::npos);
    CHECK(
        refusal(*channel, msg::Encode{std::string((std::size_t{8} << 20U) + 1, 'a'), false, false})
            .code == ErrorCode::invalid_argument);
    CHECK(ask<msg::Encoded>(*channel, msg::Encode{"The capital", false, false}).ids ==
          Ids{300, 307});
}

TEST_CASE("hostile conversations do not end the service") {
    auto service = demo_service();
    test::RunningService running(*service);
    auto channel = running.connect();
    constexpr std::size_t kDeep = 4'000'000;
    for (const std::string& json :
         {test::repeat("[", kDeep), test::repeat("{\"messages\":", kDeep / 8),
          "{\"messages\":" + test::repeat("[", kDeep) + test::repeat("]", kDeep) + "}",
          R"({"messages":[],"tools":[)" + test::repeat("{\"a\":[", kDeep / 8),
          R"({"messages":[{"role":"user","content":")" + test::repeat("\\u0000", 1'000'000),
          test::repeat("\"", kDeep), test::repeat("\\", kDeep), std::string(kDeep, '\0')}) {
        Error refused = refusal(*channel, msg::RenderChat{json});
        CHECK(refused.code == ErrorCode::invalid_argument);
        CHECK(refused.message.size() < 500);
    }
    CHECK(ask<msg::RenderedChat>(*channel, msg::RenderChat{R"({"messages": []})"}).ids.size() ==
          10);
}

TEST_CASE("short calls overtake a long one") {
    auto service = demo_service();
    test::RunningService running(*service);
    auto channel = running.connect();
    std::string megabytes = test::repeat("\xE4\xB8\xAD and words, ", 400'000);
    auto slow = channel->send(msg::Encode{megabytes, false, false});
    REQUIRE(slow.has_value());
    auto quick = ask<msg::Decoded>(*channel, msg::Decode{{300}, "", true, false});
    CHECK(quick.text == "The");
    auto encoded = transport::expect<msg::Encoded>(
        channel->receive(*slow, Deadline::after_ms(30'000)), "tokenizer");
    REQUIRE(encoded.has_value());
    CHECK(service->answer(msg::Decode{encoded->ids, "", true, false}).has_value());
    CHECK(encoded->ids.size() > 1'000'000);
}

TEST_CASE("it announces the vocabulary, the ids that end a generation, and the checkpoint") {
    auto service = demo_service();
    test::RunningService running(*service);
    auto channel = running.connect();
    auto hello = channel->hello({}, Deadline::after_ms(10'000));
    REQUIRE(hello.has_value());
    CHECK(hello->kind == msg::ServiceKind::tokenizer);
    CHECK(hello->fingerprint.size() == 32);
    const auto& facts = std::get<msg::TokenizerFacts>(hello->facts);
    CHECK(facts.vocab_size == 2304);
    CHECK(facts.n_ranks == 2048);
    CHECK(facts.stop_ids == Ids{2050, 2049});
}

TEST_CASE("its counters tell calls, refusals, bytes and ids") {
    auto service = demo_service();
    test::RunningService running(*service);
    auto channel = running.connect();
    ask<msg::Encoded>(*channel, msg::Encode{"The capital", false, false});
    ask<msg::Decoded>(*channel, msg::Decode{{300}, "", true, false});
    refusal(*channel, msg::Decode{{9999}, "", true, false});
    auto statistics = ask<msg::Statistics>(*channel, msg::GetStatistics{});
    auto value = [&](const std::string& name) -> std::uint64_t {
        for (const msg::Counter& counter : statistics.counters)
            if (counter.name == name) return counter.value;
        return 999;
    };
    CHECK(value("calls") == 3);
    CHECK(value("refused_calls") == 1);
    CHECK(value("ids") == 2);
    CHECK(value("text_bytes") == 3);
}

TEST_CASE("a box without the weights needs only config and vocabulary") {
    test::TempDir dir;
    copy_tokenizer_files(dir.path());
    auto service = Service::create(dir.path());
    if (!service) FAIL(service.error().sentence());
    CHECK((*service)->fingerprint().empty());
    CHECK((*service)->facts().stop_ids == Ids{2050, 2049});
}

TEST_CASE("files that are missing or do not belong together are refused") {
    auto refused = [](const std::filesystem::path& directory) {
        auto service = Service::create(directory);
        REQUIRE_FALSE(service.has_value());
        CHECK_FALSE(service.error().remedy.empty());
        return service.error();
    };
    CHECK(refused("/nonexistent").code == ErrorCode::not_found);
    for (const char* name : {"config.json", "tiktoken.model", "tokenizer_config.json"}) {
        CAPTURE(name);
        test::TempDir dir;
        copy_tokenizer_files(dir.path());
        std::filesystem::remove(dir.path() / name);
        Error error = refused(dir.path());
        CHECK(error.code == ErrorCode::not_found);
        CHECK(error.message.find(name) != std::string::npos);
    }
    {
        test::TempDir dir;
        copy_tokenizer_files(dir.path());
        std::filesystem::copy_file(test::golden_dir() / "tiny-k3" / "tiktoken.model",
                                   dir.path() / "tiktoken.model",
                                   std::filesystem::copy_options::overwrite_existing);
        Error error = refused(dir.path());
        CHECK(error.code == ErrorCode::incompatible);
        CHECK(error.message.find("768") != std::string::npos);
        CHECK(error.message.find("2304") != std::string::npos);
    }
    {
        test::TempDir dir;
        copy_tokenizer_files(dir.path());
        auto config = dir.path() / "tokenizer_config.json";
        std::string text = test::read_file(config);
        text.replace(text.find("<|sep|>"), 7, "<|im_sep|>");
        test::write_file(config, text);
        Error error = refused(dir.path());
        CHECK(error.code == ErrorCode::incompatible);
        CHECK(error.message.find("<|sep|>") != std::string::npos);
    }
    {
        // With the index there, the checkpoint must be whole: its fingerprint is announced.
        test::TempDir dir;
        copy_tokenizer_files(dir.path());
        std::filesystem::copy_file(test::demo_model_dir() / "model.safetensors.index.json",
                                   dir.path() / "model.safetensors.index.json");
        CHECK(refused(dir.path()).message.find("model-0000") != std::string::npos);
    }
}
