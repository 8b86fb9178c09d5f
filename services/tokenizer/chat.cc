#include "services/tokenizer/chat.h"

#include <fmt/format.h>

#include <algorithm>
#include <numeric>
#include <unordered_map>
#include <utility>

namespace k3::tokenizer {

namespace {

// The words the model was trained on, to the byte. {} stands for JSON or an effort.
constexpr std::string_view kTools =
    "# Tools\nHere are the available tools, described in JSONSchema.\n\n```json\n";
constexpr std::string_view kNewTools =
    "## New Tools Available\n"
    "The system dynamically extends the toolset via lazy-loading.\n"
    "You have access to all existing and extended tools.\n"
    "Here are the specs for the extended tools.\n\n```json\n";
constexpr std::string_view kEndOfJson = "\n```";
constexpr std::string_view kEffort =
    "`thinking_effort` guides on how much to think in your thinking channel (not including the "
    "response channel), supported values include `low`, `medium`, `high`, and `max`.\n"
    "Now the system is invoked with `thinking_effort=";
constexpr std::string_view kChoiceRequired =
    "The system is invoked with `tool_choice=required`.\n"
    "You MUST call tools in the next message.";
constexpr std::string_view kChoiceNone =
    "The system is invoked with `tool_choice=none`.\n"
    "You MUST NOT call any tools in the next message.";
constexpr std::string_view kFormatBegin = "The system is invoked with `response_format=";
constexpr std::string_view kFormatRest =
    "`.\nYour response must be raw JSON data without markdown code blocks (```json) or any "
    "additional formatting.";
constexpr std::string_view kSchema = "\nThe JSON data must match the following schema:\n```json\n";

struct Attribute {
    std::string_view key;
    std::string value;
};

std::string escaped(std::string_view value) {
    std::string out;
    for (char c : value) {
        if (c == '&')
            out += "&amp;";
        else if (c == '"')
            out += "&quot;";
        else
            out += c;
    }
    return out;
}

/// Writes pieces in the grammar of the format.
class Writer {
  public:
    void text(std::string_view text) {
        if (!text.empty()) pieces_.push_back({std::nullopt, std::string(text)});
    }
    void open(std::string_view tag, std::initializer_list<Attribute> attributes = {}) {
        begin(tag);
        for (const Attribute& attribute : attributes) add(attribute);
        control(Control::sep);
    }
    void close(std::string_view tag) {
        control(Control::close);
        text(tag);
        control(Control::sep);
    }
    /// The head of a message; `name` is left out when it is empty.
    void open_message(std::string_view role, std::string_view name = {}) {
        begin("message");
        add({"role", std::string(role)});
        if (!name.empty()) add({"name", std::string(name)});
        control(Control::sep);
    }
    void close_message() {
        close("message");
        control(Control::end_of_msg);
    }
    /// A message the system writes by itself.
    void notice(std::string_view type, std::string_view body) {
        open("message", {{"role", "system"}, {"type", std::string(type)}});
        text(body);
        close_message();
    }

    bool too_long() const noexcept { return pieces_.size() > kMaxPromptPieces; }
    std::vector<Piece> take() && { return std::move(pieces_); }

  private:
    void control(Control control) { pieces_.push_back({control, {}}); }
    void begin(std::string_view tag) {
        control(Control::open);
        text(tag);
    }
    void add(const Attribute& attribute) {
        text(" " + std::string(attribute.key));
        text("=\"");
        text(escaped(attribute.value));
        text("\"");
    }

    std::vector<Piece> pieces_;
};

class Renderer {
  public:
    explicit Renderer(const ChatRequest& request) : request_(request) {}

