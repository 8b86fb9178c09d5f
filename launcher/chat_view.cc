#include "launcher/chat_view.h"

#include <algorithm>
#include <array>
#include <utility>

namespace k3::launcher {

namespace {

constexpr std::string_view kOpen = "<|open|>";
constexpr std::string_view kClose = "<|close|>";
constexpr std::string_view kSep = "<|sep|>";
constexpr std::string_view kEnd = "<|end_of_msg|>";
constexpr std::size_t kMaxTag = 256;  // longer is not a tag but text that looks like one

/// Where the first marker begins, whole or cut off at the end; size() if there is none.
std::size_t find_marker(std::string_view text) {
    static constexpr std::array kMarkers = {kOpen, kClose, kEnd};
    for (std::size_t at = text.find('<'); at != std::string_view::npos;
         at = text.find('<', at + 1)) {
        std::string_view rest = text.substr(at);
        for (std::string_view marker : kMarkers)
            if (rest.starts_with(marker) || marker.starts_with(rest)) return at;
    }
    return text.size();
}

}  // namespace

ChatView::Text ChatView::add(std::string_view bytes) {
    Text text;
    pending_ += bytes;
    for (;;) {
        std::size_t at = find_marker(pending_);
        emit(std::string_view(pending_).substr(0, at), text);
        pending_.erase(0, at);
        if (pending_.empty() || !take_tag(text)) return text;
    }
}

ChatView::Text ChatView::finish() {
    Text text;
    // An unfinished tag is structure; an unfinished "<" is text.
    bool is_tag = pending_.starts_with(kOpen) || pending_.starts_with(kClose);
    if (!is_tag) emit(pending_, text);
    pending_.clear();
    return text;
}

void ChatView::emit(std::string_view bytes, Text& text) const {
    if (channel_ == "think")
        text.thinking += bytes;
    else if (!channel_.empty())
        text.answer += bytes;
}

/// Consumes the tag at the head of pending_; false if more bytes are needed to know its end.
bool ChatView::take_tag(Text& text) {
    if (pending_.starts_with(kEnd)) {
        pending_.erase(0, kEnd.size());
        channel_.clear();
        return true;
    }
    bool opens = pending_.starts_with(kOpen);
    if (!opens && !pending_.starts_with(kClose)) return false;
    std::size_t head = opens ? kOpen.size() : kClose.size();
    std::size_t sep = pending_.find(kSep, head);
    if (sep == std::string::npos) {
        if (pending_.size() < kMaxTag) return false;
        emit(std::string_view(pending_).substr(0, head), text);
        pending_.erase(0, head);
        return true;
    }
    std::string tag = pending_.substr(head, std::min(pending_.find(' ', head), sep) - head);
    // Inside the tools channel the calls are the answer: they are shown as they come.
    if (channel_ == "tools" && tag != "tools")
        emit(std::string_view(pending_).substr(0, sep + kSep.size()), text);
    else
        channel_ = opens ? tag : "";
    pending_.erase(0, sep + kSep.size());
    return true;
}

}  // namespace k3::launcher
