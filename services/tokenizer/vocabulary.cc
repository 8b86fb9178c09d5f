#include "services/tokenizer/vocabulary.h"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "common/storage/file.h"
#include "services/tokenizer/json.h"
#include "services/tokenizer/rank_file.h"

namespace k3::tokenizer {

namespace {

constexpr const char* kRankFile = "tiktoken.model";
constexpr const char* kConfigFile = "tokenizer_config.json";
constexpr const char* kRemedy = "use the tokenizer files that belong to this checkpoint";

/// The released file has 2.8 MB; a path that leads to a weight shard should not be read whole.
constexpr std::size_t kMaxFileBytes = std::size_t{64} << 20U;

struct NamedSlot {
    std::string name;
    bool marked = false;
};

}  // namespace

/// Puts the two files together, judging tokenizer_config.json on the way.
class VocabularyBuilder {
  public:
    VocabularyBuilder(std::vector<std::string> tokens, std::uint32_t vocab_size, std::string where)
        : tokens_(std::move(tokens)),
          n_ranks_(static_cast<std::uint32_t>(tokens_.size())),
          vocab_size_(vocab_size),
          config_file_(where + "/" + kConfigFile),
          where_(std::move(where)) {}

    Status check_sizes() const {
        if (std::uint64_t{n_ranks_} + kSpecialSlots == vocab_size_) return Status::ok();
        return Error{ErrorCode::incompatible,
                     fmt::format("{}/{} holds {} tokens, which with {} special slots makes {} ids, "
                                 "but the config's vocab_size is {}",
                                 where_, kRankFile, n_ranks_, kSpecialSlots,
                                 std::uint64_t{n_ranks_} + kSpecialSlots, vocab_size_),
                     kRemedy};
    }

    /// Every entry of added_tokens_decoder into its slot.
    Status name_slots(const Json& config) {
        slots_.resize(kSpecialSlots);
        const Json* added = config.find("added_tokens_decoder");
        if (added == nullptr || !added->is(Json::Kind::object))
            return refuse(
                "added_tokens_decoder, an object that names the special tokens, is missing");
        for (const JsonMember& entry : added->members) RETURN_IF_ERROR(name_slot(entry));
        for (std::uint32_t i = 0; i < kSpecialSlots; ++i)
            if (slots_[i].name.empty())
                slots_[i].name = fmt::format("<|reserved_token_{}|>", n_ranks_ + i);
        return Status::ok();
    }

    /// eos_token is the spelling, or an object with it as `content`.
    Status find_eos(const Json& config, const Vocabulary& vocabulary, std::uint32_t& eos_id) const {
        const Json* eos = config.find("eos_token");
        if (eos != nullptr && eos->is(Json::Kind::object)) eos = eos->find("content");
        if (eos == nullptr || !eos->is(Json::Kind::string))
            return refuse("eos_token, the spelling of a special token, is missing");
        auto id = vocabulary.special_id(eos->text);
        if (!id)
            return refuse(fmt::format("eos_token \"{}\" is none of the special tokens", eos->text));
        eos_id = *id;
        return Status::ok();
    }

    Result<Vocabulary> build() {
        Vocabulary vocabulary;
        vocabulary.n_ranks_ = n_ranks_;
        std::size_t total = 0;
        for (const std::string& token : tokens_) total += token.size();
        for (const NamedSlot& slot : slots_) total += slot.name.size();
        vocabulary.bytes_.reserve(total);
        auto append = [&](std::string_view token) {
            vocabulary.begins_.push_back(static_cast<std::uint32_t>(vocabulary.bytes_.size()));
            vocabulary.bytes_.insert(vocabulary.bytes_.end(), token.begin(), token.end());
        };
        for (const std::string& token : tokens_) {
            append(token);
            vocabulary.max_token_bytes_ = std::max(vocabulary.max_token_bytes_, token.size());
        }
        for (const NamedSlot& slot : slots_) {
            append(slot.name);
            vocabulary.marked_.push_back(slot.marked);
        }
        vocabulary.begins_.push_back(static_cast<std::uint32_t>(total));
        vocabulary.ranks_.reserve(n_ranks_);
        for (std::uint32_t id = 0; id < n_ranks_; ++id)
            vocabulary.ranks_.emplace(vocabulary.token(id), id);
        RETURN_IF_ERROR(check_spellings(vocabulary));
        return vocabulary;
    }

