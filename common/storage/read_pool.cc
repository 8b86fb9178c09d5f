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

ReadPool::ReadPool(Options options) : options_(std::move(options)) {
    const ReadShape& shape = options_.shape;
    K3_CHECK(
        shape.n_threads > 0 && shape.request_bytes > 0 && shape.request_bytes % kBlockBytes == 0,
        fmt::format("{} threads, requests of {} bytes", shape.n_threads, shape.request_bytes));
    threads_.reserve(shape.n_threads);
    for (std::uint32_t i = 0; i < shape.n_threads; ++i) threads_.emplace_back([this] { run(); });
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
        read.offset_ = offset;
        read.left_ = dst;
        read.status_ = Status::ok();
        push(read, place);
    }
    // As many threads as there are requests in it.
    if (dst.size() > options_.shape.request_bytes)
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

void ReadPool::run() {
    std::uint64_t cpu_before = thread_cpu_ns();
    std::unique_lock lock(mutex_);
    while (true) {
        while (head_ == nullptr && !is_ending_) work_.wait(lock);
        if (is_ending_) return;
        PoolRead& read = *head_;
        const std::uint64_t offset = read.offset_;
        const std::uint64_t unit = read.source_->unit_bytes();
        const std::uint64_t request = (options_.shape.request_bytes + unit - 1) / unit * unit;
        const std::span<std::byte> part = read.left_.first(std::min(read.left_.size(), request));
        read.left_ = read.left_.subspan(part.size());
        read.offset_ += part.size();
        ++read.n_requests_;
        if (read.left_.empty()) {
            remove(read);
            read.state_ = PoolRead::State::reading;
        }
        if (n_busy_++ == 0) busy_since_ = Clock::now();
        lock.unlock();

        Status status;
        if (options_.before_request)
            status = options_.before_request(*read.source_, offset, part.size());
        if (status.has_value()) status = read.source_->read(offset, part);
        const std::uint64_t cpu = thread_cpu_ns();

        lock.lock();
        if (--n_busy_ == 0) totals_.busy_ns += ns_between(busy_since_, Clock::now());
        totals_.cpu_ns += cpu - std::exchange(cpu_before, cpu);
        --read.n_requests_;
        if (status.has_value()) {
            totals_.bytes += part.size();
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
