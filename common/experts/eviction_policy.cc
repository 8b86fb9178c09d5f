#include "common/experts/eviction_policy.h"

#include <string>

#include "common/experts/lru_policy.h"
#include "common/experts/rank_weighted_policy.h"

namespace k3::experts {

Result<std::unique_ptr<EvictionPolicy>> make_policy(std::string_view name,
                                                    const EvictionPolicy::Shape& shape) {
    if (name == "rank-weighted")
        return std::unique_ptr<EvictionPolicy>(std::make_unique<RankWeightedPolicy>(shape));
    if (name == "lru") return std::unique_ptr<EvictionPolicy>(std::make_unique<LruPolicy>(shape));
    return Error{ErrorCode::invalid_argument,
                 "there is no cache policy '" + std::string(name) + "'",
                 "choose rank-weighted or lru"};
}

}  // namespace k3::experts
