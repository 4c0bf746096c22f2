#include "parallel/worker_group.h"

#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <exception>
#include <mutex>
#include <stdexcept>
#include <system_error>
#include <utility>

#include "core/error.h"

namespace kdt {
namespace {

using SteadyClock = std::chrono::steady_clock;
using Time = SteadyClock::time_point;

// How often run() looks whether the group has ended under ranks that are all at work.
constexpr auto kLook = std::chrono::milliseconds(100);

thread_local const void* working_for = nullptr;  // the state whose worker this thread is

SteadyClock::duration seconds(double count) {
  return std::chrono::duration_cast<SteadyClock::duration>(std::chrono::duration<double>(count));
}

std::string text_of(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::exception& known) {
    return known.what();
  } catch (...) {
    return "unknown exception";
  }
}

bool is_invalid_argument(const std::exception_ptr& error) {
  try {
    std::rethrow_exception(error);
  } catch (const std::invalid_argument&) {
    return true;
  } catch (...) {
    return false;
  }
}

}  // namespace

struct WorkerGroup::State {
  struct Worker {
    bool busy = false;
    bool ended = false;
    std::exception_ptr error;
  };

  std::vector<std::unique_ptr<RankGroup>> ranks;
  std::mutex run_mutex;  // of run()
  std::mutex mutex;      // of all below
  std::condition_variable wake, changed;
  std::vector<Worker> workers;
  std::shared_ptr<const std::function<void(int)>> body;
  uint64_t job = 0;
  int busy = 0;
  int first_failed = -1;  // in this job
  Time last_done;
  bool stop = false;
  std::string failure;

  double timeout_s() const { return ranks[0]->timeout_s(); }
  std::string name(int i) const { return join("rank ", ranks[i]->rank()); }

  // Of rank i's body. The first failure is written down before it wakes the others, whose errors
  // follow from it.
  void finish(int i, const std::exception_ptr& error) {
    std::string text;
    bool refused = false;
    if (error) {
      text = name(i) + ": " + text_of(error);
      refused = is_invalid_argument(error);
      std::lock_guard lock(mutex);
      workers[i].error = error;
      if (first_failed < 0) first_failed = i;
    }
    if (!error) {
      ranks[i]->set_away(name(i) + " was done while another rank waited for it");
    } else if (refused) {
      ranks[i]->set_away(text);
    } else if (ranks[i]->size() > 1) {
      ranks[i]->abort(text);
    }
    std::lock_guard lock(mutex);
    workers[i].busy = false;
    --busy;
    last_done = SteadyClock::now();
    changed.notify_all();
  }

  bool all_refused_alike() const {
    return std::all_of(workers.begin(), workers.end(), [&](const Worker& worker) {
      return worker.error && is_invalid_argument(worker.error) &&
             text_of(worker.error) == text_of(workers[0].error);
    });
  }

  std::string first_cause() const {
    const std::string ended = ranks[0]->aborted();
    if (first_failed < 0) return ended;
    const std::string text = text_of(workers[first_failed].error);
    return text == ended ? text : name(first_failed) + ": " + text;
  }

  // What the caller of run() threw while it waited.
  std::exception_ptr interrupt;

  void call(std::unique_lock<std::mutex>& lock, const std::function<void()>& meanwhile) {
    if (!meanwhile || interrupt) return;
    lock.unlock();
    try {
      meanwhile();
    } catch (...) {
      interrupt = std::current_exception();
      ranks[0]->abort("the group was interrupted");
    }
    lock.lock();
  }

  // True: all are done. False: some stay away for too long.
  bool wait_for_all(std::unique_lock<std::mutex>& lock, const std::function<void()>& meanwhile) {
    Time since = Time::max();  // when the ranks at work should have been done
    while (busy > 0) {
      changed.wait_for(lock, std::min<SteadyClock::duration>(kLook, seconds(timeout_s())));
      if (busy == 0) break;
      call(lock, meanwhile);
      if (busy == 0) break;
      if (busy < static_cast<int>(workers.size())) {
        since = last_done;
      } else if (since == Time::max() && !ranks[0]->aborted().empty()) {
        since = SteadyClock::now();
      }
      if (since != Time::max() && SteadyClock::now() - since > seconds(timeout_s())) return false;
    }
    return true;
  }
};

WorkerGroup::WorkerGroup(int size, double timeout_s) : process_(getpid()) {
  start(make_thread_group(size, timeout_s));
}

WorkerGroup::WorkerGroup(std::vector<std::unique_ptr<RankGroup>> ranks) : process_(getpid()) {
  KDT_CHECK_ARGUMENT(!ranks.empty(), "a worker group without ranks");
  start(std::move(ranks));
}

