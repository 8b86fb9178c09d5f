#include "services/tokenizer/service.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <utility>

#include "common/base/log.h"
#include "common/model/tensor_names.h"
#include "common/storage/checkpoint.h"

namespace k3::tokenizer {

namespace {

/// Text that takes longer than about ten milliseconds, with the calls that may wait for it.
constexpr std::size_t kLongCallBytes = std::size_t{64} << 10U;
constexpr std::size_t kMaxLongCalls = 16;

std::size_t text_bytes_of(const msg::Body& body) {
    if (const auto* call = std::get_if<msg::Encode>(&body)) return call->text.size();
    if (const auto* call = std::get_if<msg::RenderChat>(&body)) return call->json.size();
    if (const auto* call = std::get_if<msg::Decode>(&body)) return call->ids.size();
    return 0;
}

struct Loaded {
    model::ModelConfig config;
    std::string fingerprint;
};

/// A tokenizer may run on a box that has none of the weights: then config.json is enough.
Result<Loaded> load_model(const std::filesystem::path& directory) {
    Loaded loaded;
    ASSIGN_OR_RETURN(loaded.config, model::load_config(directory));
    std::error_code ignored;
    if (std::filesystem::exists(directory / storage::kIndexName, ignored)) {
        ASSIGN_OR_RETURN(loaded.fingerprint, model::fingerprint(directory, loaded.config));
    }
    return loaded;
}

}  // namespace

Service::Service(Vocabulary vocabulary)
    : vocabulary_(std::move(vocabulary)),
      encoder_(vocabulary_),
      decoder_(vocabulary_),
      calls_(counters_.add("calls")),
      refused_calls_(counters_.add("refused_calls")),
      text_bytes_(counters_.add("text_bytes")),
      ids_(counters_.add("ids")),
      compute_ns_(counters_.add("compute_ns")) {}

Result<std::unique_ptr<Service>> Service::create(const std::filesystem::path& directory) {
    ASSIGN_OR_RETURN(Loaded loaded, load_model(directory));
    ASSIGN_OR_RETURN(Vocabulary vocabulary, Vocabulary::load(directory, loaded.config.vocab_size));
    std::unique_ptr<Service> service(new Service(std::move(vocabulary)));
    ASSIGN_OR_RETURN(ChatEncoder chat,
                     ChatEncoder::create(service->vocabulary_, service->encoder_));
    service->chat_ = std::make_unique<ChatEncoder>(chat);
    service->fingerprint_ = std::move(loaded.fingerprint);

    msg::TokenizerFacts& facts = service->facts_;
    facts.vocab_size = service->vocabulary_.size();
    facts.n_ranks = service->vocabulary_.n_ranks();
    if (loaded.config.eos_id >= facts.vocab_size)
        return Error{ErrorCode::incompatible,
                     fmt::format("{}/config.json: eos_token_id {} is outside the vocabulary of {}",
                                 directory.string(), loaded.config.eos_id, facts.vocab_size),
                     "use the config.json that belongs to this checkpoint"};
    for (std::uint32_t id :
         {loaded.config.eos_id, chat.id_of(Control::end_of_msg), service->vocabulary_.eos_id()})
        if (std::find(facts.stop_ids.begin(), facts.stop_ids.end(), id) == facts.stop_ids.end())
            facts.stop_ids.push_back(id);

    service->worker_ = std::thread([raw = service.get()] { raw->work(); });
    return service;
}

Service::~Service() {
    {
        std::lock_guard lock(mutex_);
        stopping_ = true;
    }
    wake_.notify_one();
    if (worker_.joinable()) worker_.join();
}

void Service::handle(transport::Request request) {
    if (text_bytes_of(request.envelope.body) < kLongCallBytes) {
        answer_and_count(request);
        return;
    }
    {
        std::lock_guard lock(mutex_);
        if (long_calls_.size() < kMaxLongCalls) {
            long_calls_.push_back(std::move(request));
            wake_.notify_one();
            return;
        }
    }
    ++calls_;
    ++refused_calls_;
    request.responder.send_error(
        {ErrorCode::resource_exhausted,
         fmt::format("{} calls with more than {} bytes are waiting already", kMaxLongCalls,
                     kLongCallBytes),
         "ask again in a moment"});
}

void Service::work() {
    for (;;) {
        transport::Request request;
        {
            std::unique_lock lock(mutex_);
            wake_.wait(lock, [this] { return stopping_ || !long_calls_.empty(); });
            if (stopping_) return;
            request = std::move(long_calls_.front());
            long_calls_.pop_front();
        }
        answer_and_count(request);
    }
}

void Service::answer_and_count(const transport::Request& request) {
    const auto started = Clock::now();
    Result<msg::Body> reply = answer(request.envelope.body);
    compute_ns_ += static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(Clock::now() - started).count());
    ++calls_;
    if (!reply) {
        ++refused_calls_;
        // The sentence may quote names from the request, so it goes to the caller only.
        log::debug(fmt::format("refused {} code={}", msg::name_of(request.envelope.body),
                               to_string(reply.error().code)));
        request.responder.send_error(reply.error());
        return;
    }
    if (const auto* encoded = std::get_if<msg::Encoded>(&*reply)) ids_ += encoded->ids.size();
    if (const auto* chat = std::get_if<msg::RenderedChat>(&*reply)) ids_ += chat->ids.size();
    if (const auto* decoded = std::get_if<msg::Decoded>(&*reply))
        text_bytes_ += decoded->text.size();
    request.responder.send(std::move(*reply));
}

Result<msg::Body> Service::answer(const msg::Body& body) const {
    if (const auto* call = std::get_if<msg::Encode>(&body)) return encode(*call);
    if (const auto* call = std::get_if<msg::Decode>(&body)) return decode(*call);
    if (const auto* call = std::get_if<msg::RenderChat>(&body)) return render(*call);
    return Error{ErrorCode::unsupported,
                 fmt::format("the tokenizer does not answer {}", msg::name_of(body)),
                 "send it Encode, Decode or RenderChat; check which endpoint belongs to which "
                 "service"};
}

Result<msg::Body> Service::encode(const msg::Encode& call) const {
    EncodeOptions options{.recognise_specials = call.recognise_specials,
                          .keep_invalid_bytes = call.keep_invalid_bytes};
    ASSIGN_OR_RETURN(std::vector<std::uint32_t> ids, encoder_.encode(call.text, options));
    return msg::Body(msg::Encoded{std::move(ids)});
}

Result<msg::Body> Service::decode(const msg::Decode& call) const {
    DecodeOptions options{.final = call.final, .skip_specials = call.skip_specials};
    ASSIGN_OR_RETURN(DecodedText decoded, decoder_.decode(call.pending, call.ids, options));
    return msg::Body(msg::Decoded{std::move(decoded.text), std::move(decoded.pending)});
}

Result<msg::Body> Service::render(const msg::RenderChat& call) const {
    ASSIGN_OR_RETURN(ChatRequest request, parse_chat_request(call.json));
    ASSIGN_OR_RETURN(ChatPrompt prompt, render_chat(request));
    ASSIGN_OR_RETURN(std::vector<std::uint32_t> ids, chat_->encode(prompt.pieces));
    return msg::Body(msg::RenderedChat{std::move(ids), std::move(prompt.channel)});
}

}  // namespace k3::tokenizer
