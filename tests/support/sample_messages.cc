#include "tests/support/sample_messages.h"

#include <utility>

namespace k3::test {

namespace {

constexpr std::uint64_t kBig = 0x0123456789ABCDEFULL;

msg::Tensor inline_tensor(msg::DType dtype, std::vector<std::uint64_t> shape, std::uint32_t frame) {
    return {dtype, std::move(shape), msg::InlinePayload{frame}};
}

msg::Tensor shm_tensor(msg::DType dtype, std::vector<std::uint64_t> shape, std::uint64_t bytes) {
    return {dtype, std::move(shape),
            msg::ShmPayload{"/k3-7f3a-trunk-0-4711", 1052672, bytes, 0x1234567890}};
}

msg::SamplingParams params() { return {0.75F, 40, 0.9F, 0.05F, 1.125F, 0.25F, -0.5F, kBig}; }

msg::SampledRow sampled_row() { return {163586, -0.125F, {{163586, -0.125F}, {17, -2.5F}}, true}; }

msg::Announcement announcement() {
    msg::Announcement out;
    out.kind = msg::ServiceKind::trunk;
    out.name = "trunk-0";
    out.version = "0.1.0";
    out.instance = kBig;
    out.state = msg::State::ready;
    out.fingerprint = "00112233445566778899aabbccddeeff";
    out.arena = {"/k3-7f3a-trunk-0-4711", 0xFEDCBA9876543210ULL};
    out.probes = {true, false, true};
    return out;
}

class Samples {
  public:
    std::vector<SampleMessage> take() && { return std::move(out_); }

    void add(std::string name, msg::Body body) {
        const std::uint64_t call_id = out_.size() + 1;
        out_.push_back({std::move(name), {0x7F3A, call_id, std::move(body)}});
    }

    void control() {
        add("error", msg::Failure{{ErrorCode::corrupt, "layer 3, expert 7: scale byte 255",
                                   "copy shard model-00004 again"},
                                  "experts-1"});
        add("hello", msg::Hello{{{"/k3-7f3a-gateway-99", 1}, {"/k3-7f3a-gateway-98", kBig}}});
        msg::Announcement out = announcement();
        add("announcement_none", out);
        out.kind = msg::ServiceKind::gateway;
        out.facts = msg::GatewayFacts{"demo-k3", 1048576, 163840, 8, false};
        add("announcement_gateway", out);
        out.kind = msg::ServiceKind::tokenizer;
        out.state = msg::State::loading;
        out.facts = msg::TokenizerFacts{163840, 163584, {163585, 163586}};
        add("announcement_tokenizer", out);
        out.kind = msg::ServiceKind::trunk;
        out.state = msg::State::stopping;
        out.facts = msg::TrunkFacts{23, 24, 93, 7168, 163840, 1048576, 512, 4, 3, 9, false};
        add("announcement_trunk", out);
        out.kind = msg::ServiceKind::experts;
        out.state = msg::State::failed;
        out.facts =
            msg::ExpertFacts{896, 3584, {{1, {0xFF, 0x01, 0x80}}, {92, {0x55, 0xAA, 0x00}}}, 4096};
        add("announcement_experts", out);
        out.kind = msg::ServiceKind::sampler;
        out.facts = msg::SamplerFacts{64};
        add("announcement_sampler", out);
        add("ping", msg::Ping{});
        add("pong", msg::Pong{kBig, msg::State::loading, 420, "layer 3 of 93"});
        add("get_statistics", msg::GetStatistics{});
        add("statistics",
            msg::Statistics{
                123456, 9876543210, 3, {{"expert_cache_hits", 17}, {"read_bytes", kBig}}});
        add("shutdown", msg::Shutdown{});
        add("done", msg::Done{});
    }

    void tokenizer() {
        // The bytes after the text are no UTF-8: Data fields carry them as they are.
        add("encode", msg::Encode{"Paris, \xE5\x8C\x97\xE4\xBA\xAC \xFF\xFE", true, true});
        add("encoded", msg::Encoded{{0, 163839, 4294967295}});
        add("render_chat",
            msg::RenderChat{R"({"messages":[{"role":"user","content":"<|im_end|>"}]})"});
        add("rendered_chat", msg::RenderedChat{{163584, 163585, 12}, "think"});
        add("decode", msg::Decode{{1, 2, 3}, "\xE5\x8C", true, true});
        add("decoded", msg::Decoded{"\xE5\x8C\x97", "\xF0\x9F\x98"});
    }

