#include "tests/support/fake_stages.h"

#include <stdlib.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <filesystem>
#include <utility>

#include "common/base/check.h"
#include "common/transport/tensor_io.h"

namespace k3::test {

namespace {

std::span<const std::byte> bytes_of(const std::vector<float>& values) {
    return std::as_bytes(std::span(values));
}

Error refused(std::string message) {
    return {ErrorCode::invalid_argument, std::move(message), "correct the call"};
}

/// Length of the UTF-8 character that begins with `lead`; 0: none does.
std::size_t character_length(unsigned char lead) {
    if (lead < 0x80) return 1;
    if (lead >= 0xC2 && lead < 0xE0) return 2;
    if (lead >= 0xE0 && lead < 0xF0) return 3;
    if (lead >= 0xF0 && lead < 0xF5) return 4;
    return 0;
}

/// Bytes from the front of `text` that are whole characters; stops at the first that is not.
std::size_t whole_prefix(std::string_view text) {
    std::size_t i = 0;
    while (i < text.size()) {
        const std::size_t n = character_length(static_cast<unsigned char>(text[i]));
        if (n == 0 || i + n > text.size()) break;
        bool sound = true;
        for (std::size_t j = 1; j < n; ++j)
            sound = sound && (static_cast<unsigned char>(text[i + j]) & 0xC0U) == 0x80U;
        if (!sound) break;
        i += n;
    }
    return i;
}

std::string bytes_of_id(std::uint32_t id, bool skip_specials) {
    if (id < 256) return std::string(1, static_cast<char>(id));
    if (id == FakeTokenizer::kStop) return skip_specials ? "" : "<stop>";
    if (id == FakeTokenizer::kSpecial) return skip_specials ? "" : "<special>";
    if (id == FakeTokenizer::kLong) return "hello";
    return "?";
}

std::uint64_t hash_of(const std::vector<std::uint32_t>& history) {
    std::uint64_t hash = 14695981039346656037ULL;
    for (const std::uint32_t id : history) hash = (hash ^ (id + 1)) * 1099511628211ULL;
    return hash ^ (hash >> 29U);
}

}  // namespace

SocketDir::SocketDir() {
    std::string pattern = (std::filesystem::temp_directory_path() / "k3-test-XXXXXX").string();
    K3_CHECK(::mkdtemp(pattern.data()) != nullptr, pattern);
    path_ = pattern;
}

SocketDir::~SocketDir() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
}

std::string SocketDir::endpoint(const std::string& name) const {
    return "ipc://" + path_ + "/" + name;
}

FakeStage::FakeStage(std::string endpoint, msg::ServiceKind kind, std::string name)
    : endpoint_(std::move(endpoint)), kind_(kind), name_(std::move(name)) {}

FakeStage::~FakeStage() { K3_CHECK(!thread_.joinable(), "a fake stage must be stopped"); }

void FakeStage::start() {
    transport::Server::Options options;
    options.endpoint = endpoint_;
    options.announcement.kind = kind_;
    options.announcement.name = name_;
    auto server = transport::Server::create(options);
    K3_CHECK(server.has_value(), server.error().message);
    server_ = std::move(*server);
    reset();
    msg::Announcement announcement = options.announcement;
    announcement.fingerprint = fingerprint;
    prepare(announcement);
    if (arena_ != nullptr) announcement.arena = arena_->probe();
    if (stays_loading) {
        server_->set_progress(420, "layer 3");
    } else {
        server_->set_ready(std::move(announcement));
    }
    stop_ = false;
    thread_ = std::thread([this] { serve(); });
}

void FakeStage::stop() {
    if (!thread_.joinable()) return;
    stop_ = true;
    thread_.join();
    server_.reset();
    arena_.reset();
}

void FakeStage::set_fault(std::function<std::optional<msg::Failure>(const msg::Body&)> fault) {
    const std::lock_guard lock(mutex_);
    fault_ = std::move(fault);
}

void FakeStage::serve() {
    while (!stop_) {
        auto request = server_->next(Deadline::after_ms(20));
        if (!request.has_value()) continue;
        ++n_requests_;
        if (mute) continue;
        std::optional<msg::Failure> failure;
        {
            const std::lock_guard lock(mutex_);
            if (fault_) failure = fault_(request->envelope.body);
        }
        if (mute) continue;  // the fault may have said so
        if (failure.has_value()) {
            request->responder.send_failure(std::move(*failure));
        } else {
            answer(*request);
        }
    }
}

