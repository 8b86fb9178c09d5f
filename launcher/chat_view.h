#pragma once
// Takes the answer out of a conversation's stream.
//
// A model answers in the chat format of the checkpoint (XTML): text, then
// <|close|>response<|sep|>..., with a think channel before the response when thinking is on. People
// want the answer; `--raw` shows the stream as it is. Reading is lenient: malformed output is
// shown rather than lost, and thinking is never promoted to the answer.

#include <string>
#include <string_view>

namespace k3::launcher {

class ChatView {
  public:
    /// `channel`: the one the prompt has opened, "think" or "response".
    explicit ChatView(std::string channel) : channel_(std::move(channel)) {}

    struct Text {
        std::string thinking;
        std::string answer;
    };
    /// What became visible by these bytes. Markers may be cut anywhere between two calls.
    Text add(std::string_view bytes);
    /// What was held back as the possible beginning of a marker.
    Text finish();

  private:
    void emit(std::string_view bytes, Text& text) const;
    bool take_tag(Text& text);
    std::string channel_;  // empty: between two channels
    std::string pending_;
};

}  // namespace k3::launcher
