#include <pthread.h>

#include <atomic>
#include <thread>

#include "src/engine/engine.h"

namespace sluice {

struct EngineThread::State {
  Engine* engine;
  std::atomic<bool> idle{false};
  std::thread thread;
};

EngineThread::EngineThread(Engine* engine) : state_(new State{engine, {}, {}}) {
  state_->thread = std::thread([state = state_.get()] {
    pthread_setname_np(pthread_self(), "engine");
    while (!state->idle) {
      const Engine::Next next = state->engine->Turn();
      switch (next.kind) {
        case Engine::Next::Kind::kNow:
          break;
        case Engine::Next::Kind::kEvent:
          // If there is a time limit too, the wait is in the inbox: an event cannot end a wait
          // there.
          if (next.until == absl::InfiniteFuture()) {
            next.event->Wait();
          } else if (!next.event->Ready()) {
            state->engine->WaitForInbox(next.until);
          }
          break;
        case Engine::Next::Kind::kInbox:
          if (!state->idle) state->engine->WaitForInbox(next.until);
          break;
      }
    }
  });
}

EngineThread::~EngineThread() {
  state_->engine->Drain(absl::InfinitePast(), absl::UnavailableError("the server is shutting down"),
                        [state = state_.get()] { state->idle = true; });
  state_->thread.join();
}

}  // namespace sluice
