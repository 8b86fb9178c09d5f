#pragma once
// Several boxes on this machine, for tests of pipelines that are spread over them.
//
//   test program (its own network: bridge k3net, 10.77.0.1) --- box 0 (10.77.0.10)
//                                                          \--- box 1 (10.77.0.11) ...
//
// A box is a network, process, mount and host name namespace: an address and a name of its own
// ("box0", "box1", ...), its own /proc and
// /dev/shm (so stages of two boxes cannot meet in shared memory), its own sshd, and a directory of
// the test as its disk. Whatever runs in it dies with it. The rest of the file system is this
// machine's, so a checkpoint or program has the same path everywhere.
//
// The test program leaves the machine's network when it makes its first boxes, so no names or
// addresses can clash, and the kernel takes everything down with it, also after a crash: boxes die
// with the program, and its network with the last process in it.
//
//   TEST_CASE("..." * doctest::skip(!boxes_can_be_made())) {
//       World world;
//       Boxes boxes(world.path(), 2);                        // must end before the World
//       Pipeline pipeline(world, "demo", demo_model_dir(), "[experts]\nhost = 'box1'\n...",
//                         boxes.pipeline_keys());
//
// "box0", "box1", ... are aliases in the ssh settings that pipeline_keys() names.

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/support/delay_link.h"

namespace k3::test {

/// Whether this process may make boxes and everything they need is installed: root, namespaces,
/// ip, sshd, ssh-keygen. Says "NOT RUN: why" once if not.
bool boxes_can_be_made();

/// What /bin/sh prints for a command here; `ok` is whether it ended well.
std::string run_shell(const std::string& command, bool* ok);

class Boxes {
  public:
    /// Makes `n` boxes whose disks are directories below `directory`, and waits until every sshd
    /// listens.
    Boxes(std::filesystem::path directory, std::size_t n);
    ~Boxes();
    Boxes(const Boxes&) = delete;
    Boxes& operator=(const Boxes&) = delete;

    /// Keys of [pipeline] with which a launcher reaches the boxes.
    std::string pipeline_keys() const;
    std::filesystem::path ssh_settings() const { return directory_ / "ssh_config"; }
    std::string address(std::size_t box) const;
    /// Its HOME is home/ in it, its XDG_RUNTIME_DIR run/; whom it lets in stands in
    /// authorized_keys, and what this machine knows of the boxes in known_hosts beside the disks.
    std::filesystem::path disk(std::size_t box) const;

    /// Runs a command in the box to its end, as root, and returns what it printed. What it leaves
    /// in the background is killed then, unless it has a session of its own (setsid).
    std::string run(std::size_t box, const std::string& shell_command) const;
    /// What stages left there: processes that are not the box's own, files in its run directory,
    /// shared-memory segments. One line each.
    std::vector<std::string> leftovers(std::size_t box) const;
    /// Waits until every box that is up has none.
    bool all_clean(std::int64_t ms) const;

    /// Puts a link of this shape between the box and the network, in place of the former one; with
    /// nothing: a plain cable. What passes at that moment is lost.
    void set_link(std::size_t box, const std::optional<LinkShape>& shape);
    /// Of the link that it has now.
    DelayLink::Counts link_counts(std::size_t box) const;
    /// The cable: nothing passes while it is pulled, and nobody is told.
    void pull_cable(std::size_t box);
    void plug_in(std::size_t box);
    /// Everything in it dies at once, as without power. Its disk stays.
    void power_off(std::size_t box);
    void power_on(std::size_t box);
    bool is_on(std::size_t box) const { return boxes_[box].init > 0; }

  private:
    struct Box {
        pid_t init = -1;    // process 1 of it, as seen from here
        pid_t keeper = -1;  // our child that waits for it
        std::unique_ptr<DelayLink> link;
    };
    /// What the bridge sees of it.
    std::string port(std::size_t box) const;
    void write_keys_and_settings() const;
    std::filesystem::path directory_;
    std::vector<Box> boxes_;
};

}  // namespace k3::test
