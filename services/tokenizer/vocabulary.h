#pragma once
// The vocabulary of a checkpoint: which bytes every id stands for.
//
// Ids 0..n_ranks-1 are byte-pair tokens, read from `tiktoken.model` (base64 of the bytes, a space,
// the rank; one a line). The 256 ids after them are special slots: those that
// `tokenizer_config.json` lists under added_tokens_decoder are spelled as it says, the others
// <|reserved_token_ID|>. Names are taken from the model's own files only: earlier models of the
// family have the same ids under other names.

#include <cstdint>
#include <filesystem>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/base/result.h"

namespace k3::tokenizer {

/// Special slots after the byte-pair ranks, in every model of the family.
inline constexpr std::uint32_t kSpecialSlots = 256;

/// Immutable once loaded: any number of threads may use it.
class Vocabulary {
  public:
    /// Reads the two files of a model directory. `vocab_size` is config.json's.
    /// Errors: not_found, io; corrupt (a line or entry that cannot be read, a rank that is missing
    /// or given twice, a byte without a token; file and line named); incompatible (the files and
    /// `vocab_size` do not add up, all numbers named).
    static Result<Vocabulary> load(const std::filesystem::path& directory,
                                   std::uint32_t vocab_size);

    /// The same from memory; `where` is the directory named in errors.
    static Result<Vocabulary> parse(std::string_view tiktoken_model,
                                    std::string_view tokenizer_config, std::uint32_t vocab_size,
                                    const std::string& where);

    Vocabulary(Vocabulary&&) = default;
    Vocabulary& operator=(Vocabulary&&) = default;
    Vocabulary(const Vocabulary&) = delete;
    Vocabulary& operator=(const Vocabulary&) = delete;
    ~Vocabulary() = default;

    std::uint32_t size() const noexcept { return static_cast<std::uint32_t>(begins_.size() - 1); }
    std::uint32_t n_ranks() const noexcept { return n_ranks_; }
    /// Of the longest byte-pair token.
    std::size_t max_token_bytes() const noexcept { return max_token_bytes_; }
    /// The tokenizer's own end-of-sequence id (eos_token).
    std::uint32_t eos_id() const noexcept { return eos_id_; }

    /// The bytes of an id below size(); of a special slot, its spelling.
    std::string_view token(std::uint32_t id) const noexcept {
        return std::string_view(bytes_.data() + begins_[id], begins_[id + 1] - begins_[id]);
    }
    bool is_special_slot(std::uint32_t id) const noexcept { return id >= n_ranks_; }
    /// True for the slots the model marks "special": a skipping decode leaves them out. The tags of
    /// the chat format are not marked, so that parsers of the output still see them.
    bool is_marked_special(std::uint32_t id) const noexcept {
        return id >= n_ranks_ && marked_[id - n_ranks_];
    }

    /// The byte-pair token that is exactly `bytes`.
    std::optional<std::uint32_t> rank_of(std::string_view bytes) const {
        auto found = ranks_.find(bytes);
        if (found == ranks_.end()) return std::nullopt;
        return found->second;
    }
    /// The special slot spelled `name`.
    std::optional<std::uint32_t> special_id(std::string_view name) const;

  private:
    friend class VocabularyBuilder;
    Vocabulary() = default;

    // A moved std::vector keeps its storage, which the views in `ranks_` point into.
    std::vector<char> bytes_;            // of all tokens, in order of id
    std::vector<std::uint32_t> begins_;  // [size() + 1] offsets into bytes_
    std::unordered_map<std::string_view, std::uint32_t> ranks_;
    std::vector<bool> marked_;  // [kSpecialSlots]
    std::uint32_t n_ranks_ = 0;
    std::size_t max_token_bytes_ = 0;
    std::uint32_t eos_id_ = 0;
};

}  // namespace k3::tokenizer
