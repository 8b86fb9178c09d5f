#include "common/pack/packed_model.h"

#include <fmt/format.h>

#include <string>
#include <string_view>
#include <system_error>
#include <utility>

#include "common/model/tensor_names.h"
#include "common/storage/checkpoint.h"

namespace k3::pack {

namespace {

Error of_another(const std::filesystem::path& directory, const Pack& pack, std::string_view what,
                 std::string_view theirs, std::string_view ours) {
    return Error{ErrorCode::incompatible,
                 fmt::format("{} was made from another checkpoint than {}: its {} is {}, not {}",
                             pack.path().string(), directory.string(), what, theirs, ours),
                 "give the pack of this checkpoint, or make it with k3pipe pack"};
}

}  // namespace

Status check_origin(const Pack& pack, const std::filesystem::path& directory,
                    const model::Model& model) {
    if (!model.fingerprint.empty()) {
        if (model.fingerprint == pack.origin().fingerprint) return Status::ok();
        return of_another(directory, pack, "fingerprint", pack.origin().fingerprint,
                          model.fingerprint);
    }
    const std::string digest = model::config_digest(model.config);
    if (digest == pack.origin().config_digest) return Status::ok();
    return of_another(directory, pack, "config digest", pack.origin().config_digest, digest);
}

Result<model::Model> open_packed_model(const std::filesystem::path& directory, const Pack& pack) {
    std::error_code ignored;
    model::Model model;
    if (std::filesystem::exists(directory / storage::kIndexName, ignored)) {
        ASSIGN_OR_RETURN(model, model::open_model(directory));
    } else {
        ASSIGN_OR_RETURN(model.config, model::load_config(directory));
    }
    RETURN_IF_ERROR(check_origin(pack, directory, model));
    model.fingerprint = pack.origin().fingerprint;
    return model;
}

}  // namespace k3::pack
