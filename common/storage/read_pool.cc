#include "common/storage/read_pool.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <ctime>
#include <utility>

#include "common/storage/direct_file.h"

namespace k3::storage {

namespace {

constexpr std::chrono::milliseconds kAskEvery{50};

std::uint64_t thread_cpu_ns() noexcept {
    timespec now{};
    ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
    return static_cast<std::uint64_t>(now.tv_sec) * 1'000'000'000U +
           static_cast<std::uint64_t>(now.tv_nsec);
}

std::uint64_t ns_between(Clock::time_point begin, Clock::time_point end) {
    return static_cast<std::uint64_t>(
        std::chrono::duration_cast<std::chrono::nanoseconds>(end - begin).count());
}

}  // namespace

/// Where each lane begins in [begin_, end_).
void PoolRead::set_lanes() noexcept {
    at_.fill(end_);
    at_[0] = begin_;
    if (lanes_.count > 1) {
        const std::uint64_t first = begin_ / lanes_.stripe_bytes;
        for (std::uint64_t i = 0; i < lanes_.count; ++i)
            at_[(first + i) % lanes_.count] = std::max(begin_, (first + i) * lanes_.stripe_bytes);
    }
    n_lanes_left_ = 0;
    for (std::uint32_t lane = 0; lane < lanes_.count; ++lane)
        if (has_request(lane)) ++n_lanes_left_;
}

PoolRead::Request PoolRead::take_request(std::uint32_t lane, std::size_t request_bytes) noexcept {
    const std::uint64_t unit = source_->unit_bytes();
    const std::uint64_t offset = at_[lane];
    std::uint64_t bytes = std::min((request_bytes + unit - 1) / unit * unit, end_ - offset);
    at_[lane] += bytes;
    if (lanes_.count > 1) {
        const std::uint64_t stripe_end = (offset / lanes_.stripe_bytes + 1) * lanes_.stripe_bytes;
        bytes = std::min(bytes, stripe_end - offset);
        at_[lane] = offset + bytes;
        if (at_[lane] == stripe_end) at_[lane] += (lanes_.count - 1) * lanes_.stripe_bytes;
    }
    if (!has_request(lane)) --n_lanes_left_;
    return {offset, dst_.subspan(offset - begin_, bytes)};
}

ReadPool::ReadPool(Options options) : options_(std::move(options)) {
    const ReadShape& shape = options_.shape;
    K3_CHECK(
        shape.n_threads > 0 && shape.request_bytes > 0 && shape.request_bytes % kBlockBytes == 0,
        fmt::format("{} threads, requests of {} bytes", shape.n_threads, shape.request_bytes));
    K3_CHECK(options_.n_lanes > 0 && options_.n_lanes <= kMaxLanes,
             fmt::format("{} lanes", options_.n_lanes));
    threads_.reserve(std::size_t{shape.n_threads} * options_.n_lanes);
    for (std::uint32_t i = 0; i < shape.n_threads; ++i)
        for (std::uint32_t lane = 0; lane < options_.n_lanes; ++lane)
            threads_.emplace_back([this, lane] { run(lane); });
}

ReadPool::~ReadPool() {
    {
        const std::lock_guard lock(mutex_);
        is_ending_ = true;
    }
    work_.notify_all();
    for (std::thread& thread : threads_) thread.join();
}

void ReadPool::start(PoolRead& read, const ReadSource& source, std::uint64_t offset,
                     std::span<std::byte> dst, Place place) {
    K3_CHECK(read.state_ == PoolRead::State::idle && !dst.empty(), "a read is started once");
    {
        const std::lock_guard lock(mutex_);
        read.source_ = &source;
        read.lanes_ = source.lanes();
        K3_CHECK(read.lanes_.count <= options_.n_lanes,
                 fmt::format("{} lanes of {}", read.lanes_.count, options_.n_lanes));
        read.begin_ = offset;
        read.end_ = offset + dst.size();
        read.dst_ = dst;
        read.set_lanes();
        read.status_ = Status::ok();
        push(read, place);
    }
    // As many threads as there are requests in it; a single one may be for any of the lanes.
    if (dst.size() > options_.shape.request_bytes || options_.n_lanes > 1)
        work_.notify_all();
    else
        work_.notify_one();
}

Status ReadPool::wait(PoolRead& read, const std::function<bool()>& stopping) {
    std::unique_lock lock(mutex_);
    while (read.state_ != PoolRead::State::idle) {
        if (!stopping) {
            done_.wait(lock);
            continue;
        }
        if (done_.wait_for(lock, kAskEvery) == std::cv_status::no_timeout) continue;
        lock.unlock();
        const bool gives_up = stopping();
        lock.lock();
        if (gives_up && read.state_ != PoolRead::State::idle)
            return Error{ErrorCode::cancelled, "stopped while reading", ""};
    }
    return std::exchange(read.status_, Status::ok());
}

void ReadPool::cancel(PoolRead& read) {
    std::unique_lock lock(mutex_);
    if (read.state_ == PoolRead::State::queued) {
        remove(read);
        read.state_ = read.n_requests_ == 0 ? PoolRead::State::idle : PoolRead::State::reading;
    }
    while (read.state_ != PoolRead::State::idle) done_.wait(lock);
}

ReadPool::Totals ReadPool::totals() const {
    const std::lock_guard lock(mutex_);
    Totals totals = totals_;
    if (n_busy_ > 0) totals.busy_ns += ns_between(busy_since_, Clock::now());
    return totals;
}

/// The first that has something left in this lane.
PoolRead* ReadPool::next_read(std::uint32_t lane) const noexcept {
    PoolRead* read = head_;
    while (read != nullptr && !read->has_request(lane)) read = read->next_;
    return read;
}

void ReadPool::run(std::uint32_t lane) {
    std::uint64_t cpu_before = thread_cpu_ns();
    std::unique_lock lock(mutex_);
    while (true) {
        PoolRead* next = nullptr;
        while (!is_ending_ && (next = next_read(lane)) == nullptr) work_.wait(lock);
        if (is_ending_) return;
        PoolRead& read = *next;
        const PoolRead::Request request = read.take_request(lane, options_.shape.request_bytes);
        ++read.n_requests_;
        if (read.n_lanes_left_ == 0) {
            remove(read);
            read.state_ = PoolRead::State::reading;
        }
        if (n_busy_++ == 0) busy_since_ = Clock::now();
        lock.unlock();

        Status status;
        if (options_.before_request)
            status = options_.before_request(*read.source_, request.offset, request.bytes.size());
        if (status.has_value()) status = read.source_->read(request.offset, request.bytes);
        const std::uint64_t cpu = thread_cpu_ns();

        lock.lock();
        if (--n_busy_ == 0) totals_.busy_ns += ns_between(busy_since_, Clock::now());
        totals_.cpu_ns += cpu - std::exchange(cpu_before, cpu);
        --read.n_requests_;
        if (status.has_value()) {
            totals_.bytes += request.bytes.size();
            totals_.lane_bytes[lane] += request.bytes.size();
        } else {
            if (read.status_.has_value()) read.status_ = std::move(status);
            if (read.state_ == PoolRead::State::queued) {  // the rest would be of no use
                remove(read);
                read.state_ = PoolRead::State::reading;
            }
        }
        if (read.state_ == PoolRead::State::reading && read.n_requests_ == 0) {
            read.state_ = PoolRead::State::idle;
            done_.notify_all();
        }
    }
}

void ReadPool::push(PoolRead& read, Place place) {
    read.state_ = PoolRead::State::queued;
    read.next_ = nullptr;
    if (head_ == nullptr) {
        head_ = tail_ = &read;
    } else if (place == Place::first) {
        read.next_ = head_;
        head_ = &read;
    } else {
        tail_->next_ = &read;
        tail_ = &read;
    }
}

void ReadPool::remove(PoolRead& read) {
    PoolRead* before = nullptr;
    for (PoolRead* at = head_; at != &read; at = at->next_) before = at;
    (before == nullptr ? head_ : before->next_) = read.next_;
    if (tail_ == &read) tail_ = before;
}

}  // namespace k3::storage
