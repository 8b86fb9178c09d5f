#pragma once
// The text files of a synthetic checkpoint; see synthetic.h.

#include <cstdint>
#include <string>

namespace k3::model {

/// config.json with the released dimensions of a layer.
std::string synthetic_config_json(std::uint32_t n_layers, std::uint32_t n_experts,
                                  std::uint32_t vocab_size);

/// tiktoken.model for vocab_size - 256 ranks: every byte, then words of two and more letters.
std::string synthetic_ranks(std::uint32_t vocab_size);

/// tokenizer_config.json: the special tokens of the family in the last 256 ids.
std::string synthetic_tokenizer_config(std::uint32_t vocab_size);

}  // namespace k3::model
