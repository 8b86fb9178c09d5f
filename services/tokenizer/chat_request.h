#pragma once
// A chat request as plain validated values. docs/chat.md describes the JSON.
//
// Everything that could change what the model is told is judged here, and refused rather than
// guessed: an unknown role or effort, a content part that is not text, a misspelt key.

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "common/base/result.h"
#include "services/tokenizer/call_arguments.h"

namespace k3::tokenizer {

enum class Role { system, user, assistant, tool };

struct ToolCall {
    std::optional<std::string> id;
    std::string name;
    CallArguments arguments;
};

struct ChatMessage {
    Role role = Role::user;
    std::string name;                  // of the speaker; of a tool result, its tool; empty: none
    std::vector<std::string> content;  // texts that are encoded one by one
    // Of a system message that declares tools (its content is ignored): their JSON, sorted.
    std::string declared_tools;
    // Of the assistant:
    std::string reasoning;
    std::vector<ToolCall> calls;
    // Of a tool result:
    std::optional<std::string> tool_call_id;
};

struct ChatRequest {
    std::vector<ChatMessage> messages;
    std::string tools;            // their JSON, sorted; empty: none
    std::string thinking_effort;  // low, high or max; empty: thinking off
    std::string tool_choice;      // required or none; empty: nothing to say
    std::string response_format;  // json_object or json_schema; empty: free text
    std::string response_schema;  // of json_schema: its JSON, sorted
    bool add_generation_prompt = true;

    bool thinking() const noexcept { return !thinking_effort.empty(); }
};

/// Errors: invalid_argument (not JSON, or the place in the request and what is wrong with it),
/// unsupported (content other than text). Request texts are not quoted, only short names are.
Result<ChatRequest> parse_chat_request(std::string_view json);

}  // namespace k3::tokenizer