  private:
    Status name_slot(const JsonMember& entry) {
        std::uint32_t id = 0;
        const char* end = entry.key.data() + entry.key.size();
        auto [stop, failure] = std::from_chars(entry.key.data(), end, id);
        if (failure != std::errc() || stop != end)
            return refuse(fmt::format("added_tokens_decoder: \"{}\" is not an id", entry.key));
        if (id < n_ranks_ || id >= vocab_size_)
            return refuse(
                fmt::format("added_tokens_decoder: id {} is outside the special slots {} to {}", id,
                            n_ranks_, vocab_size_ - 1));
        const Json* content = entry.value.find("content");
        const Json* marked = entry.value.find("special");
        if (content == nullptr || !content->is(Json::Kind::string) || content->text.empty() ||
            marked == nullptr || !marked->is(Json::Kind::boolean))
            return refuse(
                fmt::format("added_tokens_decoder: id {} needs \"content\", a non-empty "
                            "string, and \"special\", true or false",
                            id));
        NamedSlot& slot = slots_[id - n_ranks_];
        if (!slot.name.empty())
            return refuse(fmt::format("added_tokens_decoder: id {} is given twice", id));
        slot = {content->text, marked->boolean};
        return Status::ok();
    }

    Status check_spellings(const Vocabulary& vocabulary) const {
        std::unordered_map<std::string_view, std::uint32_t> seen;
        for (std::uint32_t id = n_ranks_; id < vocab_size_; ++id) {
            auto [first, inserted] = seen.emplace(vocabulary.token(id), id);
            if (!inserted)
                return refuse(fmt::format("ids {} and {} are both spelled \"{}\"", first->second,
                                          id, vocabulary.token(id)));
        }
        return Status::ok();
    }

    Error refuse(const std::string& problem) const {
        return {ErrorCode::corrupt, config_file_ + ": " + problem, kRemedy};
    }

    std::vector<std::string> tokens_;
    std::vector<NamedSlot> slots_;
    std::uint32_t n_ranks_;
    std::uint32_t vocab_size_;
    std::string config_file_;
    std::string where_;
};

std::optional<std::uint32_t> Vocabulary::special_id(std::string_view name) const {
    for (std::uint32_t id = n_ranks_; id < size(); ++id)
        if (token(id) == name) return id;
    return std::nullopt;
}

Result<Vocabulary> Vocabulary::load(const std::filesystem::path& directory,
                                    std::uint32_t vocab_size) {
    ASSIGN_OR_RETURN(std::string ranks,
                     storage::read_text_file(directory / kRankFile, kMaxFileBytes));
    ASSIGN_OR_RETURN(std::string config,
                     storage::read_text_file(directory / kConfigFile, kMaxFileBytes));
    return parse(ranks, config, vocab_size, directory.string());
}

Result<Vocabulary> Vocabulary::parse(std::string_view tiktoken_model,
                                     std::string_view tokenizer_config, std::uint32_t vocab_size,
                                     const std::string& where) {
    ASSIGN_OR_RETURN(std::vector<std::string> tokens,
                     parse_rank_file(tiktoken_model, where + "/" + kRankFile));
    VocabularyBuilder builder(std::move(tokens), vocab_size, where);
    RETURN_IF_ERROR(builder.check_sizes());

    Result<Json> config = parse_json(tokenizer_config, where + "/" + kConfigFile);
    if (!config) return Error{ErrorCode::corrupt, config.error().message, kRemedy};
    RETURN_IF_ERROR(builder.name_slots(*config));
    ASSIGN_OR_RETURN(Vocabulary vocabulary, builder.build());
    RETURN_IF_ERROR(builder.find_eos(*config, vocabulary, vocabulary.eos_id_));
    return vocabulary;
}

}  // namespace k3::tokenizer