void WorkerGroup::start(std::vector<std::unique_ptr<RankGroup>> ranks) {
  state_ = std::make_shared<State>();
  state_->workers.resize(ranks.size());
  state_->ranks = std::move(ranks);
  try {
    for (int i = 0; i < size(); ++i) {
      threads_.emplace_back([state = state_, i] { work(state, i); });
    }
  } catch (const std::system_error& error) {
    const size_t started = threads_.size();
    stop();
    throw Error(join("a group of ", size(), " ranks needs as many threads, but only ", started,
                     " could be started: ", error.what()));
  }
}

WorkerGroup::~WorkerGroup() {
  if (process_ != getpid()) {
    // Threads of the process this one was forked from can be neither joined nor let go.
    new std::vector<std::thread>(std::move(threads_));
    new std::shared_ptr<State>(std::move(state_));
    return;
  }
  stop();
}

void WorkerGroup::stop() {
  std::unique_lock lock(state_->mutex);
  state_->stop = true;
  state_->wake.notify_all();
  const auto settled = [&](int i) { return !threads_[i].joinable() || state_->workers[i].ended; };
  const int started = static_cast<int>(threads_.size());
  state_->changed.wait_for(lock, seconds(state_->timeout_s()), [&] {
    for (int i = 0; i < started; ++i) {
      if (!settled(i)) return false;
    }
    return true;
  });
  for (int i = 0; i < started; ++i) {
    if (!threads_[i].joinable()) continue;
    const bool ended = state_->workers[i].ended;
    lock.unlock();
    ended ? threads_[i].join() : threads_[i].detach();
    lock.lock();
  }
}

int WorkerGroup::size() const { return static_cast<int>(state_->ranks.size()); }

RankGroup& WorkerGroup::rank(int i) const { return *state_->ranks[i]; }

void WorkerGroup::work(const std::shared_ptr<State>& state, int i) {
  working_for = state.get();
  uint64_t seen = 0;
  std::unique_lock lock(state->mutex);
  while (true) {
    state->wake.wait(lock, [&] { return state->stop || state->job != seen; });
    if (state->stop) break;
    seen = state->job;
    std::shared_ptr<const std::function<void(int)>> body = state->body;
    lock.unlock();
    std::exception_ptr error;
    try {
      (*body)(i);
    } catch (...) {
      error = std::current_exception();
    }
    body.reset();
    state->finish(i, error);
    lock.lock();
  }
  state->workers[i].ended = true;
  state->changed.notify_all();
}

void WorkerGroup::run(std::function<void(int)> body, const std::function<void()>& meanwhile) {
  KDT_CHECK(process_ == getpid(), "the ranks are threads of process ", process_,
            ", from which this one was forked");
  KDT_CHECK(working_for != state_.get(), "a rank cannot run anything on its own group");
  State& state = *state_;
  std::lock_guard one_at_a_time(state.run_mutex);
  std::unique_lock lock(state.mutex);
  if (!state.failure.empty()) throw Error(state.failure);
  for (const auto& rank : state.ranks) rank->set_away("");
  for (State::Worker& worker : state.workers) worker = {true, false, nullptr};
  state.body = std::make_shared<const std::function<void(int)>>(std::move(body));
  state.first_failed = -1;
  state.interrupt = nullptr;
  state.busy = size();
  ++state.job;
  state.wake.notify_all();
  const bool all_done = state.wait_for_all(lock, meanwhile);
  state.body.reset();
  if (all_done && state.interrupt) {
    state.failure = state.ranks[0]->aborted();
    std::rethrow_exception(std::exchange(state.interrupt, nullptr));
  }
  if (all_done) {
    if (state.first_failed < 0) return;
    // A group of one has nobody whom it could be out of step with.
    if (state.all_refused_alike() || rank(0).size() == 1) {
      std::rethrow_exception(state.workers[0].error);
    }
    state.failure = state.first_cause();
  } else {
    std::string late;
    for (int i = 0; i < size(); ++i) {
      if (!state.workers[i].busy) continue;
      late += (late.empty() ? "" : ", ") + join("rank ", rank(i).rank());
      threads_[i].detach();
    }
    late += join(" of ", rank(0).size(), " did not come back within ", state.timeout_s(), " s");
    const std::string cause = state.first_cause();
    state.failure = cause.empty() ? late : cause + "; " + late;
  }
  rank(0).abort(state.failure);
  throw Error(state.failure);
}

}  // namespace kdt