    void trunk() {
        add("open_session", msg::OpenSession{kBig, 1048576});
        add("fork_session", msg::ForkSession{kBig, kBig + 1, 2048});
        add("drop_session", msg::DropSession{kBig});
        const std::vector<msg::StepRow> rows = {{11, 5, 163585}, {11, 6, 2}, {12, 1000000, 3}};
        add("step_tokens", msg::Step{rows, {}, {1, 2}, true});
        add("step_inline",
            msg::Step{rows, inline_tensor(msg::DType::f32, {3, 9, 7168}, 1), {2}, false});
        add("step_shm", msg::Step{rows, shm_tensor(msg::DType::f32, {3, 2, 64}, 1536), {0}, true});
        add("step_result_inline",
            msg::StepResult{inline_tensor(msg::DType::f32, {2, 163840}, 1), 123456789, 23456789});
        add("step_result_shm",
            msg::StepResult{shm_tensor(msg::DType::f32, {2, 163840}, 1310720), 1, 2});
    }

    void experts() {
        const std::vector<msg::Pick> picks = {{0, 895, 0.5F, 0}, {1, 7, 0.0625F, 15}};
        add("expert_call_inline",
            msg::ExpertCall{92, inline_tensor(msg::DType::f32, {2, 3584}, 1), picks, true});
        add("expert_call_shm",
            msg::ExpertCall{1, shm_tensor(msg::DType::f32, {2, 3584}, 28672), picks, false});
        add("partial_sums_inline",
            msg::PartialSums{inline_tensor(msg::DType::i64, {2, 3584}, 1), 777, 88});
        add("partial_sums_shm",
            msg::PartialSums{shm_tensor(msg::DType::i64, {2, 3584}, 57344), 777, 88});
        add("prefetch", msg::Prefetch{5, {895, 0, 7}, {0, 3, 15}});
    }

    void sampler() {
        msg::Sample sample;
        sample.logits = shm_tensor(msg::DType::f32, {2, 163840}, 1310720);
        sample.rows = {{params(), kBig, {1, 2, 3}, {4, 5}, 20, {163585}}, {}};
        add("sample_shm", sample);
        sample.logits = inline_tensor(msg::DType::f32, {2, 163840}, 1);
        add("sample_inline", sample);
        add("sampled", msg::Sampled{{sampled_row(), {3, -1.5F, {}, false}}});
    }

    void gateway() {
        msg::Submit submit;
        submit.input = msg::TextInput{"The capital of France is"};
        submit.recognise_specials = true;
        submit.params = params();
        submit.max_tokens = 64;
        submit.stop_strings = {"\n\n", "\xE5\x8C\x97"};
        submit.stop_ids = {5, 163839};
        submit.ignore_eos = true;
        submit.n_logprobs = 20;
        submit.want_logits = msg::WantLogits::all;
        submit.skip_specials = true;
        add("submit_text", submit);
        submit.input = msg::IdsInput{{163584, 1, 2}};
        submit.want_logits = msg::WantLogits::generated;
        add("submit_ids", submit);
        submit.input = msg::ChatInput{R"({"messages":[]})"};
        submit.want_logits = msg::WantLogits::none;
        add("submit_chat", submit);
        add("accepted", msg::Accepted{kBig, {163584, 1, 2}});
        add("progress", msg::PrefillProgress{512, 2048});
        add("tokens", msg::TokenEvent{{163586, 3},
                                      " Paris \xE5\x8C\x97",
                                      {sampled_row(), {3, -1.5F, {}, false}},
                                      inline_tensor(msg::DType::f32, {2, 163840}, 1)});
        using Reason = msg::FinishReason;
        add("finished_stop_id",
            msg::Finished{Reason::stop_id, 7, 5, 163586, "", 1000000007, 2000000011});
        add("finished_stop_string",
            msg::Finished{Reason::stop_string, 7, 5, 0, "\n\n", 1000000007, 2000000011});
        add("finished_max_tokens", msg::Finished{Reason::max_tokens, 7, 64, 0, "", 1, 2});
        add("finished_context_full", msg::Finished{Reason::context_full, 7, 64, 0, "", 1, 2});
        add("finished_cancelled", msg::Finished{Reason::cancelled, 7, 1, 0, "", 1, 2});
        add("cancel", msg::Cancel{kBig});
    }

