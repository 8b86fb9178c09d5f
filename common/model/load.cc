#include "common/model/load.h"

#include <utility>

#include "common/model/tensor_names.h"

namespace k3::model {

Result<Model> open_model(const std::filesystem::path& directory) {
    Model model;
    ASSIGN_OR_RETURN(model.config, load_config(directory));
    storage::Checkpoint::Options options;
    options.directory = directory;
    ASSIGN_OR_RETURN(model.checkpoint, storage::Checkpoint::open(std::move(options)));
    ASSIGN_OR_RETURN(model.fingerprint, fingerprint(*model.checkpoint, model.config));
    return model;
}

}  // namespace k3::model
