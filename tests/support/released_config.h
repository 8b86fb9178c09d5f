#pragma once
// The config of a model of released dimensions, without its files.

#include "common/model/config.h"
#include "common/model/synthetic_config.h"

namespace k3::test {

inline const model::ModelConfig& released_config() {
    static const model::ModelConfig config =
        model::parse_config(model::synthetic_config_json(93, 896, 163840), "released sizes")
            .value();
    return config;
}

}  // namespace k3::test
