#include "services/experts/trace_recorder.h"

#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include <cerrno>
#include <iterator>
#include <system_error>
#include <utility>

#include "common/base/log.h"
#include "common/storage/file.h"

namespace k3::experts {

namespace {

constexpr std::size_t kMostUnwritten = std::size_t{256} << 10U;  // of a pass with many rows

}  // namespace

Result<TraceRecorder> TraceRecorder::create(const Options& options) {
    Fd fd(::open(options.path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0644));
    if (!fd.valid()) return storage::system_error(errno, "create", options.path);
    return TraceRecorder(options, std::move(fd));
}

TraceRecorder::TraceRecorder(Options options, Fd fd)
    : options_(std::move(options)), fd_(std::move(fd)) {
    lines_ = "position,layer";
    for (std::uint32_t rank = 0; rank < options_.top_k; ++rank)
        fmt::format_to(std::back_inserter(lines_), ",rank{}", rank);
    lines_ += '\n';
}

TraceRecorder::~TraceRecorder() { flush(); }

void TraceRecorder::visit(std::uint32_t layer, std::span<const ExpertUse> uses) {
    if (!fd_.valid()) return;
    if (layer <= last_layer_) {
        flush();
        ++position_;
    } else if (lines_.size() > kMostUnwritten) {
        flush();
    }
    last_layer_ = layer;
    const auto out = std::back_inserter(lines_);
    fmt::format_to(out, "{},{}", position_, layer);
    // The place in the line is the rank, unless rows share the call or other servers its ranks.
    for (std::uint32_t place = 0; place < uses.size(); ++place)
        if (uses[place].rank == place)
            fmt::format_to(out, ",{}", uses[place].expert);
        else
            fmt::format_to(out, ",{}:{}", uses[place].expert, uses[place].rank);
    lines_ += '\n';
}

void TraceRecorder::flush() {
    if (!fd_.valid()) return;
    if (written_bytes_ + lines_.size() > options_.max_bytes) {
        end(fmt::format("it has its {} bytes", options_.max_bytes));
        return;
    }
    for (std::size_t done = 0; done < lines_.size();) {
        const ssize_t got = ::write(fd_.get(), lines_.data() + done, lines_.size() - done);
        if (got < 0 && errno == EINTR) continue;
        if (got <= 0) {
            const std::string why = std::generic_category().message(errno);
            // A line that was cut would make the whole file unreadable.
            if (::ftruncate(fd_.get(), static_cast<off_t>(written_bytes_)) == 0)
                end(why);
            else
                end(why + ", and its last line is damaged");
            return;
        }
        done += static_cast<std::size_t>(got);
    }
    written_bytes_ += lines_.size();
    lines_.clear();
}

void TraceRecorder::end(const std::string& why) {
    log::warn(fmt::format("{}: the recording ends with {} bytes: {}", options_.path.string(),
                          written_bytes_, why));
    fd_.reset();
    lines_ = {};
}

}  // namespace k3::experts
