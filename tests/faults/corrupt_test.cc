// Corrupt experts: the request that needs one is refused with everything a repair needs, no token
// is made up, and the pipeline goes on.

#include <doctest/doctest.h>

#include <algorithm>
#include <nlohmann/json.hpp>
#include <string>

#include "tests/faults/refusal.h"
#include "tests/support/checkpoint_copy.h"
#include "tests/support/golden.h"
#include "tests/support/pipeline.h"

using namespace k3;
using namespace k3::test;
using nlohmann::json;

namespace {

json expected(const std::string& name) {
    return json::parse(read_file(golden_dir() / "expected" / name));
}

msg::Submit request_of(const json& prompt, std::uint32_t max_tokens) {
    msg::Submit submit = of_text(prompt["text"], max_tokens);
    submit.recognise_specials = true;
    submit.ignore_eos = true;
    return submit;
}

/// Whether the reference sends any position of the prompt to this expert.
bool uses(const std::string& prompt, const json& fault) {
    Array ids = load_npy("expected/" + prompt + "/router_ids.npy");  // [MoE layer, position, pick]
    std::vector<std::int64_t> picks = ids.as_i64();
    std::size_t per_layer = ids.shape[1] * ids.shape[2];
    json layers = expected("manifest.json")["moe_layers"];
    auto layer = std::find(layers.begin(), layers.end(), fault["layer"]) - layers.begin();
    auto first = picks.begin() + layer * static_cast<std::ptrdiff_t>(per_layer);
    auto last = first + static_cast<std::ptrdiff_t>(per_layer);
    return std::find(first, last, fault["expert"].get<std::int64_t>()) != last;
}

/// What a repair needs to know.
void check_named(const std::string& message, const json& fault, const CheckpointCopy& copy) {
    auto number = [&](const char* key) { return std::to_string(fault[key].get<std::uint64_t>()); };
    CHECK(has(message, "layer " + number("layer") + " expert " + number("expert") + ":"));
    CHECK(has(message, fault["tensor"].get<std::string>() + " row " + number("row") + " group " +
                           number("group")));
    CHECK(has(message, "scale byte " + number("becomes")));
    CHECK(has(message, copy.file(fault["file"].get<std::string>()).string() + " at byte " +
                           number("byte_offset")));
}

}  // namespace

TEST_CASE("every corrupt expert ends the requests that need it, and only those") {
    const json prompts = expected("manifest.json")["prompts"];
    const json faults = expected("corrupt.json")["faults"];
    REQUIRE(faults.size() >= 3);
    World world;
    Pipeline sound(world, "sound", golden_dir() / "tiny-k3", "");
    for (const json& fault : faults) {
        CAPTURE(fault.dump());
        const std::string hit = fault["prompt"];
        CheckpointCopy copy(golden_dir() / "tiny-k3");
        const std::string file = fault["file"];
        REQUIRE(static_cast<std::uint8_t>(read_file(copy.file(file))[fault["byte_offset"]]) ==
                fault["was"]);
        copy.set_byte(file, fault["byte_offset"], fault["becomes"]);
        REQUIRE(uses(hit, fault));

        Pipeline pipeline(world, "corrupt", copy.path(), "[experts]\ncount = 2\n");
        // Seen by a user: one sentence, the exit code of a bad checkpoint, no text.
        Ended ended = world.k3pipe({"run", "--attach", "corrupt", "--special", "-p",
                                    prompts[hit]["text"].get<std::string>(), "--max-tokens", "4"});
        INFO(ended.err);
        CHECK(ended.code == 3);
        CHECK(ended.out.empty());
        check_named(ended.sentence(), fault, copy);

        // Seen by a client; and what does not need that expert is served, before and after.
        std::size_t n_refused = 0;
        for (const auto& [name, prompt] : prompts.items()) {
            const auto& seen = name;  // clang 14 lets no lambda take the binding itself
            CAPTURE(seen);
            Answer answer = pipeline.ask(request_of(prompt, 1));
            if (uses(name, fault)) {
                REQUIRE(answer.error.has_value());
                CHECK(answer.error->code == ErrorCode::corrupt);
                CHECK(!answer.error->remedy.empty());
                CHECK(answer.ids.empty());
                check_named(answer.error->message, fault, copy);
                ++n_refused;
            } else {
                REQUIRE_MESSAGE(!answer.error.has_value(), answer.error->sentence());
                CHECK(answer.ids[0] == prompt["greedy"][0]);
            }
        }
        CHECK(n_refused >= 1);

        // Some tokens meet the expert, most do not; these get what a sound checkpoint gives.
        std::vector<msg::Submit> submits;
        for (std::uint32_t id = 0; id < 32; ++id) submits.push_back(of_ids({id * 16}, 1));
        std::vector<Answer> answers = ask_all(pipeline.gateway(), submits, 1);
        std::vector<Answer> wanted = ask_all(sound.gateway(), submits, 8);
        std::size_t n_served = 0;
        for (std::size_t i = 0; i < submits.size(); ++i) {
            CAPTURE(i);
            if (answers[i].error.has_value()) {
                check_named(answers[i].error->message, fault, copy);
                continue;
            }
            CHECK(answers[i].ids == wanted[i].ids);
            ++n_served;
        }
        MESSAGE(n_served << " of 32 other requests are served");
        CHECK(n_served >= 1);
        for (const char* stage :
             {"experts-0", "experts-1", "trunk", "sampler", "tokenizer", "gateway"}) {
            CAPTURE(stage);
            CHECK(pipeline.stage(stage).pid > 0);
            CHECK(pipeline.stage(stage).restarts == 0);
        }
    }
}