    Result<ChatPrompt> render() && {
        if (!request_.tools.empty())
            out_.notice("tool-declare",
                        std::string(kTools) + request_.tools + std::string(kEndOfJson));
        if (request_.thinking())
            out_.notice("thinking-effort", std::string(kEffort) + request_.thinking_effort + "`.");
        RETURN_IF_ERROR(conversation());
        if (request_.tool_choice == "required") out_.notice("tool-choice", kChoiceRequired);
        if (request_.tool_choice == "none") out_.notice("tool-choice", kChoiceNone);
        response_format();
        if (out_.too_long()) return too_long();

        ChatPrompt prompt;
        if (request_.add_generation_prompt) {
            prompt.channel = request_.thinking() ? "think" : "response";
            out_.open_message("assistant");
            out_.open(prompt.channel);
        }
        prompt.pieces = std::move(out_).take();
        return prompt;
    }

  private:
    static Error too_long() {
        return {ErrorCode::resource_exhausted,
                fmt::format("the conversation has more than {} pieces and control tokens, beyond "
                            "any context",
                            kMaxPromptPieces),
                "send fewer or shorter messages"};
    }

    Status conversation() {
        const std::vector<ChatMessage>& messages = request_.messages;
        for (std::size_t i = 0; i < messages.size();) {
            if (out_.too_long()) return too_long();
            if (messages[i].role == Role::tool) {
                std::size_t end = i;
                while (end < messages.size() && messages[end].role == Role::tool) ++end;
                RETURN_IF_ERROR(results(i, end));
                i = end;
                continue;
            }
            message(messages[i]);
            ++i;
        }
        return Status::ok();
    }

    void message(const ChatMessage& message) {
        if (message.role == Role::assistant) {
            assistant(message);
        } else if (!message.declared_tools.empty()) {
            out_.notice("tool-declare",
                        std::string(kNewTools) + message.declared_tools + std::string(kEndOfJson));
        } else {
            out_.open_message(message.role == Role::user ? "user" : "system", message.name);
            for (const std::string& text : message.content) out_.text(text);
            out_.close_message();
        }
    }

    void assistant(const ChatMessage& message) {
        last_assistant_ = &message;
        n_results_ = 0;
        out_.open_message("assistant", message.name);
        // With thinking on the part is there even when it is empty: the model was trained so.
        if (request_.thinking()) {
            out_.open("think");
            out_.text(message.reasoning);
            out_.close("think");
        }
        out_.open("response");
        for (const std::string& text : message.content) out_.text(text);
        out_.close("response");
        if (!message.calls.empty()) {
            out_.open("tools");
            for (std::size_t i = 0; i < message.calls.size() && !out_.too_long(); ++i)
                call(message.calls[i], i + 1);
            out_.close("tools");
        }
        out_.close_message();
    }

    void call(const ToolCall& call, std::size_t index) {
        out_.open("call", {{"tool", call.name}, {"index", std::to_string(index)}});
        if (!call.arguments.raw.empty()) {
            out_.open("json", {{"type", "object"}});
            out_.text(call.arguments.raw);
            out_.close("json");
        }
        for (const CallArgument& argument : call.arguments.members) {
            if (out_.too_long()) break;
            out_.open("argument", {{"key", argument.key}, {"type", std::string(argument.type)}});
            out_.text(argument.text);
            out_.close("argument");
        }
        out_.close("call");
    }

    /// The calls that messages [begin, end) answer by id, as indices into the last assistant
    /// message's calls; empty unless every one of them answers one.
    std::vector<std::size_t> matched_calls(std::size_t begin, std::size_t end) const {
        std::vector<std::size_t> matched;
        if (last_assistant_ == nullptr) return matched;
        std::unordered_map<std::string_view, std::size_t> calls;
        for (std::size_t i = 0; i < last_assistant_->calls.size(); ++i)
            if (const auto& id = last_assistant_->calls[i].id) calls.emplace(*id, i);
        for (std::size_t i = begin; i < end; ++i) {
            const auto& id = request_.messages[i].tool_call_id;
            auto found = id ? calls.find(*id) : calls.end();
            if (found == calls.end()) return {};
            matched.push_back(found->second);
        }
        return matched;
    }

