#pragma once
// Packs of tiny-k3 for tests of whole pipelines, made by `k3pipe pack`.

#include <filesystem>
#include <string>

#include "tests/support/pipeline.h"

namespace k3::test {

class Packs {
  public:
    explicit Packs(World& world) : world_(world) {}

    /// The pack of these layers, e.g. "0-4" or "all". / of this share. Made at the first call.
    std::filesystem::path trunk(const std::string& layers);
    /// The whole trunk, striped: "0/2" and so on.
    std::filesystem::path trunk_part(const std::string& part);
    std::filesystem::path experts(const std::string& share);
    /// A directory with nothing but the model's config.json.
    std::filesystem::path config_only();

  private:
    std::filesystem::path make(const std::string& kind, const std::string& flag,
                               const std::string& value);

    World& world_;
    TempDir dir_;
};

}  // namespace k3::test
