// A store that reads no faster than it is told to: the same bytes, later.

#include "services/experts/limited_store.h"

#include <doctest/doctest.h>

#include <memory>
#include <thread>
#include <vector>

#include "tests/unit/services/experts/aligned_slot.h"
#include "tests/unit/services/experts/fake_store.h"

using namespace k3;
using namespace k3::experts;
using k3::test::AlignedSlot;
using k3::test::FakeStore;

TEST_CASE("reads take turns on a limited store, and bring what the store behind it has") {
    auto behind = std::make_unique<FakeStore>();
    LimitedStore store(std::move(behind), FakeStore::kBytes * 20);  // 50 ms a record
    const Clock::time_point start = Clock::now();
    {
        std::vector<std::jthread> readers;
        for (std::uint32_t e = 0; e < 3; ++e)
            readers.emplace_back([&store, e] {
                AlignedSlot slot(store);
                const auto record = store.read({1, e}, slot.span());
                CHECK(record.has_value());
                if (record.has_value()) CHECK(FakeStore::holds(*record, {1, e}));
            });
    }
    CHECK(Clock::now() - start >= std::chrono::milliseconds(149));
    CHECK(store.counts().read_bytes == 3 * FakeStore::kBytes);
    CHECK(store.record_bytes() == FakeStore::kBytes);
}
