#include "launcher/run_output.h"

#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <nlohmann/json.hpp>
#include <utility>

namespace k3::launcher {

using nlohmann::json;

namespace {

constexpr std::size_t kNpyHeaderBytes = 128;  // magic, version, length, dict, padding

std::string npy_header(std::uint64_t rows, std::uint64_t columns) {
    std::string dict = fmt::format(
        "{{'descr': '<f4', 'fortran_order': False, 'shape': ({}, {}), }}", rows, columns);
    std::string header("\x93NUMPY\x01\x00", 8);
    std::size_t length = kNpyHeaderBytes - header.size() - 2;
    header += static_cast<char>(length & 0xff);
    header += static_cast<char>(length >> 8);
    dict.resize(length - 1, ' ');
    return header + dict + "\n";
}

Status write_stdout(std::string_view text) {
    if (std::fwrite(text.data(), 1, text.size(), stdout) == text.size() && std::fflush(stdout) == 0)
        return Status::ok();
    return Error{ErrorCode::io, fmt::format("cannot write to stdout: {}", std::strerror(errno)),
                 "check where the output goes"};
}

Status write_line(const json& object) {
    return write_stdout(object.dump(-1, ' ', false, json::error_handler_t::replace) + "\n");
}

json logprobs_of(const msg::TokenEvent& event) {
    json rows = json::array();
    for (const msg::SampledRow& row : event.logprobs) {
        json top = json::array();
        for (const msg::TokenLogprob& entry : row.top)
            top.push_back({{"id", entry.id}, {"logprob", entry.logprob}});
        rows.push_back({{"id", row.id}, {"logprob", row.logprob}, {"top", std::move(top)}});
    }
    return rows;
}

std::string without_prefix(std::string_view text, std::string_view prefix) {
    return std::string(text.starts_with(prefix) ? text.substr(prefix.size()) : text);
}

/// The parser's own sentence, without its "[json.exception...]" mark.
std::string parse_problem(const json::exception& e) {
    std::string_view what = e.what();
    std::size_t mark = what.find("] ");
    return without_prefix(mark == std::string_view::npos ? what : what.substr(mark + 2),
                          "parse error ");
}

}  // namespace

Result<std::unique_ptr<LogitsFile>> LogitsFile::create(const std::filesystem::path& path) {
    std::FILE* file = std::fopen(path.c_str(), "wbe");
    if (file == nullptr)
        return Error{ErrorCode::io,
                     fmt::format("cannot create {}: {}", path.string(), std::strerror(errno)),
                     "check the path given to --logits-out"};
    std::unique_ptr<LogitsFile> logits(new LogitsFile(path, file));
    std::string header = npy_header(0, 0);
    if (std::fwrite(header.data(), 1, header.size(), file) != header.size())
        return logits->failed();
    return logits;
}

LogitsFile::~LogitsFile() {
    if (file_ != nullptr) std::fclose(file_);
}

Error LogitsFile::failed() const {
    return Error{ErrorCode::io,
                 fmt::format("cannot write {}: {}", path_.string(), std::strerror(errno)),
                 "make room on that disk"};
}

Status LogitsFile::add(std::span<const float> values) {
    if (std::fwrite(values.data(), sizeof(float), values.size(), file_) != values.size())
        return failed();
    n_values_ += values.size();
    return Status::ok();
}

Status LogitsFile::finish(std::uint64_t vocab_size) {
    std::string header = npy_header(vocab_size == 0 ? 0 : n_values_ / vocab_size, vocab_size);
    if (std::fseek(file_, 0, SEEK_SET) != 0 ||
        std::fwrite(header.data(), 1, header.size(), file_) != header.size())
        return failed();
    std::FILE* file = std::exchange(file_, nullptr);
    if (std::fclose(file) != 0) return failed();
    return Status::ok();
}

TextOutput::TextOutput(Options options) : options_(std::move(options)) {
    if (options_.channel.has_value()) view_.emplace(*options_.channel);
}

Status TextOutput::accepted(const msg::Accepted&) { return print(options_.echo); }

void TextOutput::progress(const msg::PrefillProgress&) {}

Status TextOutput::tokens(const msg::TokenEvent& event, std::span<const float> logits) {
    if (options_.logits != nullptr) RETURN_IF_ERROR(options_.logits->add(logits));
    if (!view_.has_value()) return print(event.text);
    ChatView::Text text = view_->add(event.text);
    print_thinking(text.thinking);
    return print(text.answer);
}

Status TextOutput::finish() {
    if (view_.has_value()) {
        ChatView::Text text = view_->finish();
        print_thinking(text.thinking);
        RETURN_IF_ERROR(print(text.answer));
    }
    if (options_.terminal && open_line_) return print("\n");
    return Status::ok();
}

Status TextOutput::print(std::string_view text) {
    if (text.empty()) return Status::ok();
    if (std::exchange(thought_, false)) {
        static constexpr std::string_view kEndOfThought = "\n";
        [[maybe_unused]] ssize_t sent =
            ::write(STDERR_FILENO, kEndOfThought.data(), kEndOfThought.size());
    }
    open_line_ = text.back() != '\n';
    return write_stdout(text);
}

/// Thinking is not the answer: it goes where the events go.
void TextOutput::print_thinking(std::string_view text) {
    if (text.empty()) return;
    std::string line(text);
    if (!std::exchange(thought_, true)) line.insert(0, "k3pipe: thinking: ");
    [[maybe_unused]] ssize_t sent = ::write(STDERR_FILENO, line.data(), line.size());
}

JsonOutput::JsonOutput(LogitsFile* logits, const std::optional<std::string>& channel)
    : logits_(logits) {
    if (channel.has_value()) view_.emplace(*channel);
}

Status JsonOutput::accepted(const msg::Accepted& accepted) {
    prompt_ids_ = accepted.prompt_ids;
    return write_line({{"event", "accepted"},
                       {"request", accepted.request},
                       {"prompt_ids", accepted.prompt_ids}});
}

Status JsonOutput::session_loaded(const msg::SessionLoaded& loaded) {
    return write_line({{"event", "session_loaded"},
                       {"n_ids", loaded.n_ids},
                       {"n_agreed", loaded.n_agreed},
                       {"n_reused", loaded.n_reused}});
}

Status JsonOutput::session_saved(const msg::SessionSaved& saved) {
    if (!saved.failure.has_value())
        return write_line(
            {{"event", "session_saved"}, {"n_ids", saved.n_ids}, {"bytes", saved.bytes}});
    const Error& error = saved.failure->error;
    return write_line({{"event", "session_not_saved"},
                       {"code", std::string(to_string(error.code))},
                       {"message", error.message},
                       {"remedy", error.remedy}});
}

void JsonOutput::progress(const msg::PrefillProgress&) {}

Status JsonOutput::tokens(const msg::TokenEvent& event, std::span<const float> logits) {
    if (logits_ != nullptr) RETURN_IF_ERROR(logits_->add(logits));
    return write_tokens(
        event, view_.has_value() ? view_->add(event.text) : ChatView::Text{"", event.text});
}

Status JsonOutput::write_tokens(const msg::TokenEvent& event, const ChatView::Text& text) {
    ids_.insert(ids_.end(), event.ids.begin(), event.ids.end());
    text_ += text.answer;
    thinking_ += text.thinking;
    if (event.ids.empty() && text.answer.empty() && text.thinking.empty())
        return Status::ok();  // logits of the prompt
    json line = {{"event", "tokens"}, {"ids", event.ids}, {"text", text.answer}};
    if (!text.thinking.empty()) line["thinking"] = text.thinking;
    if (!event.logprobs.empty()) line["logprobs"] = logprobs_of(event);
    return write_line(line);
}

/// What might have become a marker and is text.
Status JsonOutput::write_held_back() {
    if (!view_.has_value()) return Status::ok();
    const ChatView::Text rest = view_->finish();
    view_.reset();
    return write_tokens({}, rest);
}

Status JsonOutput::finished(const msg::Finished& finished) {
    RETURN_IF_ERROR(write_held_back());
    json line = {{"event", "finished"},
                 {"text", text_},
                 {"ids", ids_},
                 {"prompt_ids", prompt_ids_},
                 {"reason", std::string(msg::to_string(finished.reason))},
                 {"n_prompt", finished.n_prompt},
                 {"n_generated", finished.n_generated},
                 {"prefill_ms", static_cast<double>(finished.prefill_ns) / 1e6},
                 {"decode_ms", static_cast<double>(finished.decode_ns) / 1e6}};
    if (!thinking_.empty()) line["thinking"] = thinking_;
    if (finished.reason == msg::FinishReason::stop_id) line["stop_id"] = finished.stop_id;
    if (finished.reason == msg::FinishReason::stop_string)
        line["stop_string"] = finished.stop_string;
    return write_line(line);
}

Status JsonOutput::error(const Error& error) {
    RETURN_IF_ERROR(write_held_back());
    json line = {{"event", "error"},
                 {"code", std::string(to_string(error.code))},
                 {"message", error.message},
                 {"remedy", error.remedy},
                 {"text", text_},
                 {"ids", ids_}};
    if (!thinking_.empty()) line["thinking"] = thinking_;
    return write_line(line);
}

Status check_utf8(const std::string& text, std::string_view what) {
    try {
        (void)json(text).dump();
        return Status::ok();
    } catch (const json::exception& e) {
        return Error{ErrorCode::invalid_argument,
                     fmt::format("{} is not UTF-8: {}", what, parse_problem(e)),
                     "convert it first, or give token ids with --ids"};
    }
}

Result<std::string> chat_of_text(const std::string& text, const std::string& effort) {
    RETURN_IF_ERROR(check_utf8(text, "the message"));
    json chat = {{"messages", json::array({{{"role", "user"}, {"content", text}}})}};
    if (!effort.empty()) chat["thinking_effort"] = effort;
    return chat.dump();
}

Result<std::string> chat_of_json(const std::string& text, const std::string& effort,
                                 const std::string& where) {
    try {
        json chat = json::parse(text);
        // The text itself is passed on, not a copy printed from the parsed form: order of keys and
        // spelling of numbers are part of what is rendered.
        std::string extra = effort.empty() ? "" : fmt::format("\"thinking_effort\":\"{}\"", effort);
        if (chat.is_array())
            return fmt::format("{{\"messages\":{}{}{}}}", text, extra.empty() ? "" : ",", extra);
        if (!chat.is_object())
            return Error{ErrorCode::invalid_argument,
                         where + " is neither a list of messages nor an object",
                         "write [{\"role\": \"user\", \"content\": \"...\"}]"};
        if (extra.empty() || chat.contains("thinking_effort")) return text;
        std::size_t brace = text.find('{');
        return text.substr(0, brace + 1) + extra + (chat.empty() ? "" : ",") +
               text.substr(brace + 1);
    } catch (const json::exception& e) {
        return Error{ErrorCode::invalid_argument, where + " is not JSON: " + parse_problem(e),
                     "correct it; python3 -m json.tool shows the place"};
    }
}

std::string opened_channel(const std::string& chat_json) {
    json chat = json::parse(chat_json, nullptr, false);
    auto effort = chat.find("thinking_effort");
    return effort == chat.end() || effort->is_null() ? "response" : "think";
}

}  // namespace k3::launcher
