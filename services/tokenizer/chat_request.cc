#include "services/tokenizer/chat_request.h"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "common/base/settings.h"

namespace k3::tokenizer {

namespace {

using Kind = Json::Kind;

constexpr const char* kRemedy = "correct the request; docs/chat.md lists what is accepted";

Error refuse(std::string_view where, std::string_view problem) {
    return {ErrorCode::invalid_argument, fmt::format("{}: {}", where, problem), kRemedy};
}

/// For error sentences: at most the first 40 bytes, on one line.
std::string shown(std::string_view name) {
    std::string out;
    for (char c : name.substr(0, 40)) out += static_cast<unsigned char>(c) < 0x20 ? '?' : c;
    // A character that was cut in two would make the sentence itself ill-formed.
    while (name.size() > 40 && !out.empty() &&
           (static_cast<unsigned char>(out.back()) & 0x80U) != 0)
        out.pop_back();
    return name.size() > 40 ? out + "..." : out;
}

Error wrong_kind(std::string_view where, std::string_view wanted, const Json& value) {
    return refuse(where, fmt::format("must be {}, not {}", wanted, to_string(value.kind)));
}

/// The text of an optional string member; absent and null are "".
Result<std::string> optional_text(const Json& object, std::string_view key,
                                  const std::string& where) {
    const Json* value = object.find(key);
    if (value == nullptr) return std::string();
    if (!value->is(Kind::string))
        return wrong_kind(fmt::format("{}.{}", where, key), "a string", *value);
    return value->text;
}

Result<std::string> parse_part(const Json& part, const std::string& where) {
    if (!part.is(Kind::object)) return wrong_kind(where, "an object", part);
    const Json* type = part.find("type");
    if (type == nullptr || !type->is(Kind::string)) return refuse(where, "has no type");
    if (type->text != "text")
        return Error{ErrorCode::unsupported,
                     fmt::format("{}: content of type \"{}\" cannot be served, only \"text\"",
                                 where, shown(type->text)),
                     "leave out images and other media: this engine runs the text model"};
    const Json* text = part.find("text");
    if (text == nullptr || !text->is(Kind::string)) return refuse(where, "has no text");
    return text->text;
}

/// A string, or a list of parts.
Result<std::vector<std::string>> parse_content(const Json& message, const std::string& where,
                                               bool required) {
    std::vector<std::string> texts;
    const Json* content = message.find("content");
    if (content == nullptr) {
        if (required) return refuse(where, "has no content");
    } else if (content->is(Kind::string)) {
        texts.push_back(content->text);
    } else if (content->is(Kind::array)) {
        for (std::size_t i = 0; i < content->items.size(); ++i) {
            ASSIGN_OR_RETURN(std::string text, parse_part(content->items[i],
                                                          fmt::format("{}.content[{}]", where, i)));
            texts.push_back(std::move(text));
        }
    } else {
        return wrong_kind(where + ".content", "a string or a list of parts", *content);
    }
    return texts;
}

/// The JSON of a list of tools; "" if it is absent or empty.
Result<std::string> parse_tools(const Json& owner, const std::string& where) {
    const Json* tools = owner.find("tools");
    if (tools == nullptr) return std::string();
    if (!tools->is(Kind::array)) return wrong_kind(where, "a list", *tools);
    for (std::size_t i = 0; i < tools->items.size(); ++i)
        if (!tools->items[i].is(Kind::object))
            return wrong_kind(fmt::format("{}[{}]", where, i), "an object", tools->items[i]);
    return tools->items.empty() ? std::string() : to_sorted_json(*tools);
}

Result<ToolCall> parse_call(const Json& value, const std::string& where) {
    if (!value.is(Kind::object)) return wrong_kind(where, "an object", value);
    if (const Json* type = value.find("type"); type != nullptr && type->text != "function")
        return refuse(where + ".type", "must be \"function\"");
    const Json* function = value.find("function");
    if (function == nullptr || !function->is(Kind::object))
        return refuse(where, "has no function object");

    ToolCall call;
    ASSIGN_OR_RETURN(call.name, optional_text(*function, "name", where + ".function"));
    if (call.name.empty()) return refuse(where + ".function", "has no name");
    if (value.find("id") != nullptr) {
        ASSIGN_OR_RETURN(call.id, optional_text(value, "id", where));
    }
    const Json* arguments = function->find("arguments");
    if (arguments == nullptr) return call;
    if (arguments->is(Kind::object)) {
        call.arguments = arguments_of_object(*arguments);
    } else if (arguments->is(Kind::string)) {
        if (!arguments->text.empty()) call.arguments = arguments_of_string(arguments->text);
    } else {
        return wrong_kind(where + ".function.arguments", "an object or a string", *arguments);
    }
    return call;
}

Status parse_assistant(const Json& value, const std::string& where, ChatMessage& message) {
    ASSIGN_OR_RETURN(message.content, parse_content(value, where, false));
    ASSIGN_OR_RETURN(message.reasoning, optional_text(value, "reasoning_content", where));
    if (message.reasoning.empty()) {
        ASSIGN_OR_RETURN(message.reasoning, optional_text(value, "reasoning", where));
    }
    const Json* calls = value.find("tool_calls");
    if (calls == nullptr) return Status::ok();
    if (!calls->is(Kind::array)) return wrong_kind(where + ".tool_calls", "a list", *calls);
    for (std::size_t i = 0; i < calls->items.size(); ++i) {
        ASSIGN_OR_RETURN(ToolCall call,
                         parse_call(calls->items[i], fmt::format("{}.tool_calls[{}]", where, i)));
        message.calls.push_back(std::move(call));
    }
    return Status::ok();
}

Status parse_result(const Json& value, const std::string& where, ChatMessage& message) {
    ASSIGN_OR_RETURN(message.content, parse_content(value, where, true));
    ASSIGN_OR_RETURN(std::string tool, optional_text(value, "tool", where));
    if (!tool.empty()) message.name = std::move(tool);
    if (value.find("tool_call_id") != nullptr) {
        ASSIGN_OR_RETURN(message.tool_call_id, optional_text(value, "tool_call_id", where));
    }
    return Status::ok();
}

Result<Role> parse_role(const Json& value, const std::string& where) {
    const Json* role = value.find("role");
    if (role == nullptr || !role->is(Kind::string)) return refuse(where, "has no role");
    if (role->text == "system") return Role::system;
    if (role->text == "user") return Role::user;
    if (role->text == "assistant") return Role::assistant;
    if (role->text == "tool") return Role::tool;
    return refuse(where, fmt::format("role \"{}\" is none of system, user, assistant, tool",
                                     shown(role->text)));
}

Result<ChatMessage> parse_message(const Json& value, const std::string& where) {
    if (!value.is(Kind::object)) return wrong_kind(where, "an object", value);
    ChatMessage message;
    ASSIGN_OR_RETURN(message.role, parse_role(value, where));
    ASSIGN_OR_RETURN(message.name, optional_text(value, "name", where));
    switch (message.role) {
        case Role::assistant:
            RETURN_IF_ERROR(parse_assistant(value, where, message));
            break;
        case Role::tool:
            RETURN_IF_ERROR(parse_result(value, where, message));
            break;
        case Role::system: {
            ASSIGN_OR_RETURN(message.declared_tools, parse_tools(value, where + ".tools"));
            if (!message.declared_tools.empty()) break;
            [[fallthrough]];
        }
        case Role::user: {
            ASSIGN_OR_RETURN(message.content, parse_content(value, where, true));
            break;
        }
    }
    return message;
}

Status parse_effort(const Json& root, ChatRequest& request) {
    ASSIGN_OR_RETURN(request.thinking_effort, optional_text(root, "thinking_effort", "request"));
    const std::string& effort = request.thinking_effort;
    bool absent = root.find("thinking_effort") == nullptr;
    if (absent || effort == "low" || effort == "high" || effort == "max") return Status::ok();
    return refuse("thinking_effort",
                  fmt::format("\"{}\" is none of low, high, max; leave it out to turn thinking off",
                              shown(effort)));
}

/// Only what the model is told about: auto and a named function add nothing to the prompt.
Status parse_tool_choice(const Json& root, ChatRequest& request) {
    const Json* choice = root.find("tool_choice");
    if (choice == nullptr || choice->is(Kind::object)) return Status::ok();
    if (!choice->is(Kind::string))
        return wrong_kind("tool_choice", "a string or an object", *choice);
    if (choice->text == "auto") return Status::ok();
    if (choice->text != "required" && choice->text != "none")
        return refuse("tool_choice",
                      fmt::format("\"{}\" is none of auto, none, required", shown(choice->text)));
    request.tool_choice = choice->text;
    return Status::ok();
}

Status parse_response_format(const Json& root, ChatRequest& request) {
    const Json* format = root.find("response_format");
    if (format == nullptr) return Status::ok();
    if (!format->is(Kind::object)) return wrong_kind("response_format", "an object", *format);
    ASSIGN_OR_RETURN(std::string type, optional_text(*format, "type", "response_format"));
    if (type == "text") return Status::ok();
    if (type != "json_object" && type != "json_schema")
        return refuse("response_format.type",
                      fmt::format("\"{}\" is none of text, json_object, json_schema", shown(type)));
    request.response_format = type;
    if (type == "json_object") return Status::ok();

    const Json* schema = format->find("json_schema");
    if (schema == nullptr || !schema->is(Kind::object))
        return refuse("response_format", "type json_schema needs the object json_schema");
    for (const char* key : {"schema", "json_schema"}) {
        if (const Json* inner = schema->find(key)) {
            schema = inner;
            break;
        }
    }
    request.response_schema = to_sorted_json(*schema);
    return Status::ok();
}

Status check_keys(const Json& root) {
    const std::array<std::string, 6> known = {"messages",        "tools",
                                              "tool_choice",     "thinking_effort",
                                              "response_format", "add_generation_prompt"};
    for (const JsonMember& member : root.members) {
        if (std::find(known.begin(), known.end(), member.key) != known.end()) continue;
        // Looking for the nearest name costs time with the length of the key.
        std::string nearest = member.key.size() <= 64 ? nearest_name(member.key, known) : "";
        std::string problem = fmt::format("unknown key \"{}\"", shown(member.key));
        if (!nearest.empty()) problem += fmt::format("; did you mean \"{}\"", nearest);
        return refuse("request", problem);
    }
    return Status::ok();
}

}  // namespace

Result<ChatRequest> parse_chat_request(std::string_view json) {
    ASSIGN_OR_RETURN(Json root, parse_json(json, "request"));
    if (!root.is(Kind::object)) return wrong_kind("request", "an object", root);
    RETURN_IF_ERROR(check_keys(root));

    ChatRequest request;
    const Json* messages = root.find("messages");
    if (messages == nullptr) return refuse("request", "has no messages");
    if (!messages->is(Kind::array)) return wrong_kind("messages", "a list", *messages);
    for (std::size_t i = 0; i < messages->items.size(); ++i) {
        ASSIGN_OR_RETURN(ChatMessage message,
                         parse_message(messages->items[i], fmt::format("messages[{}]", i)));
        request.messages.push_back(std::move(message));
    }
    ASSIGN_OR_RETURN(request.tools, parse_tools(root, "tools"));
    RETURN_IF_ERROR(parse_effort(root, request));
    RETURN_IF_ERROR(parse_tool_choice(root, request));
    RETURN_IF_ERROR(parse_response_format(root, request));
    if (const Json* stub = root.find("add_generation_prompt")) {
        if (!stub->is(Kind::boolean))
            return wrong_kind("add_generation_prompt", "true or false", *stub);
        request.add_generation_prompt = stub->boolean;
    }
    return request;
}

}  // namespace k3::tokenizer