    /// A run of tool results: in the order of the calls if all can be matched to one by id, else as
    /// they come. They are numbered on from the last assistant message.
    Status results(std::size_t begin, std::size_t end) {
        std::vector<std::size_t> calls = matched_calls(begin, end);
        std::vector<std::size_t> order(end - begin);
        std::iota(order.begin(), order.end(), std::size_t{0});
        if (!calls.empty())
            std::stable_sort(order.begin(), order.end(),
                             [&](std::size_t a, std::size_t b) { return calls[a] < calls[b]; });
        for (std::size_t i : order) {
            if (out_.too_long()) return too_long();
            const ChatMessage& message = request_.messages[begin + i];
            ++n_results_;
            std::string_view tool = message.name;
            if (!calls.empty()) {
                tool = last_assistant_->calls[calls[i]].name;
            } else if (tool.empty()) {
                std::size_t n_calls =
                    last_assistant_ == nullptr ? 0 : last_assistant_->calls.size();
                if (n_results_ > n_calls) return unresolvable(begin + i, n_calls);
                tool = last_assistant_->calls[n_results_ - 1].name;
            }
            out_.open("message", {{"role", "tool"},
                                  {"tool", std::string(tool)},
                                  {"index", std::to_string(n_results_)}});
            for (const std::string& text : message.content) out_.text(text);
            out_.close_message();
        }
        return Status::ok();
    }

    Error unresolvable(std::size_t message, std::size_t n_calls) const {
        return {ErrorCode::invalid_argument,
                fmt::format("messages[{}]: tool result {} names no tool, and the last assistant "
                            "message made {} calls",
                            message, n_results_, n_calls),
                "give the result the tool_call_id of a call, or name its tool"};
    }

    void response_format() {
        if (request_.response_format.empty()) return;
        std::string body = std::string(kFormatBegin) + request_.response_format;
        body += kFormatRest;
        if (!request_.response_schema.empty()) {
            body += kSchema;
            body += request_.response_schema;
            body += kEndOfJson;
        }
        out_.notice("response-format", body);
    }

    const ChatRequest& request_;
    Writer out_;
    const ChatMessage* last_assistant_ = nullptr;  // null: none so far
    std::size_t n_results_ = 0;                    // tool results since then
};

}  // namespace

std::string_view to_string(Control control) noexcept {
    constexpr std::string_view kNames[kControlCount] = {"<|open|>", "<|close|>", "<|sep|>",
                                                        "<|end_of_msg|>"};
    return kNames[static_cast<std::size_t>(control)];
}

Result<ChatPrompt> render_chat(const ChatRequest& request) { return Renderer(request).render(); }

Result<ChatEncoder> ChatEncoder::create(const Vocabulary& vocabulary, const Encoder& encoder) {
    ChatEncoder chat(vocabulary, encoder);
    for (std::size_t i = 0; i < kControlCount; ++i) {
        std::string_view name = to_string(static_cast<Control>(i));
        std::optional<std::uint32_t> id = vocabulary.special_id(name);
        if (!id)
            return Error{ErrorCode::incompatible,
                         fmt::format("tokenizer_config.json names no token {}, which conversations "
                                     "are made of",
                                     name),
                         "use the tokenizer files of a Kimi K3 checkpoint"};
        chat.ids_[i] = *id;
    }
    return chat;
}

Result<std::vector<std::uint32_t>> ChatEncoder::encode(std::span<const Piece> pieces) const {
    BytePairMerger merger(*vocabulary_);
    std::vector<std::uint32_t> ids;
    std::size_t bytes = 0;
    for (const Piece& piece : pieces) {
        if (piece.control) {
            ids.push_back(id_of(*piece.control));
            continue;
        }
        bytes += piece.text.size();
        if (bytes > kMaxEncodeBytes)
            return Error{ErrorCode::resource_exhausted,
                         fmt::format("the conversation renders to more than {} bytes of text, the "
                                     "most that is encoded in one call",
                                     kMaxEncodeBytes),
                         "send fewer or shorter messages"};
        encoder_->append(piece.text, merger, ids);
    }
    return ids;
}

}  // namespace k3::tokenizer