bool FakeStage::wait_for_requests(std::uint64_t n, std::int64_t ms) const {
    const Deadline deadline = Deadline::after_ms(ms);
    while (n_requests_ < n) {
        if (deadline.expired()) return false;
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    return true;
}

void FakeTokenizer::prepare(msg::Announcement& announcement) {
    announcement.facts = msg::TokenizerFacts{vocab_size, 256, {kStop}};
}

void FakeTokenizer::answer(transport::Request& request) {
    const msg::Body& body = request.envelope.body;
    if (const auto* encode = std::get_if<msg::Encode>(&body)) {
        const std::size_t whole = whole_prefix(encode->text);
        if (whole < encode->text.size()) {
            request.responder.send_error(
                refused("byte " + std::to_string(whole) + " of the text is not UTF-8"));
            return;
        }
        msg::Encoded encoded;
        for (const char c : encode->text) encoded.ids.push_back(static_cast<unsigned char>(c));
        request.responder.send(std::move(encoded));
    } else if (const auto* chat = std::get_if<msg::RenderChat>(&body)) {
        msg::RenderedChat rendered;
        rendered.ids.push_back(kSpecial);
        for (const char c : chat->json) rendered.ids.push_back(static_cast<unsigned char>(c));
        request.responder.send(std::move(rendered));
    } else if (const auto* decode = std::get_if<msg::Decode>(&body)) {
        std::string text = decode->pending;
        for (const std::uint32_t id : decode->ids) text += bytes_of_id(id, decode->skip_specials);
        msg::Decoded decoded;
        while (!text.empty()) {
            const std::size_t whole = whole_prefix(text);
            decoded.text += text.substr(0, whole);
            text.erase(0, whole);
            if (text.empty()) break;
            const std::size_t n = character_length(static_cast<unsigned char>(text[0]));
            if (n > text.size() && !decode->final) break;
            decoded.text += "\xEF\xBF\xBD";
            text.erase(0, n > text.size() ? text.size() : 1);
        }
        decoded.pending = text;
        request.responder.send(std::move(decoded));
    } else {
        request.responder.send_error(refused("no message for a tokenizer"));
    }
}

void FakeTrunk::prepare(msg::Announcement& announcement) {
    msg::TrunkFacts facts;
    facts.first_layer = layers_.first;
    facts.n_layers = layers_.n;
    facts.total_layers = layers_.total;
    facts.hidden_size = hidden_size;
    facts.vocab_size = vocab_size;
    facts.max_positions = max_positions;
    facts.max_step_rows = max_step_rows;
    facts.max_sessions = max_sessions;
    facts.in_vectors = in_vectors.value_or(first() ? 0 : 1 + layers_.first);
    facts.out_vectors = last() ? 0 : 1 + layers_.first + layers_.n;
    announcement.facts = facts;
    if (!use_arena) return;
    static std::atomic<unsigned> count = 0;
    transport::Arena::Options options;
    options.name = transport::segment_name(0, "fake" + std::to_string(count++));
    options.slot_bytes = std::size_t{1} << 16U;
    options.n_slots = 4;
    auto arena = transport::Arena::create(options);
    K3_CHECK(arena.has_value(), arena.error().message);
    arena_ = std::move(*arena);
}

void FakeTrunk::reset() {
    const std::lock_guard lock(state_mutex_);
    sessions_.clear();
    reserved_.clear();
}

std::size_t FakeTrunk::n_sessions() const {
    const std::lock_guard lock(state_mutex_);
    return sessions_.size();
}

std::vector<std::size_t> FakeTrunk::step_sizes() const {
    const std::lock_guard lock(state_mutex_);
    return step_sizes_;
}

std::vector<float> FakeTrunk::logits_after(const std::vector<std::uint32_t>& history) const {
    const std::uint64_t hash = hash_of(history);
    std::vector<float> logits(vocab_size);
    for (std::size_t id = 0; id < logits.size(); ++id)
        logits[id] = static_cast<float>((hash >> (id % 32)) % 1000) / 1000;
    logits[next ? next(history) : 'a' + hash % 26] = 10;
    return logits;
}

void FakeTrunk::answer(transport::Request& request) {
    const msg::Body& body = request.envelope.body;
    auto reply = [&request](Result<msg::Body> result) {
        if (result.has_value()) {
            request.responder.send(std::move(*result));
        } else {
            request.responder.send_error(result.error());
        }
    };
    if (const auto* opening = std::get_if<msg::OpenSession>(&body)) {
        reply(open(*opening));
    } else if (const auto* loading = std::get_if<msg::LoadSession>(&body)) {
        reply(load(*loading));
    } else if (const auto* saving = std::get_if<msg::SaveSession>(&body)) {
        reply(save(*saving));
    } else if (const auto* drop = std::get_if<msg::DropSession>(&body)) {
        const std::lock_guard lock(state_mutex_);
        sessions_.erase(drop->session);
        request.responder.send(msg::Done{});
    } else if (const auto* call = std::get_if<msg::Step>(&body)) {
        std::vector<msg::Bytes> frames;
        auto result = step(*call, request.frames, frames);
        if (result.has_value()) {
            request.responder.send(std::move(*result), std::move(frames));
        } else {
            request.responder.send_error(result.error());
        }
    } else {
        request.responder.send_error(refused("no message for a trunk"));
    }
}

Result<msg::Body> FakeTrunk::open(const msg::OpenSession& open) {
    const std::lock_guard lock(state_mutex_);
    if (sessions_.size() >= max_sessions)
        return Error{ErrorCode::resource_exhausted,
                     std::to_string(sessions_.size()) + " sessions are open", "drop one"};
    if (open.session == 0 || open.max_positions > max_positions ||
        !sessions_.try_emplace(open.session).second)
        return refused("session is open");
    reserved_[open.session] = open.max_positions;
    return msg::Body(msg::Done{});
}

Result<msg::Body> FakeTrunk::load(const msg::LoadSession& load) {
    std::vector<std::uint32_t> ids;
    {
        const std::lock_guard lock(state_mutex_);
        const auto found = saved_.find(load.name);
        if (found == saved_.end())
            return Error{ErrorCode::not_found, "no saved session " + load.name, "save it"};
        ids = found->second;
    }
    RETURN_IF_ERROR(open({load.session, load.max_positions, load.save_as}));
    const auto agreed = std::mismatch(ids.begin(), ids.end(), load.ids.begin(), load.ids.end());
    msg::LoadedSession loaded{ids.size(), static_cast<std::uint64_t>(agreed.first - ids.begin()),
                              0};
    if (agreed.first != ids.end() || ids.size() >= load.ids.size()) return msg::Body(loaded);
    loaded.position = ids.size();
    const std::lock_guard lock(state_mutex_);
    sessions_[load.session] = std::move(ids);
    return msg::Body(loaded);
}

Result<msg::Body> FakeTrunk::save(const msg::SaveSession& save) {
    const std::lock_guard lock(state_mutex_);
    const auto found = sessions_.find(save.session);
    if (found == sessions_.end()) return Error{ErrorCode::not_found, "no such session", "open it"};
    if (found->second != save.ids) return refused("the ids are not those of the session");
    saved_[save.name] = save.ids;
    return msg::Body(msg::SavedSession{4 * save.ids.size()});
}

std::map<std::string, std::vector<std::uint32_t>> FakeTrunk::saved() const {
    const std::lock_guard lock(state_mutex_);
    return saved_;
}

void FakeTrunk::set_saved(const std::string& name, std::vector<std::uint32_t> ids) {
    const std::lock_guard lock(state_mutex_);
    saved_[name] = std::move(ids);
}

/// A hidden row carries its token in the first value, and in the second how many layers it has
/// passed; all further values repeat the token, so that lost ones are noticed.
Result<msg::StepResult> FakeTrunk::step(const msg::Step& step, std::vector<msg::Bytes>& in,
                                        std::vector<msg::Bytes>& out) {
    const std::lock_guard lock(state_mutex_);
    step_sizes_.push_back(step.rows.size());
    if (step.rows.empty() || step.rows.size() > max_step_rows)
        return refused("step of " + std::to_string(step.rows.size()) + " rows");
    const std::size_t n_in = in_vectors.value_or(1 + layers_.first) * std::size_t{hidden_size};
    msg::Bytes hidden_bytes;
    if (!first()) {
        const std::array<std::uint64_t, 3> shape{step.rows.size(), n_in / hidden_size, hidden_size};
        if (std::holds_alternative<msg::ShmPayload>(step.hidden.payload)) ++n_shm_inputs_;
        ASSIGN_OR_RETURN(hidden_bytes, transport::take_tensor(step.hidden, "hidden",
                                                              msg::DType::f32, shape, in, reader_));
    } else if (!step.hidden.empty()) {
        return refused("the first stage takes no hidden rows");
    }
    const auto hidden = transport::view_as<float>(hidden_bytes);
    const std::size_t n_out = (1 + layers_.first + layers_.n) * std::size_t{hidden_size};
    std::vector<float> output;
    std::size_t n_wanted = 0;
    for (std::size_t i = 0; i < step.rows.size(); ++i) {
        const msg::StepRow& row = step.rows[i];
        const auto session = sessions_.find(row.session);
        if (session == sessions_.end())
            return Error{ErrorCode::not_found, "no such session", "open it"};
        std::vector<std::uint32_t>& history = session->second;
        if (history.size() != row.position)
            return Error{ErrorCode::stale, "position is not the next", "open it again"};
        if (history.size() >= reserved_[row.session])
            return Error{ErrorCode::resource_exhausted, "more positions than reserved", "reserve"};
        std::uint32_t token = row.token;
        if (!first()) {
            token = static_cast<std::uint32_t>(hidden[i * n_in]);
            if (hidden[i * n_in + 1] != static_cast<float>(layers_.first))
                return refused("hidden row comes from another layer");
            for (std::size_t j = 2; j < n_in; ++j)
                if (hidden[i * n_in + j] != hidden[i * n_in]) return refused("damaged hidden row");
        }
        history.push_back(token);
        if (!last()) {
            output.resize(output.size() + n_out, static_cast<float>(token));
            output[i * n_out + 1] = static_cast<float>(layers_.first + layers_.n);
        } else if (n_wanted < step.want.size() && step.want[n_wanted] == i) {
            std::vector<float> logits = logits_after(history);
            if (spoil) spoil(history, logits);
            output.insert(output.end(), logits.begin(), logits.end());
            ++n_wanted;
        }
    }
    if (last() && n_wanted != step.want.size())
        return refused("want is not ascending or too large");
    msg::StepResult result;
    const std::vector<std::uint64_t> shape =
        last() ? std::vector<std::uint64_t>{n_wanted, answer_vocab_size.value_or(vocab_size)}
               : std::vector<std::uint64_t>{step.rows.size(), n_out / hidden_size, hidden_size};
    if (!output.empty())
        result.output = transport::put_tensor(msg::DType::f32, shape, bytes_of(output),
                                              arena_.get(), step.reply_shm, out);
    return result;
}

void FakeSampler::prepare(msg::Announcement& announcement) {
    announcement.facts = msg::SamplerFacts{max_rows};
}

void FakeSampler::answer(transport::Request& request) {
    const auto* call = std::get_if<msg::Sample>(&request.envelope.body);
    if (call == nullptr) {
        request.responder.send_error(refused("no message for a sampler"));
        return;
    }
    auto sampled = sample(*call, request.frames);
    if (sampled.has_value()) {
        request.responder.send(std::move(*sampled));
    } else {
        request.responder.send_error(sampled.error());
    }
}

Result<msg::Sampled> FakeSampler::sample(const msg::Sample& call, std::vector<msg::Bytes>& frames) {
    if (call.rows.empty() || call.rows.size() > max_rows) return refused("too many rows");
    const std::array<std::uint64_t, 2> shape{call.rows.size(), 0};
    if (std::holds_alternative<msg::ShmPayload>(call.logits.payload)) ++n_shm_inputs_;
    ASSIGN_OR_RETURN(
        const msg::Bytes bytes,
        transport::take_tensor(call.logits, "logits", msg::DType::f32, shape, frames, reader_));
    const auto logits = transport::view_as<float>(bytes);
    const std::size_t vocab_size = call.logits.shape[1];
    msg::Sampled out;
    for (std::size_t row = 0; row < call.rows.size(); ++row) {
        const auto values = logits.subspan(row * vocab_size, vocab_size);
        for (const float value : values)
            if (std::isnan(value))
                return Error{ErrorCode::corrupt, "row " + std::to_string(row) + " holds nan",
                             "look at the trunk"};
        msg::SampledRow sampled;
        sampled.id = static_cast<std::uint32_t>(std::max_element(values.begin(), values.end()) -
                                                values.begin());
        sampled.logprob = -0.5F;
        const auto& stop_ids = call.rows[row].stop_ids;
        sampled.is_stop = std::find(stop_ids.begin(), stop_ids.end(), sampled.id) != stop_ids.end();
        for (std::uint32_t i = 0; i < call.rows[row].n_logprobs; ++i)
            sampled.top.push_back({i, -1.0F - static_cast<float>(i)});
        out.rows.push_back(std::move(sampled));
    }
    return out;
}

}  // namespace k3::test
