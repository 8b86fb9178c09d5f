#pragma once
// The states of one stage and of the pipeline, and the whole of their transitions.
//
//   state        event              next          what the supervisor does on the way
//   ----------------------------------------------------------------------------------------------
//   waiting      launched           starting      a process of ours runs (or one is attached)
//   starting     answered_loading   loading       progress lines from now on
//   starting     answered_ready     ready
//   loading      answered_ready     ready         "ready" line; all ready: the pipeline is
//   loading      answered_loading   loading       shows progress, extends the start timeout
//   ready        answered_loading   loading       another instance took the place (attached ones)
//   ready        silent             lost          one warning; nobody kills what may be debugged
//   lost         answered_ready     ready
//   lost         answered_loading   loading
//   starting     exited             backing_off   restart after a pause, bounded in number
//   loading      exited             backing_off
//   ready        exited             backing_off
//   lost         exited             backing_off
//   backing_off  launched           starting
//   (any living) refused            failed        bad settings or model, too many restarts,
//                                                 start timeout: the pipeline ends with a sentence
//   (any living) stop_asked         stopping      SIGTERM to the group in its turn, later SIGKILL
//                                                 (stop_sequence.h)
//   stopping     exited             stopped
//   (no process) stop_asked         stopped
//
// "Living" states have a process or an attached peer: starting, loading, ready, lost. Whether an
// exit is answered with `exited` (try again) or `refused` (give up) is judge_exit's decision.

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace k3::launcher {

enum class StageState : std::uint8_t {
    waiting,
    starting,
    loading,
    ready,
    lost,
    backing_off,
    stopping,
    stopped,
    failed,
};

enum class StageEvent : std::uint8_t {
    launched,
    answered_loading,
    answered_ready,
    silent,
    exited,
    refused,
    stop_asked,
};

struct Transition {
    StageState from;
    StageEvent event;
    StageState to;
};

inline constexpr std::array kTransitions = {
    Transition{StageState::waiting, StageEvent::launched, StageState::starting},
    Transition{StageState::waiting, StageEvent::refused, StageState::failed},
    Transition{StageState::waiting, StageEvent::stop_asked, StageState::stopped},
    Transition{StageState::starting, StageEvent::answered_loading, StageState::loading},
    Transition{StageState::starting, StageEvent::answered_ready, StageState::ready},
    Transition{StageState::starting, StageEvent::exited, StageState::backing_off},
    Transition{StageState::starting, StageEvent::refused, StageState::failed},
    Transition{StageState::starting, StageEvent::stop_asked, StageState::stopping},
    Transition{StageState::loading, StageEvent::answered_loading, StageState::loading},
    Transition{StageState::loading, StageEvent::answered_ready, StageState::ready},
    Transition{StageState::loading, StageEvent::exited, StageState::backing_off},
    Transition{StageState::loading, StageEvent::refused, StageState::failed},
    Transition{StageState::loading, StageEvent::stop_asked, StageState::stopping},
    Transition{StageState::ready, StageEvent::answered_loading, StageState::loading},
    Transition{StageState::ready, StageEvent::answered_ready, StageState::ready},
    Transition{StageState::ready, StageEvent::silent, StageState::lost},
    Transition{StageState::ready, StageEvent::exited, StageState::backing_off},
    Transition{StageState::ready, StageEvent::refused, StageState::failed},
    Transition{StageState::ready, StageEvent::stop_asked, StageState::stopping},
    Transition{StageState::lost, StageEvent::answered_loading, StageState::loading},
    Transition{StageState::lost, StageEvent::answered_ready, StageState::ready},
    Transition{StageState::lost, StageEvent::exited, StageState::backing_off},
    Transition{StageState::lost, StageEvent::refused, StageState::failed},
    Transition{StageState::lost, StageEvent::stop_asked, StageState::stopping},
    Transition{StageState::backing_off, StageEvent::launched, StageState::starting},
    Transition{StageState::backing_off, StageEvent::refused, StageState::failed},
    Transition{StageState::backing_off, StageEvent::stop_asked, StageState::stopped},
    Transition{StageState::stopping, StageEvent::exited, StageState::stopped},
    Transition{StageState::failed, StageEvent::stop_asked, StageState::failed},
};

/// The state after `event`; nothing if the event means nothing in `from` (a late answer of a
/// process that is being stopped, say) and is to be ignored.
constexpr std::optional<StageState> next_state(StageState from, StageEvent event) noexcept {
    for (const Transition& transition : kTransitions)
        if (transition.from == from && transition.event == event) return transition.to;
    return std::nullopt;
}

std::string_view to_string(StageState state) noexcept;

}  // namespace k3::launcher
