#pragma once
// The three ways out of `k3pipe run`: text for people, JSON lines for programs, logits for
// comparisons.

#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/base/result.h"
#include "launcher/chat_view.h"
#include "launcher/gateway_client.h"

namespace k3::launcher {

/// Rows of logits as .npy (format 1.0): [n, vocab_size] little-endian float32. The header is
/// written again at the end, when n is known.
class LogitsFile {
  public:
    /// Error: io.
    static Result<std::unique_ptr<LogitsFile>> create(const std::filesystem::path& path);
    ~LogitsFile();
    LogitsFile(const LogitsFile&) = delete;
    LogitsFile& operator=(const LogitsFile&) = delete;
    Status add(std::span<const float> values);
    /// Error: io (also of an earlier write).
    Status finish(std::uint64_t vocab_size);

  private:
    LogitsFile(std::filesystem::path path, std::FILE* file) : path_(std::move(path)), file_(file) {}
    Error failed() const;
    std::filesystem::path path_;
    std::FILE* file_;
    std::uint64_t n_values_ = 0;
};

/// Writes the text as it comes.
class TextOutput final : public GenerationSink {
  public:
    struct Options {
        std::string echo;  // printed first, so that the text continues it; may be empty
        std::optional<std::string> channel;  // a chat whose markers are hidden, and its channel
        LogitsFile* logits = nullptr;
        bool terminal = false;  // a final newline is added
    };
    explicit TextOutput(Options options);
    Status accepted(const msg::Accepted& accepted) override;
    void progress(const msg::PrefillProgress& progress) override;
    Status tokens(const msg::TokenEvent& event, std::span<const float> logits) override;
    /// After the last token.
    Status finish();

  private:
    Status print(std::string_view text);
    void print_thinking(std::string_view text);
    Options options_;
    std::optional<ChatView> view_;
    bool thought_ = false;
    bool open_line_ = false;
};

/// One JSON object per line: {"event":"accepted"}, {"event":"tokens"}..., and at the end one with
/// everything: {"event":"finished","text":...,"ids":[...],"reason":...}, or {"event":"error"}. A
/// session adds {"event":"session_loaded"} and {"event":"session_saved"} or "session_not_saved". Of
/// a chat "text" is the answer without its markers, and "thinking" is there where something was
/// thought.
class JsonOutput final : public GenerationSink {
  public:
    /// `channel`: as in TextOutput::Options.
    JsonOutput(LogitsFile* logits, const std::optional<std::string>& channel);
    Status accepted(const msg::Accepted& accepted) override;
    Status session_loaded(const msg::SessionLoaded& loaded) override;
    Status session_saved(const msg::SessionSaved& saved) override;
    void progress(const msg::PrefillProgress& progress) override;
    Status tokens(const msg::TokenEvent& event, std::span<const float> logits) override;
    Status finished(const msg::Finished& finished);
    Status error(const Error& error);

  private:
    Status write_tokens(const msg::TokenEvent& event, const ChatView::Text& text);
    Status write_held_back();
    LogitsFile* logits_;
    std::optional<ChatView> view_;
    std::vector<std::uint32_t> prompt_ids_;
    std::vector<std::uint32_t> ids_;
    std::string text_;
    std::string thinking_;
};

/// Error: invalid_argument, "<what> is not UTF-8: ..." with the place of the first wrong byte.
Status check_utf8(const std::string& text, std::string_view what);

/// The JSON of a conversation for the tokenizer: one user message, or the file's content (a list
/// of messages, or an object) with the effort put in if the file has none.
/// Errors: invalid_argument (not UTF-8, not JSON, neither list nor object).
Result<std::string> chat_of_text(const std::string& text, const std::string& effort);
Result<std::string> chat_of_json(const std::string& json, const std::string& effort,
                                 const std::string& where);
/// "think" or "response": the channel that the rendered conversation opens.
std::string opened_channel(const std::string& chat_json);

}  // namespace k3::launcher
