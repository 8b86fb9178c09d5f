#pragma once
// Private to common/storage: strings of a simdjson document without copying them, and its end.
//
// The library unescapes every string into a second buffer as large as the document (60 MB for the
// released index). Tensor and file names hold no escapes, so they are read in place.

#include <simdjson.h>

#include <cstring>
#include <string_view>

namespace k3::storage {

/// The text between the quotes. Throws simdjson_error if it contains an escape, which no name in a
/// checkpoint does. Valid as long as the document's buffer.
inline std::string_view plain_text(simdjson::ondemand::raw_json_string raw) {
    const char* begin = raw.raw();
    // The tokenizer of the library has already matched the quotes, so there is a closing one.
    const char* end = begin;
    while (*end != '"') {
        if (*end == '\\') throw simdjson::simdjson_error(simdjson::STRING_ERROR);
        ++end;
    }
    return {begin, static_cast<std::size_t>(end - begin)};
}

/// Throws simdjson_error if something follows the document's root value, which has been read.
inline void require_end(simdjson::ondemand::document& document) {
    if (document.current_location().error() != simdjson::OUT_OF_BOUNDS)
        throw simdjson::simdjson_error(simdjson::TAPE_ERROR);
}

}  // namespace k3::storage