    /// Last, because the call id of a sample is its place.
    void fast_lanes() {
        add("hello_lane", msg::Hello{{{"/k3-7f3a-trunk-0-99", 1}}, kBig});
        msg::Announcement out = announcement();
        out.kind = msg::ServiceKind::experts;
        out.facts = msg::ExpertFacts{896, 3584, {{1, {0xFF}}}, 256};
        out.lane = {4711, 17, kBig, 3, kBig + 1, 16, ""};
        add("announcement_lane", out);
        out.lane.cores = "0-7,16";
        add("announcement_lane_cores", out);
    }

    void signs_of_life() {
        msg::Pong pong{kBig, msg::State::ready, 1000, ""};
        pong.work = kBig + 2;
        pong.waits_for_reads = true;
        add("pong_work", pong);
        pong.waits_for_reads = false;
        pong.waiting_for = "experts-1 (tcp://10.0.0.2:7000)";
        add("pong_waiting", pong);
        msg::Announcement out;
        out.kind = msg::ServiceKind::experts;
        out.name = "experts-1";
        out.build = "6f3a9c0012d4";
        add("announcement_build", out);
    }

    void saved_sessions() {
        add("open_session_save", msg::OpenSession{kBig, 1048576, "chat-1"});
        add("save_session", msg::SaveSession{kBig, "chat-1", {163584, 1, 2}});
        add("saved_session", msg::SavedSession{kBig});
        add("load_session", msg::LoadSession{kBig, 2048, "chat-1", {163584, 1, 2, 3}, "chat-2"});
        add("loaded_session", msg::LoadedSession{kBig, kBig - 1, 0});
        msg::Submit submit;
        submit.input = msg::IdsInput{{163584, 1, 2, 3}};
        submit.load_session = "chat-1";
        submit.save_session = "chat-2";
        add("submit_session", submit);
        add("session_loaded", msg::SessionLoaded{3, 2, 0});
        add("session_saved", msg::SessionSaved{12, kBig, {}});
        add("session_not_saved",
            msg::SessionSaved{12, 0,
                              msg::Failure{{ErrorCode::resource_exhausted,
                                            "no room for chat-2: 4096 bytes are left to write",
                                            "free disk space"},
                                           "trunk-1"}});
    }

    void weighted_servers() {
        msg::Announcement out = announcement();
        out.kind = msg::ServiceKind::experts;
        out.facts = msg::ExpertFacts{896, 3584, {{1, {0xFF}}}, 256, 1'000'000};
        add("announcement_weight", out);
    }

    void latents() {
        msg::Announcement out = announcement();
        out.facts = msg::TrunkFacts{23, 24, 93, 7168, 163840, 1048576, 512, 4, 3, 9, true};
        add("announcement_trunk_bf16", out);
        out.kind = msg::ServiceKind::gateway;
        out.facts = msg::GatewayFacts{"demo-k3", 1048576, 163840, 8, true};
        add("announcement_gateway_bf16", out);
    }

    void hints_with_numbers() {
        add("expert_call_hint", msg::ExpertCall{1,
                                                inline_tensor(msg::DType::f32, {1, 3584}, 1),
                                                {{0, 895, 0.5F, 0}},
                                                false,
                                                kBig + 7});
        add("prefetch_number", msg::Prefetch{5, {895, 0, 7}, {0, 3, 15}, kBig + 7});
    }

  private:
    std::vector<SampleMessage> out_;
};

}  // namespace

std::vector<SampleMessage> sample_messages() {
    Samples samples;
    samples.control();
    samples.tokenizer();
    samples.trunk();
    samples.experts();
    samples.sampler();
    samples.gateway();
    samples.fast_lanes();
    samples.saved_sessions();
    samples.signs_of_life();
    samples.weighted_servers();
    samples.latents();
    samples.hints_with_numbers();
    return std::move(samples).take();
}

}  // namespace k3::test
